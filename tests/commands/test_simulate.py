"""Tests a whole job in virtual time: what is counted, what is left out, and the command's output."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_async.cli import main
from omni_async.config import load
from omni_async.config.draws import samples_of
from omni_async.control.coordinator import Coordinator
from omni_async.control.reporting import buffer_statistics
from omni_async.performance.profile import write_profile
from omni_async.simulation import simulate as module
from omni_async.simulation import sweep
from omni_async.simulation.simulate import Steady, simulate
from omni_async.simulation.sweep import arms, choose_bundle, in_bundles
from omni_async.simulation.world import Gauge, Meters, Stretches, Window
from tests.simulation.simulation_world import make_config, make_profile
from tests.support.places import ROOT

PROFILE = make_profile(
    generate=(1.0, 0.5),
    score=(0.2, 0.1),
    train=(0.0, 0.3),
    proximal=(0.1, 0.0),
    step=1.0,
    export=0.4,
    publish=1.5,
    swap=0.2,
)
VARIED = make_profile(
    generate=(1.0, 0.5, 0.3), score=(0.2, 0.1, 0.5), train=(0.0, 0.3, 0.1), step=1.0, publish=1.5, swap=0.2
)


def same(a: Any, b: Any) -> bool:
    return bool(msgspec.structs.replace(a, wall_s=0.0) == msgspec.structs.replace(b, wall_s=0.0))


# ---- what is counted -------------------------------------------------------------------------------------------------


def test_every_group_is_trained_and_nothing_is_lost_or_staler_than_allowed() -> None:
    found = simulate(make_config(rollout__workers=3, staleness__max_updates=2), VARIED, updates=40)
    assert found.counters == {"admitted": 160, "trained": 160, "rejected": 0, "dropped": 0, "live": 0}
    assert sum(found.staleness.values()) == 160 and found.staleness_max <= 2
    assert found.staleness_mean == pytest.approx(sum(age * n for age, n in found.staleness.items()) / 160)
    assert simulate(make_config(staleness__max_updates=0), VARIED, updates=20).staleness == {0: 80}


def test_shares_of_time_add_up_and_are_the_work_there_is_and_throughput_counts_all_devices() -> None:
    changes = {"rollout__workers": 2, "reward__workers": 3, "placement__trainer": {"cpus": 4}}
    found = simulate(make_config(**changes, staleness__max_updates=3), PROFILE, updates=60)
    for role, shares in found.busy.items():
        assert all(0 <= share <= 1 + 1e-9 for share in shares.values()), (role, shares)
        assert sum(shares.values()) <= 1 + 1e-9
    # Engines have no input to wait for, and what comes after a reward worker or the trainer never lacks a slot.
    assert found.busy["rollout"]["starved"] == 0
    for role in ("reward", "trainer"):
        assert found.busy[role]["backpressured"] == 0
        assert sum(found.busy[role].values()) == pytest.approx(1.0)
    per_update = found.times.train + found.times.blocked
    assert found.busy["trainer"]["busy"] == pytest.approx(per_update / found.step_s, rel=0.01)
    assert found.devices == 2 + 3 + 4
    assert found.images_per_s == pytest.approx(4 * 8 / found.step_s)
    assert found.images_per_s_per_device == pytest.approx(found.images_per_s / 9)


def test_occupancy_is_what_the_coordinator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the gauges with the coordinator's own counters after every report of a score."""
    seen = []

    class Watched(Coordinator):
        async def next_to_score(self, *args: Any) -> Any:
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._compare)  # after the engines that its scores wake
            return await super().next_to_score(*args)

        def _compare(self) -> None:
            buffers = buffer_statistics(self._groups, self._samples)
            counted = {name: buffers[name]["reserved"] for name in ("trajectories", "replay")}
            counted["slots"] = buffers["slots"]["live"] + buffers["slots"]["awaiting_publication"]
            seen.append(({name: gauge.value for name, gauge in meters[0].reserved.items()}, counted))

    meters: list[Meters] = []
    monkeypatch.setattr(module, "Meters", lambda *args: meters.append(Meters(*args)) or meters[0])
    monkeypatch.setattr(module, "Coordinator", Watched)
    found = simulate(make_config(rollout__workers=2, buffer__trajectories=24, buffer__groups=10), VARIED, updates=20)
    assert len(seen) > 100
    # A handful of calls falls between a count and its gauge, within one instant.
    assert sum(gauges != counters for gauges, counters in seen) <= 0.02 * len(seen)
    assert found.buffers["trajectories"].largest <= 24 and found.buffers["replay"].largest <= 10
    assert found.buffers["slots"].capacity == 12
    assert 0 < found.buffers["slots"].mean <= 12


# ---- reproducible, steady, in bundles --------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    config = make_config(rollout__workers=3)
    first, again, other = (simulate(config, VARIED, updates=20, seed=seed) for seed in (5, 5, 6))
    assert same(first, again) and first.step_s != other.step_s


def test_warm_up_and_drain_are_left_out_and_too_few_updates_refused_with_what_would_be_enough() -> None:
    config = make_config(staleness__max_updates=2)
    steady = Steady(config, 30)
    # The last two updates admit nothing; 24 steps are eight periods of S + 1 = 3.
    assert (steady.first, steady.last) == (4, 28)
    steps = [simulate(config, PROFILE, updates=updates).step_s for updates in (20, 60)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-3)
    with pytest.raises(ValueError, match="updates: a simulation with a budget of 2 updates needs at least 7, got 6"):
        simulate(config, PROFILE, updates=6)
    assert simulate(config, PROFILE, updates=7).updates == 7


def test_progress_is_called_after_every_update_of_which_there_are_enough_by_default() -> None:
    reported: list[int] = []
    assert simulate(make_config(trainer__updates=3), PROFILE, progress=reported.append).updates == 200
    assert reported == list(range(1, 201))


def test_bundles_change_nothing_where_every_batch_holds_whole_bundles() -> None:
    config = make_config(rollout__group_size=8, rollout__max_batch=8, rollout__max_inflight=8, reward__batch=8)
    single, bundles = simulate(config, PROFILE, updates=20, bundle=1), simulate(config, PROFILE, updates=20, bundle=4)
    assert (single.bundle, bundles.bundle) == (1, 4)
    assert bundles.step_s == pytest.approx(single.step_s)
    assert bundles.buffers["trajectories"].capacity == single.buffers["trajectories"].capacity
    assert bundles.buffers["trajectories"].mean == pytest.approx(single.buffers["trajectories"].mean, rel=0.05)


@pytest.mark.parametrize(
    ("bundle", "updates", "changes"),
    [
        (1, 200, {"rollout__group_size": 8, "trainer__groups_per_update": 4}),
        (8, 1000, {}),
        # None where an engine would not get one of them, or where they do not divide what is computed together.
        (2, 1000, {"rollout__workers": 4096}),
        *(
            (1, 1000, {key: n})
            for key, n in (("rollout__workers", 8193), ("rollout__max_batch", 15), ("reward__batch", 1))
        ),
    ],
)
def test_small_jobs_are_simulated_sample_by_sample_and_huge_ones_in_bundles(
    bundle: int, updates: int, changes: dict[str, Any]
) -> None:
    huge = {"rollout__group_size": 16, "trainer__groups_per_update": 256}
    assert choose_bundle(make_config(**huge | changes), updates) == bundle


def test_a_configuration_in_bundles_has_the_same_proportions() -> None:
    whole = {"rollout__group_size": 16, "rollout__max_inflight": 32, "reward__batch": 8, "buffer__trajectories": 64}
    config = in_bundles(make_config(**whole), 4)
    assert (config.rollout.group_size, config.rollout.max_batch, config.rollout.max_inflight) == (4, 4, 8)
    assert (config.reward.batch, config.buffer.trajectories) == (2, 16)
    with pytest.raises(ValueError, match="bundle: 3 samples do not divide"):
        in_bundles(make_config(), 3)
    for key in ("reward__batch", "rollout__max_batch", "rollout__max_inflight"):
        with pytest.raises(ValueError, match=f"bundle: 4 samples do not divide {key.replace('__', '.')} = 2"):
            in_bundles(make_config(**{**whole, key: 2}), 4)


def test_validation_and_rejections_are_left_out() -> None:
    plain = simulate(make_config(), PROFILE, updates=12)
    validated = simulate(make_config(validation__prompts="held-out.txt", validation__every=1), PROFILE, updates=12)
    assert same(plain, validated)


def test_only_time_in_the_window_counts() -> None:
    now = 0.0
    window = Window()
    worked, gauge = Stretches(window), Gauge(window, lambda: now)
    gauge.set(4)
    window.opened = 10.0
    worked.add(0.0, 12.0)
    now = 12.0
    gauge.set(1)
    window.closed = 20.0
    worked.add(13.0, 14.0)
    worked.add(18.0, 30.0)
    worked.add(25.0, 30.0)
    now = 30.0
    assert worked.seconds == 2 + 1 + 2
    assert gauge.mean == (4 * 2 + 1 * 8) / 10
    assert gauge.largest == 4


# ---- the sweep -------------------------------------------------------------------------------------------------------


def test_the_sweep_has_every_schedule_and_budget_with_slots_for_all_they_admit() -> None:
    found = arms(make_config(buffer__trajectories=8, buffer__groups=4, weights__publish_every=2))
    assert [arm.name for arm in found] == [
        *("sync", "sync_colocated", "async_reward", "one_step_off"),
        *(f"async S={budget}" for budget in (0, 1, 2, 4, 8)),
    ]
    for arm in found:
        assert arm.problem is None
        if arm.name.startswith("async S"):
            admitted = (arm.config.staleness.max_updates + 1) * 4
            assert arm.config.buffer.groups >= admitted and arm.config.buffer.trajectories >= 8 * admitted
    assert [arm.config.weights.publish_every for arm in found[4:]] == [1, 2, 2, 2, 2]


# ---- the command -----------------------------------------------------------------------------------------------------

RECIPE = """\
model: {path: nowhere/checkpoint}
data: {prompts: nowhere/prompts.txt}
reward: {scorers: [{name: "no.such.module:Scorer"}]}
rollout: {workers: 2}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    write_profile(tmp_path / "profile.json", PROFILE)
    monkeypatch.chdir(tmp_path)


def command(arguments: str) -> int:
    return main(["simulate", "recipe.yaml", *arguments.split()])


@pytest.mark.usefixtures("recipe")
def test_the_command_predicts_a_job_whose_files_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--profile profile.json --updates 20 staleness.max_updates=1") == 0
    shown = capsys.readouterr().out
    for words in ("this recipe, S = 1", "one stage after the other", "bottleneck: trainer", "backpressured", "slots"):
        assert words in shown, words
    assert "images/s over 4 devices" in shown
    assert "with the times of profile" in shown and "nothing is generated, scored or trained" in " ".join(shown.split())


EMULATED = ROOT / "recipes" / "emulated"


@pytest.mark.parametrize(
    ("recipe", "made"),
    [("qwen_image_lora_h800", "images"), ("wan22_dance", "videos"), ("qwen3_omni_thinker", "answers")],
)
def test_samples_are_called_what_the_model_makes(recipe: str, made: str) -> None:
    assert samples_of(load(EMULATED / f"{recipe}.yaml")) == made


def test_throughput_is_that_of_answers_where_the_model_draws_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(EMULATED / "qwen3_omni_thinker.yaml"), "--updates", "12"]) == 0
    shown = capsys.readouterr().out
    assert "answers/s over 8 devices" in shown and "images" not in shown


@pytest.mark.usefixtures("recipe")
def test_a_profile_s_name_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    profile = msgspec.structs.replace(PROFILE, name="a [bold]name[/red]")
    write_profile(Path("odd.json"), profile)
    assert command("--profile odd.json --updates 20") == 0
    assert "profile a [bold]name[/red]:" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("recipe")
def test_the_sweep_prints_a_row_per_arm_and_writes_all_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--profile profile.json --updates 20 --sweep --json found/sweep.json") == 0
    shown = capsys.readouterr().out
    results = json.loads(Path("found/sweep.json").read_text())["results"]
    assert [row["name"] for row in results] == [arm.name for arm in arms(make_config())]
    for row in results:
        assert row["name"] in shown
        assert row["bound_fraction"] == pytest.approx(row["law_s"] / row["step_s"])
        assert row["staleness_max"] <= row["staleness_budget"]


@pytest.mark.usefixtures("recipe")
def test_a_sweep_without_a_possible_schedule_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "check", lambda config: "it has no room")
    assert command("--profile profile.json --updates 20 --sweep") == 2
    assert "--sweep: the recipe runs under no schedule; sync: left out: it has no room" in capsys.readouterr().err


@pytest.mark.usefixtures("recipe")
def test_a_disk_that_fills_up_costs_the_file_and_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--profile profile.json --updates 20 --json /dev/full") == 1
    printed = capsys.readouterr()
    assert printed.err == "omni-async: /dev/full could not be written: No space left on device\n"
    assert "bottleneck: trainer" in printed.out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--profile nobody", "--profile: no profile 'nobody'; shipped are"),
        ("--profile missing.json", "cannot be read: No such file"),
        ("--updates 4", "--updates: a simulation with a budget of 2 updates needs at least 7, got 4"),
        ("--updates 12 --sweep", "--updates: a simulation with a budget of 8 updates needs at least 19, got 12"),
        ("--bundle 3", "--bundle: 3 samples do not divide rollout.group_size = 8"),
        ("--bundle 8 reward.batch=4", "--bundle: 8 samples do not divide reward.batch = 4"),
        ("rollout.workers=0", "rollout.workers: expected"),
        ("trainer.sequence_parallel=3", "trainer.sequence_parallel: 3 ranks share a sequence"),
        ("algorithm.name=nonsense", "algorithm.name: expected one of"),
        ("data.preferences=pairs.parquet", "leave out data.preferences"),
        ("trainer.streaming=on trainer.steps_per_update=2", "trainer.streaming: 'on' cannot be had here"),
        ("--json /proc/nothing/here.json", "--json: cannot write /proc/nothing/here.json"),
        (
            "",
            "required, because the recipe has no emulation.profile; a run's profile.json, or one of qwen3_omni_thinker",
        ),
    ],
)
@pytest.mark.usefixtures("recipe")
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(f"--profile profile.json {arguments}" if arguments else "") == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1 and said.startswith("omni-async: ")


@pytest.mark.parametrize("arguments", ["--updates 0", "--bundle none", "--nonsense", "--profile"])
def test_wrong_options_are_usage_errors(arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        command(arguments)
    assert caught.value.code == 2
