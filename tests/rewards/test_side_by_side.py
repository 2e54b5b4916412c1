"""Tests in virtual time that the scorers of a sample run side by side: asynchronous ones, slow ones, ones that may be
left out, and what they are found to cost."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from omni_async.config.reward import Reward, Scorer
from omni_async.rewards.loaded import LoadedReward
from omni_async.rewards.panel import Panel
from omni_async.simulation.virtual_time import VirtualClock
from omni_async.types import Prompt, Score
from tests.support.images import as_media

pytestmark = pytest.mark.virtual_time


IMAGE = as_media(np.zeros((2, 2, 3), np.uint8))
LEFT_OUT = [{"on_failure": "leave_out"}, {}]


def refuses(call):
    return ValueError("no")


def now():
    return asyncio.get_running_loop().time()


class Remote:
    """A judge elsewhere: a call takes `seconds` of the prompt's index, and says `says` of the number of the call."""

    accepts = ("image",)

    def __init__(self, seconds=1.0, says=lambda call: 1.0):
        self.name = "remote"
        self.calls = []  # of time and prompts
        self.running = self.most = self.cancelled = 0
        self.closed, self.addresses = False, None
        self._seconds, self._says = seconds if callable(seconds) else lambda index: seconds, says

    async def score(self, media, prompts):
        self.calls.append((now(), [prompt.index for prompt in prompts]))
        said = self._says(len(self.calls))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self._seconds(prompts[0].index))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if isinstance(said, Exception):
            raise said
        return [Score(said, {"prompt_tokens": 100.0, "completion_tokens": 1.0})] * len(prompts)

    def connect(self, addresses):
        self.addresses = addresses

    async def close(self):
        self.closed = True


def panel_of(*scorers, each=None, addresses=None, **reward):
    configs = [Scorer(**{"name": f"r{i}", **one}) for i, one in enumerate(each or [{}] * len(scorers))]
    made = iter(scorers)
    config = Reward(**{"backoff_s": 1.0, "retries": 2, **reward}, scorers=tuple(configs))

    async def report(text): ...

    loaded = LoadedReward.load(config, build=lambda *_: next(made))
    return Panel("p", loaded, config, VirtualClock(), report, addresses=addresses)


async def outcomes(panel, count, **kwargs):
    asked = (panel.score(IMAGE, Prompt(i, "a cat"), **kwargs) for i in range(count))
    return [answer.score or answer for answer in await asyncio.gather(*asked)]


async def test_three_scorers_of_1_2_and_4_seconds_take_4():
    panel = panel_of(Remote(1.0), Remote(2.0), Remote(4.0))
    (score,) = await outcomes(panel, 1)
    assert now() == 4.0 and score.value == 3.0
    await outcomes(panel, 100)
    assert now() == 8.0


@pytest.mark.parametrize(("limits", "seconds", "most"), [({}, 3.0, 48), ({"concurrency": 12, "batch": 1}, 12.0, 12)])
async def test_an_asynchronous_scorer_is_called_as_often_at_once_as_the_recipe_says(limits, seconds, most):
    remote = Remote(3.0)
    panel = panel_of(remote, each=[limits])
    await outcomes(panel, 48)
    assert now() == seconds and remote.most == most and not panel.scorers[0].load.items_running


async def test_a_slow_answer_holds_up_no_other_sample():
    remote = Remote(lambda index: 12.0 if index == 0 else 3.0)
    panel, done = panel_of(remote, each=[{"concurrency": 2, "batch": 1}]), {}

    async def score(index):
        await panel.score(IMAGE, Prompt(index, "a cat"))
        done[index] = now()

    await asyncio.gather(*map(score, range(5)))
    assert done == {1: 3.0, 2: 6.0, 3: 9.0, 0: 12.0, 4: 12.0}


async def test_a_call_that_takes_too_long_is_cancelled_and_frees_its_place():
    remote = Remote(lambda index: 100.0 if index == 0 else 1.0)
    panel = panel_of(remote, each=[{"timeout_s": 5.0, "concurrency": 1}])
    found = await outcomes(panel, 2)
    assert found[0].fault == "outage" and remote.cancelled >= 1
    assert remote.running == 0


async def test_a_scorer_that_may_be_left_out_is_asked_again_and_then_left_out_and_is_not_waited_for_while_it_is_down():
    broken = Remote(0.0, says=refuses)
    panel = panel_of(broken, Remote(1.0), each=LEFT_OUT)
    (score,) = await outcomes(panel, 1)
    assert score.values == (None, 1.0)
    assert panel.scorers[0].health.down and not panel.down, "it has never answered"
    calls = len(broken.calls)
    found = await outcomes(panel, 8)
    assert all(one.values == (None, 1.0) for one in found) and len(broken.calls) - calls <= 8
    away = Remote(0.0, says=lambda call: 2.0 if call == 1 or now() > 50 else ConnectionError("away"))
    panel = panel_of(away, Remote(1.0), each=LEFT_OUT)
    assert [one.values for one in await outcomes(panel, 1)] == [(2.0, 1.0)]
    assert {one.values for one in await outcomes(panel, 4)} == {(None, 1.0)}
    await asyncio.sleep(100)
    assert [one.values for one in await outcomes(panel, 1)] == [(2.0, 1.0)], "it was asked meanwhile, and is back"


async def test_a_sample_of_which_too_much_is_left_out_has_no_reward():
    async with panel_of(Remote(0.0, says=refuses), Remote(1.0), each=LEFT_OUT) as panel:
        outcome = await panel.score(IMAGE, Prompt(0, "a cat"), whole=True)  # outside a group
        assert outcome.score is None and outcome.error == "no answer of r0"
    async with panel_of(Remote(0.0, says=refuses), each=LEFT_OUT[:1]) as panel:
        (failure,) = await outcomes(panel, 1)
        assert failure.error == "every scorer that is asked for it has failed and may be left out"


async def test_what_one_scorer_said_is_kept_for_a_sample_that_another_failed():
    paid, moody = Remote(1.0), Remote(0.0, says=lambda call: ValueError("no") if call == 2 else 1.0)
    panel = panel_of(moody, paid, retries=0)
    assert (await outcomes(panel, 1))[0].value == 2.0  # it has answered, so it is not down
    (failure,) = await outcomes(panel, 1, key="s1")
    assert failure.fault == "retry" and len(paid.calls) == 2
    (score,) = await outcomes(panel, 1, key="s1")
    assert score.value == 2.0 and len(paid.calls) == 2


async def test_what_a_scorer_costs_is_counted():
    remote = Remote(lambda index: 1.0 + index, says=lambda call: ValueError("no") if call == 4 else 1.0)
    panel = panel_of(remote, each=[{"concurrency": 2, "batch": 1}])
    asked = asyncio.ensure_future(outcomes(panel, 3))
    await asyncio.sleep(0.5)
    (report,) = panel.take_reports()
    assert (report.scorer, report.in_flight, report.queued, report.calls) == ("r0", 3, 1, 0)
    await asked
    (report,) = panel.take_reports()
    assert (report.in_flight, report.queued, report.calls, report.samples, report.failed) == (0, 0, 3, 3, 0)
    assert report.tokens == 303.0 and report.call_s == (1.0, 2.0, 3.0) and report.answer_s == (1.0, 2.0, 4.0)
    (failure,) = await outcomes(panel, 1)
    assert failure.error and panel.take_reports()[0].failed == 1


async def test_scorers_are_told_where_roles_are_and_closed_at_the_end():
    remote, where = Remote(), object()
    panel = panel_of(remote, addresses=where)
    await panel.close()
    assert remote.addresses is where and remote.closed
