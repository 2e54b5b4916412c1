"""Tests the scorers of text answers: known answers, hostile ones, and questions that cannot be scored."""

import os
import signal
import time

import pytest

from omni_async.config import reward as sections
from omni_async.media import Media
from omni_async.rewards import registry
from omni_async.rewards.base import ScoreError, require_scores
from omni_async.rewards.scorers.choice import ChoiceScorer
from omni_async.rewards.scorers.exact_match import ExactMatchScorer
from omni_async.rewards.scorers.overlong import OverlongScorer
from omni_async.rewards.scorers.pattern import PatternScorer
from omni_async.types import Prompt, Score

ANIMALS = {"options": ["two cats", "A dog.", "3", ".5"]}
HOSTILE = {
    "empty": "",
    "huge": "4" * 2**20,
    "spaces": " \n\t\u3000" * 2**18,
    "control characters": "\0\x1b[2J\x7f\ud800 4",
    "open tags": "<answer>" * 2**17,
    "closing tags": "</answer>" * 2**17,
    "combining marks": "a" + "\u0323\u0301" * 2**19,
    "braces": "{" * 2**16 + "$",
    "latex": r"\frac{" * 5000 + "1" + "}{2}" * 5000,
    "right to left": "\u202e\u05d0\u05d1 42 \u202c" * 1000,
    "stars": "*(" * 2**18,
    "lead": "the answer is " * 2**16,
}


def config(name, **params):
    return sections.Scorer(name=name, params=params)


def answer(text, tokens=None):
    return Media(text=text, finish="stop", tokens=tokens)


def score(scorer, text, target=None, **metadata):
    prompt = Prompt(0, "how many?", target, metadata)
    [found] = require_scores("x", scorer.score([answer(text)], [prompt]), [prompt])
    return found


def refusal(name, target, metadata=None, **params):
    """What is wrong with a prompt, before the run."""
    return registry.prompt_check(config(name, **params))(Prompt(0, "how many?", target, metadata or {}))


# ---- exact_match -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "text", "target", "value"),
    [
        ({}, " Forty\n two ", "forty two", 1.0),
        ({}, "fortytwo", "forty two", 0.0),
        ({}, "forty two.", "forty two", 0.0),
        ({}, "Straße", "STRASSE", 1.0),
        ({}, "cafe\u0301", "caf\u00e9", 1.0),
        ({}, "\u202b\u05d0\u05d1\u202c\u200f", "\u05d0\u05d1", 1.0),
        ({"case_sensitive": True}, "OPEN", "open", 0.0),
        ({"case_sensitive": True}, "OPEN ", "OPEN", 1.0),
        ({"ignore_spaces": True}, "4 2\n", "42", 1.0),
        ({"tag": "answer"}, "<answer>1</answer> no, <answer> 42 </answer> done", "42", 1.0),
        ({"tag": "answer"}, "<answer>42</answer> or <answer>43", "42", 1.0),
        ({"tag": "answer"}, "<answer><answer>42</answer>", "42", 1.0),
        ({"tag": "answer"}, "42", "42", 0.0),
        ({"tag": "answer"}, "</answer>42<answer>", "42", 0.0),
        ({"tag": "answer"}, "<answer>42</Answer>", "42", 0.0),
    ],
)
def test_an_answer_equals_its_target(params, text, target, value):
    assert score(ExactMatchScorer(**params), text, target).value == value


def test_the_content_of_the_tag_is_shown_and_its_presence_counted():
    scorer = ExactMatchScorer(tag="answer")
    assert score(scorer, "so <answer>41</answer>", "42") == Score(0.0, {"answered": 1.0}, "41")
    assert score(scorer, "so 42", "42") == Score(0.0, {"answered": 0.0}, None)
    assert score(ExactMatchScorer(), "42", "42") == Score(1.0, {}, "42")


def test_a_target_without_a_character_is_refused_before_and_when_scoring():
    assert refusal("exact_match", " \u200e\n") == "scorer 'exact_match': the prompt's target is empty"
    assert "needs 'target'" in refusal("exact_match", None)
    for target, why in ((" ", "target is empty"), (None, "has no target")):
        with pytest.raises(ScoreError, match=rf"^sample 0 \(prompt 0: 'how many\?'\): the prompt.*{why}"):
            ExactMatchScorer().score([answer("")], [Prompt(0, "how many?", target)])


@pytest.mark.parametrize("tag", ["", "a>b", "answer\n", "a" * 101])
def test_a_tag_is_a_word(tag):
    with pytest.raises(registry.ScorerConfigError, match="parameter 'tag'"):
        registry.build(config("exact_match", tag=tag))


# ---- choice ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(b)", "B"),
        ("**B.**", "B"),
        ("B: a dog", "B"),
        ("b) A dog.", "B"),
        ("A dog", "B"),
        ("[a] two cats", "A"),
        ("The answer is B.", "B"),
        ("the correct option is **C**", "C"),
        ("Answer: two cats", "A"),
        ("3", "C"),
        (".5", "D"),
        ("D .5", "D"),
        ("B: two cats", None),
        ("A cat", None),
        ("E", None),
        ("B or C", None),
        ("not B", None),
        ("5", None),
        ("I think that it is B", None),
    ],
)
def test_an_option_is_named_by_its_letter_or_text(text, letter):
    found = score(ChoiceScorer(), text, "B", **ANIMALS)
    assert found == Score(float(letter == "B"), {"answered": float(letter is not None)}, letter)


@pytest.mark.parametrize("target", ["B", "b", "a dog", "B. a dog", "(B)"])
def test_the_target_is_a_letter_or_a_text(target):
    assert score(ChoiceScorer(tag="answer"), "Cats? <answer>B</answer>", target, **ANIMALS).value == 1.0
    assert score(ChoiceScorer(tag="answer"), "B", target, **ANIMALS) == Score(0.0, {"answered": 0.0}, None)


@pytest.mark.parametrize(
    ("options", "target", "why"),
    [
        (None, "A", "metadata 'key': expected a list of texts or numbers"),
        (["a", None], "A", "metadata 'key': expected a list of texts or numbers"),
        (["one"], "A", "expected 2 to 26 options, got 1"),
        ([str(i) for i in range(27)], "A", "expected 2 to 26 options, got 27"),
        (["a cat", " A  cat."], "A", "options are empty or alike"),
        (["one", ""], "A", "options are empty or alike"),
        (["b", "a"], "A", "the text of option 'b' is the letter of another"),
        ([1, 2], "C", "the target 'C' is no letter or text of the 2 options"),
    ],
)
def test_a_question_without_one_right_option_is_refused_before_and_when_scoring(options, target, why):
    metadata = {} if options is None else {"key": options}
    assert why in refusal("choice", target, metadata, options="key")
    with pytest.raises(ScoreError, match=why):
        score(ChoiceScorer(options="key"), "A", target, **metadata)


def test_options_may_begin_with_the_letters_of_others():
    assert score(ChoiceScorer(), "ab", "B", options=["abc", "ab", "c"]).value == 1.0


# ---- pattern ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "text", "value"),
    [
        ({"pattern": r"<think>.*</think>\d+"}, "<think>so</think>42", 1.0),
        ({"pattern": r"<think>.*</think>\d+"}, "<think>so</think>42\n", 0.0),
        ({"pattern": r"<think>.*</think>"}, "<think>a\nb</think>", 0.0),
        ({"pattern": r"(?s)<think>.*</think>"}, "<think>a\nb</think>", 1.0),
        ({"pattern": "a|b"}, "ab", 0.0),
        ({"pattern": "4+", "whole": False}, "is 44.", 1.0),
        ({"pattern": "^4+$", "whole": False}, "is 44.", 0.0),
        ({"pattern": ".{2}"}, "\u05d0\U0001f600", 1.0),
        ({"pattern": ".+"}, "\ud800", 1.0),
        ({"pattern": "a\\x00b"}, "a\0b", 1.0),
    ],
)
def test_an_answer_has_a_format(params, text, value):
    assert score(PatternScorer(**params), text).value == value


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "missing"),
        ("a)(b", "unexpected"),
        (r"\Qa", "pattern: "),
        (r"(a)\1", "escape"),
        ("(?=a)", "perl"),
        ("\ud800", "utf"),
    ],
)
def test_a_pattern_that_does_not_compile_is_one_line_before_the_run(pattern, why, capfd):
    with pytest.raises(registry.ScorerConfigError, match=why) as error:
        registry.check_files(config("pattern", pattern=pattern))
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(ValueError, match=why):
        PatternScorer(pattern=pattern)
    assert capfd.readouterr() == ("", "")


def test_a_pattern_of_exponential_time_takes_linear_time():
    began = time.process_time()
    assert score(PatternScorer(pattern=r"(a+)+b|(a|a)*c|(.*,){20}x"), "a" * 2**18 + "," * 2**10).value == 0.0
    assert time.process_time() - began < 20, "Python's re would need longer than the universe has"


# ---- overlong --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 0.0), (60, 0.0), (61, -0.025), (80, -0.5), (99, -0.975), (100, -1.0), (5000, -1.0)]
)
def test_the_penalty_rises_over_the_last_tokens(tokens, value):
    [found] = OverlongScorer(max_tokens=100, buffer=40).score([answer("a", tokens)], [Prompt(0, "x")])
    assert found == Score(pytest.approx(value), {"tokens": float(tokens)})


def test_an_unknown_length_has_no_score():
    with pytest.raises(ScoreError, match="the number of the answer's tokens is unknown"):
        score(OverlongScorer(max_tokens=100, buffer=40), "a")


def test_a_buffer_larger_than_the_answer_is_refused():
    with pytest.raises(registry.ScorerConfigError, match="buffer: expected at most max_tokens = 10, got 11"):
        registry.check_files(config("overlong", max_tokens=10, buffer=11))
    with pytest.raises(ValueError, match="buffer"):
        OverlongScorer(max_tokens=10, buffer=11)


# ---- math_answer -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mathematician():
    pytest.importorskip("math_verify")
    built = registry.build(config("math_answer", limit_s=1.0))
    yield built
    built.close()


@pytest.mark.parametrize(
    ("text", "target", "value"),
    [
        (r"$\frac{1}{2}$", "0.5", 1.0),
        (r"The answer is \boxed{12}.", "12", 1.0),
        ("12 apples", "12", 1.0),
        ("$x=3$", "3", 1.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
        (r"\boxed{2}", r"2\sqrt{2}", 0.0),
        ("$1{,}000$", "1000", 1.0),
        ("first 8, then 7", "8", 0.0),
        ("I think 7", "8", 0.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{(-\infty, 3]}", r"$(-\infty,3]$", 1.0),
    ],
)
def test_an_answer_is_mathematically_equal(mathematician, text, target, value):
    assert score(mathematician, text, target) == Score(value, {"answered": 1.0})


def test_an_answer_without_a_formula_is_wrong(mathematician):
    assert score(mathematician, "I do not know", "8") == Score(0.0, {"answered": 0.0})


def test_the_content_of_a_tag_is_a_formula():
    scorer = registry.build(config("math_answer", tag="answer"))
    try:
        assert score(scorer, r"is 3 <answer>2\sqrt{2}</answer>", r"\sqrt{8}").value == 1.0
        assert score(scorer, r"<answer>x + 1</answer>", "1").value == 0.0
        assert score(scorer, r"\boxed{3}", "3") == Score(0.0, {"answered": 0.0})
    finally:
        scorer.close()


def test_a_target_that_cannot_be_parsed_is_refused_before_and_when_scoring(mathematician):
    why = r"math-verify cannot parse the target '\\frac{'"
    assert refusal("math_answer", "\\frac{") == f"scorer 'math_answer': {why}"
    assert refusal("math_answer", r"\frac{1}{2}") is None
    with pytest.raises(ScoreError, match="math-verify cannot parse the target"):
        score(mathematician, "1", "\\frac{")
    assert score(mathematician, "1", "1").value == 1.0


def test_an_endless_comparison_has_no_score_and_the_next_has_one():
    scorer = registry.build(config("math_answer", limit_s=0.5))
    try:
        with pytest.raises(ScoreError, match=r"takes more than 0.5 s of CPU time \(limit_s\)"):
            score(scorer, r"\boxed{123456789^{987654321}}", "17")
        assert score(scorer, "7", "7").value == 1.0
    finally:
        scorer.close()


def test_a_lost_process_is_an_error_once_and_none_is_left():
    scorer = registry.build(config("math_answer"))
    assert score(scorer, "7", "7").value == 1.0
    process = scorer._process._running
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ScoreError, match="the process that compares ended with status -9"):
        score(scorer, "7", "7")
    assert score(scorer, "8", "7").value == 0.0
    second = scorer._process._running
    scorer.close()
    assert second.poll() is not None and process.poll() is not None


def test_the_process_ends_with_its_scorer():
    """A reward worker that is killed leaves no process."""
    from omni_async.rewards.scorers.math_answer import _started

    process = _started()
    process.stdin.close()
    assert process.wait(60) == 0
    process.stdout.close()


# ---- all -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HOSTILE.values(), ids=[*HOSTILE])
def test_hostile_answers_are_wrong_and_take_no_time(text):
    began = time.process_time()
    for scorer in (ExactMatchScorer(), ExactMatchScorer(tag="answer", ignore_spaces=True), ChoiceScorer()):
        found = score(scorer, text, "B", **ANIMALS)
        assert found.value == 0.0 and len(found.text or "") < 2100
    assert score(PatternScorer(pattern=r"(?s)(.*,){3}\d+ B"), text).value == 0.0
    assert time.process_time() - began < 20, "they are linear"


SHORT = ("control characters", "latex")


@pytest.mark.parametrize(
    "text",
    [pytest.param(HOSTILE[name], id=name, marks=() if name in SHORT else pytest.mark.thorough) for name in HOSTILE],
)
def test_hostile_formulas_are_wrong_or_have_no_score(mathematician, text):
    try:
        assert score(mathematician, text, "17").value == 0.0
    except ScoreError as error:
        assert "takes more than 1 s of CPU time" in str(error)
    assert score(mathematician, "17", "17").value == 1.0
