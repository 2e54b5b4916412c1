"""Implements the Python API: `omni_async.train`, `simulate`, `score` and `load_run`.

The functions are those of the command line. They also work where an event loop runs, as in a notebook: a run then has
its own thread. A process makes one run at a time. `Run.wait` waits for the end of a run, and Ctrl-C ends it in order.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from omni_async.aio.threads import DaemonThread
from omni_async.commands.command_line import print_line
from omni_async.commands.operate import left_behind
from omni_async.commands.scoring.report import records
from omni_async.commands.scoring.scoring import build_reward, prompt_checks, rows_of, score_samples
from omni_async.commands.simulate import job_of, measured_job
from omni_async.commands.train import problems_of, run_to_its_end
from omni_async.config import Config, ConfigError, load
from omni_async.config.tree import json_of
from omni_async.records.read.rounds import is_round
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.summary import Summary
from omni_async.rewards.functions import label_of, named
from omni_async.runtime.driver.control_socket import NotRunning, Request, ask
from omni_async.runtime.preflight.resume import nothing_to_do
from omni_async.simulation.result import Simulated, Sweep
from omni_async.simulation.simulate import simulate as simulate_job
from omni_async.simulation.simulate import sweep as sweep_of
from omni_async.simulation.what_if import WhatIf, what_if

T = TypeVar("T")
Recipe = str | Path | Mapping[str, Any]
Overrides = str | Sequence[str] | Mapping[str, Any]
# Called with the run and a line of its metrics, the numbers of an update or of a validation round.
Callback = Callable[["Run", Mapping[str, Any]], object]

_POLL_S = 0.2
_STARTING_S = 60.0  # for a run to listen to requests
_ONE_RUN = threading.Lock()  # a run prepares this process's environment and its Ray
_UNTABLED = ("scores", "drawn", "reasons")


class RunFailed(RuntimeError):
    """A run failed, or could not write its results; the text is one line."""


class Run:
    """A run, by its folder `path`. It may be over, or run in this or another process."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._thread: threading.Thread | None = None
        self._summary: Summary | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def config(self) -> Config:
        """The resolved recipe."""
        return load(self.path / "config.yaml", within=self.path)

    @property
    def metrics(self) -> Any:
        """The numbers of every update so far: a pandas DataFrame, or a list of dicts without pandas."""
        return _table([line for line in RunDirectory(self.path).read_metrics() if not is_round(line)])

    @property
    def validation(self) -> Any:
        """The means of every validation round so far, as `metrics`."""
        rounds = filter(is_round, RunDirectory(self.path).read_metrics())
        return _table([{name: one for name, one in line.items() if name not in _UNTABLED} for line in rounds])

    def status(self) -> dict[str, Any]:
        """Return the state of the run, as `omni-async status --json`.

        Its `status` is `running`, `done`, `failed` or `interrupted`, or `killed` for a run that left no summary."""
        try:
            return {"status": "running", **ask(RunDirectory(self.path).control, Request())}
        except NotRunning:
            found = left_behind(self.path)
        ended = "killed" if found.summary is None else found.summary.status
        return {**msgspec.to_builtins(found), "status": "running" if found.running else ended}

    def stop(self) -> None:
        """End the run as Ctrl-C does: it writes a checkpoint first. Returns at once; does nothing if it is over.

        Raises ControlError if it cannot be reached, for example because it runs on another machine."""
        end = time.monotonic() + _STARTING_S
        while self._is_running():
            try:
                ask(RunDirectory(self.path).control, Request(stop=True))
                return
            except NotRunning:
                if time.monotonic() > end:
                    raise
                time.sleep(_POLL_S)

    def wait(self, timeout_s: float | None = None) -> Run:
        """Wait until the run is over. Ctrl-C stops it in order; a second Ctrl-C ends only the waiting.

        Raises TimeoutError, RunFailed, or ConfigError for a problem of the recipe that only its start detected."""
        end, stopping = None if timeout_s is None else time.monotonic() + timeout_s, False
        while self._is_running():
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{self.path} is not over after {timeout_s:g} s")
            try:
                time.sleep(_POLL_S)
            except KeyboardInterrupt:
                if stopping:
                    raise
                stopping = True
                self.stop()
        if self._error is not None:
            raise self._error
        if self._summary is not None and (problems := problems_of(self._summary)):
            raise RunFailed("; ".join(problems))
        return self

    def _is_running(self) -> bool:
        if self._thread is not None:
            return self._thread.is_alive()
        return RunDirectory(self.path).is_running()

    def _train(self, config: Config, callbacks: Sequence[Callback], wait: bool) -> None:
        if not _ONE_RUN.acquire(blocking=False):
            raise ConfigError("another run of this process is not over; wait for it, or use another process")
        begun = threading.Event()

        def begin(run: RunDirectory) -> None:
            self.path = run.path
            begun.set()

        def work() -> None:
            try:
                hooks = {"callbacks": [partial(one, self) for one in callbacks], "begun": begin}
                self._summary = run_to_its_end(config, **hooks)
            except BaseException as error:  # noqa: BLE001 (`wait` raises it)
                self._error = error
            finally:
                _ONE_RUN.release()
                begun.set()

        if wait and not _in_loop() and threading.current_thread() is threading.main_thread():
            work()  # here alone, signals such as SIGTERM end it in order
        else:
            self._thread = threading.Thread(target=work, name="omni_async run", daemon=True)
            self._thread.start()
            begun.wait()
        if wait or self._error is not None:
            self.wait()


def train(
    recipe: Recipe,
    overrides: Overrides = (),
    *,
    reward: Any = None,
    reward_weights: Mapping[str, float] | None = None,
    callbacks: Sequence[Callback] = (),
    wait: bool = True,
) -> Run:
    """Train from a recipe, and return the run.

    Args:
        recipe: the path of a YAML file, or a mapping of its sections; paths in a mapping are relative to the working
            directory.
        overrides: `key.path=value` texts, or a mapping from key path to value.
        reward: replaces `reward.scorers`: a function `(images, prompts)` that returns one number or `Score` per image,
            plain or asynchronous, or a class with a method `score`; or a mapping from name to reward, for several. A
            name's reward may also be a text: the name of a scorer, such as `ocr`.
        reward_weights: weights of several rewards by name, 1 for a name that is not there.
        callbacks: called as `callback(run, line)` with every line of the metrics, in another thread. `run.stop()` ends
            the run early. A callback that raises fails the run.
        wait: whether to return after the end of the run. If not, call `Run.wait` before the process ends.

    Raises:
        ConfigError: a wrong recipe, override, reward or callback; one line, before anything starts.
        RunFailed: the run failed, or could not write its results."""
    config = load(recipe, _texts(overrides, reward, reward_weights))
    for one in callbacks:
        _require_callback(one)
    if (done := nothing_to_do(config)) is not None:
        print_line(done)
        return load_run(str(config.checkpoint.resume))
    run = Run(config.run.dir)
    run._train(config, callbacks, wait)
    return run


def load_run(path: str | Path) -> Run:
    """Return the run in a folder. Raises ConfigError if it is no run folder."""
    run = Run(path)
    if not RunDirectory(run.path).config_yaml.is_file():
        raise ConfigError(f"{run.path} is not a run folder")
    return run


def simulate(
    recipe: Recipe,
    overrides: Overrides = (),
    *,
    profile: str | None = None,
    updates: int | None = None,
    seed: int = 0,
    changes: bool = False,
    sweep: bool = False,
) -> Simulated | WhatIf | Sweep:
    """Simulate a job in virtual time, as `omni-async simulate`.

    Args:
        recipe: as for `train`, or a run's folder, whose recipe and measured profile count.
        overrides: as for `train`.
        profile: a profile.json, or the name of a shipped profile; None: the recipe's `emulation.profile`.
        updates: updates to simulate, not for `changes` or a run's folder; None: the recipe's, at least 200.
        seed: of the service times.
        changes: return the gain of single changes instead. A run's folder always has these.
        sweep: return the predictions of every schedule and of several staleness budgets instead.

    Raises:
        ConfigError: one line."""
    texts = _texts(overrides)
    of_run = not isinstance(recipe, Mapping) and Path(recipe).is_dir()
    if changes or of_run:
        if sweep:
            raise ConfigError(f"sweep: not for {'the folder of a run' if of_run else 'changes'}; leave it out")
        if updates is not None:
            raise ConfigError("updates: not for changes or the folder of a run, which have their own; leave it out")
        job, _ = measured_job(recipe, texts, profile)
        return _outside_loop(lambda: what_if(*job[:3], **job.comparison, seed=seed))
    config, found = job_of(recipe, texts, profile)
    try:
        if sweep:
            return _outside_loop(lambda: sweep_of(config, found, updates=updates, seed=seed))
        return _outside_loop(lambda: simulate_job(config, found, updates=updates, seed=seed))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def score(
    recipe: Recipe,
    paths: str | Path | Sequence[str | Path],
    overrides: Overrides = (),
    *,
    reward: Any = None,
    reward_weights: Mapping[str, float] | None = None,
    repeat: int = 1,
) -> Any:
    """Score media files, folders, tables or runs with a recipe's reward, as `omni-async score`.

    Args:
        recipe, overrides, reward, reward_weights: as for `train`. The model need not exist.
        paths: what to score.
        repeat: how often each sample is scored.

    Returns:
        A row per sample: a pandas DataFrame, or a list of dicts without pandas.

    Raises:
        ConfigError: one line."""
    config = load(recipe, _texts(overrides, reward, reward_weights))
    rows = rows_of(config, [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)])
    checks = prompt_checks(config, [row.sample for row in rows])
    scorers = build_reward(config)
    _outside_loop(lambda: asyncio.run(score_samples(config, scorers, rows, checks, repeat, lambda done: None)))
    return _table(records(rows))


def _texts(overrides: Overrides, reward: Any = None, reward_weights: Mapping[str, float] | None = None) -> list[str]:
    """Return overrides as texts `key.path=value`; a `reward` replaces `reward.scorers` first."""
    if isinstance(overrides, str):
        texts = [overrides]
    elif isinstance(overrides, Mapping):
        texts = [f"{key}={json_of(value, f'override {key!r}')}" for key, value in overrides.items()]
    else:
        texts = [*overrides]
    if reward is None and reward_weights is None:
        return texts
    return [f"reward.scorers={json_of(_scorers(reward, reward_weights), 'reward_weights')}", *texts]


def _scorers(reward: Any, weights: Mapping[str, float] | None) -> list[dict[str, Any]]:
    """Return `reward.scorers` for one reward, or for a mapping of several."""
    if not isinstance(reward, Mapping):
        if weights is not None:
            raise ConfigError("reward_weights: needs several rewards; give reward a mapping from name to function")
        return [{"name": _named(reward, "reward")}]
    if not reward:
        raise ConfigError("reward: expected at least one reward, got an empty mapping")
    weights = weights or {}
    if unknown := [name for name in weights if name not in reward]:
        raise ConfigError(
            f"reward_weights: {unknown[0]!r} is no name of reward, which has {', '.join(map(str, reward))}"
        )
    scorers: list[dict[str, Any]] = []
    for name, one in reward.items():
        own = one if isinstance(one, str) else _named(one, f"reward: {name}", str(name))
        scorers.append({"name": own, **({"weight": weights[name]} if name in weights else {})})
    return scorers


def _named(reward: Any, where: str, own: str | None = None) -> str:
    try:
        return named(reward, own)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _require_callback(callback: Any) -> None:
    try:
        inspect.signature(callback).bind(None, None)
    except (TypeError, ValueError) as error:
        expected = "expected a function (run, line)"
        raise ConfigError(f"callbacks: {label_of(callback)!r}: {expected}: {error}") from None


def _table(rows: list[dict[str, Any]]) -> Any:
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows)


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _outside_loop(work: Callable[[], T]) -> T:
    """Return the result of `work`, which runs an event loop. A thread can run only one."""
    return DaemonThread("omni_async").submit(work).result() if _in_loop() else work()
