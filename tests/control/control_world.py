"""Runs small real roles around a real Coordinator, with random scheduling from a seed, for the tests of the control
plane.

Nothing sleeps: every pause is a number of turns of the event loop, so a stranded waiter shows as a timeout and nothing
else does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

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
    WeightReport,
)
from omni_async.version_spans import VersionSpans
from tests.configs import build

STRANDED_AFTER_S = 20.0
SAMPLE_BYTES = 100


def make_config(
    *,
    S: int = 1,
    P: int = 2,
    group_size: int = 2,
    updates: int = 4,
    window: int = 1,
    publish_every: int = 1,
    trajectories: int = 64,
    groups: int = 16,
    max_bytes: int | str | None = None,
    buckets: Sequence[float] = (),
    engines: int = 1,
    max_inflight: int = 4,
    retries: int = 1,
    score_retries: int = 1,
    backoff_s: float = 0.0,
    validation: dict[str, Any] | None = None,
    seed: int = 0,
    drop_zero_variance: bool = True,
    aggregate: str = "rewards",
    exact: bool = False,
    steps: int | None = None,
    score_at_once: bool = True,
) -> Config:
    """Makes a configuration. `steps`: samples are made without noise in as many steps, and their final latents are
    trained on. `score_at_once` is reward.streaming; without it less room for samples is allowed than a real
    configuration must have. `buckets` are their weights; bucket i is sampled by `{"size": i}`, and its samples have
    `SAMPLE_BYTES` / (i + 1) bytes."""
    noisy = {"sde": {"window": {"size": 2, "range": [0, 5]}}}
    config = build(
        {
            "run": {"seed": seed},
            "model": {"pipeline": "qwen_image"},
            "rollout": {
                "workers": engines,
                "group_size": group_size,
                "max_inflight": max_inflight,
                "retries": retries,
                "buckets": [{"sampling": {"size": size}, "weight": weight} for size, weight in enumerate(buckets)],
                **(noisy if steps is None else {"sde": None, "num_inference_steps": steps}),
            },
            "reward": {"retries": score_retries, "backoff_s": backoff_s, "streaming": score_at_once},
            "staleness": {"max_updates": S, "exact": exact},
            "buffer": {"trajectories": trajectories, "groups": groups, "window": window, "max_bytes": max_bytes},
            "weights": {"publish_every": publish_every},
            "algorithm": {
                "name": "flow_grpo" if steps is None else "diffusion_nft",
                "advantage": {"drop_zero_variance": drop_zero_variance, "aggregate": aggregate},
            },
            "trainer": {"updates": updates, "groups_per_update": P},
            "validation": None if validation is None else {"prompts": "validation.txt", **validation},
        }
    )
    problem = check(config)
    assert problem is None or (not score_at_once and problem.startswith("buffer.trajectories")), problem
    return config


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(index=i, text=f"prompt {i}") for i in range(count)]


def make_coordinator(
    config: Config,
    *,
    prompts: int = 5,
    validation_prompts: int = 2,
    start_version: int = 0,
    start_group: int = 0,
    start: ControlState | None = None,
) -> tuple[Coordinator, list[LedgerEntry]]:
    """Makes a coordinator and the list its ledger writes to."""
    entries: list[LedgerEntry] = []
    start = start or ControlState(version=start_version, next_group=start_group)
    coordinator = Coordinator(
        config, "run-1", make_prompts(prompts), make_prompts(validation_prompts), entries.append, start
    )
    return coordinator, entries


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
    )


def bytes_of(request: SampleRequest) -> int:
    return SAMPLE_BYTES // (1 + request.spec.get("size", 0)) if isinstance(request.spec, dict) else SAMPLE_BYTES


def now(work: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of a coroutine that does not wait (everything of the coordinator but its four waits)."""
    try:
        work.send(None)
    except StopIteration as finished:
        return finished.value
    work.close()
    raise AssertionError(f"{work} waits")


async def hold(coordinator: Coordinator, version: int, *engines: str) -> None:
    """Publishes `version` and lets engines hold it."""
    published = coordinator.versions.published
    if published is None or published < version:
        await coordinator.announce(version, digest_of(version))
    for engine in engines or ("rollout-0",):
        await coordinator.engine_holds(WeightReport(engine, version, digest_of(version)))


async def started(**config: Any) -> tuple[Coordinator, list[LedgerEntry]]:
    """Makes a coordinator whose engines all hold version 0, and the list its ledger writes to."""
    coordinator, entries = make_coordinator(make_config(**config))
    await hold(coordinator, 0, *(f"rollout-{i}" for i in range(config.get("engines", 1))))
    return coordinator, entries


async def drawn(coordinator: Coordinator, count: int, limit: int | None = None) -> list[ScoreJob]:
    """Has `count` samples drawn, with version 0, and returns those that a reward worker takes, `limit` at most."""
    await finish(coordinator, "rollout-0", await coordinator.next_samples("rollout-0", count, count), 0)
    return await coordinator.next_to_score("reward-0", count if limit is None else limit)


async def finish(
    coordinator: Coordinator, engine: str, requests: list[SampleRequest], version: int, *, stored: bool = False
) -> None:
    """Reports samples that the engine made all with one version; or they were `stored`, and no version made them."""
    versions = [(version,) * (0 if stored else len(trained_steps(r))) for r in requests]
    results = [make_result(r, engine, v, version=version) for r, v in zip(requests, versions, strict=True)]
    await coordinator.samples_done(engine, results)


async def score(
    coordinator: Coordinator, jobs: list[ScoreJob], values: Callable[[ScoreJob], float | str], worker: str = "reward-0"
) -> None:
    """Scores jobs; a text is an error."""
    results = []
    for job in jobs:
        value = values(job)
        if isinstance(value, str):
            results.append(ScoreResult(job.sample_id, job.attempt, error=value))
        else:
            results.append(ScoreResult(job.sample_id, job.attempt, score=Score(value)))
    await coordinator.scored(worker, results)


def distinct(job: ScoreJob) -> float:
    """Returns a different reward for every sample of a group."""
    return float(job.sample_id.rsplit(".s", 1)[1])


def report(version: int, groups: list[ReadyGroup]) -> UpdateReport:
    """Returns the report of the update that made `version`."""
    return UpdateReport(version, tuple(g.group for g in groups), {}, 0.0, 1.0)


class Run:
    """All roles over one coordinator: engines, reward workers, a trainer, a publisher and the driver that reads
    events."""

    def __init__(
        self,
        config: Config,
        *,
        reward: Callable[[ScoreJob], float | str] = distinct,
        generate: Callable[[str, SampleRequest], str | None] = lambda engine, request: None,
        reward_workers: int = 2,
        seed: int = 0,
        pause: dict[str, int] | None = None,
        start_version: int = 0,
        **kwargs: Any,
    ) -> None:
        self.config = config
        self.start_version = start_version
        self.coordinator, self.entries = make_coordinator(config, start_version=start_version, **kwargs)
        self.engines = [f"rollout-{i}" for i in range(config.rollout.workers)]
        self.holds = dict.fromkeys(self.engines, -1)
        self.events: list[RunEvent] = []
        self.requests: list[SampleRequest] = []
        self.taken: list[tuple[int, ReadyGroup]] = []
        self.leases: list[tuple[str, int]] = []  # engine, how many
        self._reward, self._generate = reward, generate
        self._reward_workers = reward_workers
        self._random = random.Random(seed)
        self._pause = {"generate": 3, "score": 2, "train": 3, "publish": 4, **(pause or {})}
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
            self.leases.append((engine, len(leased)))
            running |= {asyncio.create_task(self.sample(engine, request)) for request in leased}
            while len(running) >= capacity:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            running = {task for task in running if not task.done()}
        await asyncio.gather(*running)

    async def sample(self, engine: str, request: SampleRequest) -> None:
        self.requests.append(request)
        started, versions = self.holds[engine], []
        for step in range(request.num_inference_steps):
            await self.turns("generate")
            if step in trained_steps(request):
                versions.append(self.holds[engine])
        if (error := self._generate(engine, request)) is not None:
            await self.coordinator.sample_failed(engine, request.sample_id, error)
        else:
            await self.coordinator.samples_done(
                engine, [make_result(request, engine, tuple(versions), version=started)]
            )

    async def rewarder(self, worker: str) -> None:
        while jobs := await self.coordinator.next_to_score(worker, self.config.reward.batch):
            await self.turns("score")
            await score(self.coordinator, jobs, self._reward, worker)

    async def trainer(self) -> None:
        per_update, last = self.config.trainer.groups_per_update, self.config.trainer.updates
        for version in range(self.start_version, last):
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
        self._to_publish.put_nowait(self.start_version)
        while True:
            version = await self._to_publish.get()
            await self.coordinator.announce(version, digest_of(version))
            for engine in self._random.sample(self.engines, len(self.engines)):
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
            async with asyncio.timeout(STRANDED_AFTER_S):
                await asyncio.gather(
                    self.driver(),
                    self.trainer(),
                    *(self.producer(engine) for engine in self.engines),
                    *(self.rewarder(f"reward-{i}") for i in range(self._reward_workers)),
                )
        finally:
            publisher.cancel()
        return self

    @property
    def staleness(self) -> list[int]:
        """Returns the staleness of every trained group, counted here from what the trainer took."""
        return [version - group.oldest_version for version, group in self.taken]


class Bench:
    """One engine with room for everything, where each group is finished by name. `stored`: its samples are a
    dataset's."""

    def __init__(self, *, stored: bool = False, **config: Any) -> None:
        self.c, self.entries = make_coordinator(make_config(trajectories=1000, groups=100, **config))
        self.stored = stored
        self.waiting: dict[int, list[SampleRequest]] = {}
        self.version = 0
        now(hold(self.c, 0))

    async def generate(self, group: int, version: int, reward: Callable[[ScoreJob], float | str] = distinct) -> None:
        while group not in self.waiting:
            for request in now(self.c.next_samples("rollout-0", 1000, 1000)):
                self.waiting.setdefault(request.group, []).append(request)
        await finish(self.c, "rollout-0", self.waiting.pop(group), version, stored=self.stored)
        await score(self.c, now(self.c.next_to_score("reward-0", 100)), reward)

    def take(self, needed: int = 1) -> ReadyGroup | None:
        """Takes one group; returns None if nothing may be taken now."""
        try:
            (taken,) = now(self.c.next_groups(self.version, needed))
        except AssertionError:
            return None
        return taken

    async def train(self, *groups: ReadyGroup) -> None:
        self.version += 1
        await self.c.update_done(report(self.version, list(groups)))

    async def update(self, *groups: ReadyGroup) -> None:
        """Trains and publishes."""
        await self.train(*groups)
        await hold(self.c, self.version)


def play(config: Config, **kwargs: Any) -> Run:
    async def main() -> Run:
        return await Run(config, **kwargs).play()

    return asyncio.run(main())
