"""Tests scorers that fail under a whole control plane with real reward workers: every group ends trained or rejected
with its reason, and the run ends. Engines, trainer and publisher are those of the control plane's tests."""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Coroutine
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from omni_async.aio.clock import Clock, WallClock
from omni_async.config import Config, with_spec
from omni_async.media import Media
from omni_async.rewards.base import Scorer
from omni_async.rewards.loaded import LoadedReward
from omni_async.rewards.probe import Probe
from omni_async.roles.rewarder import Rewarder
from omni_async.simulation.virtual_time import VirtualClock, run
from omni_async.store import LocalStore
from omni_async.types import Prompt, Score
from tests.control.control_world import Run, make_config
from tests.support.images import as_media
from tests.support.patience import PATIENCE


def with_reward(config: Config, **reward: Any) -> Config:
    return replace(config, reward=replace(config.reward, **reward))


def job(updates: int = 6, **reward: Any) -> Config:
    """Configures updates of two groups, S = 1, and scorers that are asked again after a second."""
    return with_reward(make_config(S=1, P=2, updates=updates), **{"backoff_s": 1.0, "retries": 1, **reward})


def sample_of(image: np.ndarray) -> tuple[int, int]:
    """Returns the group and the number of the sample that an image is of."""
    high, low, sample = (int(value) for value in image[0, 0])
    return 256 * high + low, sample


class Images(LocalStore):
    """A store that draws the image of `media g3.s1` when it is asked for."""

    async def get(self, reference: str) -> Media:
        group, _, sample = reference.removeprefix("media g").partition(".s")
        return as_media(np.full((2, 2, 3), (*divmod(int(group), 256), int(sample)), np.uint8))


class ScoredRun(Run):
    """A run with real reward workers. `scorers()` are a reward worker's, built for each by itself; `tried`: they score
    a synthetic sample first."""

    def __init__(
        self, config: Config, scorers: Callable[[], Scorer], clock: Clock, tried: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(config, **kwargs)
        self._tried, self._scorers, self._clock = tried, scorers, clock

    async def rewarder(self, worker: str) -> None:
        reward = LoadedReward.of(self.config.reward, self._scorers())
        probe = Probe.of(with_spec(self.config), [Prompt(0, "a synthetic cat")]) if self._tried else None
        rewarder = Rewarder(worker, self.config, reward, self.coordinator, Images(), self._clock, probe)
        await rewarder.start()
        await rewarder.run()

    @property
    def logged(self) -> list[str]:
        return [data["text"] for data in self.of_kind("phase")]

    @property
    def ended(self) -> dict[str, set[int]]:
        """Returns the groups by how they ended, and requires that each ended once."""
        assert len({entry.group for entry in self.entries}) == len(self.entries)
        groups: dict[str, set[int]] = {"trained": set(), "rejected": set(), "dropped": set()}
        for entry in self.entries:
            groups[entry.event].add(entry.group)
            assert (entry.reason is None) == (entry.event == "trained")
        return groups

    @property
    def reasons(self) -> list[str]:
        return [entry.reason or "" for entry in self.entries if entry.event == "rejected"]


# ---- virtual time ----------------------------------------------------------------------------------------------------


class Judge:
    """A scorer whose reward is the sample's number, or what `drawn` says; a whole batch is not a number if one of it is
    not. It is down unless `up`. It distinguishes drawn images, of size 2, from the synthetic one, which is larger."""

    name = "judge"

    def __init__(
        self,
        drawn: Callable[[int, int], float] = lambda group, sample: float(sample),
        synthetic: Callable[[], float] = lambda: 0.0,
        up: Callable[[float], bool] = lambda now: True,
    ) -> None:
        self._drawn, self._synthetic, self._up = drawn, synthetic, up
        self.asked = 0
        self.drawn: Counter[tuple[int, int]] = Counter()

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        self.asked += 1
        if not self._up(asyncio.get_running_loop().time()):
            raise ConnectionRefusedError("nobody listens")
        if images[0].shape != (2, 2, 3):
            return [Score(self._synthetic()) for _ in images]
        samples = [sample_of(image) for image in images]
        self.drawn.update(samples)
        values = [self._drawn(*sample) for sample in samples]
        return [Score(math.nan if any(map(math.isnan, values)) else value) for value in values]


MISSPELT = "'Judge' object has no attribute '_tresh'"


def misspelt(*_: int) -> float:
    raise AttributeError(MISSPELT)


class Paced(ScoredRun):
    """A run whose roles take tenths of a second for what they do."""

    async def turns(self, kind: str) -> None:
        await asyncio.sleep(0.1 * self._random.randint(0, self._pause[kind]))


def play(config: Config, judge: Judge, stop_s: float = math.inf, **kwargs: Any) -> tuple[ScoredRun, float]:
    """Plays a run to its end, or stops it. Returns it with the virtual seconds that it took."""

    async def main() -> tuple[ScoredRun, float]:
        played = Paced(config, lambda: judge, VirtualClock(), **kwargs)
        publisher, loop = asyncio.create_task(played.publisher()), asyncio.get_running_loop()
        roles: list[Coroutine[Any, Any, None]] = [played.driver(), played.trainer()]
        roles += [played.producer(engine) for engine in played.holds]
        roles += [played.rewarder(f"reward-{i}") for i in range(played._reward_workers)]
        if stop_s < math.inf:
            loop.call_later(stop_s, lambda: loop.create_task(played.coordinator.stop("enough")))
        try:
            async with asyncio.timeout(1e5):
                await asyncio.gather(*roles)
        finally:
            publisher.cancel()
        return played, loop.time()

    return run(main())


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("workers", [1, 3])
def test_an_outage_of_a_minute_costs_no_group(streaming, workers):
    judge = Judge(up=lambda now: not 4 <= now < 64)
    played, seconds = play(job(retries=3, streaming=streaming, batch=2), judge, reward_workers=workers)
    assert played.outcome == ("done", None)
    assert played.ended == {"trained": set(range(12)), "rejected": set(), "dropped": set()}
    assert 64 <= seconds < 120
    assert judge.asked < 300, "it was not asked all the time"
    assert len([text for text in played.logged if text.startswith("warning: scorer 'judge' fails (")]) <= workers
    assert len(played.logged) % 2 == 0 and 2 <= len(played.logged) <= 2 * workers
    outages = [span for data in played.of_kind("spans") for span in data["spans"] if span.kind == "outage"]
    assert outages and 55 <= max(span.end - span.start for span in outages) <= 95


def test_a_scorer_that_never_comes_back_ends_the_run_with_its_reason():
    played, seconds = play(job(400, outage_s=60.0), Judge(up=lambda now: now < 10))
    status, reason = played.outcome
    assert status == "failed" and reason is not None
    assert "groups in a row ended without being trained" in reason
    assert "scorer 'judge' has been failing for" in reason and "ConnectionRefusedError: nobody listens" in reason
    assert len(played.ended["rejected"]) >= 32
    assert all("ConnectionRefusedError" in why for why in played.reasons)
    assert 70 <= seconds < 1000


def test_a_run_that_is_stopped_in_an_outage_ends_at_once():
    played, seconds = play(job(400, outage_s=1e6), Judge(up=lambda now: now < 0), stop_s=1000)
    assert seconds <= 1001
    assert played.outcome == ("interrupted", "enough") and not played.ended["rejected"]


@pytest.mark.parametrize(
    ("drawn", "words"),
    [
        (
            misspelt,
            f"nothing could be scored so far, and the error stays the same: scorer 'judge': AttributeError: {MISSPELT}",
        ),
        (lambda group, sample: 1e30, "beyond reward.max_abs"),
    ],
    ids=["the same error for every sample", "every score is absurd"],
)
def test_a_scorer_that_is_wrong_ends_the_run_within_seconds_in_its_own_words(drawn, words):
    played, seconds = play(job(400, retries=3), Judge(drawn), tried=True)
    status, reason = played.outcome
    assert status == "failed" and reason is not None and words in reason
    assert drawn is not misspelt or (reason.startswith(words) and __file__ in reason), "with the line that is wrong"
    assert seconds < 10, "not the 600 s of an outage"


ABSURD = "a reward of 1e+30, beyond reward.max_abs = 1e+06"


def judge_of(wrong: Callable[[int, int], bool], drawn: Callable[..., float]) -> Judge:
    """Builds a judge that is wrong about some samples."""
    return Judge(lambda group, sample: drawn() if wrong(group, sample) else float(sample))


@pytest.mark.parametrize(
    ("judge", "rejected", "reason", "least_s"),
    [
        (judge_of(lambda group, _: group in (0, 1), misspelt), {0, 1}, MISSPELT, 0),
        (judge_of(lambda *sample: sample == (3, 1), lambda: 1e30), {3}, ABSURD, 0),
        (Judge(up=lambda now: now >= 300), set(), "", 300),
    ],
    ids=["prompts that cannot be scored", "an absurd score, which is not asked for again", "away at the start"],
)
def test_what_is_not_wrong_with_every_sample_does_not_end_the_run(judge, rejected, reason, least_s):
    played, seconds = play(job(), judge, tried=True)
    assert played.outcome == ("done", None) and least_s <= seconds < least_s + 100
    assert played.ended["rejected"] == rejected
    assert all("scorer 'judge'" in why and reason in why for why in played.reasons)
    assert reason != ABSURD or judge.drawn[3, 1] == 1
    assert max(abs(value) for _, group in played.taken for value in group.rewards) <= 1e6


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_outages_cost_no_group_and_bad_samples_only_theirs(seed):
    """Varies the arrangement, once the scorer has answered each worker. Some try their scorer before the first
    sample."""
    dice = random.Random(seed)
    bad = {group for group in range(1, 40) if dice.random() < 0.2}
    down, t = [], dice.uniform(2, 20)
    for _ in range(dice.randint(0, 3)):
        down.append((t, t := t + dice.uniform(1, 300)))
        t += dice.uniform(1, 100)
    judge = Judge(
        lambda group, sample: math.nan if group in bad and sample == 1 else float(sample),
        up=lambda now: not any(a <= now < b for a, b in down),
    )
    config = make_config(
        S=dice.randint(0, 2),
        P=dice.randint(1, 3),
        group_size=dice.randint(2, 4),
        updates=dice.randint(2, 6),
        engines=dice.randint(1, 2),
        score_retries=3,
        backoff_s=dice.choice([0.5, 1.0, 4.0]),
        score_at_once=dice.random() < 0.7,
    )
    config = with_reward(config, batch=dice.choice([1, 2, 8]), outage_s=1000.0)
    played, _ = play(config, judge, reward_workers=dice.choice([1, 2, 3, 12]), seed=seed, tried=dice.random() < 0.5)
    assert played.outcome == ("done", None)
    assert played.ended["rejected"] <= bad and not played.ended["trained"] & bad
    for reason in played.reasons:
        assert "reward failed 4 times: scorer 'judge', sample 0" in reason and "value is nan" in reason


# ---- a real server ---------------------------------------------------------------------------------------------------


class Server:
    """A server that answers with the number of the sample; `mood` is what is wrong with it. It can stop, and start
    again on the same port."""

    def __init__(self) -> None:
        self.mood, self.port = "well", 0
        self.moods: Counter[str] = Counter()
        self.start()

    def start(self) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.moods[server.mood] += 1
                status, answer = server.answer(sent)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                """Logs nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._http.daemon_threads = True
        self._http.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that do not wait
        self.port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, samples: list[int]) -> tuple[int, bytes]:
        if self.mood == "slow":
            time.sleep(2 * SHORT_S)
        wrong = {"short": samples[1:], "nan": [math.nan] * len(samples), "null": [None] * len(samples)}
        broken = {"error": (500, b"CUDA out of memory"), "garbage": (200, b"<html>502</html>")}
        return broken.get(self.mood) or (200, json.dumps(wrong.get(self.mood, samples)).encode())


class HttpJudge:
    """A scorer as a user would write the client of a judge server. Only a server that is slow is not waited for, so
    that no stall of this machine looks like one."""

    name = "http_judge"
    concurrency = None

    def __init__(self, server: Server) -> None:
        self._server = server

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        body = json.dumps([sample_of(image)[1] for image in images]).encode()
        timeout_s = SHORT_S if self._server.mood == "slow" else PATIENCE
        with urllib.request.urlopen(f"http://127.0.0.1:{self._server.port}/score", body, timeout=timeout_s) as answer:
            return [Score(value) for value in json.load(answer)]


SHORT_S = 0.15
WRONG = ("slow", "error", "garbage", "short", "nan", "null")


FAILS = "warning: scorer 'http_judge' fails"


def said(played: ScoredRun) -> list[str]:
    """Returns what was logged, without reasons and times."""
    return [text.split(" (")[0].split(" after")[0] for text in played.logged]


def failing(played: ScoredRun) -> int:
    """Returns how many workers have reported that their scorer fails, and not yet that it answers again."""
    return said(played).count(FAILS) - said(played).count("scorer 'http_judge' answers again")


def test_a_run_outlives_everything_its_judge_server_does():
    """Lets the server do each wrong thing until a worker has reported it."""
    config = make_config(S=2, P=2, group_size=4, updates=60, score_retries=2, backoff_s=0.01)
    config = with_reward(config, batch=4, backoff_max_s=0.05, timeout_s=PATIENCE, hedge_s=0.1)

    async def main() -> ScoredRun:
        played = ScoredRun(config, lambda: HttpJudge(judge), WallClock(), reward_workers=2)

        async def come_to(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(PATIENCE):
                while not condition():  # noqa: ASYNC110 (the run does not report what its trainer takes)
                    await asyncio.sleep(0.005)

        async def trouble() -> None:
            for mood in (*WRONG, "away"):
                before = len(played.taken) + 6
                await come_to(lambda before=before: len(played.taken) >= before and not failing(played))  # type: ignore[misc]
                judge.mood = mood
                if mood == "away":
                    await asyncio.to_thread(judge.stop)
                    judge.moods[mood] += 1
                await come_to(lambda mood=mood: judge.moods[mood] > 0 and failing(played) > 0)  # type: ignore[misc]
                if mood == "away":
                    judge.start()
                judge.mood = "well"

        await asyncio.gather(trouble(), played.play())
        return played

    judge = Server()
    try:
        played = asyncio.run(main())
    finally:
        judge.stop()
    assert played.outcome == ("done", None)
    assert set(judge.moods) == {"well", *WRONG, "away"}, "each was met"
    assert len(played.ended["trained"]) == 120 and not played.ended["dropped"]
    assert not played.ended["rejected"], "no sample was to blame"
    assert failing(played) == 0 and said(played).count(FAILS) >= len(WRONG) + 1
