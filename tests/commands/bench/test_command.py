"""Tests `omni-async bench`: its help, what it refuses, and its exit codes."""

from __future__ import annotations

import pytest

from omni_async import cli
from omni_async.commands.bench import overlap as overlap_module
from omni_async.commands.bench.result import read_overlap
from tests.commands.bench import overlap_world as world


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """Runs the command with a `train` that takes no time; returns (exit code, stdout, stderr)."""
    recipe = world.write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(*arguments, train=None, name="toy.yaml"):
        monkeypatch.setattr(overlap_module, "train_here", train or world.FakeTrain())
        monkeypatch.setattr(overlap_module, "simulated_step", world.half_the_profile)
        code = cli.main(["bench", "overlap", str(recipe.parent / name), *arguments])
        return code, *capsys.readouterr()

    return run


SHORT = ("--arms", "sync,async:1", "--repeats", "2")


def test_a_benchmark_prints_its_table_and_leaves_its_files(bench, tmp_path):
    code, out, err = bench(*SHORT)
    assert (code, err) == (0, "")
    assert "4/4 sync round 2: 14 s per update" in out
    assert "| bound fraction" in out
    assert out.index("**async:1 saves ") < out.index("| generation overlapped with training") < out.index("| median")
    left = {path.name for path in (tmp_path / "runs" / "overlap-toy").iterdir()}
    assert left == {"overlap.json", "overlap.html", "overlap.md", "overlap.png", "runs"}


def test_overrides_may_stand_anywhere_and_a_profile_replaces_the_recipes(bench, tmp_path):
    other = tmp_path / "other.json"
    other.write_bytes((tmp_path / "toy.json").read_bytes())
    given = ("--profile", "other.json", "rollout.group_size=2", "--updates", "14")
    assert bench("reward.batch=3", "--out", "there", *SHORT, *given)[0] == 0
    config = read_overlap(tmp_path / "there").arms[0].config
    assert (config["reward"]["batch"], config["rollout"]["group_size"], config["trainer"]["updates"]) == (3, 2, 14)
    assert config["emulation"]["profile"] == str(other)


def test_a_failed_run_is_exit_code_1_and_its_reason_is_shown(bench):
    failing = world.FakeTrain(ends=lambda arm, number: ("failed", "EngineError: gone") if arm == "sync" else None)
    code, out, _ = bench(*SHORT, train=failing)
    assert code == 1
    assert "sync: run 1 failed: EngineError: gone" in out
    [median] = [line for line in out.splitlines() if line.startswith("| median")]
    assert "failed" in median


def test_ctrl_c_is_exit_code_130_and_says_how_to_go_on(bench):
    interrupted = world.FakeTrain(ends=lambda arm, number: KeyboardInterrupt() if number == 1 else None)
    code, out, _ = bench(*SHORT, train=interrupted)
    assert code == 130
    assert out.splitlines()[-1] == "interrupted; the same command continues with what is missing in runs/overlap-toy"


def test_a_report_shows_a_result_again_without_running(bench, tmp_path, capsys):
    bench(*SHORT, "--out", "there")
    (tmp_path / "there" / "overlap.png").unlink()
    (tmp_path / "toy.yaml").unlink()
    before = (tmp_path / "there" / "overlap.json").read_bytes()
    for path in ("there", "there/overlap.json"):
        assert cli.main(["bench", "overlap", path, "--report"]) == 0
        assert "| bound fraction" in capsys.readouterr().out
    assert (tmp_path / "there" / "overlap.png").is_file()
    assert cli.main(["bench", "overlap", "there", "--report", "--out", "elsewhere"]) == 0
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == {"overlap.html", "overlap.md", "overlap.png"}
    assert (tmp_path / "there" / "overlap.json").read_bytes() == before, "a result is never written again"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "sync,fast"], "--arms: 'fast' is no arm; expected sync"),
        (["--updates", "5"], "trainer.updates: 5 are too few"),
        (["trainer.updates=5"], "trainer.updates belongs to the benchmark: use --updates"),
        (["rollout.wrkers=5"], "rollout.wrkers: unknown key; did you mean 'workers'?"),
        (["nonsense"], "expected key.path=value"),
        (["--profile", "nowhere"], "emulation.profile: no profile 'nowhere'"),
        (["--profile", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--out", "toy.yaml"], "--out: "),
        ("nowhere.yaml", "no such file"),
        ("toy.json", "unknown key"),
    ],
)
def test_bad_input_or_a_recipe_that_is_none_is_one_line_and_exit_code_2(bench, arguments, message):
    if isinstance(arguments, str):
        code, _, err = bench(name=arguments)
    else:
        code, _, err = bench(*(["--arms", "sync"] if "--arms" not in arguments else []), *arguments)
    assert code == 2
    assert err.startswith("omni-async: ") and err.count("\n") == 1
    assert message in err


RUNS_NOTHING, NO_RESULT = "--report: runs nothing", "not a benchmark result"


@pytest.mark.parametrize(
    ("content", "given", "message"),
    [
        *((None, given, RUNS_NOTHING) for given in ("reward.batch=3", "--arms sync", "--profile p", "--steps 8")),
        (None, "", "no finished benchmark to report on"),
        *((content, "", NO_RESULT) for content in ("{}", "{")),
    ],
)
def test_a_report_on_nothing_or_with_options_of_a_run_is_one_line_and_exit_code_2(
    tmp_path, capsys, content, given, message
):
    if content is not None:
        (tmp_path / "overlap.json").write_text(content)
    assert cli.main(["bench", "overlap", str(tmp_path), *given.split(), "--report"]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
