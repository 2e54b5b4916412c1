"""Compares emulated runs with their simulations: validation rounds, rejected groups, and the stage that differs."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from omni_async import cli
from omni_async.algorithms.kinds import samples_per_rank
from omni_async.config import Config, resolved_yaml
from omni_async.performance.measure import measure
from omni_async.performance.profile import Profile, ServiceTime, write_profile
from omni_async.records.write.timeline import write_trace
from omni_async.roles.inputs import RunInputs
from omni_async.runtime.preflight.check import preflight
from omni_async.simulation import what_if as module
from omni_async.simulation.run_folder import read_measured, stage_seconds
from omni_async.simulation.simulate import simulate
from omni_async.simulation.what_if import what_if
from omni_async.types import Prompt
from tests.simulation.simulation_world import make_config
from tests.support import job_world
from tests.support.job_world import Emulated, emulate, write_emulated

VALIDATED = 16
SLOW_ENGINES = Profile(
    name="slow engines",
    source="made up",
    generate=ServiceTime(fixed_s=2.0, unit_s=2.0),
    score=ServiceTime(fixed_s=0.5, unit_s=0.25),
    train=ServiceTime(fixed_s=0.2, unit_s=0.1),
    publish=ServiceTime(fixed_s=0.5),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """A run with a validation round of 16 samples after every other update of 16; its engines are always busy."""
    prompts = tuple(Prompt(number, "a validation prompt") for number in range(VALIDATED))

    def with_rounds(config: Config) -> RunInputs:
        """Keeps the validation rounds, which an emulated run leaves out."""
        found = preflight(config)
        validated = replace(found.config, validation=config.validation)
        return dataclasses.replace(found, config=validated, validation_prompts=prompts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_world, "preflight", with_rounds)
        rounds = {"prompts": "no/such/validation.txt", "every": 2, "num_inference_steps": 10}
        sections: dict[str, Any] = {"validation": rounds, "rollout": {"num_inference_steps": 10}}
        trainer = {"updates": 24, "groups_per_update": 4}
        recipe = write_emulated(tmp_path_factory.mktemp("run"), SLOW_ENGINES, trainer=trainer, **sections)
        return emulate(recipe)


@pytest.fixture(autouse=True)
def only_the_present(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates no change of a run: other tests do."""
    monkeypatch.setattr(module, "changes", lambda config, profile: [])


def write_metrics(folder: Path, *lines: dict[str, Any]) -> None:
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_a_run_with_validation_rounds_takes_what_its_simulation_takes(made: Emulated) -> None:
    finished = [update["finished"] for update in made.updates]
    stages = stage_seconds(made.spans, finished, made.config)
    found = what_if(made.config, SLOW_ENGINES, finished, stages=stages, validation=VALIDATED)
    assert found.measured_s is not None and found.measured_s > 25.0, "an update alone takes 20 s"
    assert found.measured_s == pytest.approx(stages["training"] + stages["checkpoints"] + stages["waits"])
    assert found.present.step_s == pytest.approx(found.measured_s, rel=0.03) and not found.difference
    for one in found.stages:
        assert one.simulated_s == pytest.approx(one.measured_s, abs=0.03 * found.measured_s), one


def test_the_output_names_the_stage_that_differs(
    made: Emulated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Writes the folder of the run, first with its validation rounds, then without them."""
    per_rank = samples_per_rank(made.config)
    profile = measure(made.spans, made.config, samples_per_rank=per_rank, name="run", source="a test")
    (tmp_path / "config.yaml").write_text(resolved_yaml(made.config))
    write_profile(tmp_path / "profile.json", profile)
    write_trace(tmp_path / "trace.json", made.spans)
    updates = [{"update": update["version"], "finished": update["finished"]} for update in made.updates]
    rounds = [{"update": 2, "validation/reward": 0.5, "samples": VALIDATED, "asked": VALIDATED}]
    write_metrics(tmp_path, *updates, *rounds)
    assert read_measured(tmp_path).validation == VALIDATED
    assert cli.main(["simulate", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "the simulated update is" not in out
    assert out.startswith(f"{tmp_path}: Emulated: engines, scorers and trainer take the times of profile "), out

    write_metrics(tmp_path, *updates)
    assert cli.main(["simulate", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    said = r"the simulated update is [\d.]+% shorter than the run's: generation differs most: ([\d.]+) s simulated,"
    found = re.search(said + r" ([\d.]+) s measured", " ".join(out.split()))
    assert found, out
    measured = read_measured(tmp_path).stages["generation"]
    assert float(found[2]) == pytest.approx(measured, rel=0.01) and float(found[1]) < 0.8 * measured
    assert re.search(r"generation +[\d.]+ +[\d.]+", out) and re.search(r"waits +[\d.]+ +[\d.]+", out)


def test_rejected_groups_are_generated_as_well() -> None:
    config = make_config(rollout__workers=2, staleness__max_updates=2, trainer__groups_per_update=4)
    whole = simulate(config, SLOW_ENGINES, updates=60)
    found = simulate(config, SLOW_ENGINES, updates=60, rejected=0.25)
    rejected, trained = found.counters["rejected"], found.counters["trained"]
    assert whole.counters["rejected"] == 0 and rejected / (rejected + trained) == pytest.approx(0.25, abs=0.07)
    assert found.step_s == pytest.approx(whole.step_s * (1 + rejected / trained), rel=0.08)
