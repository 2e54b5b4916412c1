"""What is shown of configurations and texts holds no credential, and is otherwise what it was."""

from __future__ import annotations

import time

import pytest
from recipe import MINIMAL, complaint, load_text

from omni_async.config import resolved_yaml
from omni_async.config.redact import is_secret_key, one_line, redact, redact_text, secrets_in


@pytest.mark.parametrize(
    "key",
    [
        "token",
        "hf_token",
        "api_key",
        "apiKey",
        "X-Api-Key",
        "Authorization",
        "PASSWORD",
        "client_secret",
        "aws_secret_access_key",
        "secret_key",
        "credentials",
        "private-key",
        "Cookie",
        "db_passwd",
        "reward.scorers.0.params.api_key",
    ],
)
def test_a_key_that_names_a_secret(key: str) -> None:
    assert is_secret_key(key)


@pytest.mark.parametrize(
    "key", ["max_tokens", "tokens", "key", "keyboard", "tokenizer", "reject_level", "target_modules", "secretary", "path"]
)
def test_a_key_that_does_not(key: str) -> None:
    assert not is_secret_key(key)


def test_values_under_secret_keys_are_masked_whatever_they_are() -> None:
    tree = {
        "headers": {"Authorization": "Bearer x"},
        "pin": 1,
        "password": 1234,
        "secret": {"a": "b"},
        "token": ["a"],
        "api_key": "env:KEY",
    }
    assert redact(tree) == {
        "headers": {"Authorization": "***"},
        "pin": 1,
        "password": "***",
        "secret": "***",
        "token": "***",
        "api_key": "env:KEY",
    }
    assert redact({"token": None, "secret": False}) == {"token": None, "secret": False}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot reach https://me:pw@h/x", "cannot reach https://***@h/x"),
        ("GET https://h/v1?api_key=abcdef&n=3 failed", "GET https://h/v1?api_key=***&n=3 failed"),
        ("sent Authorization: Bearer sk-abcdef0123456789", "sent Authorization: Bearer ***"),
        ("override 'reward.scorers.0.params.api_key=abcdef'", "override 'reward.scorers.0.params.api_key=***"),
        ("OPENAI_API_KEY=abcdef is wrong", "OPENAI_API_KEY=*** is wrong"),
        ("staleness.max_updates=3", "staleness.max_updates=3"),
        ("a basic red circle, bearer of news", "a basic red circle, bearer of news"),
    ],
)
def test_credentials_in_a_text(text: str, shown: str) -> None:
    assert redact_text(text) == shown


def test_known_secrets_are_masked_wherever_they_turn_up() -> None:
    tree = {"url": "http://me:p%40ss@h/?token=t0ken", "params": {"api_key": "sk-123", "headers": [{"X-Api-Key": 98765}], "password": "x"}}
    found = secrets_in(tree)
    assert found == {"p%40ss", "p@ss", "t0ken", "sk-123", "98765"}, "one of a single letter would mask everything"
    assert redact_text("no p@ss for sk-123, nor 98765", found) == "no *** for ***, nor ***"


def test_a_hostile_text_is_no_work() -> None:
    started = time.process_time()
    for piece in ("?token", "a.", "://", "token=", "Bearer ", "&key", "_token", "a"):
        redact_text(piece * (100_000 // len(piece)))
    assert time.process_time() - started < 5


def test_a_terminal_shows_control_characters_and_does_not_obey_them() -> None:
    assert one_line("a\x1b[2Jb\nc\u202ed\x00") == r"a\x1b[2Jb c\u202ed\x00"
    assert one_line("ein Würfel 骰子") == "ein Würfel 骰子"


def test_check_shows_no_credentials() -> None:
    recipe = MINIMAL.replace("{name: ocr}", "{name: ocr, params: {api_key: hunter2, n: 1}}")
    text = resolved_yaml(load_text(recipe, "tracking.mlflow.tracking_uri=http://me:hunter2@h"))
    assert "hunter2" not in text and "http://***@h" in text


@pytest.mark.parametrize(
    "override",
    [
        "reward.scorers.7={name: x, params: {api_key: hunter2}}",
        "reward.scorers.7.params.api_key=hunter2",
        "reward.scorers.0.name.token=hunter2",
        "trainer.updates=http://me:hunter2@h",
        "trainer.updates={password: hunter2}",
        "reward.scorers=[{name: x, wieght: 1, params: {password: hunter2}}]",
        "data.prompts=\"http://me:hunter2@h/\\0\"",
    ],
)  # fmt: skip
def test_a_complaint_shows_no_credentials(override: str) -> None:
    assert "hunter2" not in complaint(MINIMAL, override)
