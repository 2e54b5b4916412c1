"""Tests that a random secret, wherever a recipe may hold one, is in no byte that a run leaves behind: not in its
folder, not in MLflow, not on the terminal."""

from __future__ import annotations

import asyncio
import io
import string
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from omni_async.cli import main
from omni_async.commands.command_line import print_error
from omni_async.commands.report import configuration
from omni_async.commands.scoring import scoring
from omni_async.commands.watch import app as watch
from omni_async.config.redact import redact_text, secrets_in
from omni_async.control.reasons import short
from omni_async.records.write.console import LineConsole
from omni_async.records.write.live_console import LiveConsole
from tests.support.examples import few
from tests.support.job_world import write_emulated

# Something in them that no other text holds: hypothesis also draws the constants of our own files, such as
# "profile.json".
_PIECES = st.text(string.ascii_letters + string.digits + "-_.~+/=@%!", max_size=14)
SECRETS = st.builds("{}Zq7hV{}".format, _PIECES, _PIECES).filter(lambda text: len(text) >= 12 and len({*text}) > 8)
_NAMES = """api_key token hf_token password X-Api-Key Authorization clientSecret aws_secret_access_key api_keys secrets
passwords auth basic_auth license_key Ocp-Apim-Subscription-Key tokens"""
KEYS = _NAMES.split()
URLS = (
    "https://me:{}@judge.example/v1",
    "https://{}@judge.example",
    "https://judge.example/?api_key={}&n=1",
    "postgresql://u:{}@db/x",
    "https://judge.example/?n=1&auth={}",
    "https://judge.example/?subscription-key={}",
    "https://judge.example/?key={}",
)


class LeakingScorer:
    def __init__(self, given: dict[str, Any], api_key: str) -> None:
        raise ConnectionError(f"{given} refused {api_key}")

    def score(self, images: list[Any], prompts: list[Any]) -> list[Any]:
        return []


def forms(secret: str) -> set[str]:
    return {secret, quote(secret, safe=""), quote(secret), secret.replace("/", "\\/")}


def shown(secret: str, *texts: str) -> bool:
    return any(form in text for text in texts for form in forms(secret))


def test_a_whole_run_keeps_its_secrets(tmp_path, capfd):
    secret = "Zk3-qT_9.w~X+/=5"
    recipe = write_emulated(tmp_path)
    tree = yaml.safe_load(recipe.read_text())
    params: dict[str, Any] = dict.fromkeys(KEYS, secret)
    params |= {f"url{n}": url.format(quote(secret, safe="")) for n, url in enumerate(URLS)}
    params |= {"headers": {"Authorization": f"Bearer {secret}"}, "judges": [{"password": secret}, {"secret": [secret]}]}
    tree["reward"]["scorers"] = [{"name": f"{__name__}:LeakingScorer", "params": {"given": params, "api_key": secret}}]
    tree["tracking"] = {"mlflow": {"enabled": True, "tracking_uri": None}}
    tree["trainer"] = {"updates": 1, "groups_per_update": 2}
    recipe.write_text(yaml.safe_dump(tree))
    override = f"reward.scorers.0.params.extra={{token: '{secret}'}}"
    assert main(["train", str(recipe), override, "emulation.time_scale=0.001"]) == 0
    assert main(["check", str(recipe), override]) == 0
    assert main(["train", str(recipe), override, "trainer.updates=0"]) == 2
    assert main(["check", str(recipe), f"trainer.updates={{password: '{secret}'}}"]) == 2
    assert main(["check", str(recipe), f"reward.scorers.9.params.token={secret}"]) == 2
    printed = capfd.readouterr()
    runs = tmp_path / "runs"
    assert (runs / "mlflow.db").is_file() and [*runs.glob("*/config.yaml")] and "update 1/1" in printed.out
    for file in runs.rglob("*"):
        assert not file.is_file() or not shown(secret, file.read_bytes().decode("latin-1")), file
    assert not shown(secret, printed.out, printed.err)


@few(60)
@given(secret=SECRETS, url=st.sampled_from(URLS), key=st.sampled_from(KEYS))
def test_no_secret_is_in_a_text_that_is_shown(secret, url, key):
    address = url.format(quote(secret, safe=""))
    assert not shown(secret, redact_text(f"cannot reach {address}: refused"))
    tree = {"url": address, "params": {key: secret}}
    assert not shown(secret, redact_text(f"{secret} is no {key} for {address}", secrets_in(tree)))


# ---- where texts leave the program -----------------------------------------------------------------------------------


def on(console: LiveConsole | LineConsole, stream: io.StringIO, name: str, text: str) -> str:
    getattr(console, name)(text)
    console.close()
    return stream.getvalue()


# Each returns what it shows of a text, or writes that to stderr.
WAYS: dict[str, Callable[[str], Any]] = {
    "commands": print_error,
    "score": lambda text: asyncio.run(scoring._tell(text)),
    "watch": lambda text: watch._refusal(400, text).body.decode(),  # type: ignore[union-attr]
    "a phase on a terminal": lambda text: on(LiveConsole(stream := io.StringIO(), 1), stream, "phase", text),
    "a note on a terminal": lambda text: on(LiveConsole(stream := io.StringIO(), 1), stream, "note", text),
    "a phase in a line": lambda text: on(LineConsole(stream := io.StringIO(), 1), stream, "phase", text),
    "a note in a line": lambda text: on(LineConsole(stream := io.StringIO(), 1), stream, "note", text),
    "a reason": short,
    "a page": lambda text: configuration._value({"key": text}, "key"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_message_is_masked_where_it_leaves_the_program(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    returned = WAYS[way]("https://me:hunter2@h failed")
    output = f"{returned} {capsys.readouterr().err}"
    assert "https://***@h failed" in output and "hunter2" not in output
