"""Tests that a known secret is found in every form that libraries give it, at any offset of the encoded text, and
nothing else is masked."""

from __future__ import annotations

import base64
import html
import json
import time
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omni_async.config.redact import MASK, redact_text
from omni_async.config.secret_forms import find

Encoder = Callable[[str], str]


def wrapped_base64(text: str) -> str:
    return base64.encodebytes(text.encode()).decode()


def all_percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode())


def all_escaped(text: str) -> str:
    """Escapes all characters as UTF-16 code units, as JSON does."""
    units = text.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


ENCODERS: dict[str, Encoder] = {
    "itself": lambda text: text,
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64 without padding": lambda text: base64.b64encode(text.encode()).decode().rstrip("="),
    "base64 for URLs": lambda text: base64.urlsafe_b64encode(text.encode()).decode(),
    "base64 in lines": wrapped_base64,
    "base64 of UTF-16": lambda text: base64.b64encode(text.encode("utf-16-le")).decode(),
    "percent": lambda text: quote(text, safe=""),
    "percent, lower case": lambda text: "".join(
        f"%{b:02x}" if b > 127 or not chr(b).isalnum() else chr(b) for b in text.encode()
    ),
    "percent, every byte": all_percent,
    "form": quote_plus,
    "hex": lambda text: text.encode().hex(),
    "HEX": lambda text: text.encode().hex().upper(),
    "hex with colons": lambda text: text.encode().hex(":"),
    "hex dump": lambda text: ", ".join(f"0x{byte:02x}" for byte in text.encode()),
    "JSON": json.dumps,
    "JSON with slashes": lambda text: json.dumps(text).replace("/", "\\/"),
    "JSON, every character": all_escaped,
    "JavaScript": lambda text: "".join(f"\\u{{{ord(character):x}}}" for character in text),
    "repr": repr,
    "ascii": ascii,
    "repr of bytes": lambda text: repr(text.encode()),
    "bytes, every one": lambda text: "".join(f"\\x{byte:02x}" for byte in text.encode()),
    "octal": lambda text: "".join(f"\\{byte:03o}" for byte in text.encode()),
    "HTML": html.escape,
    "HTML, decimal": lambda text: "".join(f"&#{ord(character)};" for character in text),
    "HTML, hex": lambda text: "".join(f"&#x{ord(character):X};" for character in text),
}
SECRETS = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]), min_size=6, max_size=40).filter(
    lambda text: len({*text}) > 4
)
AROUND = st.text(st.characters(codec="utf-8"), max_size=12)


@settings(max_examples=200, deadline=None)
@given(secret=SECRETS, before=AROUND, after=AROUND, form=st.sampled_from(sorted(ENCODERS)))
@example(secret="sk-4242/42+42", before="user:", after="", form="base64")
@example(secret="p\"a\\s's<w>&rd", before="", after="", form="HTML")
@example(secret="a%25b%2Fc", before="", after="", form="percent")
def test_a_secret_is_masked_in_every_form_wherever_it_stands(secret: str, before: str, after: str, form: str) -> None:
    encoded = ENCODERS[form](secret)
    shown = redact_text(f"{before} {encoded} {after}", [secret])
    assert MASK in shown
    assert encoded not in shown and secret not in shown


@settings(max_examples=200, deadline=None)
@given(secret=SECRETS, user=AROUND, rest=AROUND, form=st.sampled_from(sorted(ENCODERS)))
@example(secret="sk-424242", user="u", rest="", form="base64")
@example(secret="sk-424242", user="us", rest="x", form="base64")
@example(secret="sk-424242", user="use", rest="xy", form="base64")
def test_a_secret_is_masked_in_what_was_encoded_together_with_other_text(
    secret: str, user: str, rest: str, form: str
) -> None:
    """Masks as in `Basic base64(user:password)`, where the secret begins and ends at any of the encoded bytes."""
    encoded = ENCODERS[form](f"{user}:{secret}@{rest}")
    shown = redact_text(f"refused: {encoded}", [secret])
    assert MASK in shown and encoded not in shown
    if form.startswith("base64") and "UTF" not in form and form != "base64 in lines":
        core = base64.b64encode(f"{user}:".encode()).decode()
        assert len(shown) - len("refused: ") - len(MASK) <= len(core) + 2 * len(rest.encode()) + 8, (
            "no bits of the secret are left beside the mask"
        )


@settings(max_examples=100, deadline=None)
@given(
    secret=SECRETS,
    inner=st.sampled_from(["percent", "JSON", "base64", "hex", "repr", "HTML"]),
    outer=st.sampled_from(["percent", "JSON", "repr", "HTML"]),
)
def test_forms_within_escapes_are_masked(secret: str, inner: str, outer: str) -> None:
    encoded = ENCODERS[outer](ENCODERS[inner](secret))
    shown = redact_text(f"body: {encoded}", [secret])
    assert MASK in shown and encoded not in shown and secret not in shown


@given(text=st.text(max_size=200))
@example(text='{"a": "\\u00e9\\/", "b": "%20&amp;AAAA"} 0xdead beef')
def test_a_text_without_secrets_stays_as_it_is(text: str) -> None:
    assert find(text, ["Zq7hV-unlikely-secret"]) == []


@pytest.mark.parametrize(
    "text",
    ["\\" * 20_000, "%25" * 7_000, "&#" * 10_000, "\\u" * 10_000, "0x" * 10_000, "\\\\u0073" * 3_000, "A" * 20_000],
)
def test_a_hostile_text_costs_no_more_than_its_length(text: str) -> None:
    began = time.process_time()
    find(text, ["\\" * 30, "%25%25%25%25", "A" * 30])
    assert time.process_time() - began < 2.0


def test_a_half_pair_in_a_text_or_a_secret_is_no_obstacle() -> None:
    assert redact_text("\ud800 sk-424242 \udfff", ["sk-424242"]) == f"\ud800 {MASK} \udfff"
    assert redact_text("x \ud800-secret", ["\ud800-secret"]) == f"x {MASK}"


def test_two_secrets_beside_each_other_are_two_masks_and_one_in_the_other_is_one() -> None:
    assert redact_text("first2nd-one", ["first", "2nd-one"]) == MASK * 2
    assert redact_text("key=?", ["first"]) != MASK and redact_text("longer-secret", ["longer", "longer-secret"]) == MASK
