"""Tests `omni-async tune` on the command line: what it prints, writes and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from omni_async import cli
from omni_async.config import load
from omni_async.performance.profile import write_profile
from omni_async.simulation import simulate as simulator
from omni_async.tune.keys import TUNED, keys_of
from tests.tune.tune_world import PROFILE, RECIPE, simulate_by_law

ROOT = Path(__file__).parents[2]
COMMAND = "recipe.yaml --devices 4 --profile steady.json"


@pytest.fixture
def by_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the simulator by one that takes no time itself."""
    monkeypatch.setattr(simulator, "simulate", simulate_by_law)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a working directory with a recipe and a profile."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    write_profile(tmp_path / "steady.json", PROFILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_prints_the_choice_and_writes_the_recipe(folder, capsys):
    assert cli.main(["tune", "recipe.yaml", "--profile", "steady.json", "--devices", "3"]) == 0
    printed = capsys.readouterr()
    assert "Throughput against staleness: 3 gpus, profile steady" in printed.out
    assert printed.out.endswith("wrote recipe.tuned.yaml\n")
    assert load("recipe.tuned.yaml").staleness.max_updates == 1
    lines = printed.err.splitlines()
    assert all(line.startswith(f"simulated {number}: ") for number, line in enumerate(lines, start=1))
    assert f"profile steady, {len(lines)} simulations" in printed.out


def test_json_holds_everything(folder, by_law, capsys):
    arguments = ["--profile", "steady.json", "--devices", "3", "--json", "new/t.json", "--out", "new/t.yaml", "--plot"]
    assert cli.main(["tune", "recipe.yaml", *arguments]) == 0
    assert capsys.readouterr().out.endswith("wrote new/t.yaml, new/t.png, new/t.json\n")
    found = json.loads((folder / "new" / "t.json").read_text())
    written = keys_of(load("new/t.yaml"), TUNED)
    assert found["chosen"]["keys"] == written
    assert found["keys"].items() <= written.items()
    assert {"front", "points", "recipe", "fastest", "reasons", "times", "devices"} <= found.keys()
    assert (folder / "new" / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_recipe_that_nothing_beats_is_left_as_it_is(folder, capsys):
    """Writes nothing where two devices that take turns waste less than a split of them, which leaves one waiting for
    the other."""
    (folder / "recipe.yaml").write_text("schedule: sync_colocated\n" + RECIPE)
    arguments = ["--profile", "steady.json", "--devices", "2", "rollout.workers=1", "reward.workers=8"]
    assert cli.main(["tune", "recipe.yaml", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "The recipe as it is makes more images (" in printed and "wrote" not in printed
    assert not (folder / "recipe.tuned.yaml").exists()


def test_the_same_command_finds_the_same(folder, capsys):
    found = []
    for name in ("first.json", "second.json"):
        arguments = ["--profile", "steady.json", "--devices", "4", "--seed", "5", "--budget", "16", "--json", name]
        cli.main(["tune", "recipe.yaml", *arguments])
        found.append((folder / name).read_text())
    assert found[0] == found[1]


def test_the_recipes_own_profile_is_the_default(folder, by_law, capsys):
    (folder / "recipe.yaml").write_text(RECIPE + "emulation: {profile: steady.json}\n")
    assert cli.main(["tune", "recipe.yaml", "--devices", "3", "--budget", "12"]) == 0
    assert "profile steady" in capsys.readouterr().out
    assert load("recipe.tuned.yaml").emulation.profile == str(folder / "steady.json")


def test_overrides_come_first_and_are_kept(folder, by_law, capsys):
    changes = "trainer.workers=2 trainer.groups_per_update=8 --devices 5 --keep trainer.workers --budget 16"
    assert cli.main(["tune", *COMMAND.split(), *changes.split()]) == 0
    written = load("recipe.tuned.yaml")
    assert (written.trainer.workers, written.trainer.groups_per_update, written.rollout.workers) == (2, 8, 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("recipe.yaml --profile steady.json", "--devices: required"),
        ("recipe.yaml --profile steady.json --devices 0", "--devices: expected at least 1, got 0"),
        ("recipe.yaml --profile steady.json --devices 1", "--devices: 1 gpus are fewer than the roles take at least"),
        ("recipe.yaml --devices 4", "--profile: required, because the recipe has no emulation.profile"),
        ("recipe.yaml --devices 4 --profile nowhere.json", "--profile: nowhere.json: cannot be read"),
        ("recipe.yaml --devices 4 --profile recipe", "--profile: no profile 'recipe'; shipped are"),
        ("nowhere.yaml --devices 4 --profile steady.json", "nowhere.yaml: no such file"),
        (f"{COMMAND} --keep rollout.seed", "--keep: rollout.seed is not tuned; keys that are"),
        (f"{COMMAND} --budget 1", "--budget: expected at least 12 simulations"),
        (f"{COMMAND} --out recipe.yaml", "--out: recipe.yaml is the recipe itself"),
        (f"{COMMAND} --json .", "--json: cannot write .: "),
        (f"{COMMAND} --json recipe.yaml/x", "--json: cannot write recipe.yaml/x"),
        (f"{COMMAND} --out recipe.yaml/t.yaml", "--out: cannot write recipe.yaml/t.yaml"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2_before_the_search(folder, by_law, capsys, arguments, said):
    assert cli.main(["tune", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"omni-async: {said}") and printed.err.count("\n") == 1
    assert not list(folder.glob("*.tuned.yaml"))


def test_the_help_shows_it_being_used_and_names_the_keys(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["tune", "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "  omni-async tune recipes/" in shown
    options = ("--devices", "--profile", "--keep", "--budget", "--seed", "--out", "--plot", "--json")
    assert all(word in shown for word in (*TUNED, *options))


def test_neither_torch_nor_ray_is_imported(folder):
    program = (
        "import sys\n"
        "from omni_async import cli\n"
        "code = cli.main(['tune', 'recipe.yaml', '--profile', 'steady.json', '--devices', '3', '--budget', '12'])\n"
        "print(code, [name for name in ('torch', 'ray', 'mlflow', 'tensordict', 'matplotlib') if name in sys.modules])"
    )
    found = {"capture_output": True, "text": True, "timeout": 120, "check": True, "env": {"PYTHONPATH": str(ROOT)}}
    done = subprocess.run([sys.executable, "-c", program], **found)
    assert done.stdout.splitlines()[-1] == "0 []"
