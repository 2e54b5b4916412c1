# Everything starts from a plain CPython 3.11 or 3.12: each target makes the environment it needs, and running it again changes nothing.
#
#   make quickstart   install, then run the main job (about 10 minutes the first time)
#   make test         install, then every kind of test, with a slice of the long searches

# EXTRA=cuda installs vLLM's CUDA build in place of the CPU one.
EXTRA ?= cpu
VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
# Half of a test run is waiting: for kills to be noticed, for Ray and engines to start. Two processes take turns; a file's tests share what they start.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
INSTALLED := $(VENV)/.installed-$(EXTRA)

FAMILIES = $$($(BIN)/python -c 'from omni_async.families import family_names; print(*family_names())')

.PHONY: help conformance install quickstart test test-all test-fast test-gpu lint format docs site clean

help:
	@echo "make quickstart   install and run the main job: asynchronous FlowGRPO on a small Qwen-Image"
	@echo "make test         install and run every kind of test, with a slice of the long searches (about 12 minutes)"
	@echo "make test-all     every test and every schedule (about 35 minutes)"
	@echo "make test-fast    the tests that start neither Ray nor vLLM-Omni"
	@echo "make test-gpu     the tests for a machine that has accelerators"
	@echo "make conformance  compare every model family with its upstream pipeline, on every engine; writes docs/models/measured.md"
	@echo "make lint         ruff, mypy, import contracts, hadolint"
	@echo "make format       rewrite the code in the project's format"
	@echo "make docs         regenerate docs/configuration.md"
	@echo "make site         the documentation as a site in build/site"
	@echo "make clean        remove the environment and caches (runs/ stays)"

install: $(INSTALLED)

# torch is named beside the package so that one resolution sees both; constraints.txt holds the exact set that is tested.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "CPython 3.11 or 3.12 is needed; name it with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "installing into $(VENV) with $$($(PYTHON) --version) (about 5.5 GB, some minutes) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt torch==2.13.0 -e ".[$(EXTRA),dev]"
	@touch $@

quickstart: install
	$(BIN)/omni-async train recipes/quickstart/quickstart.yaml

test: install
	$(PYTEST)

test-all: install
	$(PYTEST) --all

test-fast: install
	$(BIN)/python -m pytest -m "not slow"

# One process for each: an engine claims its process. Stops at the first family with a failed check.
conformance: install
	@{ echo "# What parity measured"; echo; \
	echo "\`make conformance\` at commit $$(git rev-parse --short HEAD), $$(date -u +%F), on the CPU in float32: random checkpoints of"; \
	echo "real architecture, beside the most that is allowed ([what the checks are](../integrate-a-model.md#5-compare-it-with-diffusers))."; \
	echo; set -e; for family in $(FAMILIES); do OMP_NUM_THREADS=1 $(BIN)/omni-async parity $$family --engine all; done; \
	} > docs/models/measured.md
	@grep -c "| ok " docs/models/measured.md | xargs -I{} echo "{} checks passed; see docs/models/measured.md"

# -rs says why a test was skipped: too few accelerators, or a torch that does not see them.
test-gpu: install
	$(BIN)/python -m pytest -m gpu -rs

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/Dockerfile

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install
	$(BIN)/omni-async docs

# NO_MKDOCS_2_WARNING: what Material says of its successor is none of the pages' business.
site: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open build/site/index.html"

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
