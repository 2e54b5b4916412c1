"""Tests that configurations and texts are shown without credentials, and otherwise unchanged."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import unquote

import msgspec
import pytest
from recipe import MINIMAL, complaint, load_text

from omni_async.config import Config, resolved_yaml
from omni_async.config.describe import walk
from omni_async.config.redact import (
    is_secret_key,
    one_line,
    redact,
    redact_text,
    resolve_references,
    secrets_in,
    with_secrets,
)
from omni_async.config.section import Section


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
        "api_keys",
        "apiKeys",
        "APIKey",
        "openaiapikey",
        "secrets",
        "passwords",
        "auth",
        "basic_auth",
        "oauth",
        "auth_key",
        "license_key",
        "subscription_key",
        "Ocp-Apim-Subscription-Key",
        "x-functions-key",
        "X-Amz-Signature",
        "X-Amz-Security-Token",
        "sig",
        "tokens",
        "hf_tokens",
        "headers[Authorization]",
        "api_key[]",
    ],
)
def test_a_key_that_names_a_secret(key: str) -> None:
    assert is_secret_key(key)


HARMLESS = (
    "key keys sort_key prompt_key keyboard monkey tokenizer token_count reject_level target_modules secretary path"
    " author authenticate"
)


@pytest.mark.parametrize("key", [*HARMLESS.split(), "config", "design", "cookie_jar_size", ""])
def test_a_key_that_does_not(key: str) -> None:
    assert not is_secret_key(key)
    assert redact_text(f"{key}=hunter2") == f"{key}=hunter2"


def test_tokens_are_secrets_where_they_are_texts_and_counts_where_they_are_numbers() -> None:
    tree = {"max_tokens": 512, "tokens": [1, 2.5, None], "stop": {"image_tokens": 3}}
    assert redact(tree) == tree and secrets_in(tree) == frozenset()
    assert redact({"tokens": "hf_abc", "maxTokens": ["hf_abc"], "hf_tokens": {"a": "hf_abc"}}) == {
        "tokens": "***",
        "maxTokens": "***",
        "hf_tokens": "***",
    }
    assert secrets_in({"tokens": ["hf_abc", "hf_def"]}) == {"hf_abc", "hf_def"}
    assert (
        redact_text("max_tokens=512, at https://h/?max_tokens=512&n=1 (tokens=4).")
        == "max_tokens=512, at https://h/?max_tokens=512&n=1 (tokens=4)."
    )
    assert redact_text("tokens=hf_abc12 at https://h/?tokens=12ab&n=1") == "tokens=*** at https://h/?tokens=***&n=1"


def test_no_key_of_the_schema_is_taken_for_a_secret() -> None:
    names = {name for path, _, _ in walk(Config) for name in path.replace("[]", "").split(".")}
    assert {"seed", "mlflow", "lora", "ema_coef_end"} <= names
    assert [name for name in sorted(names) if is_secret_key(name)] == []
    whole = msgspec.to_builtins(load_text(MINIMAL, "model.lora={}", "trainer.ema={}"))
    assert msgspec.json.encode(redact(whole)) == msgspec.json.encode(whole)


@pytest.mark.parametrize(
    "key", ["api_key", "apiKeys", "auth", "sig", "Ocp-Apim-Subscription-Key", "pwd", "tokens", "api%5Fkey"]
)
def test_a_query_value_is_a_secret_under_the_names_that_a_mapping_hides(key: str) -> None:
    assert is_secret_key(unquote(key))
    check_query(key)


@pytest.mark.parametrize(
    "key",
    [
        "key",
        "access_token_v2",
        "AWSAccessKeyId",
        "secret_value",
        "tokenid",
        "password_hash",
        "key_id",
        "apikeyv2",
        "sort_key",
    ],
)
def test_a_query_value_is_a_secret_under_names_that_only_hold_such_a_word(key: str) -> None:
    check_query(key)


def check_query(key: str) -> None:
    url = f"https://h/v1?n=1&{key}=hunter2&m=2"
    assert redact_text(url) == f"https://h/v1?n=1&{key}=***&m=2"
    assert secrets_in({"url": url}) == {"hunter2"}


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
        ("expected key=value, got 'x'", "expected key=value, got 'x'"),
        ("Authorization=Bearer abcdefghij1234567890 refused", "Authorization=*** *** refused"),
        ("--header=Authorization=abcdef", "--header=Authorization=***"),
        ("conn=Endpoint=sb://h;SharedAccessKey=abcdef;n=1", "conn=Endpoint=sb://h;SharedAccessKey=***;n=1"),
        ("https://h/?to=https://i/?token=abcdef", "https://h/?to=https://i/?token=***"),
        ("https://h/#access_token=abcdef&n=1", "https://h/#access_token=***&n=1"),
        ("a basic red circle, bearer of news", "a basic red circle, bearer of news"),
        ("sqlite:////tmp/a@b/mlflow.db", "sqlite:////tmp/a@b/mlflow.db"),
        ("http://host:5000/a?x=1", "http://host:5000/a?x=1"),
        ("postgresql://u:p%40@db/x", "postgresql://***@db/x"),
    ],
)
def test_credentials_in_a_text(text: str, shown: str) -> None:
    assert redact_text(text) == shown


def test_known_secrets_are_masked_wherever_they_turn_up() -> None:
    tree = {
        "url": "http://me:p%40ss@h/?token=t0ken",
        "params": {"api_key": "sk-123", "headers": [{"X-Api-Key": 98765}], "password": "x"},
    }
    found = secrets_in(tree)
    assert found == {"p%40ss", "p@ss", "t0ken", "sk-123", "98765"}, "one of a single letter would mask everything"
    assert redact_text("no p@ss for sk-123, nor 98765", found) == "no *** for ***, nor ***"


def test_a_hostile_text_is_no_work() -> None:
    started = time.process_time()
    for piece in (
        "?token",
        "a.",
        "://",
        "token=",
        "Bearer ",
        "&key",
        "_token",
        "a",
        "x=",
        "?x=",
        "tokens=1",
        "&tokens=1",
        "-",
        "[",
        "%5F",
    ):
        redact_text(piece * (100_000 // len(piece)))
    assert time.process_time() - started < 5


def test_a_terminal_shows_control_characters_and_does_not_obey_them() -> None:
    assert one_line("a\x1b[2Jb\nc\u202ed\x00") == r"a\x1b[2Jb c\u202ed\x00"
    assert one_line("ein Würfel 骰子") == "ein Würfel 骰子"


def test_check_shows_no_credentials() -> None:
    recipe = MINIMAL.replace("{name: ocr}", "{name: ocr, params: {api_key: hunter2, n: 1}}")
    text = resolved_yaml(load_text(recipe, "tracking.mlflow.tracking_uri=http://me:hunter2@h/?token=hunter2"))
    assert "hunter2" not in text and "http://***@h/?token=***" in text


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


# ---- references to secrets, replaced where a part is built ----


class Settings(Section, kw_only=True, frozen=True):
    api_key: str
    hosts: dict[str, list[str]] = msgspec.field(default_factory=dict)


def test_references_are_replaced_however_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "hunter2")
    settings = Settings(api_key="env:JUDGE_KEY", hosts={"a": ["env:JUDGE_KEY", "b"]})
    found = with_secrets(settings, "roles.0.settings")
    assert found == Settings(api_key="hunter2", hosts={"a": ["hunter2", "b"]})
    assert with_secrets({}, "roles.0.settings") == {}


@pytest.mark.parametrize(
    ("value", "said"),
    [("***", "roles.0: a masked credential"), ({"key": ["env:NOT_THERE"]}, "roles.0: 'env:NOT_THERE' names an env")],
)
def test_what_cannot_be_replaced_is_refused(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("*", r"\*")):
        resolve_references(value, "roles.0")
