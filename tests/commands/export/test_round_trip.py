"""Tests that diffusers alone, loading an export as its last line shows, computes what the trainer computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from omni_async.plugins.families import find_family
from tests.commands.export.export_world import computed_elsewhere, exported, trained_run
from tests.pipelines.families import FAMILIES, Family

MOST = 1e-5  # between processes, which may add in another order, as adapters do
KINDS = ("full", "adapters", "merged", "for ComfyUI")


@pytest.fixture(scope="module")
def outputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the trainer's outputs and diffusers', by family and kind of export, of the families in this session."""
    folder = tmp_path_factory.mktemp("exports")
    here = [item for item in request.session.items if item.path == request.path]
    tested = {item.callspec.params["family"].label for item in here if hasattr(item, "callspec")}
    jobs: list[dict[str, Any]] = []
    wanted: dict[str, Any] = {}
    for family in (family for family in FAMILIES if family.label in tested):
        for kind, code, calls, expected in _exports(folder / family.label, family):
            jobs.append({"name": f"{family.label} {kind}", "code": code, "calls": calls})
            wanted[f"{family.label} {kind}"] = expected
    found = computed_elsewhere(folder, jobs)
    return {name: (expected, found[name]) for name, expected in wanted.items()}


def _exports(folder: Path, family: Family) -> Any:
    trained = trained_run(folder / "all", family)
    yield "full", exported(trained.run, "--out", folder / "full"), *trained.calls()
    trained = trained_run(folder / "few", family, lora=True)
    adapters = exported(trained.run, "--out", folder / "adapters")
    yield "adapters", adapters, *trained.calls()
    yield "merged", exported(trained.run, "--merged", "--out", folder / "merged"), *trained.calls()
    if find_family(family.name).comfyui_layers:
        # diffusers reads ComfyUI's names, too, and has them the other way round.
        alone = adapters.replace(f'{folder / "adapters" / "transformer_2"}"', f'{folder}/two"')
        alone = alone.replace(f'{folder / "adapters"}"', f'{folder}/adapters/comfyui/transformer.safetensors"')
        alone = alone.replace(f'{folder}/two"', f'{folder}/adapters/comfyui/transformer_2.safetensors"')
        yield "for ComfyUI", alone, *trained.calls()


@pytest.mark.slow
@pytest.mark.sliced(floor=1)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.label)
def test_an_export_computes_what_the_trainer_does(outputs, family):
    for kind in KINDS[: None if find_family(family.name).comfyui_layers else -1]:
        expected, found = outputs[f"{family.label} {kind}"]
        assert len(expected) == len(found) >= 2
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=MOST, msg=f"{kind}: {{}}".format)
    full, adapters = (outputs[f"{family.label} {kind}"][1] for kind in ("full", "adapters"))
    assert not torch.allclose(full[0], adapters[0], atol=0.01), "weights that moved otherwise"
