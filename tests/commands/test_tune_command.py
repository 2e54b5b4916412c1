"""Tests `omni-async tune` on the command line: what it prints, writes and refuses; and that what docs/tuning.md and the
help print of it is so, and works when it is typed as it stands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from omni_async import cli
from omni_async.config import load, resolved_yaml
from omni_async.config.describe import annotation_at
from omni_async.config.schedule import SCHEDULES
from omni_async.config.schema import Config
from omni_async.performance.profile import write_profile
from omni_async.simulation import simulate as simulator
from omni_async.simulation.tune.keys import TUNED, keys_of
from tests.simulation.tune.tune_world import PROFILE, RECIPE, simulate_by_law
from tests.support.places import ROOT
from tests.test_documented import COMMANDS

PAGE = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
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


def tune(arguments: str) -> int:
    return cli.main(["tune", *arguments.split()])


def test_it_prints_the_choice_and_writes_the_recipe(folder, capsys):
    assert tune("recipe.yaml --profile steady.json --devices 3 --staleness") == 0
    printed = capsys.readouterr()
    assert "Throughput against staleness: 3 gpus, profile steady" in printed.out
    assert printed.out.endswith(f"wrote {folder / 'recipe.tuned.yaml'}\n")
    assert load("recipe.tuned.yaml").staleness.max_updates == 1
    lines = printed.err.splitlines()
    assert all(line.startswith(f"simulated {number}: ") for number, line in enumerate(lines, start=1))
    assert f"profile steady, {len(lines)} simulations" in printed.out


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (8, "staleness.max_updates: 8 is kept, as a cap: groups are 0.50 updates old on average, 8 at most."),
        (0, "staleness.max_updates: 0 is kept, and it holds the run up: by the law the slowest stage needs 1."),
    ],
)
def test_staleness_is_kept_unless_it_is_searched(folder, by_law, capsys, budget, said):
    assert tune(f"recipe.yaml --profile steady.json --devices 3 staleness.max_updates={budget}") == 0
    shown = capsys.readouterr().out
    assert said in shown and f"0.5 % of the best throughput with S = {budget}, and no slower" in shown
    assert "Chosen:" in shown and "  staleness.max_updates: " not in shown
    written = yaml.safe_load((folder / "recipe.tuned.yaml").read_text())
    assert written["staleness"] == {"max_updates": budget}, "given on the command line"
    assert tune(f"recipe.yaml --profile steady.json --devices 3 --staleness staleness.max_updates={budget}") == 0
    assert load("recipe.tuned.yaml").staleness.max_updates == 1
    shown = capsys.readouterr().out
    assert "  staleness.max_updates: 1, because" in shown and "is kept" not in shown


def test_staleness_is_searched_if_the_recipe_s_schedule_fixes_it(folder, by_law, capsys):
    (folder / "recipe.yaml").write_text("schedule: sync\n" + RECIPE.replace("max_updates: 0", "max_updates: 3"))
    assert tune("recipe.yaml --profile steady.json --devices 3") == 0
    assert "  staleness.max_updates: 1, because" in capsys.readouterr().out
    written = load("recipe.tuned.yaml")
    assert (written.schedule, written.staleness.max_updates) == ("async", 1)


def test_json_holds_everything(folder, by_law, capsys):
    assert tune("recipe.yaml --profile steady.json --devices 3 --json new/t.json --out new/t.yaml --plot") == 0
    assert capsys.readouterr().out.endswith("wrote new/t.yaml, new/t.png, new/t.json\n")
    found = json.loads((folder / "new" / "t.json").read_text())
    written = keys_of(load("new/t.yaml"), TUNED)
    assert found["chosen"]["keys"] == written and found["keys"].items() <= written.items()
    assert {"front", "points", "recipe", "fastest", "reasons", "times", "devices"} <= found.keys()
    assert (folder / "new" / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_recipe_that_nothing_beats_is_left_as_it_is(folder, capsys):
    """Writes nothing where two devices that take turns waste less than a split of them, which leaves one waiting for
    the other."""
    (folder / "recipe.yaml").write_text("schedule: sync_colocated\n" + RECIPE)
    assert tune("recipe.yaml --profile steady.json --devices 2 rollout.workers=1 reward.workers=8") == 0
    printed = capsys.readouterr().out
    assert "The recipe as it is makes more images (" in printed and "wrote" not in printed
    assert not (folder / "recipe.tuned.yaml").exists()


def test_the_same_command_finds_the_same(folder):
    for name in ("first.json", "second.json"):
        tune(f"{COMMAND} --seed 5 --budget 16 --json {name}")
    assert (folder / "first.json").read_text() == (folder / "second.json").read_text()


def test_the_recipes_own_profile_is_the_default_and_overrides_come_first_and_are_kept(folder, by_law, capsys):
    (folder / "recipe.yaml").write_text(RECIPE + "emulation: {profile: steady.json}\n")
    changes = "trainer.workers=2 trainer.groups_per_update=8 --devices 5 --keep trainer.workers --budget 16"
    assert tune(f"recipe.yaml {changes}") == 0
    assert "profile steady" in capsys.readouterr().out
    written = load("recipe.tuned.yaml")
    assert written.emulation.profile == str(folder / "steady.json")
    assert (written.trainer.workers, written.trainer.groups_per_update, written.rollout.workers) == (2, 8, 3)


def test_a_credential_that_the_command_gives_is_not_written(folder, by_law, capsys):
    assert tune(f"{COMMAND} --budget 16 --json t.json reward.scorers.0.params.api_key=hunter2") == 0
    printed = capsys.readouterr()
    texts = [printed.out, printed.err, (folder / "recipe.tuned.yaml").read_text(), (folder / "t.json").read_text()]
    assert "hunter2" not in "".join(texts) and "***" in texts[2]


def test_a_recipe_of_answers_is_tuned_into_the_working_directory(folder, by_law, capsys):
    assert tune(f"{ROOT}/recipes/emulated/qwen3_omni_thinker.yaml --devices 16 --budget 16") == 0
    printed = capsys.readouterr()
    written = folder / "qwen3_omni_thinker.tuned.yaml"
    assert printed.out.endswith(f"wrote {written}\n") and load(written).rollout.sampling.max_tokens == 8192
    assert "answers/s" in printed.out and " answers/s" in printed.err
    assert "images" not in f"{printed.out}{printed.err}{written.read_text()}"


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
        (f"{COMMAND} --staleness --keep staleness.max_updates", "--keep: staleness.max_updates is what --staleness"),
        (f"{COMMAND} --budget 1", "--budget: expected at least 12 simulations"),
        (f"{COMMAND} --out recipe.yaml", "--out: recipe.yaml is the recipe itself"),
        (f"{COMMAND} --json .", "--json: cannot write .: "),
        (f"{COMMAND} --json recipe.yaml/x", "--json: cannot write recipe.yaml/x"),
        (f"{COMMAND} --out recipe.yaml/t.yaml", "--out: cannot write recipe.yaml/t.yaml"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2_before_the_search(folder, by_law, capsys, arguments, said):
    assert tune(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"omni-async: {said}") and printed.err.count("\n") == 1
    assert not list(folder.glob("*.tuned.yaml")) and (folder / "recipe.yaml").read_text() == RECIPE


# ---- what is documented ----------------------------------------------------------------------------------------------


def test_the_table_of_schedules_is_the_codes():
    section = PAGE.split("\n## Schedules\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|") and not re.fullmatch(r"[|\-: ]+", line)]
    (_, *names), *lines = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]
    documented = {
        name: {
            line[0]: yaml.safe_load(f'"{cell}"' if cell in ("on", "off") else cell)
            for line, cell in zip(lines, column, strict=True)
            if cell != "–"
        }
        for name, column in zip(names, zip(*(line[1:] for line in lines), strict=True), strict=True)
    }
    assert documented == SCHEDULES and names == list(SCHEDULES)


def test_every_key_link_and_figure_of_the_page_is_there():
    keys = set(re.findall(rf"`((?:{'|'.join(Config.__struct_fields__)})\.[a-z_.]+)[`=]", PAGE))
    targets = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert len(keys) > 15 and targets
    for key in keys:
        annotation_at(Config, key.split("."))
    for target in targets:
        assert (ROOT / "docs" / target).is_file(), target


def helped() -> list[list[str]]:
    """Returns the words of every example in the help of `tune` and `simulate`."""
    [commands] = [action.choices for action in cli._parser()._actions if action.choices]
    lines = [line for name in ("tune", "simulate") for line in commands[name].description.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("  omni-async ")]


SHOWN = [words for words in [*(found.values[0] for found in COMMANDS), *helped()] if words[0] in ("tune", "simulate")]
assert len(SHOWN) > 10


@pytest.mark.thorough
@pytest.mark.parametrize("command", sorted({shlex.join(words) for words in SHOWN}))
def test_a_printed_example_works_as_it_stands(command, folder, by_law, capsys):
    (folder / "recipes").symlink_to(ROOT / "recipes")
    for name in ("my-run", "quickstart-20260101-120000"):
        (run := folder / "runs" / name).mkdir(parents=True)
        write_profile(run / "profile.json", PROFILE)
        (run / "config.yaml").write_text(resolved_yaml(load(ROOT / "recipes" / "quickstart" / "quickstart.yaml")))
    assert cli.main(shlex.split(command)) == 0, capsys.readouterr().err
    assert command.startswith("simulate") or "\nwrote " in capsys.readouterr().out
