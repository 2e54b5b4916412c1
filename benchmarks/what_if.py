"""Compares the predicted effect of one change with its real effect.

Runs an emulated job on Ray in real time, predicts changes from its folder, makes each change in a separate run, and
compares seconds per update.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import EMULATED, asked, benchmark_parser, write_json
from omni_async.simulation.run_folder import read_measured
from omni_async.simulation.what_if import Prospect, measured_step, what_if

_DESCRIPTION = """\
Predict what one change buys an emulated job from a run of it, make the change, and compare:

  python -m benchmarks.what_if qwen_image_lora_h800 trainer.groups_per_update=8 rollout.group_size=8

`off` is the predicted seconds per update over those that the changed run took. Needs no GPU.
"""
_ASKED = ("S = ", "+1 rollout engine", "+1 reward worker")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = benchmark_parser("what_if", _DESCRIPTION)
    parser.add_argument("recipe", metavar="RECIPE", help=f"name of a recipe in {EMULATED.name}/")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="of the recipe, for all runs")
    options = parser.parse_args(arguments)
    recipe = EMULATED / f"{options.recipe}.yaml"
    if not recipe.is_file():
        parser.error(f"no emulated recipe is called {options.recipe!r}")
    options.out.mkdir(parents=True, exist_ok=True)

    run = train(recipe, options.out / "as_it_is", options.overrides)
    answer = what_if(*read_measured(run)[:3])
    say(f"as it is: {answer.measured_s:.4g} s per update, simulated {answer.present.step_s:.4g}")
    rows = []
    for number, one in enumerate(one for one in answer.changes if one.name.startswith(_ASKED)):
        keys = [f"{key}={value}" for key, value in one.keys.items()]
        rows.append(compared(one, train(recipe, options.out / f"change_{number}", [*options.overrides, *keys])))
        say("{name}: predicted {predicted_s:.4g} s, took {took_s:.4g} s, off {off:+.1%}".format(**rows[-1]))
    results = {"asked": asked(options), "answer": answer, "done": rows}
    say(f"wrote {write_json(options.out / 'results.json', results)}")
    return 0


def train(recipe: Path, folder: Path, overrides: Sequence[str]) -> Path:
    """Train as a user does; return the run's folder."""
    command = [sys.executable, "-m", "omni_async.cli", "train", str(recipe), *overrides, f"run.dir={folder}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return max(folder.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime).parent


def compared(predicted: Prospect, run: Path) -> dict[str, Any]:
    changed = read_measured(run)
    took, updates = measured_step(changed.config, changed.finished)
    assert took is not None, f"{run} has no steady part"
    step = predicted.step_s
    return {"name": predicted.name, "predicted_s": step, "took_s": took, "updates": updates, "off": step / took - 1}


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
