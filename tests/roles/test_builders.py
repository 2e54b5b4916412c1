"""Tests how the roles' parts that other packages bring are built: what fails is named."""

from pathlib import Path
from typing import Any

import pytest

from omni_async.config import load
from omni_async.plugins.programs import RolloutProgram
from omni_async.roles import builders
from omni_async.runtime.preflight.check import preflight
from omni_async.store import LocalStore
from omni_async.worker import Worker
from tests.config.recipe import MINIMAL, load_text
from tests.control import control_world
from tests.support.job_world import write_emulated

NAMED = ("rollout.calls=2", "rollout.program={name: refine, settings: {judge: {name: jpeg_size}}}")


def raises(config: object) -> None:
    raise OSError("no such file")


def forgets(config: object) -> None:
    """Returns no program."""


@pytest.mark.parametrize(
    ("build", "said"), [("raises", "OSError: no such file"), ("forgets", "expected a Program, got a NoneType")]
)
def test_rollout_programs(monkeypatch, build, said):
    assert builders.built_program(load_text(MINIMAL)) is None
    assert type(builders.built_program(load_text(MINIMAL, *NAMED))).__name__ == "Refine"
    monkeypatch.setattr(builders, "find_program", lambda name: RolloutProgram(f"{__name__}:{build}"))
    with pytest.raises(RuntimeError, match=f"rollout.program 'refine' was not built: {said}"):
        builders.built_program(load_text(MINIMAL, *NAMED))


def test_roles_know_the_address_of_their_machine(tmp_path: Path, monkeypatch):
    inputs = preflight(load(write_emulated(tmp_path)))
    coordinator, _ = control_world.make_coordinator(control_world.make_config())

    def context(name: str) -> builders.WorkerContext:
        peers = {"coordinator": coordinator}
        return builders.WorkerContext(Worker.parse(name), inputs, tmp_path, LocalStore(), peers, "192.0.2.7")

    sent: list[Any] = []
    monkeypatch.setattr(builders, "build_sender", lambda *how: sent.append(how[-1]))
    trainer: Any = builders.trainer(context("trainer"))
    assert (trainer.host, sent) == ("192.0.2.7", ["192.0.2.7"])
    assert context("counter-0").service_site().host == "192.0.2.7"
