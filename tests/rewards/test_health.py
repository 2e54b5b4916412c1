"""Tests, on virtual time, scorers that fail in every way: whose fault it is, and when they are asked again."""

import asyncio
import io
import math
import re
import urllib.error
from email.message import Message
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from omni_async.config import with_spec
from omni_async.config.reward import Reward
from omni_async.media import require_media
from omni_async.plugins.families import MediaShape
from omni_async.rewards.base import Outage, ScoreError, Unbounded
from omni_async.rewards.calls import ScorerHangs
from omni_async.rewards.failures import is_outage
from omni_async.rewards.loaded import LoadedReward
from omni_async.rewards.panel import Panel
from omni_async.rewards.probe import Probe
from omni_async.rewards.threads import Threads
from omni_async.simulation.virtual_time import VirtualClock
from omni_async.types import Prompt, Score
from tests.control.control_world import make_config
from tests.support.images import as_media

pytestmark = pytest.mark.virtual_time

HANGS = math.inf
BAD = "scorer '0': ValueError: unreadable"
PROBE = Probe.of(with_spec(make_config()), [Prompt(0, "a cat", metadata={"colour": "red"}), Prompt(1, "a dog")])


def now():
    return asyncio.get_running_loop().time()


def image(pixel):
    return as_media(np.full((2, 2, 3), pixel, np.uint8))


class Judge:
    """A scorer that scores an image by its first pixel. `up` says whether it works at a time, `seconds` how long its
    next call takes, or a list of that for one call after the other; it fails for `bad` pixels. With `says`, call number
    n, from 1, does what `says(n)` says instead."""

    name = "judge"

    def __init__(self, up=lambda t: True, seconds=lambda t: 0.0, bad=(), says=None, concurrent=False):
        self.seconds = (lambda t: seconds.pop(0) if seconds else 0.0) if isinstance(seconds, list) else seconds
        self.up, self.bad, self.says, self.concurrency = up, bad, says, 2 if concurrent else 1
        self.calls = []  # of time and pixels

    @property
    def seen(self):
        return [pixels for _, pixels in self.calls]

    def score(self, images, prompts):
        pixels = [int(one[0, 0, 0]) for one in images]
        self.calls.append((now(), pixels))
        if self.says is not None and isinstance(said := self.says(len(self.calls)), BaseException):
            raise said
        if not self.up(now()):
            raise ConnectionRefusedError("nobody listens")
        if set(pixels) & set(self.bad):
            raise ValueError("unreadable")
        return [Score(float(pixel) if self.says is None else said) for pixel in pixels]


class VirtualThreads(Threads):
    """Threads whose calls begin at once and take the judge's seconds of virtual time."""

    def __init__(self, judge):
        super().__init__("virtual")
        self._judge = judge
        self.begun = 0

    def run(self, call):
        self.begun += 1
        future, seconds = asyncio.get_running_loop().create_future(), self._judge.seconds(now())
        self._busy[future] = None
        future.add_done_callback(self._busy.pop)
        if seconds < HANGS:
            asyncio.get_running_loop().call_later(seconds, lambda: future.set_result(call()))
        return future


class Stage:
    """A panel of judges, and the reports about them."""

    def __init__(self, *judges, probe=None, **reward):
        self.reports = []
        pools = {f"p/{number}": VirtualThreads(judge) for number, judge in enumerate(judges)}
        self.threads = pools["p/0"]
        for number, judge in enumerate(judges):
            judge.name = str(number)
        loaded = LoadedReward.of(config := Reward(**reward), *judges)
        self.panel = Panel(
            "p", loaded, config, VirtualClock(), self.report, lambda name: pools.get(name) or Threads(name), probe
        )

    async def report(self, text):
        self.reports.append((now(), without_place(text)))

    async def outcomes(self, *pixels):
        asked = (self.panel.score(image(pixel), Prompt(pixel, "a cat")) for pixel in pixels)
        return [answer.score or answer for answer in await asyncio.gather(*asked)]

    async def score(self, *pixels):
        """Returns values, reasons without their place, and None for postponed samples."""
        return [
            o.value if isinstance(o, Score) else None if o.fault == "outage" else without_place(o.error)
            for o in await self.outcomes(*pixels)
        ]


def without_place(text):
    return re.sub(r" \([^()]+\.py:\d+\)", "", text)


async def after_one(seconds, *judges, **reward):
    """Makes a stage whose judges have scored a sample, so many seconds ago."""
    stage = Stage(*judges, **reward)
    assert await stage.score(1) == [float(len(judges))]
    await asyncio.sleep(seconds)
    return stage


# ---- a scorer that is down -------------------------------------------------------------------------------------------


async def test_an_outage_is_held_against_no_sample_and_ends_with_the_first_answer():
    stage = await after_one(5, judge := Judge(up=lambda t: not 5 <= t < 65))
    assert await stage.score(3, 4, 5) == [None, None, None]
    assert judge.calls[1:] == [(5, [3, 4, 5]), (5, [3]), (5, [1])], "the last is one that it could score before"
    assert stage.panel.down
    await stage.panel.recover()
    assert [time for time, _ in judge.calls[4:]] == [6, 8, 12, 20, 36, 66]
    assert {tuple(pixels) for pixels in judge.seen[4:]} == {(1,)}
    assert not stage.panel.down
    assert await stage.score(3, 4, 5) == [3.0, 4.0, 5.0]
    assert stage.reports == [
        (6, "warning: scorer '0' fails (ConnectionRefusedError: nobody listens); its samples wait"),
        (66, "scorer '0' answers again after 61 s"),
    ]


async def test_an_outage_that_is_over_after_the_first_pause_is_not_worth_a_word():
    stage = await after_one(5, Judge(up=lambda t: not 5 <= t < 5.5))
    assert await stage.score(2) == [None]
    await stage.panel.recover()
    assert await stage.score(2) == [2.0] and now() == 6 and stage.reports == []


async def test_a_bad_sample_alone_opens_nothing():
    stage = await after_one(0, Judge(bad=(7, 8)))
    for _ in range(10):
        assert await stage.score(7) == [BAD] and await stage.score(7, 8) == [BAD] * 2
    assert not stage.panel.down and stage.reports == []
    assert await stage.score(7, 2, 8) == [BAD, 2.0, BAD]
    stage, shown = Stage(judge := Judge(bad=(7,))), image(1)
    await stage.panel.score(shown, Prompt(1, "a cat"))
    shown.image[:] = 7  # the store uses its memory for something else
    assert await stage.score(7) == [BAD]
    assert judge.seen[-1] == [1] and not stage.panel.down


async def test_the_first_samples_ever_may_be_bad_ones_which_only_the_next_sample_distinguishes_from_an_outage():
    stage = Stage(Judge(bad=(7, 8, 9)))
    assert stage.panel.room() > 1
    assert await stage.score(7, 8, 9, 1) == [None] * 4
    assert stage.panel.down and stage.panel.room() == 1, "an attempt"
    await stage.panel.recover()
    assert now() == 1.0
    assert await stage.score(7, 8, 9, 1) == [BAD, BAD, BAD, 1.0]
    assert not stage.panel.down


async def test_a_score_that_is_too_large_rejects_its_sample_and_is_not_asked_for_again():
    stage = Stage(judge := Judge(says=lambda call: Unbounded("beyond reward.max_abs")))
    (found,) = await stage.outcomes(1)
    assert (without_place(found.error), found.fault) == ("scorer '0': beyond reward.max_abs", "reject")
    assert judge.seen == [[1]] and not stage.panel.down


async def test_a_scorer_that_stays_down_is_given_up_with_its_reason_and_still_asked_now_and_then():
    stage = await after_one(5, judge := Judge(up=lambda t: t < 5 or t >= 1000), outage_s=100.0)
    assert await stage.score(2, 3) == [None, None]
    await stage.panel.recover()
    assert now() == 127, "a pause ends later than the limit, and a worker beside this one has a second for itself"
    calls = len(judge.calls)
    for _ in range(20):
        await stage.panel.recover()
        reason = f"scorer '0' has been failing for {now() - 5:.0f} s: ConnectionRefusedError: nobody listens"
        assert await stage.score(2, 3) == [reason, reason]
        await asyncio.sleep(2)
    assert now() == 187 and len(judge.calls) - calls == 1, "one attempt every 30 s"
    await asyncio.sleep(1000)
    await stage.panel.recover()
    assert await stage.score(2, 3) == [2.0, 3.0]
    assert [text.split(" (")[0] for _, text in stage.reports] == [
        "warning: scorer '0' fails",
        "warning: scorer '0' has been failing for 121 s; its samples fail now",
        "scorer '0' answers again after 1182 s",
    ]


async def test_one_of_two_scorers_that_is_down_is_waited_for_alone_and_what_the_other_fails_is_no_fault_of_it():
    stage = await after_one(5, fine := Judge(), broken := Judge(up=lambda t: not 5 <= t < 9))
    assert await stage.score(2, 3) == [None, None]
    calls = len(fine.calls)
    await stage.panel.recover()
    assert len(fine.calls) == calls and len(broken.calls) > 5
    assert await stage.score(2, 3) == [4.0, 6.0]
    stage = Stage(Judge(bad=(7,)), other := Judge())
    assert await stage.score(1, 7, 2) == [2.0, BAD, 4.0]
    assert other.seen == [[1, 7, 2]], "they are asked side by side"


async def test_media_that_are_none_are_not_the_scorers_failure():
    stage = Stage(judge := Judge())
    for _ in range(5):
        outcome = await stage.panel.score(np.zeros((2, 2), np.uint8), Prompt(0, "a cat"))
        assert "expected media, got a ndarray" in outcome.error and outcome.fault == "retry"
    assert judge.calls == [] and not stage.panel.down


# ---- a scorer that is slow, or hangs ---------------------------------------------------------------------------------


async def test_a_slow_call_is_made_twice_and_the_first_answer_counts():
    stage = Stage(Judge(seconds=[50, 1], concurrent=True), hedge_s=10.0)
    assert await stage.score(1) == [1.0]
    assert now() == 11 and stage.threads.begun == 2
    assert stage.threads.busy == 1, "the slow one is left behind"
    assert await stage.score(3) == [3.0], "and does not hold up the next"
    assert now() == 11
    await asyncio.sleep(100)
    assert stage.threads.busy == 0


@pytest.mark.parametrize(
    ("judge", "ends", "begun"),
    [
        pytest.param({"seconds": [12, 50], "concurrent": True}, 12, 2, id="the second call may be the slower one"),
        pytest.param({"seconds": [12, 5], "concurrent": True, "up": lambda t: t > 13}, 15, 2, id="or the one to fail"),
        pytest.param({"seconds": [50]}, 50, 1, id="one that does not say it is concurrent is not called twice"),
    ],
)
async def test_a_slow_call_ends_with_the_first_score(judge, ends, begun):
    stage = Stage(Judge(**judge), hedge_s=10.0)
    assert await stage.score(1) == [1.0]
    assert now() == ends and stage.threads.begun == begun


async def test_there_is_one_second_call_the_timeout_is_for_both_and_a_call_that_fails_is_not_repeated():
    stage = await after_one(0, Judge(seconds=[0, HANGS, HANGS], concurrent=True), hedge_s=10.0, timeout_s=25.0)
    assert await stage.score(2) == ["scorer '0': no score within 25 s"]
    assert now() == 25 and stage.threads.busy == 2
    stage = await after_one(0, judge := Judge(bad=(7,), concurrent=True), hedge_s=10.0)
    assert await stage.score(7) == [BAD] and judge.seen == [[1], [7], [1]]
    stage = Stage(Judge(seconds=[90, 20, 20]), timeout_s=60.0)
    assert await stage.score(1, 2) == [1.0, 2.0] and now() == 125, "a batch that is too slow is scored one by one"


async def test_samples_that_hang_for_ever_end_the_worker_before_it_is_full_of_threads():
    stage = Stage(Judge(seconds=lambda t: HANGS if t % 20 < 10 else 0.0), timeout_s=10.0)
    await asyncio.sleep(10)
    assert await stage.score(2) == [2.0]
    await asyncio.sleep(10)
    with pytest.raises(ScorerHangs, match="8 calls have not returned; let the scorer bound each call by a timeout"):
        for _ in range(100):
            assert await stage.score(1) == ["scorer '0': no score within 10 s"]
            assert await stage.score(2) == [2.0]
            await asyncio.sleep(10)
    assert stage.threads.busy == 8 and not stage.panel.down


async def test_slow_calls_that_were_given_up_are_waited_for_before_there_are_too_many():
    every_other_is_slow_and_its_second_is_not = [0.0] + [50.0, 0.0] * 40
    stage = Stage(Judge(seconds=every_other_is_slow_and_its_second_is_not, concurrent=True), hedge_s=1.0)
    for pixel in range(1, 41):
        assert await stage.score(pixel) == [float(pixel)]
        assert stage.threads.busy <= 2 * 8 + 1
    assert 50 < now() < 150, "twice for sixteen of them"


async def test_a_server_that_hangs_for_a_while_is_asked_no_more_than_there_are_threads():
    stage = await after_one(5, Judge(seconds=lambda t: max(0.0, 300 - t) if t >= 5 else 0.0), timeout_s=10.0)
    assert await stage.score(2, 3, 4) == [None] * 3
    await stage.panel.recover()
    assert 300 <= now() <= 340
    assert await stage.score(2, 3, 4) == [2.0, 3.0, 4.0]
    assert stage.threads.begun <= 1 + 8 + 2


async def test_a_server_that_hangs_for_ever_ends_the_worker_when_the_outage_is_over():
    stage = await after_one(5, Judge(seconds=lambda t: HANGS if t >= 5 else 0.0), timeout_s=10.0, outage_s=200.0)
    assert await stage.score(2, 3, 4) == [None] * 3
    with pytest.raises(ScorerHangs, match=r"8 calls have not returned.*reward.outage_s = 200 is over"):
        await stage.panel.recover()
    assert 200 <= now() <= 300


# ---- tried before any sample is drawn: wrong, or down ----------------------------------------------------------------


def typo(call):
    return AttributeError("'Judge' object has no attribute '_tresh'")


def test_the_synthetic_sample_is_two_images_of_the_runs_size_with_its_first_prompts():
    require_media(PROBE.media, with_spec(make_config()).rollout.sampling)
    first, second = (media.pixels for media in PROBE.media)
    assert first.shape == (512, 512, 3) and not np.array_equal(first, second) and (first.min(), first.max()) == (0, 255)
    assert [(prompt.text, prompt.metadata) for prompt in PROBE.prompts] == [("a cat", {"colour": "red"}), ("a dog", {})]


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (typo, "AttributeError: 'Judge' object has no attribute '_tresh'"),
        (lambda call: float("nan"), "sample 0 (prompt 0: 'a cat'): value is nan, expected a finite number"),
        (lambda call: "0.5", "value is a str, expected a number"),
        (lambda call: RuntimeError("no such layer"), "RuntimeError: no such layer"),
        (lambda call: FileNotFoundError("weights.pt"), "FileNotFoundError: weights.pt"),
        (lambda call: ValueError(f"<Tensor at 0x7f{call}a>"), "ValueError: <Tensor at 0x7f2a>"),  # but for addresses
        (lambda call: SystemExit(3), "SystemExit: 3"),
    ],
)
async def test_one_that_fails_twice_in_the_same_way_is_wrong_and_said_so_at_once_in_its_own_words(says, words):
    wrong = await Stage(judge := Judge(says=says), probe=PROBE).panel.try_out()
    assert wrong is not None and words in wrong and "reward.probe=false" in wrong
    assert now() == 0 and len(judge.calls) == 2


def test_scorers_of_texts_are_tried_with_two_texts():
    config, spec = make_config(), SimpleNamespace(media=lambda: (MediaShape("text", ()),))
    config = replace(config, rollout=replace(config.rollout, sampling=spec))
    one, other = Probe.of(config, [Prompt(0, "1 + 1")]).media
    assert one.parts == other.parts == ("text",) and one.text != other.text


@pytest.mark.parametrize(
    "says",
    [
        pytest.param(lambda call: ConnectionRefusedError("nobody listens"), id="nobody listens"),
        pytest.param(lambda call: Outage("still loading"), id="it says so itself"),
        pytest.param(lambda call: RuntimeError(f"request {call} failed"), id="words that change"),
        pytest.param(lambda call: MemoryError("no room") if call == 2 else typo(call), id="two kinds"),
    ],
)
async def test_one_that_is_down_or_changes_its_words_is_waited_for(says):
    judge = Judge(says=lambda call: says(call) if now() < 100 else 7.0)
    stage = Stage(judge, probe=PROBE, outage_s=600.0)
    assert await stage.panel.try_out() is None
    assert stage.panel.down and len(stage.panel.outages) == 1 and len(judge.calls) <= 2
    while stage.panel.down:
        await stage.panel.recover()
        outcome = await stage.outcomes(1)
    assert outcome == [Score(7.0, values=(7.0,))] and 100 <= now() <= 200


async def test_each_scorer_is_tried_a_single_failure_is_forgiven_and_one_that_hangs_is_an_outage_after_one_timeout():
    wrong = await Stage(Judge(), Judge(says=typo), probe=PROBE).panel.try_out()
    assert wrong is not None and wrong.startswith("scorer '1': AttributeError")
    stage = Stage(Judge(says=lambda call: typo(call) if call == 1 else 2.0), probe=PROBE)
    assert await stage.panel.try_out() is None
    assert not stage.panel.down and stage.reports == []
    stage = Stage(Judge(seconds=lambda t: HANGS if t < 1 else 0.0), probe=PROBE, timeout_s=20.0)
    assert await stage.panel.try_out() is None
    assert now() == 20 and stage.panel.outages == ["scorer '0': no score within 20 s"]


async def test_a_drawn_sample_that_fails_twice_alike_is_the_scorers_mistake_until_one_is_scored():
    judge = Judge(says=lambda call: 1.0 if call == 1 or judge.seen[-1] == [0] else typo(call))
    stage = Stage(judge, probe=PROBE)
    assert await stage.panel.try_out() is None
    assert all(outcome.wrong and outcome.fault == "retry" for outcome in await stage.outcomes(3, 4))
    assert not stage.panel.down, "it was tried, so this is no outage"
    assert judge.seen[1:] == [[3, 4], [3], [3], [0], [4], [4], [0]], "twice, then what it could score"
    stage = Stage(Judge(says=lambda call: ConnectionRefusedError() if now() < 5 else typo(call)), probe=PROBE)
    assert await stage.panel.try_out() is None
    await asyncio.sleep(5)
    await stage.panel.recover()
    assert all(outcome.wrong and outcome.fault == "outage" for outcome in await stage.outcomes(3, 4))
    stage = Stage(judge := Judge(bad=(9,)), probe=PROBE)
    assert await stage.panel.try_out() is None
    await stage.score(1)
    (outcome,) = await stage.outcomes(9)
    assert not outcome.wrong
    assert judge.seen == [[0, 0], [1], [9], [1]], "asked once, and then for a drawn sample that it has scored"


# ---- whose fault it is -----------------------------------------------------------------------------------------------


def named(name, **attributes):
    """An exception named as in an HTTP library."""
    return type(name, (Exception,), attributes)()


def http_error(status):
    return urllib.error.HTTPError("http://judge", status, "no", Message(), io.BytesIO())


def http_status(status):
    return named("HTTPStatusError", response=SimpleNamespace(status_code=status))


def caused_by(cause):
    error = LookupError("the judge failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("outage", "errors"),
    [
        (True, [ConnectionResetError(), TimeoutError(), OSError("the judge is out for lunch"), MemoryError()]),
        (True, [urllib.error.URLError("refused"), http_error(503), http_error(404), http_status(502)]),
        (True, [named("ConnectTimeout"), caused_by(ConnectionRefusedError()), Outage("loading")]),
        (False, [http_error(401), http_status(422), caused_by(KeyError("score")), ScoreError("unreadable")]),
        (
            False,
            [
                AttributeError("x"),
                FileNotFoundError("x"),
                PermissionError("x"),
                named("Prickly", response=property(lambda self: 1 / 0)),
            ],
        ),
    ],
)
def test_what_counts_as_an_outage(outage, errors):
    assert [error for error in errors if is_outage(error) is not outage] == []
