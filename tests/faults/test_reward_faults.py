"""Tests scorers that fail under a whole control plane: every group ends trained or rejected with its reason, and the
run ends."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from omni_async.aio.clock import WallClock
from omni_async.config import Config
from omni_async.simulation.virtual_time import VirtualClock, run
from omni_async.types import Prompt, Score
from tests.control.control_world import make_config
from tests.faults.scored_run import ScoredRun, sample_of


def with_reward(config: Config, **reward: Any) -> Config:
    return replace(config, reward=replace(config.reward, **reward))


def events(played: ScoredRun) -> dict[str, set[int]]:
    """Returns the groups by how they ended, and requires that each ended once."""
    assert len({entry.group for entry in played.entries}) == len(played.entries)
    ended: dict[str, set[int]] = {"trained": set(), "rejected": set(), "dropped": set()}
    for entry in played.entries:
        ended[entry.event].add(entry.group)
        assert (entry.reason is None) == (entry.event == "trained")
    return ended


# ---- virtual time ----------------------------------------------------------------------------------------------------


class Judge:
    """A scorer whose reward is the sample's number. It is down at some times, and cannot score some samples; `asked`
    counts."""

    name = "judge"

    def __init__(
        self, up: Callable[[float], bool], bad: Callable[[int, int], bool] = lambda group, sample: False
    ) -> None:
        self._up, self._bad = up, bad
        self.asked = 0

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        self.asked += 1
        if not self._up(asyncio.get_running_loop().time()):
            raise ConnectionRefusedError("nobody listens")
        samples = [sample_of(image) for image in images]
        if any(self._bad(*sample) for sample in samples):
            return [Score(float("nan")) for _ in samples]
        return [Score(float(number)) for _, number in samples]


class Paced(ScoredRun):
    """A run whose roles take tenths of a second for what they do."""

    async def turns(self, kind: str) -> None:
        await asyncio.sleep(0.1 * self._random.randint(0, self._pause[kind]))


def play(config: Config, judge: Judge, **kwargs: Any) -> tuple[ScoredRun, float]:
    async def main() -> tuple[ScoredRun, float]:
        played = Paced(config, lambda: judge, VirtualClock(), **kwargs)
        publisher = asyncio.create_task(played.publisher())
        roles = [
            played.driver(),
            played.trainer(),
            *(played.producer(engine) for engine in played.engines),
            *(played.rewarder(f"reward-{i}") for i in range(played._reward_workers)),
        ]
        try:
            async with asyncio.timeout(1e5):
                await asyncio.gather(*roles)
        finally:
            publisher.cancel()
        return played, asyncio.get_running_loop().time()

    return run(main())


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("workers", [1, 3])
def test_an_outage_of_a_minute_costs_no_group(streaming: bool, workers: int) -> None:
    config = with_reward(
        make_config(S=1, P=2, updates=6, score_retries=3, backoff_s=1.0, score_at_once=streaming), batch=2
    )
    judge = Judge(up=lambda t: not 4 <= t < 64)
    played, seconds = play(config, judge, reward_workers=workers)
    assert played.outcome == ("done", None)
    assert events(played) == {"trained": set(range(12)), "rejected": set(), "dropped": set()}
    assert 64 <= seconds < 120
    assert judge.asked < 300, "it was not asked all the time"
    assert len([text for text in played.logged if text.startswith("warning: scorer 'judge' fails (")]) <= workers
    assert len(played.logged) % 2 == 0 and 2 <= len(played.logged) <= 2 * workers
    outages = [span for data in played.of_kind("spans") for span in data["spans"] if span.kind == "outage"]
    assert outages and 55 <= max(span.end - span.start for span in outages) <= 95


def test_a_scorer_that_never_comes_back_ends_the_run_with_its_reason() -> None:
    config = with_reward(make_config(S=1, P=2, updates=400, score_retries=1, backoff_s=1.0), outage_s=60.0)
    played, seconds = play(config, Judge(up=lambda t: t < 10))
    status, reason = played.outcome
    assert status == "failed" and reason is not None
    assert "groups in a row ended without being trained" in reason
    assert "scorer 'judge' has been failing for" in reason and "ConnectionRefusedError: nobody listens" in reason
    ended = events(played)
    assert len(ended["rejected"]) >= 32
    assert all(
        "ConnectionRefusedError" in (entry.reason or "") for entry in played.entries if entry.event == "rejected"
    )
    assert 70 <= seconds < 1000


class Whimsical(Judge):
    """A scorer that distinguishes images of size 2 from the synthetic one, which is larger; what it says of those is up
    to `drawn`, and of the other to `synthetic`."""

    def __init__(self, drawn: Callable[[int, int], float], synthetic: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(up=lambda t: True)
        self._drawn, self._synthetic = drawn, synthetic
        self.drawn: Counter[tuple[int, int]] = Counter()

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        self.asked += 1
        if images[0].shape != (2, 2, 3):
            return [Score(self._synthetic()) for _ in images]
        self.drawn.update(sample_of(image) for image in images)
        return [Score(self._drawn(*sample_of(image))) for image in images]


def misspelt(*_: int) -> float:
    raise AttributeError("'Judge' object has no attribute '_tresh'")


def test_a_scorer_that_fails_every_drawn_sample_in_the_same_way_ends_the_run_within_seconds_in_its_own_words() -> None:
    config = with_reward(make_config(S=1, P=2, updates=400, score_retries=3, backoff_s=1.0))
    played, seconds = play(config, Whimsical(misspelt), tried=True)
    words = (
        "nothing could be scored so far, and the error stays the same: scorer 'judge': AttributeError: 'Judge' object"
        " has no attribute '_tresh'"
    )
    assert played.outcome == ("failed", words)
    assert seconds < 10, "not the 600 s of an outage"


def test_one_prompt_that_cannot_be_scored_is_not_taken_for_a_scorer_that_is_wrong() -> None:
    config = with_reward(make_config(S=1, P=2, updates=6, score_retries=1, backoff_s=1.0))
    played, _ = play(
        config, Whimsical(lambda group, sample: misspelt() if group in (0, 1) else float(sample)), tried=True
    )
    assert played.outcome == ("done", None)
    assert events(played)["rejected"] == {0, 1}


def test_a_judge_that_is_away_at_the_start_is_waited_for_whatever_it_says_the_same_way_each_time() -> None:
    def away(group: int = 0, sample: int = 0) -> float:
        if asyncio.get_running_loop().time() < 300:
            raise ConnectionRefusedError("nobody listens")
        return float(sample)

    config = with_reward(make_config(S=1, P=2, updates=6, score_retries=1, backoff_s=1.0))
    played, seconds = play(config, Whimsical(away, away), tried=True)
    assert played.outcome == ("done", None) and not events(played)["rejected"]
    assert 300 <= seconds < 400


def test_an_absurd_score_rejects_its_group_with_the_reason_and_is_not_asked_for_again() -> None:
    config = with_reward(make_config(S=1, P=2, updates=6, score_retries=3, backoff_s=1.0))
    judge = Whimsical(lambda group, sample: 1e30 if (group, sample) == (3, 1) else float(sample))
    played, _ = play(config, judge, tried=True)
    assert played.outcome == ("done", None)
    (rejected,) = [entry for entry in played.entries if entry.event == "rejected"]
    assert rejected.group == 3 and rejected.reason is not None
    assert "scorer 'judge'" in rejected.reason and rejected.reason.endswith(
        "a reward of 1e+30, beyond reward.max_abs = 1e+06"
    )
    assert judge.drawn[3, 1] == 1
    assert max(abs(value) for _, group in played.taken for value in group.rewards) <= 1e6


def test_a_scorer_whose_every_score_is_absurd_ends_the_run_and_says_why() -> None:
    played, seconds = play(make_config(S=1, P=2, updates=400), Whimsical(lambda group, sample: 1e30), tried=True)
    status, reason = played.outcome
    assert status == "failed" and reason is not None and "beyond reward.max_abs" in reason and seconds < 10


def test_a_run_that_is_stopped_in_an_outage_ends_at_once() -> None:
    async def main() -> None:
        config = with_reward(make_config(S=1, P=2, updates=400), outage_s=1e6, backoff_s=1.0)
        played = ScoredRun(config, lambda: Judge(up=lambda t: t < 0), VirtualClock())

        async def stop() -> None:
            await asyncio.sleep(1000)
            await played.coordinator.stop("enough")

        publisher = asyncio.create_task(played.publisher())
        async with asyncio.timeout(1e5):
            await asyncio.gather(
                stop(),
                played.driver(),
                played.trainer(),
                played.producer("rollout-0"),
                played.rewarder("reward-0"),
                played.rewarder("reward-1"),
            )
        publisher.cancel()
        assert asyncio.get_running_loop().time() <= 1001
        assert played.outcome == ("interrupted", "enough")
        assert not events(played)["rejected"]

    run(main())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_outages_cost_no_group_and_bad_samples_only_theirs(seed: int) -> None:
    """Varies the arrangement, once the scorer has answered each worker. Some try their scorer before the first
    sample."""
    dice = random.Random(seed)
    bad = {group for group in range(1, 40) if dice.random() < 0.2}
    down, t = [], dice.uniform(2, 20)
    for _ in range(dice.randint(0, 3)):
        down.append((t, t := t + dice.uniform(1, 300)))
        t += dice.uniform(1, 100)
    judge = Judge(
        lambda now: not any(a <= now < b for a, b in down), lambda group, sample: group in bad and sample == 1
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
    ended = events(played)
    assert ended["rejected"] <= bad and not ended["trained"] & bad
    reasons = {entry.reason for entry in played.entries if entry.event == "rejected"}
    assert all(
        reason and "reward failed 4 times: scorer 'judge', sample 0" in reason and "value is nan" in reason
        for reason in reasons
    )


# ---- a real server ---------------------------------------------------------------------------------------------------


class Server:
    """A server that answers with the number of the sample; `mood` is what is wrong with it. It can go away, and come
    back on the same port."""

    def __init__(self) -> None:
        self.mood = "well"
        self.moods: Counter[str] = Counter()
        self.port = 0
        self._http: ThreadingHTTPServer | None = None
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

        class Http(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                """Ignores clients that do not wait, which the test is about."""

        self._http = Http(("127.0.0.1", self.port), Handler)
        self.port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def answer(self, samples: list[int]) -> tuple[int, bytes]:
        match self.mood:
            case "slow":
                time.sleep(0.3)
            case "error":
                return 500, b"CUDA out of memory"
            case "garbage":
                return 200, b"<html>502</html>"
            case "short":
                samples = samples[1:]
            case "nan":
                return 200, json.dumps([float("nan")] * len(samples)).encode()
            case "null":
                return 200, json.dumps([None] * len(samples)).encode()
        return 200, json.dumps(samples).encode()


class HttpJudge:
    """A scorer as a user would write the client of a judge server."""

    name = "http_judge"
    concurrent = True

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/score"

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        body = json.dumps([sample_of(image)[1] for image in images]).encode()
        with urllib.request.urlopen(self._url, body, timeout=0.5) as answer:
            return [Score(value) for value in json.load(answer)]


def test_a_run_outlives_everything_its_judge_server_does() -> None:
    server = Server()

    async def main() -> ScoredRun:
        config = with_reward(
            make_config(S=2, P=2, group_size=4, updates=60, score_retries=2, backoff_s=0.01),
            batch=4,
            backoff_max_s=0.05,
            timeout_s=0.2,
            hedge_s=0.1,
        )
        played = ScoredRun(config, lambda: HttpJudge(server.port), WallClock(), reward_workers=2)

        async def trained(count: int) -> None:
            while len(played.taken) < count:  # noqa: ASYNC110 (the run does not report when its trainer takes a group)
                await asyncio.sleep(0.005)

        async def trouble() -> None:
            for mood in ("slow", "error", "garbage", "short", "nan", "null", "away"):
                before = len(played.taken)
                await trained(before + 6)
                server.mood = mood
                if mood == "away":
                    await asyncio.to_thread(server.stop)
                await asyncio.sleep(0.25)
                if mood == "away":
                    server.start()
                server.mood = "well"

        _, played = await asyncio.gather(trouble(), played.play())
        return played

    try:
        played = asyncio.run(main())
    finally:
        server.stop()
    assert played.outcome == ("done", None)
    assert set(server.moods) - {"away"} == {"well", "slow", "error", "garbage", "short", "nan", "null"}, "each was met"
    ended = events(played)
    assert len(ended["trained"]) == 120 and not ended["dropped"]
    assert not ended["rejected"], "no sample was to blame"
    logged = [text.split(" (")[0].split(" after")[0] for text in played.logged]
    assert logged.count("warning: scorer 'http_judge' fails") == logged.count("scorer 'http_judge' answers again") >= 6


def test_a_server_that_answers_every_tenth_call_late_is_hedged() -> None:
    server = Server()
    calls = Counter[str]()

    def answer(samples: list[int]) -> tuple[int, bytes]:
        calls["all"] += 1
        if calls["all"] % 10 == 0:
            time.sleep(1.0)
        return 200, json.dumps(samples).encode()

    server.answer = answer  # type: ignore[method-assign]

    async def main() -> ScoredRun:
        config = with_reward(make_config(S=1, P=2, updates=20), batch=1, hedge_s=0.05, timeout_s=2.0)
        return await ScoredRun(config, lambda: HttpJudge(server.port), WallClock(), reward_workers=1).play()

    began = time.monotonic()
    try:
        played = asyncio.run(main())
    finally:
        server.stop()
    assert played.outcome == ("done", None) and len(events(played)["trained"]) == 40
    assert calls["all"] > 80 and time.monotonic() - began < 4.0, (
        "eight late answers of a second each were not waited for"
    )
    assert played.logged == []
