"""How much of the suite runs, and what every test file shares.

`pytest` runs every kind of test and a slice of what is long; `pytest --all` runs all of it. What is long says so:

- `@pytest.mark.thorough`: one more of a kind of which a shorter one is always run. Left to `--all`.
- `@pytest.mark.sliced(floor=n)`, on a test or a module: n of its tests are run, drawn by the slice's seed.
- the fixtures `slice_of`, a run of consecutive seeds out of all that a search has, and `some_of`, some of a list.
- `@few(n)` (`tests/support/examples.py`): n examples of a property, and a third of them in a slice.

The end of the output has what was left out, and the seed that draws the same slice again. A file or a test that is
named runs whole, unless `--slice-seed` is given. `tests/support/second_try.py` runs failed tests once more.
"""

from __future__ import annotations

import gc
import inspect
import os
import random
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import settings

# Before any test file imports diffusers: it prepares the import system for a mixed install (`omni_async.compat`).
import omni_async  # noqa: F401
from omni_async.simulation.virtual_time import run as run_in_virtual_time
from tests.support import examples
from tests.support.browser import NO_CHROMIUM, browser, find_chromium, open_page  # noqa: F401 (two are fixtures)
from tests.support.loops import play

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

# Torch in one thread, before anything imports it: there are two cores, and small tensors gain nothing. Not by
# torch.set_num_threads: the first matrix products in a new thread would still use all cores, and round otherwise.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Processes that Ray starts in advance have another environment than the tests' actors, which cannot use them.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")

# A busy machine takes its time, which says nothing about the code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


Item = TypeVar("Item")


@dataclass
class Slice:
    """What of the long searches this session runs."""

    seed: int
    whole: bool
    told: list[str] = field(default_factory=list)

    def consecutive(self, what: str, total: int, floor: int) -> range:
        """`floor` numbers of range(total), or all of them."""
        if self.whole:
            return range(total)
        start = random.Random(f"{self.seed}/{what}").randrange(total - floor + 1)
        self.told.append(f"{floor:,} of {total:,} {what}, from {start:,}")
        return range(start, start + floor)

    def some(self, what: str, items: list[Item], floor: int) -> list[Item]:
        """`floor` of the items, or all of them."""
        if self.whole or len(items) <= floor:
            return items
        self.told.append(f"{floor} of {len(items)} {what}")
        return random.Random(f"{self.seed}/{what}").sample(items, floor)


_SLICE = pytest.StashKey[Slice]()


@pytest.fixture(autouse=True)
def python_path() -> Iterator[None]:
    """Takes back what a test puts before `sys.path`: every command adds its working directory, and each look for entry
    points searches all of them."""
    before = [*sys.path]
    yield
    sys.path[:] = before


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.import_plugin("tests.support.second_try")
    group = parser.getgroup("how much")
    group.addoption(
        "--all", action="store_true", dest="everything", help="every test and every schedule, not a slice of them"
    )
    group.addoption(
        "--slice-seed",
        type=int,
        metavar="SEED",
        help="which slice of the long searches (default: another one every time)",
    )
    group.addoption(
        "--require-browser", action="store_true", help="end at once without Chromium, in place of skipping page tests"
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a job in the background, whose children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        config.stash[_SLICE] = Slice(*config.workerinput["slice"])
        examples.whole = config.stash[_SLICE].whole
        return
    seed = config.option.slice_seed
    named = seed is None and any(".py" in argument for argument in config.args)
    if seed is None:
        config.option.slice_seed = seed = random.SystemRandom().randrange(10**6)
    config.stash[_SLICE] = Slice(seed, config.getoption("everything") or named)
    examples.whole = config.stash[_SLICE].whole
    if find_chromium() is None:
        if config.getoption("--require-browser"):
            raise pytest.UsageError(f"--require-browser: {NO_CHROMIUM}")
        print(NO_CHROMIUM, flush=True)  # noqa: T201


def pytest_unconfigure(config: pytest.Config) -> None:
    """Repeats on the last line that the page tests are skipped."""
    if not hasattr(config, "workerinput") and find_chromium() is None:
        print(NO_CHROMIUM, flush=True)  # noqa: T201


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Gives each process of `-n` the same slice: they must collect the same tests."""
    chosen = node.config.stash[_SLICE]
    node.workerinput["slice"] = (chosen.seed, chosen.whole)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    """Collects what the processes have to tell about their slices."""
    told = node.config.stash[_SLICE].told
    told += [line for line in getattr(node, "workeroutput", {}).get("told", ()) if line not in told]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["told"] = session.config.stash[_SLICE].told


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Leaves the objects of imported modules out of garbage collection, which would go through them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The last folders have files that take long: begun last, one would run while the other process has nothing to do.
    items.sort(key=lambda item: item.path.parts[-2] not in ("training", "weights"))
    chosen = config.stash[_SLICE]
    if chosen.whole:
        return
    left_out = {item for item in items if item.get_closest_marker("thorough")}
    sliced: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if item not in left_out and (marker := item.get_closest_marker("sliced")) is not None:
            what = item.nodeid.partition("[" if marker in item.own_markers else "::")[0]
            sliced.setdefault((what, marker.kwargs["floor"]), []).append(item)
    if left_out:
        chosen.told.append(f"{len(items) - len(left_out):,} of {len(items):,} tests: the others are thorough ones")
    for (what, floor), those in sliced.items():
        left_out |= {*those} - {*chosen.some(f"tests in {what}", those, floor)}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    chosen = config.stash[_SLICE]
    if chosen.told:
        terminalreporter.section(f"a slice: --slice-seed={chosen.seed} draws it again, --all runs everything")
        for line in chosen.told:
            terminalreporter.line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine, in virtual time if it is marked so."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    work = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
    if pyfuncitem.get_closest_marker("virtual_time"):
        play(work, run_in_virtual_time)
    else:
        play(work)
    return True


@pytest.fixture(scope="session")
def slice_of(request: pytest.FixtureRequest) -> Callable[[str, int, int], range]:
    """`slice_of(what, total, floor)`: seeds out of range(total) to try in this session."""
    return request.config.stash[_SLICE].consecutive


@pytest.fixture(scope="session")
def some_of(request: pytest.FixtureRequest) -> Callable[[str, list[Item], int], list[Item]]:
    """`some_of(what, items, floor)`: what to try of the items in this session."""
    return request.config.stash[_SLICE].some


@pytest.fixture(autouse=True)
def accelerators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips a test marked `gpu`, or `gpu(devices=n)`, where torch sees fewer accelerators. Others compute float32 in
    full: TF32, torch's default for convolutions on CUDA, is off by up to 1e-3 from what a CPU computes."""
    marker = request.node.get_closest_marker("gpu")
    if marker is not None:
        import torch

        wanted, found = marker.kwargs.get("devices", 1), torch.accelerator.device_count()
        if found < wanted:
            pytest.skip(f"needs {wanted} accelerator{'s' * (wanted > 1)}: torch {torch.__version__} sees {found} here")
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen-Image of one layer."""
    from omni_async_pipelines.qwen_image.tiny import build

    return str(build(tmp_path_factory.mktemp("checkpoint") / "tiny", layers=1))


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: str) -> Path:
    """A recipe around that model, for a run of seconds."""
    from tests.support.job_world import write_recipe

    return write_recipe(tmp_path, checkpoint)
