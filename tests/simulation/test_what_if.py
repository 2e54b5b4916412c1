"""Holds predicted gains to emulated runs in virtual time with the change."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from omni_async import cli
from omni_async.algorithms.kinds import samples_per_rank
from omni_async.config import Config, ConfigError, load, resolved_yaml
from omni_async.performance.measure import measure
from omni_async.performance.profile import Payload, Profile, ScorerTime, ServiceTime, write_profile
from omni_async.simulation.changes import Change, changes, with_keys
from omni_async.simulation.run_folder import read_measured
from omni_async.simulation.simulate import Steady
from omni_async.simulation.what_if import LEARNING, Prospect, WhatIf, measured_step, what_if
from tests.simulation.simulation_world import make_config, make_profile
from tests.support.job_world import Emulated, emulate, write_emulated

UPDATES = 48
USUAL: dict[str, Any] = {
    "generate": ServiceTime(2.0, 1.0, 0.25),
    "score": ServiceTime(0.5, 0.25, 0.3),
    "train": ServiceTime(0.2, 0.2, 0.2),
    "step": ServiceTime(1.0),
    "export": ServiceTime(0.5, 0.0, 0.1),
    "publish": ServiceTime(1.5, 0.0, 0.2),
    "swap": ServiceTime(0.25, 0.0, 0.1),
    "payload": Payload(20_000, 3_000, 100_000),
}
SLOW = {
    "rollout": {"generate": ServiceTime(8.0, 4.0, 0.25)},
    "reward": {"score": ServiceTime(2.0, 1.5, 0.4)},
    "trainer": {"train": ServiceTime(1.0, 1.0, 0.3)},
}
DONE = {
    "S = 0": "staleness.max_updates=0",
    "S = 2": "staleness.max_updates=2",
    "+1 rollout engine": "rollout.workers=3",
    "+1 reward worker": "reward.workers=2",
}


class Job:
    """An emulated run whose slowest role is known, and what it is told one change would buy it."""

    def __init__(self, folder: Path, slow: str) -> None:
        self.slow = slow
        profile = Profile(name=slow, source="made up", **(USUAL | SLOW[slow]))
        trainer, staleness = {"updates": UPDATES, "groups_per_update": 8}, {"max_updates": 1}
        self.recipe = write_emulated(folder, profile, trainer=trainer, staleness=staleness)
        made = emulate(self.recipe)
        self.config, per_rank = made.config, samples_per_rank(made.config)
        # As at the end of a run (`omni_async.runtime.driver.results`), of which this one has no driver.
        self.profile = measure(made.spans, made.config, samples_per_rank=per_rank, name="run", source="a test")
        self.finished = [update["finished"] for update in made.updates]
        self.answer = what_if(made.config, self.profile, self.finished)

    def prospect(self, name: str) -> Prospect:
        return next(one for one in self.answer.changes if one.name == name)

    def do(self, change: str) -> float:
        """Makes the change, and returns the seconds per update that it takes then."""
        return step_of(emulate(self.recipe, change))


def step_of(made: Emulated) -> float:
    steady = Steady(made.config, UPDATES)
    return statistics.fmean(made.steps(steady.first, steady.last))


# Each takes five seconds to play.
@pytest.fixture(
    scope="module",
    params=["rollout", *(pytest.param(slow, marks=pytest.mark.thorough) for slow in SLOW if slow != "rollout")],
)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp(request.param), request.param)


def test_the_simulated_present_is_what_the_run_took(job: Job) -> None:
    answer = job.answer
    assert answer.present.step_s == pytest.approx(answer.measured_s, rel=0.03)
    assert answer.model_error == pytest.approx(answer.present.step_s / answer.measured_s - 1)
    assert answer.present.bottleneck == job.slow
    assert (answer.seeds, answer.learning) == (3, LEARNING)


@pytest.mark.sliced(floor=1)
@pytest.mark.parametrize("change", list(DONE))
def test_a_change_buys_what_was_predicted(job: Job, change: str) -> None:
    """Compares the gain, too: its size is no accident of a time that does not move."""
    predicted, took = job.prospect(change), job.do(DONE[change])
    assert predicted.step_s == pytest.approx(took, rel=0.05)
    assert predicted.gain == pytest.approx(job.answer.measured_s / took - 1, abs=0.05)
    assert 0 < predicted.uncertainty < 0.1


def test_one_more_of_the_slowest_role_is_what_pays(job: Job) -> None:
    names = {"rollout": "+1 rollout engine", "reward": "+1 reward worker", "trainer": "+1 trainer rank"}
    for role, name in names.items():
        found = job.prospect(name)
        assert (found.gain > 0.2 and found.is_clear) == (role == job.slow), (name, found)
        assert found.devices == 1 and found.gain_per_device == found.gain
    assert job.prospect("S = 0").bottleneck == "staleness.max_updates"
    assert job.prospect("S = 0").is_clear and job.prospect("S = 0").gain < 0


# ---- which changes there are -----------------------------------------------------------------------------------------

TIMES = make_profile(generate=(0.0, 1.0), score=(0.0, 0.2), train=(0.0, 0.3))


def asked(profile: Profile = TIMES, **settings: Any) -> dict[str, Change]:
    return {change.name: change for change in changes(make_config(**settings), profile)}


def test_a_larger_budget_brings_a_slot_for_every_group_that_it_admits() -> None:
    found = asked(staleness__max_updates=1, trainer__groups_per_update=4, buffer__groups=8)
    assert found["S = 3"].keys == {"staleness.max_updates": 3, "buffer.groups": 16}
    assert found["S = 0"].keys == {"staleness.max_updates": 0}
    assert "S = 1" not in found


def test_a_smaller_budget_is_one_that_publishes_often_enough() -> None:
    found = asked(staleness__max_updates=2, weights__publish_every=3)
    assert found["S = 1"].keys == {"staleness.max_updates": 1, "weights.publish_every": 2}


def test_one_engine_more_can_fill_its_batches() -> None:
    sizes = {"rollout__workers": 2, "rollout__max_batch": 8, "rollout__max_inflight": 8, "rollout__group_size": 8}
    found = asked(**sizes, buffer__trajectories=16, trainer__groups_per_update=4)
    assert found["+1 rollout engine"].keys == {"rollout.workers": 3, "buffer.trajectories": 24}


def test_a_schedule_that_decides_the_budget_is_left_for_one_that_does_not() -> None:
    found = asked(schedule="one_step_off", staleness__max_updates=1, trainer__streaming="off")
    assert found["S = 2"].keys == {"schedule": "async", "staleness.max_updates": 2}
    assert found["S = 2"].config.trainer.streaming == "auto", "schedule: async sets it"


def test_roles_that_take_turns_on_their_devices_are_not_asked_for_more_workers() -> None:
    found = asked(schedule="sync_colocated", placement__colocated=True, staleness__max_updates=0)
    for name in ("S = 1", "+1 rollout engine", "+1 reward worker", "+1 trainer rank"):
        assert "take turns" in (found[name].problem or ""), name


def test_the_next_number_of_ranks_is_one_that_leaves_each_less() -> None:
    found = asked(rollout__group_size=16, trainer__workers=4)
    assert found["+2 trainer ranks"].keys == {"trainer.workers": 6}, "16 samples over 5 ranks: one has 4, as of 4 ranks"
    found = asked(rollout__group_size=4, trainer__workers=4)
    assert found["+1 trainer rank"].problem == (
        "the busiest of 4 ranks has 1 of the 4 samples of a group, and up to 8 ranks would leave it no fewer"
    )


def test_ranks_come_in_whole_groups_of_those_that_share_a_sequence() -> None:
    found = asked(rollout__group_size=16, trainer__workers=2, trainer__sequence_parallel=2)
    assert found["+2 trainer ranks"].keys == {"trainer.workers": 4}


def test_the_worker_that_is_asked_about_runs_the_slowest_scorer() -> None:
    scorers = [{"name": "ocr", "pool": "readers"}, {"name": "pick_score", "pool": "judges"}]
    pools = [{"name": "readers"}, {"name": "judges", "workers": 2}]
    slow, quick = ScorerTime(ServiceTime(unit_s=4.0)), ScorerTime(ServiceTime(unit_s=0.1))
    for times, name, keys in (
        ({"ocr": quick, "pick_score": slow}, "+1 worker of pool judges", {"reward.pools.1.workers": 3}),
        ({"ocr": slow, "pick_score": quick}, "+1 worker of pool readers", {"reward.pools.0.workers": 2}),
    ):
        config = make_config(reward={"scorers": scorers, "pools": pools})
        found = {change.name: change for change in changes(config, replace(TIMES, scorers=times))}
        assert found[name].keys == keys
    assert with_keys(config, {"reward.pools.1.workers": 3}).reward.pools[1].workers == 3


def test_a_scorer_that_asks_servers_gains_nothing_by_a_worker_that_asks() -> None:
    judge = [{"name": "vlm_judge", "params": {"urls": ["http://127.0.0.1:1"]}}]
    assert "asks servers" in (asked(reward__scorers=judge)["+1 reward worker"].problem or "")


def test_buffers_that_hold_all_that_is_admitted_are_not_asked_to_grow() -> None:
    sizes = {"trainer__groups_per_update": 4, "staleness__max_updates": 1, "rollout__group_size": 4}
    found = asked(**sizes, buffer__groups=8, buffer__trajectories=16, rollout__max_batch=4)
    assert found["buffer.groups = 16"].problem == "all 8 that S admits fit into 8"
    assert found["buffer.groups = 4"].keys == {"buffer.groups": 4}
    assert found["buffer.trajectories = 32"].keys == {"buffer.trajectories": 32}


# ---- what is not known -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calm() -> tuple[Config, WhatIf]:
    config = make_config(rollout__workers=2, staleness__max_updates=1)
    return config, what_if(config, TIMES)


def test_times_that_do_not_vary_are_simulated_once_and_certain(calm: tuple[Config, WhatIf]) -> None:
    config, found = calm
    assert found.seeds == 1 and found.model_error is None
    assert all(one.uncertainty == pytest.approx(0.0, abs=1e-12) for one in found.changes)
    assert any("no steady part" in said for said in found.caveats)
    assert not any("the roles share" in said for said in found.caveats)
    shared = what_if(config, TIMES, devices=2).caveats
    assert any("the roles share 2 CPUs and ask for 4" in said for said in shared)


def test_shorter_simulations_are_of_the_same_job(calm: tuple[Config, WhatIf]) -> None:
    config, whole = calm
    short = what_if(config, TIMES, each=400)
    assert short.updates < whole.updates
    assert short.present.step_s == pytest.approx(whole.present.step_s, rel=0.05)
    assert [one.name for one in short.changes] == [one.name for one in whole.changes]


def test_what_the_simulation_is_off_by_is_carried_as_uncertainty(calm: tuple[Config, WhatIf]) -> None:
    config, step = calm[0], calm[1].present.step_s
    finished = [1.25 * step * number for number in range(40)]
    found = what_if(config, TIMES, finished)
    assert found.measured_s == pytest.approx(1.25 * step)
    assert found.model_error == pytest.approx(-0.2)
    assert all(one.uncertainty == pytest.approx(0.2) for one in found.changes)


def test_the_warm_up_and_the_drain_of_a_run_are_no_part_of_its_pace() -> None:
    config = make_config(staleness__max_updates=2)
    steps = [50.0] * 4 + [10.0] * 20 + [3.0, 3.0]
    finished = [sum(steps[: number + 1]) for number in range(len(steps))]
    assert measured_step(config, finished)[0] == pytest.approx(10.0)
    assert measured_step(config, finished[:5]) == (None, 0)


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Returns the folder of a run of ten updates that takes 4 s each: what it leaves, without running it."""
    write_emulated(tmp_path, Profile(name="p", source="made up", generate=SECOND, score=SECOND, train=SECOND))
    folder = tmp_path / "runs" / "emulated-20260101-120000"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(resolved_yaml(load(tmp_path / "recipe.yaml", ["staleness.max_updates=1"])))
    write_profile(folder / "profile.json", TIMES)
    lines = [{"update": number, "finished": 100.0 + 4.0 * number, "reward": 0.5} for number in range(1, 11)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


SECOND = ServiceTime(fixed_s=1.0)


def test_the_folder_of_a_run_is_enough_to_ask(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", str(run), "--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    assert "4 s measured over" in printed and LEARNING in printed and "+1 rollout engine" in printed
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["measured_s"] == pytest.approx(4.0)
    assert [one["name"] for one in found["changes"]][:1] == ["S = 0"]


def test_updates_of_an_attempt_before_the_newest_are_not_its_pace(run: Path) -> None:
    attempt = {"began": 0.0, "ended": 1.0, "status": "done", "reason": None, "wall_s": 1.0}
    attempts = [attempt | {"from_update": 0, "to_update": 4}, attempt | {"from_update": 4, "to_update": 10}]
    attempts.append(attempt | {"from_update": 10, "to_update": 10})  # made none, so the profile is not its own
    (run / "attempts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in attempts))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    early = [json.dumps(json.loads(line) | {"finished": -1e6}) for line in lines[:4]]
    (run / "metrics.jsonl").write_text("\n".join([*early, *lines[4:], ""]))
    assert read_measured(run).finished == [100.0 + 4.0 * number for number in range(5, 11)]


@pytest.mark.parametrize(
    ("gone", "options", "said"),
    [
        ("profile.json", [], "has no profile.json"),
        ("config.yaml", [], "is not a run folder"),
        (None, ["--sweep"], "--sweep: not for"),
        (None, ["--bundle", "2"], "--bundle: not for"),
        (None, ["rollout.workers=3"], "rollout.workers=3: the folder of a run has its recipe"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    run: Path, gone: str | None, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if gone is not None:
        (run / gone).unlink()
    assert cli.main(["simulate", str(run), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("keys", "profile", "problem"),
    [
        ({"data.preferences": "pairs.jsonl"}, TIMES, r"data\.preferences"),
        ({"rollout.group_size": 4096, "rollout.max_inflight": 4097}, TIMES, "samples would be simulated"),
        ({"rollout.workers": 10_000}, TIMES, "samples would be simulated"),
        ({"reward.workers": 10_000}, TIMES, "samples would be simulated"),
        ({}, make_profile(switch=1.0), "an update takes no time"),
    ],
)
def test_what_cannot_be_compared_is_refused(keys: dict[str, Any], profile: Profile, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        what_if(with_keys(make_config(), keys), profile, most=500_000)


def test_every_change_says_what_to_set(job: Job) -> None:
    answer: WhatIf = job.answer
    for one in answer.changes:
        assert one.keys and with_keys(job.config, one.keys) != job.config, one.name
    assert all(left.reason for left in answer.left_out)
