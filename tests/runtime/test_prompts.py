"""Prompt files: what is read, and that whatever else is in one is refused in one line that says where."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from omni_async.config import ConfigError
from omni_async.runtime.prompts import load_prompts
from omni_async.types import Prompt


def read(folder: Path, content: str | bytes, name: str = "prompts.txt", max_chars: int = 50) -> list[Prompt]:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_prompts(str(path), "data.prompts", max_chars)


def refusal(folder: Path, content: str | bytes, name: str = "prompts.txt", max_chars: int = 50) -> str:
    with pytest.raises(ConfigError) as refused:
        read(folder, content, name, max_chars)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_text_file_is_a_prompt_a_line_without_the_empty_ones(tmp_path):
    assert read(tmp_path, "a cat\n\n   \n  a dog \r\na cat") == [Prompt(0, "a cat"), Prompt(1, "a dog"), Prompt(2, "a cat")]


def test_a_json_line_has_a_prompt_a_target_and_whatever_else(tmp_path):
    [prompt, plain] = read(tmp_path, '{"prompt": "the digit 7", "target": "7", "font": "serif", "n": 1}\n{"prompt": "x"}\n', "p.jsonl")
    assert prompt == Prompt(0, "the digit 7", "7", {"font": "serif", "n": 1})
    assert plain == Prompt(1, "x", None, {})


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path):
    assert read(tmp_path, b"\xef\xbb\xbfa cat\n")[0].text == "a cat"
    assert read(tmp_path, b'\xef\xbb\xbf{"prompt": "a cat"}\n', "p.jsonl")[0].text == "a cat"


@pytest.mark.parametrize("content", ["", "\n\n", "  \t \n"])
def test_a_file_without_prompts_is_refused(tmp_path, content):
    assert "holds no prompts; expected one a line" in refusal(tmp_path, content)


def test_a_long_prompt_is_refused_with_its_line_and_the_key_that_allows_more(tmp_path):
    message = refusal(tmp_path, "short\n" + "x" * 51)
    assert "prompts.txt:2: the prompt has 51 characters, data.max_prompt_chars allows 50" in message


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"prompt": "a cat"', "not valid JSON"),
        ("a cat", "not valid JSON"),
        ('["a cat"]', 'expected an object with a non-empty string "prompt"'),
        ('{"text": "a cat"}', 'expected an object with a non-empty string "prompt"'),
        ('{"prompt": ""}', 'expected an object with a non-empty string "prompt"'),
        ('{"prompt": 7}', 'expected an object with a non-empty string "prompt"'),
        ('{"prompt": "x", "target": 7}', "target: expected a string, got 7"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_broken_json_line_is_refused_with_its_number(tmp_path, line, why):
    message = refusal(tmp_path, f'{{"prompt": "fine"}}\n\n{line}\n', "p.jsonl")
    assert "p.jsonl:3: " in message
    assert message.startswith("data.prompts: ")
    assert why in message


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^validation\.prompts: no such file: .*nowhere\.txt$"):
        load_prompts(str(tmp_path / "nowhere.txt"), "validation.prompts", 10)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_prompts(str(tmp_path), "data.prompts", 10)
    assert "cannot be read" in refusal(tmp_path, b"caf\xe9\n")


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\x0c", "\x1c"])
def test_only_a_line_feed_ends_a_line(tmp_path, separator):
    """Python's splitlines knows more line ends than editors and JSON do."""
    assert len(read(tmp_path, f"a{separator}b\nc")) == 2
    line = msgspec.json.encode({"prompt": f"a{separator}b"})
    assert read(tmp_path, line, "p.jsonl")[0].text == f"a{separator}b"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["prompt", "target", "x"]), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=200) | st.text(max_size=200).map(lambda t: t.encode("utf-8", "surrogatepass")), st.sampled_from([".txt", ".jsonl"])
)
@example(b'{"prompt": "\\ud800"}', ".jsonl")
@example(b"\xef\xbb\xbf", ".txt")
def test_any_bytes_are_prompts_or_a_refusal(tmp_path, content, suffix):
    _prompts_or_refusal(tmp_path, content, suffix)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_JSON.map(msgspec.json.encode), max_size=4).map(b"\n".join))
def test_any_json_lines_are_prompts_or_a_refusal(tmp_path, content):
    _prompts_or_refusal(tmp_path, content, ".jsonl")


def _prompts_or_refusal(folder: Path, content: bytes, suffix: str) -> None:
    try:
        prompts = read(folder, content, f"p{suffix}")
    except ConfigError:
        return
    assert [prompt.index for prompt in prompts] == list(range(len(prompts)))
    for prompt in prompts:
        assert prompt.text.strip()
        assert len(prompt.text) <= 50
        assert msgspec.json.decode(msgspec.json.encode(prompt), type=Prompt).text == prompt.text  # it can be sent
