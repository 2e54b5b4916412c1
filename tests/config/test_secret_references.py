"""A reference to a secret is replaced where a part is built; what cannot be is told in one line."""

from typing import Any

import msgspec
import pytest

from omni_async.config.secret_references import resolve_references, with_secrets
from omni_async.config.section import Section


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
