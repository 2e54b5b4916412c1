"""Tests that a scorer's failure is a reason with its line, never a number, and shows no credential."""

import asyncio
import concurrent.futures
import math
import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from omni_async.aio.clock import WallClock
from omni_async.config import schema
from omni_async.config.schema import Reward
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
from tests.support.patience import PATIENCE

IMAGE = (MediaShape("image", (3, 4, 4)),)
MEDIA = [as_media(np.full((4, 4, 3), i, np.uint8)) for i in range(3)]
PROMPTS = [Prompt(i, f"prompt {i}") for i in range(3)]


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def raises(error: BaseException) -> Callable[[int], Any]:
    def answer(count: int) -> Any:
        raise error

    return answer


LINE_THAT_RAISES = raises.__code__.co_firstlineno + 2


def each(*args: Any, **kwargs: Any) -> Callable[[int], Any]:
    return lambda count: [Score(*args, **kwargs) for _ in range(count)]


def outcomes_of(
    answer: Callable[[int], Any], run: Callable[..., Any] = asyncio.run, **reward: Any
) -> list[Score | Answer]:
    """Returns what a panel makes of a scorer that returns `answer(number of images)`."""
    scorer: Any = SimpleNamespace(name="hostile", score=lambda images, prompts: answer(len(images)))
    settings = Reward(**reward)
    return run(answers_of(LoadedReward.of(settings, scorer), settings))


async def answers_of(reward: LoadedReward, settings: Reward) -> list[Score | Answer]:
    async def report(text: str) -> None: ...

    async with Panel("reward-0", reward, settings, WallClock(), report) as panel:
        return [answer.score or answer for answer in await asyncio.gather(*map(panel.score, MEDIA, PROMPTS))]


ANSWERS = [
    (lambda count: None, "returned a NoneType, expected a list of Score"),
    (lambda count: "1.0", "returned a str, expected a list of Score"),
    (lambda count: np.ones(count), r"returned a ndarray of shape \(\d,\), expected a list of Score"),
    (lambda count: (Score(1.0) for _ in range(count)), "returned a generator"),
    (lambda count: dict.fromkeys(range(count), Score(1.0)), "returned a dict"),
    (lambda count: [], "returned 0 scores"),
    (lambda count: [Score(1.0)] * (count + 1), "returned [42] scores for [31] samples"),
    (lambda count: [1.0] * count, "a float, expected a Score"),
    (lambda count: [None] * count, "a NoneType, expected a Score"),
    (each(math.nan), "value is nan"),
    (each(-math.inf), "value is -inf"),
    (each(np.float32("nan")), "value is nan"),
    (each(None), "value is a NoneType, expected a number"),
    (each("0.5"), "value is a str, expected a number"),
    (each(1j), "value is a complex, expected a number"),
    (each(np.ones(3)), r"value is a ndarray of shape \(3,\), expected a number"),
    (each(np.ones(())), r"value is a ndarray of shape \(\), expected a number"),
    (each(10**400), "value is inf"),
    (each(np.timedelta64(1, "s")), "value is a timedelta64.*, expected a number"),
    (each(1.0, {"part": 10**400}), "part is inf"),
    (each(1.0, {"part": 1e160}), "part is 1e[+]160, expected at most 1e[+]100"),
    (each(1.0, {"part": math.nan}), "part is nan"),
    (each(1.0, {"part": None}), "part is a NoneType"),
    (each(1.0, None), "parts is a NoneType, expected a dict"),
    (each(1.0, {1: 1.0}), "a part's name is a int, expected a str"),
    (each(1.0, {"\ud800": 1.0}), r"a part is called '\\ud800', expected 1 to 100 characters"),
    (each(1.0, {"a\x00b": 1.0}), r"a part is called 'a\\x00b'"),
    (each(1.0, {"": 1.0}), "a part is called ''"),
    (each(1.0, {"x" * 101: 1.0}), "a part is called 'x{100}'"),
    (each(1.0, {str(i): 1.0 for i in range(257)}), "257 parts, expected 256 at most"),
    (each(1.0, {"part": 1e200}), "part is 1e[+]200, expected at most 1e[+]100"),
    (each(1.0, text=b"x"), "text is a bytes"),
    (each(1.0, values=[1.0]), "values is a list"),
    (each(1.0, values=(1.0, math.nan)), r"values\[1\] is nan"),
    (raises(ValueError("no")), "ValueError: no"),
    (raises(TimeoutError("socket")), "TimeoutError: socket"),
    (raises(SystemExit(3)), "SystemExit: 3"),
    (raises(KeyboardInterrupt()), "KeyboardInterrupt"),
    (raises(StopIteration()), "StopIteration"),
    (raises(asyncio.CancelledError()), "CancelledError"),
    (raises(concurrent.futures.CancelledError()), "CancelledError"),
    (raises(GeneratorExit()), "GeneratorExit"),
    (raises(MemoryError()), "MemoryError"),
    (raises(ValueError("\ud83d\x00\x1b[31m")), r"ValueError: \\ud83d\\x00\\x1b\[31m"),
    (raises(Speechless()), "Speechless: an exception that cannot be shown"),
]


@pytest.mark.parametrize(("answer", "reason"), ANSWERS)
def test_it_is_a_failure_with_a_reason(answer, reason):
    for outcome in outcomes_of(answer):
        assert isinstance(outcome, Answer)
        assert outcome.fault == "outage", "a scorer that never worked looks like one that is not there yet"
    for outcome in outcomes_of(answer, outage_s=0.0):
        assert isinstance(outcome, Answer) and outcome.fault == "retry"
        assert re.search(reason, outcome.error), outcome.error
        assert outcome.error.count("hostile") - outcome.error.count("test_hostile") == 1, "named once"
        assert outcome.error.isascii() or outcome.error.isprintable(), "it goes into the ledger and onto consoles"


def test_a_failure_says_the_line_that_raised_whatever_it_raised_and_a_servers_error_page_is_cut_to_a_line():
    for error in (ValueError("no"), ScoreError("no"), Outage("no")):
        (first, *_) = outcomes_of(raises(error))
        assert re.fullmatch(rf"scorer 'hostile': (ValueError: )?no \({__file__}:{LINE_THAT_RAISES}\)", first.error)
    for outcome in outcomes_of(raises(OSError("<html>\n" + "x" * 10_000))):
        assert len(outcome.error) == 300 and "\n" not in outcome.error
        assert re.search(r"x\.\.\. \(.*\.py:\d+\)$", outcome.error)


def test_numbers_of_any_real_type_become_floats_that_can_be_written():
    given = (Score(np.float32(0.5), {"part": np.int64(3)}), Score(2), Score(np.float64(1)))
    scores = require_scores("x", given, PROMPTS)
    assert scores == [Score(0.5, {"part": 3.0}), Score(2.0), Score(1.0)]
    assert {type(score.value) for score in scores} == {float} and type(scores[0].parts["part"]) is float
    assert msgspec.json.decode(msgspec.json.encode(scores), type=list[Score]) == scores


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
def test_a_text_is_kept_as_far_as_it_can_be_written_and_names_of_parts_are_plain(text, kept):
    for outcome in outcomes_of(each(1.0, {np.str_("part"): True}, text=text)):
        assert isinstance(outcome, Score)
        assert outcome.text == kept and type(outcome.text) is str
        assert outcome.parts == {"part": 1.0} and {type(name) for name in outcome.parts} == {str}
        assert msgspec.json.decode(msgspec.json.encode(outcome), type=Score) == outcome


@pytest.mark.filterwarnings("error::RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning")
def test_an_asynchronous_scorer_is_reported_in_one_line():
    async def score() -> list[Score]:
        return []

    with pytest.raises(ScoreError, match="scorer 'x' returned a coroutine: make score itself `async def`"):
        require_scores("x", score(), [Prompt(0, "a")])


@pytest.mark.parametrize("value", [1e30, -1e30, 1.1e6, sys.float_info.max])
def test_an_absurd_score_is_a_final_failure_and_not_the_scorers_outage(value):
    for outcome in outcomes_of(each(value)):
        assert isinstance(outcome, Answer) and outcome.fault == "reject"
        assert f"a reward of {value:g}, beyond reward.max_abs = 1e+06" in outcome.error
    assert outcomes_of(each(1e6)) == [Score(1e6, values=(1e6,))] * 3
    assert outcomes_of(each(11.0), max_abs=11.0) == [Score(11.0, values=(11.0,))] * 3
    assert isinstance(outcomes_of(each(11.0), max_abs=10.0)[0], Answer)


def test_a_call_that_hangs_leaves_its_thread_behind_and_the_next_call_has_another():
    go, loop = threading.Event(), MovedLoop()
    names: list[str] = []

    def answer(count: int) -> list[Score]:
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
    async with asyncio.timeout(PATIENCE):
        while threading.active_count() > before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# ---- credentials: from the environment, and in no message ------------------------------------------------------------


class Judge:
    """A scorer that shows its secret in errors."""

    def __init__(self, api_key: str = "", url: str = "", headers: dict[str, str] | None = None, broken: bool = False):
        self._said = f"{url} refused {api_key} {(headers or {}).get('X-Api-Key', '')}"
        if broken:
            raise OSError(self._said)

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        raise ConnectionError(self._said)


class Talker(Judge):
    def __init__(self, api_key: str = "", copies: int = 1, page: bool = False) -> None:
        self._said = "<html>" * 100_000 if page else f"header {f'{api_key} ' * copies} was refused"


def config(scorer: str = "Judge", **params: object) -> schema.Scorer:
    return schema.Scorer(name=f"{__name__}:{scorer}", params=params)


def failure(scorer: schema.Scorer) -> str:
    with pytest.raises(Exception) as raised:
        score_all(LoadedReward.load(Reward(scorers=(scorer,))), MEDIA[:1], PROMPTS[:1])
    assert raised.value.__cause__ is None
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_parameter_is_taken_from_the_environment_and_a_missing_variable_or_a_wrong_secret_is_refused(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-42424242")
    scorer = registry.build(config(api_key="env:JUDGE_KEY", headers={"X-Api-Key": "env:JUDGE_KEY"}))
    with pytest.raises(ConnectionError, match="refused sk-42424242 sk-42424242"):
        scorer.score(MEDIA[:1], PROMPTS[:1])
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ScorerConfigError, match="'api_key': 'env:JUDGE_KEY' names an environment variable that is not"):
        registry.check(config(api_key="env:JUDGE_KEY"), IMAGE)
    with pytest.raises(ScorerConfigError) as refused:
        registry.check(config(api_key=424242), IMAGE)
    assert "424242" not in str(refused.value) and "parameter 'api_key': Expected `str`, got `int`" in str(refused.value)


def test_a_reference_is_replaced_where_the_scorer_is_built_and_not_in_the_configuration_that_travels_there(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "here")
    given = load_text(MINIMAL, f"reward.scorers=[{{name: '{__name__}:Judge', params: {{api_key: env:JUDGE_KEY}}}}]")
    assert "here" not in repr(given)
    monkeypatch.setenv("JUDGE_KEY", "there")
    with pytest.raises(ConnectionError, match="refused there"):
        registry.build(given.reward.scorers[0]).score(MEDIA[:1], PROMPTS[:1])


@pytest.mark.parametrize(("key", "masked"), [("abc", False), ("abcd", True)])
def test_a_referenced_secret_of_four_characters_is_searched_for_and_a_shorter_one_is_not(key, masked, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", key)
    assert (key not in failure(config(api_key="env:JUDGE_KEY"))) == masked


class Choosy(Judge):
    def __init__(self, api_key: Literal["one", "two"] = "one") -> None: ...


def test_a_refused_parameter_is_named_without_a_secret_that_it_holds(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-42424242")
    refusals = [
        partial(registry.check, config("Choosy", api_key=key), IMAGE) for key in ("sk-42424242", "env:JUDGE_KEY")
    ]
    lost = schema.Scorer(name="aesthetic", params={"path": "env:JUDGE_KEY", "head": "x.safetensors"})
    for refusal in (*refusals, partial(registry.check_files, lost)):
        with pytest.raises(ScorerConfigError, match=r"\*\*\*") as refused:
            refusal()
        assert "sk-42424242" not in str(refused.value)


PARAMS = ({"url": "https://me:sk-42424242@judge/"}, {"headers": {"X-Api-Key": "sk-42424242"}}, {"url": "env:JUDGE_KEY"})


@pytest.mark.parametrize("broken", [False, True], ids=["scoring", "starting"])
@pytest.mark.parametrize("params", [{"api_key": "sk-42424242"}, *PARAMS], ids=["key", "url", "header", "environment"])
def test_what_a_scorer_raises_shows_none_of_its_credentials(params, broken, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-42424242")
    said = failure(config(**params, broken=broken))
    assert "sk-42424242" not in said and "***" in said
    assert ("OSError" if broken else "ConnectionError") in said, "the cause is still reported"
    assert failure(config(url="https://judge/")) == "ConnectionError: https://judge/ refused  ", "what has no secret"


class Remote(Judge):
    async def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:  # type: ignore[override]
        raise ConnectionError(self._said)


@pytest.mark.parametrize("scorer", ["Judge", "Remote"])
@pytest.mark.parametrize("params", [{"api_key": "sk-42424242"}, *PARAMS], ids=["key", "url", "header", "environment"])
def test_nor_does_the_reason_of_a_failure(params, scorer, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-42424242")
    settings = Reward(scorers=(config(scorer, **params),), outage_s=0.0)
    for answer in asyncio.run(answers_of(LoadedReward.load(settings), settings)):
        assert isinstance(answer, Answer) and answer.error is not None
        assert "ConnectionError: " in answer.error and "***" in answer.error and "sk-42424242" not in answer.error


@pytest.mark.parametrize("length", [8, 300, 5000])
@pytest.mark.parametrize("copies", [1, 7, 500])
def test_no_piece_of_a_long_credential_is_left_where_a_text_is_cut(length, copies):
    key = "".join(f"{number:04x}" for number in range(length // 4))
    said = failure(config("Talker", api_key=key, copies=copies))
    assert not any(key[at : at + 8] in said for at in range(0, length - 7, 4))
    page = failure(config("Talker", page=True))
    assert "<html>" * 300 in page and len(page) < 2300 and Outage.__name__ in page
    assert re.search(r"\.\.\. \(600000 characters\)$", page)


@pytest.mark.parametrize(("length", "shown"), [(100, True), (200, False)])
def test_a_place_longer_than_half_of_a_reason_is_left_out(length, shown):
    try:
        eval(compile("1 / 0", "x" * length, "eval"))
    except ZeroDivisionError as error:
        said = str(score_error("own", error, frozenset()))
    assert said == "scorer 'own': ZeroDivisionError: division by zero" + shown * f" ({'x' * length}:1)"


def test_a_scorers_attributes_are_read_once_and_not_at_every_call():
    """Attributes of a proxy are calls: they may raise, with a credential, or block the event loop."""

    class Proxy:
        name, broken = "proxy", False

        @property
        def score(self) -> Any:
            if self.broken:
                raise ConnectionError("down, key sk-abcdefgh12345678")
            return lambda images, prompts: [Score(1.0) for _ in images]

    proxy = Proxy()

    async def answers() -> list[Answer]:
        async def report(text: str) -> None: ...

        settings = Reward(probe=False)
        reward = LoadedReward.of(settings, proxy)
        async with Panel("reward-0", reward, settings, WallClock(), report) as panel:
            first = await panel.score(MEDIA[0], PROMPTS[0])
            proxy.broken = True
            return [first, await panel.score(MEDIA[1], PROMPTS[1])]

    first, second = asyncio.run(answers())
    assert first.score is not None and first.score.value == 1.0
    assert second.score is None and "ConnectionError" in second.error


@pytest.mark.parametrize("name", ["ocr:ReadingScorer", "clip:PromptAlignmentScorer"])
def test_the_base_of_built_in_scorers_is_no_scorer(name):
    with pytest.raises(TypeError, match="abstract"):
        registry._load(f"omni_async.rewards.scorers.{name}")()


def test_a_secret_that_a_later_constructor_removes_from_the_environment_is_masked(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-abcdefgh12345678")

    def build(config: schema.Scorer, gpus: float) -> Any:
        if config.name == "b":
            monkeypatch.delenv("JUDGE_KEY")
        return SimpleNamespace(
            name=config.name, score=lambda images, prompts: raises(ValueError("sk-abcdefgh12345678"))(0)
        )

    named = schema.Scorer(name="a", params={"key": "env:JUDGE_KEY"}), schema.Scorer(name="b")
    settings = Reward(scorers=named, probe=False)
    answers = asyncio.run(answers_of(LoadedReward.load(settings, build=build), settings))
    assert all("sk-abcdefgh12345678" not in one.error for one in answers)
