"""Tests the trainer: what it publishes and keeps, and how it ends."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import torch
from msgspec.structs import replace
from tensordict import TensorDict

from omni_async.aio.clock import ManualClock
from omni_async.checkpoint import State, read_state, require_whole
from omni_async.checkpoint.state import write_state
from omni_async.control.control_state import ControlState, Unfinished
from omni_async.control.rounds import Round
from omni_async.roles.plan import plan_updates
from omni_async.roles.trainer import Trainer
from omni_async.roles.update import PolicyGradient
from omni_async.store import LocalStore, ObjectStore
from omni_async.types import ReadyGroup, SampleDrift
from omni_async.weights.snapshot import Snapshot
from tests.roles.actor_world import (
    FINAL_LATENTS,
    PREFERENCES,
    AccountingRank,
    Desk,
    LossyStore,
    failure_of,
    make_config,
    make_group,
)
from tests.support.loops import play, settle

RAMP = [0.0, 1.0, 2.0, 3.0]
ONE = {"trainer.updates": 1}
EACH = {"checkpoint.every": 1}
BYPASS = {"algorithm.correction": {"mode": "bypass"}}
AUTO = {"algorithm.correction": {"mode": "auto"}, "model.dtype": "bfloat16"}


class Publications:
    """A publisher that takes every version. Withdrawn ones are in the log too."""

    def __init__(self, log: list[str]) -> None:
        self.versions: list[int] = []
        self.whole: list[asyncio.Task[Snapshot]] = []
        self._log = log

    def withdraw(self) -> None:
        self._log.append("withdraw")

    def publish(self, snapshot: Snapshot) -> None:
        assert snapshot.buckets[0].tolist() == [snapshot.version]
        self.versions.append(snapshot.version)
        self.whole.append(asyncio.ensure_future(snapshot.whole()))
        self._log.append(f"publish {snapshot.version}")


class Stage:
    """A trainer with a model-free rank; `groups` are ready for it, of as many prompts or of `prompts` in turn, and the
    run ends when they are used up."""

    def __init__(
        self,
        folder: Path,
        groups: int,
        *,
        ranks: int = 1,
        metrics: Any = (),
        prompts: int | None = None,
        store: ObjectStore | None = None,
        **changes: Any,
    ) -> None:
        self.desk, self.folder = Desk(), folder
        self.publications = Publications(self.desk.log)
        logs = [self.desk.log, *([] for _ in range(ranks - 1))]
        self.ranks = [AccountingRank(log, rank=i, world=ranks, metrics=metrics) for i, log in enumerate(logs)]
        config = make_config(**changes, **{"trainer.workers": ranks})
        rule = PolicyGradient(config, plan_updates(config), self.ranks)
        self.trainer = Trainer(
            config, self.ranks, rule, self.desk, self.publications, store or LocalStore(), str(folder), ManualClock()
        )
        self.desk.offer(*(make_group(i, RAMP, prompt=i % prompts if prompts else None) for i in range(groups)))

    async def main(self) -> None:
        await self.trainer.start()
        run = asyncio.create_task(self.trainer.run())
        while not run.done() and self.desk.groups:
            await settle()
        await settle()
        self.desk.close()
        await run

    def play(self) -> Stage:
        play(self.main())
        return self

    @property
    def kept(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def state(self, name: str) -> State:
        require_whole(self.folder / name)
        return read_state(self.folder / name)


@pytest.mark.parametrize(
    ("groups", "every", "published"), [(0, 1, [0]), (8, 1, [0, 1, 2, 3, 4]), (8, 2, [0, 2, 4]), (8, 3, [0, 3, 4])]
)
def test_it_publishes_the_first_version_every_k_updates_and_the_last(tmp_path, groups, every, published):
    stage = Stage(tmp_path, groups, **{"weights.publish_every": every}).play()
    assert stage.publications.versions == published
    assert [report.version for report in stage.desk.updates] == [*range(1, groups // 2 + 1)]
    assert [report.groups for report in stage.desk.updates] == [(i, i + 1) for i in range(0, groups, 2)]
    assert {"export"} <= {span.kind for span in stage.desk.spans} <= {"export", "train", "checkpoint", "starved"}


def test_an_update_is_reported_before_its_version_is_published_and_published_before_it_is_saved(tmp_path):
    log = Stage(tmp_path, 2, **ONE).play().desk.log
    publish = [["withdraw", f"export {version}", f"publish {version}"] for version in (0, 1)]
    assert log == [*publish[0], "accumulate", "accumulate", "step", "update 1", *publish[1], "save update-000001"]


def test_a_group_that_cannot_be_read_is_given_back_and_trained_when_it_comes_again(tmp_path):
    stage = Stage(tmp_path, 4, **{"trainer.updates": 2})
    stage.ranks[0].lost = {"trajectory 0.2"}
    report = stage.desk.group_gone

    async def made_again(group: int, reason: str) -> None:
        await report(group, reason)
        stage.desk.groups.insert(0, make_group(group, RAMP, [f"again {group}.{i}" for i in range(4)]))

    stage.desk.group_gone = made_again
    stage.play()
    assert stage.desk.gone == [(0, "trajectory 0.2 is gone")]
    assert [report.groups for report in stage.desk.updates] == [(1, 0), (2, 3)]
    assert stage.ranks[0].fetched[0][0] == "again 0.0"
    assert stage.ranks[0].step_weights == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    ("groups", "lost", "trained"),
    [
        pytest.param(5, [], [(0, 1), (2, 3)], id="the third update gets one group of two"),
        pytest.param(4, [2], [(0, 1)], id="a group cannot be read and does not come again"),
    ],
)
def test_an_early_end_stops_it_and_leaves_a_checkpoint_of_the_last_whole_update(tmp_path, groups, lost, trained):
    stage = Stage(tmp_path, groups)
    stage.ranks[0].lost = {f"trajectory {group}.0" for group in lost}
    stage.play()
    assert stage.desk.gone == [(group, f"trajectory {group}.0 is gone") for group in lost]
    assert [report.groups for report in stage.desk.updates] == trained
    assert stage.publications.versions == [*range(len(trained) + 1)]
    assert stage.kept == [f"update-{len(trained):06d}"]
    assert stage.ranks[0].step_weights == pytest.approx([1.0] * len(trained))


@pytest.mark.parametrize(("updates", "saves"), [(7, [2, 4, 6, 7]), (4, [2, 4])])
def test_it_saves_every_k_updates_and_the_last_once_and_keeps_the_newest(tmp_path, updates, saves):
    changes = {"trainer.updates": updates, "checkpoint.every": 2, "checkpoint.keep": 2}
    stage = Stage(tmp_path, 2 * updates, **changes).play()
    saved = [line for line in stage.desk.log if line.startswith("save")]
    assert saved == [f"save update-{version:06d}" for version in saves]
    assert stage.kept == [f"update-{version:06d}" for version in saves[-2:]]
    state = stage.state(stage.kept[-1])
    assert (state.version, state.control.next_group, state.engine) == (updates, 77, {"theta": stage.ranks[0].theta})


def test_the_best_by_validation_stays_besides_the_newest(tmp_path):
    rewards = {2: 0.5, 4: 0.9, 6: 0.4, 8: 0.7}
    changes = {"trainer.updates": 9, "checkpoint.every": 3, "checkpoint.keep": 2, "staleness.max_updates": 0}
    stage = Stage(tmp_path, 18, validation={"every": 2, "prompts": "v.txt"}, **changes)
    continuation = stage.desk.continuation

    async def with_rounds() -> ControlState:
        """Returns the state as it is when the round before has just ended."""
        state = await continuation()
        rounds = tuple(Round(version, reward) for version, reward in rewards.items() if version < state.version)
        return replace(state, rounds=rounds, validated=rounds[-1].version if rounds else 0)

    stage.desk.continuation = with_rounds
    stage.play()
    saved = [line for line in stage.desk.log if line.startswith("save")]
    assert saved == [f"save update-{version:06d}" for version in (2, 3, 4, 6, 8, 9)]
    assert stage.kept == [f"update-{version:06d}" for version in (4, 8, 9)]


def test_a_resumed_trainer_continues_with_the_checkpoints_version(tmp_path):
    write_state(tmp_path, State(ControlState(version=2, next_group=4), "qwen_image", "flow_grpo"))
    stage = Stage(tmp_path / "new", 4, **{"checkpoint.resume": str(tmp_path)})
    stage.desk.version = 2
    stage.play()
    assert stage.ranks[0].setup_calls == [(str(tmp_path), None)]
    assert stage.publications.versions == [2, 3, 4]
    assert [report.version for report in stage.desk.updates] == [3, 4]


def test_it_says_how_it_streams_and_what_it_needs_of_a_sample(tmp_path):
    stage = Stage(tmp_path, 0).play()
    assert sorted(stage.desk.fields) == ["conditioning", "latents", "log_probs"]
    said = "each group is trained on as soon as it is scored (the objective scales with the advantage"
    assert stage.desk.phases[0].startswith(said)
    for name in ("diffusion_nft", "awm", "diffusion_dpo"):  # objectives on final latents need nothing of the steps
        stage = Stage(tmp_path / name, 0, **FINAL_LATENTS, **{"algorithm.name": name}).play()
        assert set(stage.desk.fields) == {"final", "conditioning"}, name


def test_a_datasets_reader_holds_every_version_and_is_sent_no_weights(tmp_path):
    stage = Stage(tmp_path, 8, **PREFERENCES).play()
    assert stage.publications.versions == []
    assert [version for version, _ in stage.desk.announced] == [*range(5)]
    assert [(report.engine, report.version) for report in stage.desk.held] == [("reader", v) for v in range(5)]
    assert not [line for line in stage.desk.log if line.startswith("export")]


TRACKED = {"algorithm.advantage": {"track_prompts": True, "std": "none"}}


def test_a_checkpoint_holds_every_prompts_rewards_and_a_resumed_trainer_goes_on_with_them(tmp_path):
    before = Stage(tmp_path / "before", 4, prompts=1, **TRACKED, **{"trainer.updates": 2}).play()
    count_mean_and_squares = pytest.approx([16, 1.5, 20.0])
    assert before.state("update-000002").rule["reward_history"] == {"0": count_mean_and_squares}
    assert before.ranks[0].groups[-1] == pytest.approx([-1.5, -0.5, 0.5, 1.5])

    resume = str(tmp_path / "before" / "update-000002")
    after = Stage(tmp_path / "after", 0, **TRACKED, **{"trainer.updates": 3, "checkpoint.resume": resume})
    after.desk.offer(*(make_group(4 + i, [3.0, 4.0, 5.0, 6.0], prompt=0) for i in range(2)))
    after.play()
    mean = (16 * 1.5 + 8 * 4.5) / 24
    assert after.ranks[0].groups == [pytest.approx([r - mean for r in (3.0, 4.0, 5.0, 6.0)])] * 2
    count, remembered, _ = after.state("update-000003").rule["reward_history"]["0"]
    assert (count, remembered) == (24, pytest.approx(mean))


async def test_rewards_of_an_update_that_was_cut_off_are_not_remembered_and_a_history_no_trainer_wrote_is_refused(
    tmp_path,
):
    stage = Stage(tmp_path / "cut", 3, **TRACKED)  # the second update gets one group of two
    await stage.main()
    assert sorted(stage.state("update-000001").rule["reward_history"]) == ["0", "1"]
    wrong = {"reward_history": {"3": [0, 1.0]}}
    write_state(tmp_path, State(ControlState(version=1), "qwen_image", "flow_grpo", rule=wrong))
    stage = Stage(tmp_path / "new", 0, **TRACKED, **{"checkpoint.resume": str(tmp_path)})
    assert "reward history of prompt 3" in str(await failure_of(stage.trainer.start()))


def mismatch(velocity: float, clipped: float = 0.0, nats: float = 1.0, fresh: float = 1.0) -> dict[str, float]:
    by_step = {"engine_mismatch_nats/mean/step_01": -nats / 2, "engine_mismatch_nats/variance/step_01": nats**2}
    of_rows = {"engine_mismatch_nats/mean": -nats / 2, "engine_mismatch_nats/variance": nats**2}
    of_rows |= {"fresh_fraction": fresh}
    return {**by_step, **of_rows, "engine_mismatch_velocity": velocity, "engine_mismatch_clipped": clipped}


def test_engine_and_trainer_are_compared_once_and_a_fault_of_theirs_is_reported_each_time(tmp_path):
    found = [mismatch(0.004), mismatch(0.005), {}, mismatch(0.4, nats=31.4159)]
    stage = Stage(tmp_path, 10, metrics=found, **{"trainer.updates": 5, **BYPASS}).play()
    once, fault = (phase for phase in stage.desk.phases if "engine and trainer" in phase)
    assert once == (
        "engine and trainer, same weights, update 1: log-ratio -0.5 ± 1 nats, velocity error 0.004 of its rms, 0% of"
        " the rows outside the clip range before any update"
    )
    assert fault.startswith("warning: engine and trainer, same weights, update 4: log-ratio -16 ± 31 nats")
    assert "velocity error 0.4 of its rms" in fault and "rounding in float32 explains 0.01" in fault
    honest = ["engine_mismatch_honest" in report.metrics for report in stage.desk.updates]
    assert honest == [True, True, False, True, False]
    assert stage.state("update-000005").rule == {}, "nothing was to be decided or remembered"


@pytest.mark.parametrize(("dtype", "warned"), [("float32", True), ("bfloat16", False)])
def test_an_error_that_bfloat16_explains_is_a_fault_in_float32(tmp_path, dtype, warned):
    stage = Stage(tmp_path, 2, metrics=[mismatch(0.03, nats=4.6)], **ONE, **{"model.dtype": dtype}).play()
    [phase] = (phase for phase in stage.desk.phases if "engine and trainer" in phase)
    assert phase.startswith("warning: ") == warned


def ratios(stage: Stage) -> list[bool]:
    return [batch.proximal_ratio for batch in stage.ranks[0].batches]


def test_ratios_leave_an_engine_whose_rounding_the_clip_cannot_bear_and_a_resumed_run_keeps_to_that(tmp_path):
    rounds = [mismatch(0.03, clipped=0.62)] + [mismatch(0.03)] * 3
    stage = Stage(tmp_path / "auto", 6, metrics=rounds, **AUTO, **EACH, **{"trainer.updates": 3}).play()
    assert ratios(stage) == [False] * 2 + [True] * 4
    [said] = (phase for phase in stage.desk.phases if "engine and trainer" in phase)
    assert said.startswith("engine and trainer, same weights, update 1: ") and said.endswith(
        "algorithm.correction.mode auto becomes decoupled, ratios to the trainer's own policy, from the next update on"
    )
    assert "-0.5 ± 1 nats (step 1 -0.5 ± 1), velocity error 0.03" in said
    resumed = {"checkpoint.resume": str(tmp_path / "auto" / "update-000001")}
    assert ratios(Stage(tmp_path / "resumed", 4, metrics=[mismatch(0.03)], **AUTO, **resumed).play()) == [True] * 4
    explicit = Stage(tmp_path / "bypass", 4, metrics=rounds, **AUTO | BYPASS | resumed).play()
    assert ratios(explicit) == [False] * 4
    [said] = (phase for phase in explicit.desk.phases if "engine and trainer" in phase)
    assert said.startswith("warning: engine and trainer, same weights, update 2: ") and "mode auto or none" in said


def test_a_fault_is_reported_with_what_it_decides_and_an_emulated_engine_decides_nothing(tmp_path):
    metrics = [mismatch(0.4, clipped=0.9), mismatch(0.4, clipped=0.9)]
    stage = Stage(tmp_path / "fault", 4, metrics=metrics, **AUTO).play()
    first, second = (phase for phase in stage.desk.phases if "engine and trainer" in phase)
    assert first.startswith("warning: ") and first.endswith("from the next update on")
    assert second.startswith("warning: ") and second.endswith("shows where)")
    emulated = {"rollout.engine": "emulated"}
    assert ratios(Stage(tmp_path / "emulated", 4, metrics=metrics, **AUTO, **emulated).play()) == [False] * 4


def test_an_engine_that_rounds_like_the_trainer_leaves_auto_as_it_is_for_good(tmp_path):
    metrics = [mismatch(0.001, clipped=0.04), mismatch(0.001, clipped=0.9)]
    stage = Stage(tmp_path, 8, metrics=metrics, **AUTO).play()
    assert ratios(stage) == [False] * 8
    assert stage.state("update-000004").rule["rounds"] is False


def test_a_few_fresh_rows_decide_nothing(tmp_path):
    metrics = [mismatch(0.03, clipped=0.9, fresh=0.1), mismatch(0.03, clipped=0.9)]
    stage = Stage(tmp_path, 6, metrics=metrics, **AUTO).play()
    assert ratios(stage) == [False] * 4 + [True] * 2
    first, decided = (phase for phase in stage.desk.phases if "engine and trainer" in phase)
    assert "auto" not in first and "auto becomes decoupled" in decided


def test_a_resumed_run_of_another_clip_range_decides_again(tmp_path):
    honest = mismatch(0.001, clipped=0.04)
    Stage(tmp_path / "before", 4, metrics=[honest], **AUTO, **EACH).play()
    resumed = {"checkpoint.resume": str(tmp_path / "before" / "update-000001"), "trainer.updates": 3}
    kept = Stage(tmp_path / "kept", 4, metrics=[mismatch(0.001, clipped=0.9)], **AUTO, **resumed).play()
    assert ratios(kept) == [False] * 4
    assert not any("mode auto or none" in phase for phase in kept.desk.phases), "the recipe has auto"
    narrow = {**AUTO, **resumed, "algorithm.clip_range": 1e-6}
    changed = Stage(tmp_path / "changed", 4, metrics=[mismatch(0.001, clipped=0.9)], **narrow).play()
    assert ratios(changed) == [False] * 2 + [True] * 2


def test_several_steps_of_an_update_get_a_proximal_pass_once_ratios_leave_the_engine(tmp_path):
    stage = Stage(tmp_path, 4, metrics=[mismatch(0.03, clipped=0.62)], **AUTO, **{"trainer.steps_per_update": 2})
    samples = [f"trajectory {group}.{i}" for group in (2, 3) for i in range(4)]
    stage.ranks[0].drifts = dict.fromkeys(samples, SampleDrift((0.0, 0.0), None, 1))
    stage.play()
    assert [batch.group for batch in stage.ranks[0].recomputed] == [2, 3], "those of the second update"


def test_beyond_the_budget_of_bypass_the_mask_goes_where_it_takes_rows_that_no_update_moved(tmp_path):
    changes = {**AUTO, "staleness.max_updates": 8}
    rule = PolicyGradient(make_config(**changes), plan_updates(make_config(**changes)), [])
    assert rule.config.correction.kappa_nats == 2.0
    assert "decoupled without kappa_nats" in rule.learn(mismatch(0.03, clipped=0.5))
    assert rule.config.correction.kappa_nats is None and rule.config.correction.weights == "tempered"
    assert rule.learn(mismatch(0.03, clipped=0.0)) is None, "it is decided once"


async def test_a_first_update_whose_samples_are_not_the_policys_fails_before_anything_is_published(tmp_path):
    wrong = Stage(tmp_path / "wrong", 10, metrics=[{"engine_mismatch": 0.3}])
    refused = str(await failure_of(wrong.main()))
    assert "differ by up to 0.3 per latent element (trainer.max_mismatch is 0.01)" in refused and "parity" in refused
    later = [{"engine_mismatch": 0.002}, {"engine_mismatch": 0.3}]  # the policy's own drift, say
    await Stage(tmp_path / "later", 10, metrics=later).main()
    await Stage(tmp_path / "off", 10, metrics=[{"engine_mismatch": 0.3}], **{"trainer.max_mismatch": None}).main()


def test_several_ranks_meet_at_one_address_and_others_of_the_first_copy_share_their_rows_once_per_export(tmp_path):
    stage = Stage(tmp_path, 2, ranks=4, **ONE, **{"trainer.shard": 2}).play()
    [(_, address)], *others = (rank.setup_calls for rank in stage.ranks)
    assert address.startswith("tcp://127.0.0.1:") and others == [[(None, address)]] * 3
    assert [rank.step_weights for rank in stage.ranks] == [pytest.approx([0.25])] * 4
    exported = [line for line in stage.ranks[1].log if line.startswith(("export", "share"))]
    assert exported == ["export 0", "share 0", "export 1", "share 1"]
    assert ["share 1" in rank.log for rank in stage.ranks] == [False, True, False, False]
    assert [snapshot.result().manifest().nbytes for snapshot in stage.publications.whole] == [1, 1]


def test_a_lone_rank_meets_nobody_and_opens_no_port(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "omni_async.weights.transport.tcp_store.serve_store", lambda *_: pytest.fail("a port was opened")
    )
    assert Stage(tmp_path, 2, **ONE).play().ranks[0].setup_calls == [(None, None)]


def test_no_other_process_can_take_the_port_at_which_the_ranks_meet(tmp_path, monkeypatch):
    """Another program tries before each rank joins, as it could while ranks import torch."""
    refused: list[str] = []

    async def setup(self: AccountingRank, resume: str | None, rendezvous: str | None) -> None:
        host, port = urlsplit(rendezvous).hostname, urlsplit(rendezvous).port
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                thief.bind((host, port))
        refused.append(rendezvous)

    monkeypatch.setattr(AccountingRank, "setup", setup)
    Stage(tmp_path, 2, ranks=2, **ONE).play()
    assert len(refused) == 2


def test_ready_groups_are_kept_with_their_trajectories_and_taken_up_again(tmp_path):
    stage = Stage(tmp_path / "first", 2, store=LossyStore("gone"), **ONE)
    steps = {"means": torch.arange(3)}
    trajectories = [TensorDict({"latents": torch.randn(3, 4).bfloat16(), "steps": steps}) for _ in range(4)]
    stage.desk.waiting = [make_group(8, RAMP, [*trajectories[:3], "gone"]), make_group(9, RAMP, trajectories)]
    stage.play()
    control = stage.state("update-000001").control
    assert control.unfinished == (Unfinished(8),), "its trajectories are gone"
    (kept,) = control.ready
    assert kept.group == 9 and kept.rewards == RAMP and {s.trajectory for s in kept.samples} == {None}

    resume = str(tmp_path / "first" / "update-000001")
    again = Stage(tmp_path / "second", 0, **{"checkpoint.resume": resume}).play()
    (taken,) = again.desk.taken_up
    assert taken.group == 9 and taken.rewards == kept.rewards
    for sample, before in zip(taken.samples, trajectories, strict=True):
        for name in ("latents", ("steps", "means")):
            assert torch.equal(sample.trajectory[name], before[name])


async def test_training_goes_on_while_a_checkpoint_is_written_and_nothing_of_that_is_in_it(tmp_path):
    stage = Stage(tmp_path, 6, prompts=1, **TRACKED, **EACH, **{"trainer.updates": 3})
    writing, written = asyncio.Event(), asyncio.Event()
    end_save = stage.ranks[0].end_save

    async def slowly() -> None:
        writing.set()
        await written.wait()
        await end_save()

    stage.ranks[0].end_save = slowly
    await stage.trainer.start()
    run = asyncio.create_task(stage.trainer.run())
    await writing.wait()
    await settle()
    # One at a time, beside the next update.
    assert "update 2" in stage.desk.log and "save update-000002" not in stage.desk.log
    written.set()
    await run
    assert stage.kept == ["update-000001", "update-000002", "update-000003"]
    remembered = [stage.state(name).rule["reward_history"]["0"][0] for name in stage.kept]
    assert remembered == [8, 16, 24], "rewards of the updates up to the checkpoint's"


@pytest.mark.parametrize(("failed", "why"), [(1, "OSError: no space left on device"), (2, "FileExistsError")])
def test_a_checkpoint_that_cannot_be_begun_or_written_is_told_and_tried_again(tmp_path, failed, why):
    stage = Stage(tmp_path, 6, **EACH, **{"trainer.updates": 3})
    stage.ranks[0].disk_is_full = failed == 1
    if failed == 2:
        (tmp_path / ".update-000002.partial").write_text("in the way of a folder")
    phase = stage.desk.phase

    async def record(text: str) -> None:
        await phase(text)
        stage.ranks[0].disk_is_full = "could not be written" not in text and stage.ranks[0].disk_is_full

    stage.desk.phase = record
    stage.play()
    (warning,) = [text for text in stage.desk.phases if text.startswith("warning")]
    assert f"checkpoint update-{failed:06d} could not be written ({why}" in warning
    kept = [f"update-{version:06d}" for version in (1, 2, 3) if version != failed]
    assert [name for name in stage.kept if not name.startswith(".")] == kept


def test_the_last_checkpoint_has_to_succeed_and_what_a_failed_one_has_written_is_removed(tmp_path):
    stage = Stage(tmp_path, 2, **ONE)
    stage.ranks[0].disk_is_full = True
    with pytest.raises(OSError, match="no space left on device"):
        stage.play()
    assert stage.kept == []


def test_weights_that_the_ledger_does_not_know_of_are_not_saved(tmp_path):
    """Ends the run before the update: its groups are in the ledger as dropped, and made again."""
    stage = Stage(tmp_path, 4, **EACH, **{"trainer.updates": 2})
    continuation = stage.desk.continuation

    async def as_of_the_end() -> ControlState:
        return msgspec.structs.replace(await continuation(), version=1)

    stage.desk.continuation = as_of_the_end
    stage.play()
    assert stage.kept == ["update-000001"]


def test_a_failed_update_lets_the_checkpoint_that_is_being_written_be_finished(tmp_path):
    stage = Stage(tmp_path, 4, **EACH, **{"trainer.updates": 2})
    end_save, add = stage.ranks[0].end_save, stage.trainer._add

    async def slowly() -> None:
        for _ in range(50):
            await settle()
        await end_save()

    async def fails(update: Any, group: ReadyGroup) -> None:
        if stage.trainer._version == 1:
            raise ValueError("a group that cannot be trained")
        await add(update, group)

    stage.ranks[0].end_save, stage.trainer._add = slowly, fails
    with pytest.raises(ValueError, match="cannot be trained"):
        stage.play()
    assert stage.kept == ["update-000001"]


@pytest.mark.parametrize("group", [1, 2])
def test_a_preempted_trainer_gives_its_update_up_between_groups_or_at_its_end_and_saves(tmp_path, group):
    stage = Stage(tmp_path, 4, **{"trainer.streaming": "off", "trainer.updates": 2})
    fetch, fetched = stage.ranks[0].fetch, list[int]()

    async def fetch_and_preempt(*arguments: Any) -> None:
        await fetch(*arguments)
        fetched.append(arguments[0])
        if len(fetched) == group:
            await stage.trainer.preempt()

    stage.ranks[0].fetch = fetch_and_preempt
    stage.play()
    assert len(fetched) == group and stage.desk.updates == [] and stage.kept == ["update-000000"]


def test_operations_are_reported_as_what_a_rank_computes_per_second_and_as_a_share_of_the_most(tmp_path):
    """Two ranks together make 8 TFLOP an update, each in two groups of a second; another second passes per version."""
    metrics = [{"flops/sum": 8e12, "peak_tflops": 10.0}] * 2
    stage = Stage(tmp_path, 4, ranks=2, metrics=metrics, **{"trainer.updates": 2})
    clock, rank = stage.trainer.clock, stage.ranks[0]
    accumulate, export = rank.accumulate, rank.export

    async def accumulate_for_a_second(*args: Any) -> None:
        await accumulate(*args)
        clock.advance(1.0)

    async def export_for_a_second(version: int) -> Any:
        clock.advance(1.0)
        return await export(version)

    rank.accumulate, rank.export = accumulate_for_a_second, export_for_a_second
    first, second = (report.metrics for report in stage.play().desk.updates)
    assert first == {"loss": 1.0, "tflops/trainer": 2.0, "mfu/trainer": 0.2}
    assert second == {"loss": 2.0, "tflops/trainer": 2.0, "mfu/trainer": 0.2, "mfu/overall": pytest.approx(4 / 3 / 10)}


@pytest.mark.parametrize(
    ("counted", "reported"),
    [
        ({}, set()),  # by a backend that does not count
        ({"flops/sum": 8e12}, {"tflops/trainer"}),  # on a device that nothing is known of
        ({"flops/sum": 0.0, "peak_tflops": 10.0}, set()),
    ],
)
def test_what_is_not_known_of_the_operations_is_not_reported(tmp_path, counted, reported):
    stage = Stage(tmp_path, 2, metrics=[counted], **ONE)
    clock, rank = stage.trainer.clock, stage.ranks[0]
    accumulate = rank.accumulate

    async def accumulate_for_a_second(*args: Any) -> None:
        await accumulate(*args)
        clock.advance(1.0)

    rank.accumulate = accumulate_for_a_second
    (report,) = stage.play().desk.updates
    assert report.metrics.keys() == {"loss", *reported}
