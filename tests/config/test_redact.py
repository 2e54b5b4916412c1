"""Tests that configurations and texts are shown without credentials and otherwise unchanged."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, quote_plus

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omni_async.config import Config, resolved_yaml
from omni_async.config.describe import walk
from omni_async.config.redact import (
    MASK,
    is_secret_key,
    one_line,
    redact,
    redact_text,
    resolve_references,
    secrets_in,
    with_secrets,
)
from omni_async.config.section import Section
from tests.config.recipe import MINIMAL, complaint, load_text
from tests.support.effort import LINEAR, growth

SECRET = (
    "token hf_token api_key apiKey X-Api-Key Authorization PASSWORD client_secret aws_secret_access_key secret_key"
    " credentials private-key Cookie db_passwd reward.scorers.0.params.api_key api_keys apiKeys APIKey openaiapikey"
    " secrets passwords auth basic_auth oauth auth_key license_key subscription_key Ocp-Apim-Subscription-Key"
    " x-functions-key X-Amz-Signature X-Amz-Security-Token sig tokens hf_tokens headers[Authorization] api_key[]"
)
HARMLESS = (
    "key keys sort_key prompt_key keyboard monkey tokenizer token_count reject_level target_modules secretary path"
    " author authenticate config design cookie_jar_size"
)
# Secret in a query: under the names that a mapping hides, and under some that only hold such a word.
IN_QUERIES = (
    "api_key apiKeys auth sig Ocp-Apim-Subscription-Key pwd tokens api%5Fkey key access_token_v2 AWSAccessKeyId"
    " secret_value tokenid password_hash key_id apikeyv2 sort_key"
)


def test_secret_keys() -> None:
    assert [key for key in SECRET.split() if not is_secret_key(key)] == []
    for key in (*HARMLESS.split(), ""):
        assert not is_secret_key(key), key
        assert redact_text(f"{key}=hunter2") == f"{key}=hunter2"


def test_secrets_in_queries() -> None:
    for key in IN_QUERIES.split():
        url = f"https://h/v1?n=1&{key}=hunter2&m=2"
        assert redact_text(url) == f"https://h/v1?n=1&{key}=***&m=2"
        assert secrets_in({"url": url}) == {"hunter2"}, key


def test_tokens_and_counts_of_tokens() -> None:
    tree = {"max_tokens": 512, "tokens": [1, 2.5, None], "stop": {"image_tokens": 3}}
    assert redact(tree) == tree and secrets_in(tree) == frozenset()
    texts = {"tokens": "hf_abc", "maxTokens": ["hf_abc"], "hf_tokens": {"a": "hf_abc"}}
    assert redact(texts) == dict.fromkeys(texts, "***")
    assert secrets_in({"tokens": ["hf_abc", "hf_def"]}) == {"hf_abc", "hf_def"}
    counts = "max_tokens=512, at https://h/?max_tokens=512&n=1 (tokens=4)."
    assert redact_text(counts) == counts
    assert redact_text("tokens=hf_abc12 at https://h/?tokens=12ab&n=1") == "tokens=*** at https://h/?tokens=***&n=1"


def test_no_key_of_the_schema_is_secret() -> None:
    names = {name for path, _, _ in walk(Config) for name in path.replace("[]", "").split(".")}
    assert {"seed", "mlflow", "lora", "ema_coef_end"} <= names
    # `micro_batch_tokens` is a number.
    assert [name for name in sorted(names) if is_secret_key(name)] == ["api_key", "micro_batch_tokens"]
    whole = msgspec.to_builtins(load_text(MINIMAL, "model.lora={}", "trainer.ema={}"))
    assert msgspec.json.encode(redact(whole)) == msgspec.json.encode(whole)


def test_values_under_secret_keys() -> None:
    tree = {"headers": {"Authorization": "Bearer x"}, "password": 1234, "secret": {"a": "b"}, "token": ["a"]}
    masked = {"headers": {"Authorization": "***"}, "password": "***", "secret": "***", "token": "***"}
    rest = {"pin": 1, "api_key": "env:KEY", "hf_token": None, "client_secret": False}
    assert redact(tree | rest) == masked | rest


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot reach https://me:pw@h/x", "cannot reach https://***@h/x"),
        ("GET https://h/v1?api_key=abcdef&n=3 failed", "GET https://h/v1?api_key=***&n=3 failed"),
        ("sent Authorization: Bearer sk-abcdef0123456789", "sent Authorization: Bearer ***"),
        ("override 'reward.scorers.0.params.api_key=abcdef'", "override 'reward.scorers.0.params.api_key=***"),
        ("OPENAI_API_KEY=abcdef is wrong", "OPENAI_API_KEY=*** is wrong"),
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


def test_secrets_of_a_configuration() -> None:
    tree = {
        "url": "http://me:p%40ss@h/?token=t0ken",
        "params": {"api_key": "sk-123", "headers": [{"X-Api-Key": 98765}], "password": "abc"},
    }
    found = secrets_in(tree)
    assert found == {"p%40ss", "p@ss", "t0ken", "sk-123", "98765"}, "less than four characters would mask everything"
    assert redact_text("no p@ss for sk-123, nor 98765", found) == "no *** for ***, nor ***"
    assert redact({"password": "abc"}) == {"password": MASK} and redact_text("password=abc") == f"password={MASK}"


@pytest.mark.parametrize(
    ("text", "secrets", "shown"),
    [
        ("\ud800 sk-424242 \udfff", ["sk-424242"], "\ud800 *** \udfff"),  # half a pair is no obstacle
        ("x \ud800-secret", ["\ud800-secret"], "x ***"),
        ("first2nd-one", ["first", "2nd-one"], "******"),
        ("longer-secret", ["longer", "longer-secret"], "***"),
        ("key=?", ["first"], "key=?"),
    ],
)
def test_secrets_that_overlap(text: str, secrets: list[str], shown: str) -> None:
    assert redact_text(text, secrets) == shown


def test_control_characters() -> None:
    assert one_line("a\x1b[2Jb\nc\u202ed\x00") == r"a\x1b[2Jb c\u202ed\x00"
    assert one_line("ein Würfel 骰子") == "ein Würfel 骰子"


def test_resolved_yaml_shows_no_credentials() -> None:
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
def test_errors_show_no_credentials(override: str) -> None:
    assert "hunter2" not in complaint(MINIMAL, override)


# ---- references to secrets, replaced where a part is built ----


class Settings(Section, kw_only=True, frozen=True):
    api_key: str
    hosts: dict[str, list[str]] = msgspec.field(default_factory=dict)


def test_references_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "hunter2")
    settings = Settings(api_key="env:JUDGE_KEY", hosts={"a": ["env:JUDGE_KEY", "b"]})
    found = with_secrets(settings, "roles.0.settings")
    assert found == Settings(api_key="hunter2", hosts={"a": ["hunter2", "b"]})
    assert with_secrets({}, "roles.0.settings") == {}


@pytest.mark.parametrize(
    ("value", "said"),
    [("***", "roles.0: a masked credential"), ({"key": ["env:NOT_THERE"]}, "roles.0: 'env:NOT_THERE' names an env")],
)
def test_missing_references(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("*", r"\*")):
        resolve_references(value, "roles.0")


# ---- a known secret, encoded ----

FORMS: dict[str, Callable[[str], str]] = {
    "itself": str,
    "percent": quote,
    "percent, all": lambda text: quote(text, safe=""),
    "form": quote_plus,
    "JSON": json.dumps,
    "JSON in UTF-8": lambda text: json.dumps(text, ensure_ascii=False),
    "repr": lambda text: repr({"key": text}),
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64 for URLs": lambda text: base64.urlsafe_b64encode(text.encode()).decode().rstrip("="),
}
SECRETS = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]), min_size=6, max_size=40).filter(
    lambda text: len({*text}) > 4
)


@pytest.mark.parametrize("form", FORMS)
@given(secret=SECRETS)
@example(secret="sk-4242/42+42?")
@example(secret="p\"a\\s's<w>&rd")
@example(secret="a%25b%2Fc")
def test_a_known_secret_is_masked_in_every_form(form: str, secret: str) -> None:
    encoded = FORMS[form](secret)
    shown = redact_text(f"refused: {encoded} at once", [secret])
    assert MASK in shown and encoded not in shown and secret not in shown


def test_a_secret_of_less_than_four_characters_is_masked_by_its_context_alone() -> None:
    assert secrets_in({"password": "abc", "url": "http://me:xyz@h/?token=123"}) == frozenset()
    assert secrets_in({"password": "abcd", "url": "http://me:wxyz@h/?token=1234"}) == {"abcd", "wxyz", "1234"}


HOSTILE = "?token a. :// token= Bearer &key _token a x= ?x= tokens=1 &tokens=1 - [ %5F \\ %25 &# \\u 0x \\\\u0073 A"


@pytest.mark.parametrize(("head", "piece"), [*(("", piece) for piece in HOSTILE.split()), ("%", "25")])
def test_hostile_texts_are_linear_work(head: str, piece: str) -> None:
    secrets = ["\\" * 30, "%25%25%25%25", "A" * 30]
    assert growth(lambda length: redact_text(head + piece * (length // len(piece)), secrets), 4_000) < LINEAR
