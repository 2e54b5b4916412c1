"""Tests a run whose judge, a scripted OpenAI-compatible server, has every fault in turn: none becomes a number."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.rewards.judge_server import completion, judging
from tests.support.job_world import run
from tests.support.patience import PATIENCE

FAULTS = ("429", "500", "truncated JSON", "half a surrogate pair", "1 MB", "slow", "hang")
# A fault that counted as any number would show in a group's reward.
YES = {
    "the digit 7": 0.9,
    "a photo of a red circle on a white background": 0.3,
    "7": None,  # asked for this one, the server says that it has no such model
    "a red digit on a white photo": 0.7,
    "the white circle": 0.1,
}


class Judge:
    """Answers with a fault when it is first asked about every other image, and then as it should."""

    def __init__(self) -> None:
        self.met: Counter[str] = Counter()
        self.over = asyncio.Event()
        self._seen: set[str] = set()
        self._next = itertools.cycle(fault for one in FAULTS for fault in (one, "none"))

    async def __call__(self, body: dict[str, Any], n: int) -> Any:
        image, question = body["messages"][0]["content"]
        likely = YES[question["text"].removeprefix("Is this ")]
        if likely is None:
            self.met["wrong model"] += 1
            return 404, {"error": {"message": "The model `m` does not exist."}}
        fault = "none" if image["image_url"]["url"] in self._seen else next(self._next)
        self._seen.add(image["image_url"]["url"])
        self.met[fault] += 1
        tops = ("Yes", likely), ("No", 1 - likely)
        match fault:
            case "429":
                return 429, {}, {"Retry-After": "0"}
            case "500":
                return 500, b"CUDA out of memory"
            case "truncated JSON":
                return b'{"choices": [{"message": {"content": "Yes"}, "logprobs": {"content": [{"top_logp'
            case "half a surrogate pair":
                return b'{"choices": [{"message": {"content": "Yes \\ud83d"}}]}'
            case "1 MB":
                return completion("y" * 2**20, *tops)
            case "slow":
                await asyncio.sleep(0.2)
            case "hang":
                await self.over.wait()
        return completion("Yes", *tops)


@contextmanager
def serving(judge: Judge) -> Iterator[str]:
    """Yields the address of the judge's server, which runs in a thread."""
    urls, loop = queue.SimpleQueue[str](), asyncio.new_event_loop()

    async def serve() -> None:
        async with judging(judge) as server:
            urls.put(server.url)
            await judge.over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        yield urls.get(timeout=PATIENCE)
    finally:
        loop.call_soon_threadsafe(judge.over.set)
        thread.join()
        loop.close()


def test_a_run_outlives_every_fault_of_its_judge(recipe: Path) -> None:
    judge = Judge()
    with serving(judge) as url:
        # Only a sample whose 41 questions all take longer than half a second would be one that the judge fails.
        asking = "timeout_s: 0.5, backoff_s: 0.01, backoff_max_s: 0.05, retries: 40"
        params = f"model: m, urls: ['{url}'], prompt: 'Is this {{prompt}}', {asking}"
        finished = run(
            recipe,
            f"reward.scorers=[{{name: vlm_judge, params: {{{params}}}}}]",
            "reward.retries=1",
            "reward.backoff_s=0.01",
            "trainer.updates=5",
            "staleness.max_updates=1",
            "algorithm.advantage.drop_zero_variance=false",
        )
    assert finished.summary.status == "done", finished.summary.reason
    finished.check_every_group_ended_once()
    assert judge.met.keys() == {*FAULTS, "wrong model", "none"}, "each was met"
    says = [*YES.values()]
    trained = [line for line in finished.ledger if line["event"] == "trained"]
    assert [line["reward"] for line in trained] == [pytest.approx(says[line["prompt"]]) for line in trained]
    rejected = [line for line in finished.ledger if line["event"] == "rejected"]
    assert rejected and all(says[line["prompt"]] is None for line in rejected)
    assert all("answered 404: The model `m` does not exist." in line["reason"] for line in rejected)
