"""Tests that a scorer's failure is a reason with its line, never a number, and shows no credential."""

import asyncio
import concurrent.futures
import math
import re
import sys
import threading
from types import SimpleNamespace
from typing import Literal

import msgspec
import numpy as np
import pytest

from omni_async.aio.clock import WallClock
from omni_async.config import reward as sections
from omni_async.config.reward import Reward
from omni_async.plugins.families import MediaShape
from omni_async.rewards import registry
from omni_async.rewards.base import Outage, ScoreError, require_scores
from omni_async.rewards.failures import score_error
from omni_async.rewards.loaded import LoadedReward
from omni_async.rewards.panel import Panel
from omni_async.rewards.registry import ScorerConfigError
from omni_async.rewards.threads import Threads
from omni_async.types import Answer, Prompt, Score
from tests.config.recipe import MINIMAL, load_text
from tests.support.images import as_media, score_all
from tests.support.moved_clock import MovedLoop
from tests.support.patience import PATIENCE, until

IMAGE = (MediaShape("image", (3, 4, 4)),)
MEDIA = [as_media(np.full((4, 4, 3), i, np.uint8)) for i in range(3)]
PROMPTS = [Prompt(i, f"prompt {i}") for i in range(3)]


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no")


def raises(error):
    def answer(count):
        raise error

    return answer


LINE_THAT_RAISES = raises.__code__.co_firstlineno + 2


def each(*args, **kwargs):
    return lambda count: [Score(*args, **kwargs) for _ in range(count)]


async def answers_of(reward, settings):
    async def report(text): ...

    async with Panel("reward-0", reward, settings, WallClock(), report) as panel:
        return [answer.score or answer for answer in await asyncio.gather(*map(panel.score, MEDIA, PROMPTS))]


def outcomes_of(answer, run=asyncio.run, **reward):
    """Returns what a panel makes of a scorer that returns `answer(number of images)`."""
    scorer = SimpleNamespace(name="hostile", score=lambda images, prompts: answer(len(images)))
    settings = Reward(**reward)
    return run(answers_of(LoadedReward.of(settings, scorer), settings))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda count: None, "returned None .*expected a list of Score or numbers"),
        (lambda count: (Score(1.0) for _ in range(count)), "returned a generator"),
        (lambda count: [], "returned 0 scores"),
        (lambda count: [Score(1.0)] * (count + 1), "returned [42] scores for [31] samples"),
        (lambda count: [1.0] * (count + 1), "returned [42] scores for [31] samples"),
        (each(math.nan), "value is nan"),
        (each(-math.inf), "value is -inf"),
        (each("0.5"), "value is a str, expected a number"),
        (each(np.ones(1)), r"value is a ndarray of shape \(1,\), expected a number"),
        (each(10**400), "value is inf"),
        (each(np.timedelta64(1, "s")), "value is a timedelta64.*, expected a number"),
        (each(1.0, {"part": math.nan}), "part is nan"),
        (each(1.0, {"part": 1e160}), "part is 1e[+]160, expected at most 1e[+]100"),
        (each(1.0, None), "parts is a NoneType, expected a dict"),
        (each(1.0, {1: 1.0}), "a part's name is a int, expected a str"),
        (each(1.0, {"\ud800": 1.0}), r"a part is called '\\ud800', expected 1 to 100 characters"),
        (each(1.0, {"": 1.0}), "a part is called ''"),
        (each(1.0, {"x" * 101: 1.0}), "a part is called 'x{100}'"),
        (each(1.0, {str(i): 1.0 for i in range(257)}), "257 parts, expected 256 at most"),
        (each(1.0, text=b"x"), "text is a bytes"),
        (each(1.0, values=[1.0]), "values is a list"),
        (each(1.0, values=(1.0, math.nan)), r"values\[1\] is nan"),
        (raises(SystemExit(3)), "SystemExit: 3"),
        (raises(KeyboardInterrupt()), "KeyboardInterrupt"),
        (raises(StopIteration()), "StopIteration"),
        (raises(asyncio.CancelledError()), "CancelledError"),
        (raises(concurrent.futures.CancelledError()), "CancelledError"),
        (raises(ValueError("\ud83d\x00\x1b[31m")), r"ValueError: \\ud83d\\x00\\x1b\[31m"),
        (raises(Speechless()), "Speechless: an exception that cannot be shown"),
    ],
)
def test_it_is_a_failure_with_a_reason(answer, reason):
    for outcome in outcomes_of(answer):
        assert outcome.fault == "outage", "a scorer that never worked looks like one that is not there yet"
    for outcome in outcomes_of(answer, outage_s=0.0):
        assert outcome.fault == "retry"
        assert re.search(reason, outcome.error), outcome.error
        assert outcome.error.count("hostile") - outcome.error.count("test_hostile") == 1, "named once"
        assert outcome.error.isascii() or outcome.error.isprintable(), "it goes into the ledger and onto consoles"


def test_a_failure_names_the_line_that_raised_and_is_cut_to_a_line():
    for error in (ValueError("no"), ScoreError("no"), Outage("no")):
        (first, *_) = outcomes_of(raises(error))
        assert re.fullmatch(rf"scorer 'hostile': (ValueError: )?no \({__file__}:{LINE_THAT_RAISES}\)", first.error)
    for outcome in outcomes_of(raises(OSError("<html>\n" + "x" * 10_000))):
        assert len(outcome.error) == 300 and "\n" not in outcome.error
        assert re.search(r"x\.\.\. \(.*\.py:\d+\)$", outcome.error)
    for length, place in ((100, f" ({'x' * 100}:1)"), (200, "")):  # not longer than half of a reason
        with pytest.raises(ZeroDivisionError) as raised:
            eval(compile("1 / 0", "x" * length, "eval"))
        said = str(score_error("own", raised.value, frozenset()))
        assert said == f"scorer 'own': ZeroDivisionError: division by zero{place}"


class Words(str):
    """A text that is no plain str."""


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("half \ud83d a pair \udc00", "half \ufffd a pair \ufffd"),
        ("a\x00b\x1b[31mc\x7f\x85", "a\ufffdb\ufffd[31mc\ufffd\ufffd"),
        pytest.param("x" * 10**6, "x" * 2000 + "...", id="gigantic"),
        ("两\n行\u3000\t\U0001f600", "两\n行\u3000\t\U0001f600"),
        *((kind("yes"), "yes") for kind in (Words, np.str_)),
    ],
)
def test_texts_and_numbers_become_plain_ones_that_can_be_written(text, kept):
    numbers = {np.str_("part"): True, "other": np.int64(3)}
    for outcome in outcomes_of(each(np.float32(0.5), numbers, text=text)):
        assert outcome == Score(0.5, {"part": 1.0, "other": 3.0}, kept, (0.5,))
        assert {type(one) for one in (outcome.value, *outcome.parts.values())} == {float}
        assert {type(one) for one in (outcome.text, *outcome.parts)} == {str}
        assert msgspec.json.decode(msgspec.json.encode(outcome), type=Score) == outcome


@pytest.mark.filterwarnings("error::RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning")
def test_an_asynchronous_scorer_is_reported_in_one_line():
    async def score():
        return []

    with pytest.raises(ScoreError, match="scorer 'x' returned a coroutine: make the scorer itself `async def`"):
        require_scores("x", score(), [Prompt(0, "a")])


@pytest.mark.parametrize("value", [1e30, -1e30, 1.1e6, sys.float_info.max])
def test_an_absurd_score_is_a_final_failure_and_not_the_scorers_outage(value):
    for outcome in outcomes_of(each(value)):
        assert outcome.fault == "reject" and f"a reward of {value:g}, beyond reward.max_abs = 1e+06" in outcome.error
    assert outcomes_of(each(1e6)) == [Score(1e6, values=(1e6,))] * 3
    assert outcomes_of(each(11.0), max_abs=11.0) == [Score(11.0, values=(11.0,))] * 3
    assert isinstance(outcomes_of(each(11.0), max_abs=10.0)[0], Answer)


def test_a_call_that_hangs_leaves_its_thread_behind_and_the_next_call_has_another():
    go, loop, names = threading.Event(), MovedLoop(), []

    def answer(count):
        names.append(threading.current_thread().name)
        if len(names) == 1:
            loop.move(PATIENCE)
            go.wait(2 * PATIENCE)
        return [Score(1.0)] * count

    assert outcomes_of(answer, loop.run_until_complete, timeout_s=PATIENCE) == [Score(1.0, values=(1.0,))] * 3
    loop.close()
    assert len(names) == 4, "the batch that hung, and its samples"
    hanging = [thread for thread in threading.enumerate() if thread.name == "reward-0/hostile"]
    assert all(thread.daemon for thread in hanging), "the process can end without it"
    go.set()


async def test_calls_that_do_not_overlap_share_one_thread_and_closing_ends_idle_threads():
    before, threads = threading.active_count(), Threads("t")
    used = {await threads.run(threading.get_ident) for _ in range(20)}
    assert threads.busy == 0
    together = threading.Barrier(2, timeout=PATIENCE)
    both = threads.run(together.wait), threads.run(together.wait)
    assert threads.busy == 2
    await asyncio.gather(*both)
    assert threads.busy == 0
    used.add(await threads.run(threading.get_ident))
    assert len(used) <= 2
    threads.close()
    await until(lambda: threading.active_count() <= before, "the end of its threads")


def test_an_attribute_that_raises_is_a_failure_too():
    called = []

    class Proxy:
        name = "proxy"

        @property
        def score(self):
            if called:
                raise ConnectionError("down")
            return lambda images, prompts: called.append(1) or [Score(1.0) for _ in images]

    settings = Reward(probe=False, batch=1)
    first, second, _ = asyncio.run(answers_of(LoadedReward.of(settings, Proxy()), settings))
    assert first.value == 1.0 and "ConnectionError: down" in second.error


# ---- credentials: from the environment, and in no message ------------------------------------------------------------

KEY = "sk-42424242"


class Judge:
    """A scorer that shows its secret in errors."""

    def __init__(self, api_key: str = "", url: str = "", headers: dict[str, str] | None = None, broken: bool = False):
        self._said = f"{url} refused {api_key} {(headers or {}).get('X-Api-Key', '')}"
        if broken:
            raise OSError(self._said)

    def score(self, images, prompts):
        raise ConnectionError(self._said)


class Remote(Judge):
    async def score(self, images, prompts):
        raise ConnectionError(self._said)


class Talker(Judge):
    def __init__(self, api_key: str = "", copies: int = 1):
        self._said = f"header {f'{api_key} ' * copies} was refused" if api_key else "<html>" * 100_000


class Choosy(Judge):
    def __init__(self, api_key: Literal["one", "two"] = "one"): ...


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)


def config(scorer="Judge", **params):
    return sections.Scorer(name=f"{__name__}:{scorer}", params=params)


def failure(scorer):
    with pytest.raises(Exception) as raised:
        score_all(LoadedReward.load(Reward(scorers=(scorer,))), MEDIA[:1], PROMPTS[:1])
    assert raised.value.__cause__ is None
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_reference_is_replaced_where_the_scorer_is_built_and_a_missing_variable_is_refused(monkeypatch):
    params = "{api_key: env:JUDGE_KEY, headers: {X-Api-Key: env:JUDGE_KEY}}"
    given = load_text(MINIMAL, f"reward.scorers=[{{name: '{__name__}:Judge', params: {params}}}]")
    assert KEY not in repr(given), "the configuration travels to other machines"
    monkeypatch.setenv("JUDGE_KEY", "there")
    with pytest.raises(ConnectionError, match="refused there there"):
        registry.build(given.reward.scorers[0]).score(MEDIA[:1], PROMPTS[:1])
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ScorerConfigError, match="'api_key': 'env:JUDGE_KEY' names an environment variable that is not"):
        registry.check(config(api_key="env:JUDGE_KEY"), IMAGE)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (config(api_key=42424242), "parameter 'api_key': Expected `str`, got `int`"),
        (config("Choosy", api_key=KEY), "***"),
        (config("Choosy", api_key="env:JUDGE_KEY"), "***"),
    ],
)
def test_a_refused_parameter_is_named_without_a_secret_that_it_holds(given, said):
    with pytest.raises(ScorerConfigError) as refused:
        registry.check(given, IMAGE)
    assert said in str(refused.value) and "42424242" not in str(refused.value)


@pytest.mark.parametrize(
    "params",
    [
        {"api_key": KEY},
        {"url": f"https://me:{KEY}@judge/"},
        {"headers": {"X-Api-Key": KEY}},
        {"url": "env:JUDGE_KEY"},
    ],
    ids=["key", "url", "header", "environment"],
)
def test_what_a_scorer_raises_shows_none_of_its_credentials_nor_does_the_reason_of_a_failure(params):
    said = [failure(config(**params)), failure(config(**params, broken=True))]
    for scorer in ("Judge", "Remote"):
        settings = Reward(scorers=(config(scorer, **params),), outage_s=0.0)
        said += [answer.error for answer in asyncio.run(answers_of(LoadedReward.load(settings), settings))]
    assert all(KEY not in one and "***" in one for one in said)
    assert "OSError" in said.pop(1) and all("ConnectionError" in one for one in said), "the cause is still reported"
    assert failure(config(url="https://judge/")) == "ConnectionError: https://judge/ refused  ", "what has no secret"


def test_a_referenced_secret_of_four_characters_is_searched_for_and_a_shorter_one_is_not(monkeypatch):
    for short in ("abc", "abcd"):
        monkeypatch.setenv("JUDGE_KEY", short)
        assert (short in failure(config(api_key="env:JUDGE_KEY"))) == (short == "abc")


@pytest.mark.parametrize("length", [8, 300, 5000])
@pytest.mark.parametrize("copies", [1, 7, 500])
def test_no_piece_of_a_long_credential_is_left_where_a_text_is_cut(length, copies):
    key = "".join(f"{number:04x}" for number in range(length // 4))
    said = failure(config("Talker", api_key=key, copies=copies))
    assert not any(key[at : at + 8] in said for at in range(0, length - 7, 4))


def test_a_long_page_is_cut():
    page = failure(config("Talker"))
    assert "<html>" * 300 in page and len(page) < 2300 and Outage.__name__ in page
    assert re.search(r"\.\.\. \(600000 characters\)$", page)


def test_a_secret_that_a_later_constructor_removes_from_the_environment_is_masked(monkeypatch):
    def build(config, gpus):
        if config.name == "b":
            monkeypatch.delenv("JUDGE_KEY")
        return SimpleNamespace(name=config.name, score=lambda images, prompts: raises(ValueError(KEY))(0))

    named = sections.Scorer(name="a", params={"key": "env:JUDGE_KEY"}), sections.Scorer(name="b")
    settings = Reward(scorers=named, probe=False)
    answers = asyncio.run(answers_of(LoadedReward.load(settings, build=build), settings))
    assert all(KEY not in one.error for one in answers)
