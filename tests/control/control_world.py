"""Runs small roles around a real Coordinator. Nothing sleeps: a pause is a number of turns of the event loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from omni_async.aio.clock import ManualClock
from omni_async.config import Config, check
from omni_async.control.control_state import ControlState
from omni_async.control.coordinator import Coordinator
from omni_async.control.events import RunEvent
from omni_async.types import (
    LedgerEntry,
    Prompt,
    ReadyGroup,
    SampleRequest,
    SampleResult,
    Score,
    ScoreJob,
    ScoreResult,
    UpdateReport,
    VersionSpans,
    WeightReport,
)
from tests.support.configs import build
from tests.support.patience import PATIENCE

SAMPLE_BYTES, MEDIA_BYTES = 100, 40  # of a trajectory, and of its media
Reward = Callable[[ScoreJob], float | str]


# The settings that tests change, by a short name: where one stands, and what it is unless a test says otherwise.
SETTINGS: dict[str, tuple[str, Any]] = {
    "S": ("staleness.max_updates", 1),
    "P": ("trainer.groups_per_update", 2),
    "reserve": ("staleness.reserve", "all"),
    "updates": ("trainer.updates", 4),
    "group_size": ("rollout.group_size", 2),
    "engines": ("rollout.workers", 1),
    "max_inflight": ("rollout.max_inflight", 4),
    "retries": ("rollout.retries", 1),
    "score_retries": ("reward.retries", 1),
    "backoff_s": ("reward.backoff_s", 0.0),
    "score_at_once": ("reward.streaming", True),
    "trajectories": ("buffer.trajectories", 64),
    "groups": ("buffer.groups", 16),
    "window": ("buffer.window", 1),
    "max_bytes": ("buffer.max_bytes", None),
    "publish_every": ("weights.publish_every", 1),
    "drop_zero_variance": ("algorithm.advantage.drop_zero_variance", True),
    "aggregate": ("algorithm.advantage.aggregate", "rewards"),
    "exact": ("staleness.exact", False),
    "images": ("tracking.images", 16),
    "images_every": ("tracking.images_every", 10),
    "seed": ("run.seed", 0),
}


def make_config(
    *,
    buckets: Sequence[float] = (),
    unscored: bool = False,
    validation: dict[str, Any] | None = None,
    steps: int | None = None,
    **settings: Any,
) -> Config:
    """Makes a configuration with these `SETTINGS`. `steps`: samples are made without noise in as many steps, and their
    final latents are trained on. Without `score_at_once` there may be less room for samples. `buckets` are weights:
    trajectories of bucket i have `SAMPLE_BYTES` / (i + 1) bytes. `unscored`: a teacher takes the place of scorers."""
    assert settings.keys() <= SETTINGS.keys(), settings
    noise = {"window": {"size": 2, "range": [0, 5]}} if steps is None else None
    weights = [{"sampling": {"size": size}, "weight": weight} for size, weight in enumerate(buckets)]
    sections: dict[str, Any] = {
        "model": {"pipeline": "qwen_image"},
        "rollout": {"sde": noise, "buckets": weights, **({"num_inference_steps": steps} if steps else {})},
        "algorithm": {"name": "diffusion_nft" if steps else "flow_grpo"},
        "validation": None if validation is None else {"prompts": "validation.txt", **validation},
    }
    if unscored:
        sections |= {"algorithm": {"name": "distill", "teacher": {"path": "t"}}, "reward": {"scorers": []}}
    config = build(sections, {path: settings.get(name, usual) for name, (path, usual) in SETTINGS.items()})
    problem = check(config)
    may_be_small = not config.reward.streaming and problem is not None and problem.startswith("buffer.trajectories")
    assert problem is None or may_be_small, problem
    return config


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(index=i, text=f"prompt {i}") for i in range(count)]


def make_coordinator(
    config: Config, *, validation_prompts: int = 2, start: ControlState | None = None
) -> tuple[Coordinator, list[LedgerEntry]]:
    """Makes a coordinator and the list its ledger writes to."""
    entries: list[LedgerEntry] = []
    prompts = make_prompts(5), make_prompts(validation_prompts)
    return Coordinator(config, "run-1", *prompts, entries.append, start, clock=ManualClock()), entries


def digest_of(version: int) -> str:
    return f"digest-{version}"


def trained_steps(request: SampleRequest) -> range:
    """Returns the denoising steps whose versions a generated sample carries."""
    if request.window is not None:
        return request.window.steps
    return range(request.num_inference_steps if request.kind == "train" else 0)


def make_result(request: SampleRequest, engine: str, versions: tuple[int, ...], *, version: int = 0) -> SampleResult:
    return SampleResult(
        sample_id=request.sample_id,
        engine=engine,
        trajectory=f"trajectory {request.sample_id}",
        media=f"media {request.sample_id}",
        version=versions[0] if versions else version,
        step_versions=VersionSpans.of(versions),
        started=0.0,
        finished=1.0,
        nbytes=bytes_of(request),
        media_bytes=MEDIA_BYTES,
    )


def bytes_of(request: SampleRequest) -> int:
    return SAMPLE_BYTES // (1 + request.spec.get("size", 0)) if isinstance(request.spec, dict) else SAMPLE_BYTES


def now_or(otherwise: Any, work: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of a coroutine, or something else if it would have to wait."""
    try:
        work.send(None)
    except StopIteration as finished:
        return finished.value
    work.close()
    return otherwise


def now(work: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of a coroutine that does not wait (everything of the coordinator but its waits)."""
    result = now_or(now, work)
    assert result is not now, f"{work} waits"
    return result


def number_of(sample: str) -> int:
    """Returns the number of a sample's group or round."""
    return int(sample[1:].split(".")[0])


def distinct(job: ScoreJob) -> float:
    """Returns a different reward for every sample of a group."""
    return float(job.sample_id.rsplit(".s", 1)[1])


def scores(jobs: Sequence[ScoreJob], reward: Reward) -> list[ScoreResult]:
    """Scores jobs; a text is an error."""
    results = []
    for job in jobs:
        value = reward(job)
        error, score = (value, None) if isinstance(value, str) else (None, Score(value))
        results.append(ScoreResult(job.sample_id, job.attempt, score=score, error=error))
    return results


def report(version: int, groups: Sequence[ReadyGroup]) -> UpdateReport:
    """Returns the report of the update that made `version`."""
    return UpdateReport(version, tuple(g.group for g in groups), {}, 0.0, 1.0)


class Run:
    """All roles over one coordinator: engines, reward workers, trainer, publisher and the driver that reads events."""

    def __init__(
        self,
        config: Config,
        *,
        reward: Reward = distinct,
        reward_workers: int = 2,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        self.config = config
        self.coordinator, self.entries = make_coordinator(config, **kwargs)
        self.holds = dict.fromkeys(config.engine_names, -1)
        self.events: list[RunEvent] = []
        self.taken: list[tuple[int, ReadyGroup]] = []
        self._reward, self._reward_workers = reward, reward_workers
        self._pause = {"generate": 3, "score": 2, "train": 3, "publish": 4}
        self._random = random.Random(seed)
        self._to_publish: asyncio.Queue[int] = asyncio.Queue()

    @property
    def outcome(self) -> tuple[str, str | None]:
        ended = [e for e in self.events if e.kind == "ended"]
        assert len(ended) == 1, self.events
        return ended[0].data["status"], ended[0].data["reason"]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [e.data for e in self.events if e.kind == kind]

    async def turns(self, kind: str) -> None:
        for _ in range(self._random.randint(0, self._pause[kind])):
            await asyncio.sleep(0)

    async def producer(self, engine: str) -> None:
        capacity = self.config.rollout.max_inflight
        running: set[asyncio.Task[None]] = set()
        while leased := await self.coordinator.next_samples(engine, capacity - len(running), capacity):
            running |= {asyncio.create_task(self.sample(engine, request)) for request in leased}
            while len(running) >= capacity:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            running = {task for task in running if not task.done()}
        await asyncio.gather(*running)

    async def sample(self, engine: str, request: SampleRequest) -> None:
        started, versions = self.holds[engine], []
        for step in range(request.num_inference_steps):
            await self.turns("generate")
            if step in trained_steps(request):
                versions.append(self.holds[engine])
        result = make_result(request, engine, tuple(versions), version=started)
        await self.coordinator.samples_done(engine, [result])

    async def rewarder(self, worker: str) -> None:
        while jobs := await self.coordinator.next_to_score(worker, self.config.reward.batch):
            await self.turns("score")
            await self.score(worker, jobs)

    async def score(self, worker: str, jobs: list[ScoreJob]) -> None:
        await self.coordinator.scored(worker, scores(jobs, self._reward))

    async def trainer(self) -> None:
        per_update, last = self.config.trainer.groups_per_update, self.config.trainer.updates
        for version in range(self.coordinator.versions.trained, last):
            groups: list[ReadyGroup] = []
            while len(groups) < per_update:
                taken = await self.coordinator.next_groups(version, per_update - len(groups))
                if not taken:
                    return
                self.taken += [(version, group) for group in taken]
                groups += taken
                await self.turns("train")
            await self.coordinator.update_done(report(version + 1, groups))
            if (version + 1) % self.config.weights.publish_every == 0 or version + 1 == last:
                self._to_publish.put_nowait(version + 1)

    async def publisher(self) -> None:
        self._to_publish.put_nowait(self.coordinator.versions.trained)
        while True:
            version = await self._to_publish.get()
            await self.coordinator.announce(version, digest_of(version))
            for engine in self._random.sample([*self.holds], len(self.holds)):
                await self.turns("publish")
                self.holds[engine] = version
                await self.coordinator.engine_holds(WeightReport(engine, version, digest_of(version)))

    async def driver(self) -> None:
        while not any(event.kind == "ended" for event in self.events):
            self.events += await self.coordinator.events()

    async def play(self) -> Run:
        """Plays until the run has ended and every role has returned by itself."""
        publisher = asyncio.create_task(self.publisher())
        try:
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(
                    self.driver(),
                    self.trainer(),
                    *(self.producer(engine) for engine in self.holds),
                    *(self.rewarder(f"reward-{i}") for i in range(self._reward_workers)),
                )
        finally:
            publisher.cancel()
        return self


class Bench:
    """A coordinator that is driven call by call. Its engines hold the version it starts from, if `holding`."""

    def __init__(
        self,
        *,
        start: ControlState | None = None,
        validation_prompts: int = 2,
        holding: bool = True,
        **config: Any,
    ) -> None:
        self.config = make_config(**config)
        self.c, self.entries = make_coordinator(self.config, start=start, validation_prompts=validation_prompts)
        self.version = start.version if start else 0
        self.leased: dict[int, list[SampleRequest]] = {}  # training samples that no method has finished yet, by group
        self._told: list[RunEvent] = []
        if holding:
            self.hold(self.version)

    def hold(self, version: int, *engines: str) -> None:
        """Publishes `version` and lets engines hold it: all, unless some are named."""
        published = self.c.versions.published
        if published is None or published < version:
            now(self.c.announce(version, digest_of(version)))
        for engine in engines or [*self.c.versions.engines]:
            now(self.c.engine_holds(WeightReport(engine, version, digest_of(version))))

    def lease(self, free: int = 100, engine: str = "rollout-0", capacity: int = 100) -> list[SampleRequest]:
        requests: list[SampleRequest] = now(self.c.next_samples(engine, free, capacity))
        for request in requests:
            if request.kind == "train":
                self.leased.setdefault(request.group, []).append(request)
        return requests

    def make(self, requests: Sequence[SampleRequest], version: int | None = None, engine: str = "rollout-0") -> None:
        """Reports samples that the engine made all with one version."""
        version = self.version if version is None else version
        versions = [(version,) * len(trained_steps(request)) for request in requests]
        results = [make_result(r, engine, v, version=version) for r, v in zip(requests, versions, strict=True)]
        now(self.c.samples_done(engine, results))

    def jobs(self, limit: int = 100, worker: str = "reward-0") -> list[ScoreJob]:
        """Returns the jobs that a reward worker gets now; none if it would have to wait."""
        return now_or([], self.c.next_to_score(worker, limit))  # type: ignore[no-any-return]

    def score(self, jobs: Sequence[ScoreJob] | None = None, values: Reward = distinct, who: str = "reward-0") -> None:
        """Scores jobs; all there are, unless some are given."""
        now(self.c.scored(who, scores(self.jobs(worker=who) if jobs is None else jobs, values)))

    def fail(self, job: ScoreJob, error: str = "x", worker: str = "reward-0", **how: Any) -> None:
        now(self.c.scored(worker, [ScoreResult(job.sample_id, job.attempt, error=error, **how)]))

    def complete(self, requests: Sequence[SampleRequest], values: Reward = distinct) -> None:
        """Makes samples and scores all there are."""
        self.make(requests)
        self.score(values=values)

    def generate(self, *groups: int, values: Reward = distinct) -> None:
        """Makes and scores groups, once they are admitted."""
        for group in groups:
            while group not in self.leased:
                self.lease()
            self.complete(self.leased.pop(group), values)

    def take(self, needed: int = 1) -> list[ReadyGroup]:
        """Takes groups for the next update; returns none if none may be taken now."""
        return now_or([], self.c.next_groups(self.version, needed))  # type: ignore[no-any-return]

    def train(self, groups: Sequence[ReadyGroup]) -> None:
        self.version += 1
        now(self.c.update_done(report(self.version, groups)))

    def events(self) -> list[RunEvent]:
        """Returns all that was told so far."""
        self._told += now_or([], self.c.events())
        return self._told

    def data(self, kind: str) -> list[dict[str, Any]]:
        return [event.data for event in self.events() if event.kind == kind]

    def buffers(self) -> dict[str, Any]:
        return now(self.c.statistics())["buffers"]  # type: ignore[no-any-return]

    def lines(self) -> list[tuple[int, str, str | None]]:
        """Returns what the ledger says became of groups."""
        return [(entry.group, entry.event, entry.reason) for entry in self.entries]


def play(config: Config, **kwargs: Any) -> Run:
    return asyncio.run(Run(config, **kwargs).play())
