"""Makes runs with checkpoints of moved weights, without training, and computes with exports in another process."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

import omni_async.compat
from omni_async.checkpoint.contents import model_contents
from omni_async.checkpoint.folders import folder_name, partial, put_in_place, write_manifest
from omni_async.checkpoint.state import State, write_state
from omni_async.checkpoint.statement import stated
from omni_async.cli import main
from omni_async.config import Config, load, resolved_yaml
from omni_async.control.control_state import ControlState
from omni_async.training.engine import TrainEngine
from tests.pipelines.families import Family
from tests.support.job_world import ENVIRONMENT
from tests.training.training_world import make_config, nudge, started

VERSION = 3
LORA = {"rank": 2, "alpha": 3.0}  # a factor that is no power of two


@dataclass(frozen=True)
class Trained:
    """A run with one checkpoint, and the engine that holds its weights."""

    run: Path
    config: Config
    engine: TrainEngine

    def calls(self) -> tuple[list[Any], list[Tensor]]:
        """Returns the calls of every trained denoiser in one step of a sample, and what the trainer's own return."""
        policy, spec = self.engine.policy, self.config.rollout.sampling
        conditioning = policy.stack_conditioning([policy.blank_conditioning(spec)])
        latents = torch.randn((1, *policy.latent_shape(spec)), generator=torch.Generator().manual_seed(1))
        modules = {name: self.engine._model.components[name] for name in policy.components}
        made: list[Any] = []
        outputs: list[Tensor] = []

        def record(component: str) -> Any:
            def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
                made.append((component, args, {**kwargs, "return_dict": False}))
                outputs.append(first_tensor(output).detach().clone())

            return hook

        hooks = [module.register_forward_hook(record(name), with_kwargs=True) for name, module in modules.items()]
        with torch.no_grad():
            for sigma in (0.97, 0.11):
                policy.velocity(modules, latents, torch.tensor([sigma]), conditioning, spec)
        for hook in hooks:
            hook.remove()
        assert {component for component, _, _ in made} == set(policy.components)
        return made, outputs


def first_tensor(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = output[0]
    return output


def trained_run(folder: Path, family: Family, lora: bool = False, **changes: Any) -> Trained:
    """Builds the family's smallest model, and a run of it whose weights have moved."""
    base = family.build(folder / "base")
    keys = {
        "model.pipeline": family.name,
        "model.path": str(base),
        "sampling": msgspec.to_builtins(family.specs[0]),
        "rollout.num_inference_steps": 10,
        **({"model.lora": LORA | {"target_modules": family.case.targets}} if lora else {}),
        **changes,
    }
    run = folder / "runs" / "trained-20260101-120000"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(resolved_yaml(make_config(**keys)))
    config = load(run / "config.yaml")
    engine = started(config, family.policy(str(base)))
    nudge(engine, 0.05)
    write_checkpoint(run, config, engine)
    return Trained(run, config, engine)


def write_checkpoint(run: Path, config: Config, engine: TrainEngine, version: int = VERSION) -> Path:
    folder = run / "checkpoints" / folder_name(version)
    partial(folder).mkdir(parents=True)
    writing, counts = engine.begin_save(partial(folder))
    writing.result()
    control, statement = ControlState(version=version), stated(config, model_contents(Path(config.model.path)))
    state = State(control, config.model.pipeline, config.algorithm.name, statement=statement)
    write_state(partial(folder), msgspec.structs.replace(state, engine=counts | {"optimizer_steps": version}))
    write_manifest(partial(folder))
    put_in_place(folder)
    return folder


def exported(*arguments: Any) -> str:
    """Exports by the command, and returns the Python that its last line says."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["export", *map(str, arguments)]) == 0
    last = said.getvalue().splitlines()[-1]
    assert last.startswith("load it: ")
    return f"import torch; from diffusers import DiffusionPipeline; {last.removeprefix('load it: ')}"


def refused(capsys: Any, *arguments: Any) -> str:
    """Exports what cannot be, and returns the one line that says why."""
    assert main(["export", *map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err


def computed_elsewhere(folder: Path, jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Runs `plain.py` on the jobs in a process of its own, and returns the outputs by the jobs' names."""
    file = folder / "jobs.pt"
    torch.save([*jobs], file)
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    script = [str(Path(__file__).with_name("plain.py")), str(file), str(omni_async.compat.__file__)]
    done = subprocess.run([sys.executable, "-P", *script], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = torch.load(file.with_suffix(".out"), weights_only=False)
    return found
