"""Tests that judges' answers are read in a time of their length, and that no number outside the range passes."""

import json

import pytest

from omni_async.rewards.base import ScoreError
from omni_async.rewards.scorers.judging import Reply, TopToken, preference, rating, read_refusal, read_reply, reading
from omni_async.rewards.scorers.model_names import is_version_of, listed_names, served_names
from omni_async.rewards.scorers.model_servers import BadAnswer
from omni_async.rewards.scorers.ocr import wanted_text
from omni_async.types import Prompt
from tests.support.effort import LINEAR, growth


def reply(text, first=None):
    return Reply(text, first, False, 0, 0, None)


def failed(call, *args):
    with pytest.raises(ScoreError) as raised:
        call(*args)
    return str(raised.value)


@pytest.mark.parametrize(
    ("begin", "unit", "end"),
    [
        ("score", "\n", "x"),
        ("score:", " \t", "x"),
        ("7", "\n", "x"),
        ("", "7", "x"),
        ("", "\\", ""),
        ("{", "{", ""),
        ("1.", "1", ".x"),
        ("", "score ", "7"),
    ],
)
def test_an_answer_costs_no_more_than_its_length(begin, unit, end):
    def read(size):
        answer = reply(begin + unit * (size // len(unit)) + end)
        failed(rating, answer, 1.0, 10.0)
        failed(preference, answer, "yes", "no", True, 0.1)

    assert growth(read, 1000, tries=3) < LINEAR


def test_a_prompt_of_unclosed_quotes_costs_no_more_than_its_length():
    assert growth(lambda size: wanted_text(Prompt(0, "“" * size)), 500, tries=3) < LINEAR
    for text, wanted in (
        ("“a” and “b”", "a"),
        ('x “a "b" c', "b"),
        ('“open” "shut"', "open"),
        ('"shut" “open”', "shut"),
        ("“”“a”", "a"),
        ("“a “b”", "a“b"),
        ("” “a", None),
    ):
        assert wanted_text(Prompt(0, text)) == wanted


def test_an_answer_that_is_too_long_is_named_with_its_length_before_it_is_read():
    long = reply("7" * (2**17 + 1))
    said = "the answer has 131073 characters, expected 131072 at most"
    assert failed(rating, long, 1.0, 10.0) == said
    assert failed(reading, long, Prompt(0, "x", "7")) == said
    assert failed(preference, long, "yes", "no", True, 0.1) == said
    assert preference(long._replace(first=[TopToken("yes", 0.0)]), "yes", "no", False, 0.1) == 1.0  # nobody reads it


@pytest.mark.parametrize(
    "text",
    ["1e160", "9" * 400, "9" * 5000, "nan", "inf", "-inf", "\u0667", "7\u0660", "0x7", "1_0", "+-7", "-1", "10.0001"]
    + [f'{{"score": {number}}}' for number in ("1e160", "9" * 400, "9" * 5000, "1e400", "NaN", "Infinity", "-1", '"7"')]
    + ['{"score":1,"score":9}', '{"score":7,"score":7}', '{"rating":1,"rating":9}']
    + ['{"score": [7]}', '{"score": {"score": 7}}', '{"score": 7, "why": "\ud800"}', '{"a":' * 5000],
)
def test_a_number_that_the_scale_does_not_have_is_a_failure_of_one_line(text):
    said = failed(rating, reply(text), 0.0, 10.0)
    assert "expected" in said and "from 0 to 10" in said and len(said) < 400 and "\n" not in said
    assert str(rating(reply("-0.0"), 0.0, 10.0)) == "0.0"


def completion(**usage):
    return {"choices": [{"message": {"content": "7"}}], "usage": usage}


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(completion(prompt_tokens=10**400)),
        json.dumps(completion(prompt_tokens=-1)),
        json.dumps(completion(completion_tokens=1e160)),
        json.dumps(completion()).replace('"usage": {}', '"usage": {"prompt_tokens": ' + "9" * 5000 + "}"),
        '{"choices": [' + ",".join(['{"message":{}}'] * 400_000) + "]}",
        '{"choices": [{"message": {"content": ""}, "logprobs": {"content": [{"top_logprobs": ['
        + ",".join(['{"token":"yes","logprob":0}'] * 1001)
        + "]}]}}]}",
        '{"choices": ' + "[" * 100_000,
    ],
    ids=range(7),
)
def test_a_body_beyond_its_bounds_is_no_completion(body):
    with pytest.raises(BadAnswer, match="sent no chat completion") as raised:
        read_reply(body.encode())
    assert len(str(raised.value)) < 400


def test_a_refusal_and_a_list_of_models_beyond_their_bounds_tell_nothing():
    assert read_refusal(b'{"error": {"message": "no"}}') == "no"
    assert read_refusal(b'{"error": "no", "x": [' + b"{}," * 2000 + b"{}]}") == ""
    card = {"id": "m", "root": "r"}

    def body(*others):
        return json.dumps({"data": [card, *others]}).encode()

    assert listed_names(body({"id": "n", "root": "r"}), "m") == {"m", "n", "r"}
    assert listed_names(body({"id": "n" * 1001, "root": "r"}), "m") == set()
    assert listed_names(body(*({"id": str(i), "root": "r"} for i in range(1001))), "m") == set()
    assert served_names(body()) == ["m"]
    for wrong in (b"[]", b"{", b'{"data": [{}]}', b'{"data": [' + b"1," * 200_000 + b"1]}"):
        assert "its list of models cannot be read" in failed(served_names, wrong)
    assert growth(lambda size: is_version_of("m-" + "1" * size, "m"), 1000, tries=3) < LINEAR
