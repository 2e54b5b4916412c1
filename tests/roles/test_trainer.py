"""Tests the trainer: what it publishes and keeps, and how it ends."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from msgspec.structs import replace
from tensordict import TensorDict

from omni_async.aio.clock import ManualClock
from omni_async.checkpoint import State, read_state, require_whole
from omni_async.control.control_state import ControlState, Unfinished
from omni_async.control.rounds import Round
from omni_async.roles.plan import plan_updates
from omni_async.roles.trainer import Trainer
from omni_async.roles.update import PolicyGradient
from omni_async.store import LocalStore, ObjectStore
from omni_async.types import SampleDrift
from omni_async.weights.snapshot import Snapshot
from tests.roles.actor_world import (
    FINAL_LATENTS,
    PREFERENCES,
    AccountingRank,
    Desk,
    LossyStore,
    failure_of,
    hook,
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
    """A trainer with a model-free rank; `groups` are ready, and the run ends when they are used up."""

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


@pytest.mark.parametrize(("groups", "every", "published"), [(0, 1, [0]), (8, 1, [0, 1, 2, 3, 4]), (8, 3, [0, 3, 4])])
def test_published_versions(tmp_path, groups, every, published):
    stage = Stage(tmp_path, groups, **{"weights.publish_every": every}).play()
    assert stage.publications.versions == published
    assert [report.version for report in stage.desk.updates] == [*range(1, groups // 2 + 1)]
    assert [report.groups for report in stage.desk.updates] == [(i, i + 1) for i in range(0, groups, 2)]
    assert {"export"} <= {span.kind for span in stage.desk.spans} <= {"export", "train", "checkpoint", "starved"}


def test_order_of_an_update(tmp_path):
    log = Stage(tmp_path, 2, **ONE).play().desk.log
    publish = [["withdraw", f"export {version}", f"publish {version}"] for version in (0, 1)]
    assert log == [*publish[0], "accumulate", "accumulate", "step", "update 1", *publish[1], "save update-000001"]


def test_saves_and_kept_checkpoints(tmp_path):
    rewards = {2: 0.5, 4: 0.9, 6: 0.4, 8: 0.7}
    changes = {"trainer.updates": 9, "checkpoint.every": 3, "checkpoint.keep": 2, "staleness.max_updates": 0}
    stage = Stage(tmp_path, 18, validation={"every": 2, "prompts": "v.txt"}, **changes)

    def with_rounds(state: ControlState) -> ControlState:
        rounds = tuple(Round(version, reward) for version, reward in rewards.items() if version < state.version)
        return replace(state, rounds=rounds, validated=rounds[-1].version if rounds else 0)

    hook(stage.desk, "continuation", after=with_rounds)
    stage.play()
    saved = [line for line in stage.desk.log if line.startswith("save")]
    assert saved == [f"save update-{version:06d}" for version in (2, 3, 4, 6, 8, 9)]
    assert stage.kept == [f"update-{version:06d}" for version in (4, 8, 9)], "the best and the newest"
    state = stage.state("update-000009")
    assert (state.version, state.control.next_group, state.engine) == (9, 77, {"theta": stage.ranks[0].theta})


def test_required_fields(tmp_path):
    stage = Stage(tmp_path, 0).play()
    assert sorted(stage.desk.fields) == ["conditioning", "latents", "log_probs"]
    said = "each group is trained on as soon as it is scored (the objective scales with the advantage"
    assert stage.desk.phases[0].startswith(said)
    stage = Stage(tmp_path / "forward", 0, **FINAL_LATENTS, **{"algorithm.name": "awm"}).play()
    assert set(stage.desk.fields) == {"final", "conditioning"}


def test_dataset_readers_get_no_weights(tmp_path):
    stage = Stage(tmp_path, 8, **PREFERENCES).play()
    assert stage.publications.versions == []
    assert [version for version, _ in stage.desk.announced] == [*range(5)]
    assert [(report.engine, report.version) for report in stage.desk.held] == [("reader", v) for v in range(5)]
    assert not [line for line in stage.desk.log if line.startswith("export")]


TRACKED = {"algorithm.advantage": {"track_prompts": True, "std": "none"}}


def test_resuming_with_reward_history(tmp_path):
    before = Stage(tmp_path / "before", 4, prompts=1, **TRACKED, **{"trainer.updates": 2}).play()
    count_mean_and_squares = pytest.approx([16, 1.5, 20.0])
    assert before.state("update-000002").rule["reward_history"] == {"0": count_mean_and_squares}
    assert before.ranks[0].groups[-1] == pytest.approx([-1.5, -0.5, 0.5, 1.5])

    resume = str(tmp_path / "before" / "update-000002")
    after = Stage(tmp_path / "after", 0, **TRACKED, **{"trainer.updates": 3, "checkpoint.resume": resume})
    after.desk.version = 2
    after.desk.offer(*(make_group(4 + i, [3.0, 4.0, 5.0, 6.0], prompt=0) for i in range(2)))
    after.play()
    assert (after.ranks[0].setup_calls, after.publications.versions) == ([(resume, None)], [2, 3])
    mean = (16 * 1.5 + 8 * 4.5) / 24
    assert after.ranks[0].groups == [pytest.approx([r - mean for r in (3.0, 4.0, 5.0, 6.0)])] * 2
    count, remembered, _ = after.state("update-000003").rule["reward_history"]["0"]
    assert (count, remembered) == (24, pytest.approx(mean))


def mismatch(velocity: float, clipped: float = 0.0, nats: float = 1.0, fresh: float = 1.0) -> dict[str, float]:
    by_step = {"engine_mismatch_nats/mean/step_01": -nats / 2, "engine_mismatch_nats/variance/step_01": nats**2}
    of_rows = {"engine_mismatch_nats/mean": -nats / 2, "engine_mismatch_nats/variance": nats**2}
    of_rows |= {"fresh_fraction": fresh}
    return {**by_step, **of_rows, "engine_mismatch_velocity": velocity, "engine_mismatch_clipped": clipped}


def said(stage: Stage) -> list[str]:
    return [phase for phase in stage.desk.phases if "engine and trainer" in phase]


def ratios(stage: Stage) -> list[bool]:
    return [batch.proximal_ratio for batch in stage.ranks[0].batches]


def test_engine_and_trainer_are_compared_once(tmp_path):
    found = [mismatch(0.004), mismatch(0.005), {}, mismatch(0.4, nats=31.4159)]
    stage = Stage(tmp_path, 10, metrics=found, **{"trainer.updates": 5, **BYPASS}).play()
    once, fault = said(stage)
    assert once == (
        "engine and trainer, same weights, update 1: log-ratio -0.5 ± 1 nats, velocity error 0.004 of its rms, 0% of"
        " the rows outside the clip range before any update"
    )
    assert fault.startswith("warning: engine and trainer, same weights, update 4: log-ratio -16 ± 31 nats")
    assert "velocity error 0.4 of its rms" in fault and "rounding in float32 explains 0.01" in fault
    honest = ["engine_mismatch_honest" in report.metrics for report in stage.desk.updates]
    assert honest == [True, True, False, True, False]
    assert stage.state("update-000005").rule == {}, "nothing to decide or remember"
    bfloat16 = Stage(tmp_path / "bfloat16", 2, metrics=[mismatch(0.03)], **ONE, **{"model.dtype": "bfloat16"}).play()
    assert not said(bfloat16)[0].startswith("warning: ")


def test_ratios_leave_an_engine_that_rounds(tmp_path):
    rounds = [mismatch(0.03, clipped=0.62)] + [mismatch(0.03)] * 3
    stage = Stage(tmp_path / "auto", 6, metrics=rounds, **AUTO, **EACH, **{"trainer.updates": 3}).play()
    assert ratios(stage) == [False] * 2 + [True] * 4
    [decided] = said(stage)
    assert decided.startswith("engine and trainer, same weights, update 1: ") and decided.endswith(
        "algorithm.correction.mode auto becomes decoupled, ratios to the trainer's own policy, from the next update on"
    )
    assert "-0.5 ± 1 nats (step 1 -0.5 ± 1), velocity error 0.03" in decided
    resumed = {"checkpoint.resume": str(tmp_path / "auto" / "update-000001")}
    assert ratios(Stage(tmp_path / "resumed", 4, metrics=[mismatch(0.03)], **AUTO, **resumed).play()) == [True] * 4
    explicit = Stage(tmp_path / "bypass", 4, metrics=rounds, **AUTO | BYPASS | resumed).play()
    assert ratios(explicit) == [False] * 4
    [advice] = said(explicit)
    assert advice.startswith("warning: engine and trainer, same weights, update 2: ") and "mode auto or none" in advice

    faults = [mismatch(0.4, clipped=0.9)] * 2
    first, second = said(Stage(tmp_path / "fault", 4, metrics=faults, **AUTO).play())
    assert first.startswith("warning: ") and first.endswith("from the next update on")
    assert second.startswith("warning: ") and second.endswith("shows where)")
    emulated = Stage(tmp_path / "emulated", 4, metrics=faults, **AUTO, **{"rollout.engine": "emulated"}).play()
    assert ratios(emulated) == [False] * 4


def test_several_steps_get_a_proximal_pass(tmp_path):
    stage = Stage(tmp_path, 4, metrics=[mismatch(0.03, clipped=0.62)], **AUTO, **{"trainer.steps_per_update": 2})
    samples = [f"trajectory {group}.{i}" for group in (2, 3) for i in range(4)]
    stage.ranks[0].drifts = dict.fromkeys(samples, SampleDrift((0.0, 0.0), None, 1, (0, 1)))
    stage.play()
    assert [batch.group for batch in stage.ranks[0].recomputed] == [2, 3], "those of the second update"


def rule_of(**changes: Any) -> PolicyGradient:
    config = make_config(**AUTO, **changes)
    return PolicyGradient(config, plan_updates(config), [])


def test_the_automatic_correction_is_decided_once():
    rule = rule_of()
    assert rule.learn(mismatch(0.03, clipped=0.9, fresh=0.1)) is None, "a few fresh rows decide nothing"
    assert rule.learn(mismatch(0.001, clipped=0.04)) == "algorithm.correction.mode auto stays bypass"
    assert rule.learn(mismatch(0.001, clipped=0.9)) is None
    state = rule.state()
    assert state["auto"]["reason"] is None
    for clip_range, decides in ((0.2, False), (1e-6, True)):  # another clip range decides again
        resumed = rule_of(**{"algorithm.clip_range": clip_range})
        resumed.restore(state)
        assert (resumed.learn(mismatch(0.001, clipped=0.9)) is not None) == decides

    pair = rule_of(**{"algorithm.clip_range": [0.1, 0.2]})
    pair.learn(mismatch(0.001, clipped=0.04))
    for ends, decides in (([0.1, 0.2], False), ([0.1, 0.3], True)):
        resumed = rule_of(**{"algorithm.clip_range": ends})
        resumed.restore(json.loads(json.dumps(pair.state())))
        assert (resumed.learn(mismatch(0.001, clipped=0.9)) is not None) == decides


def drifted(*shares: float) -> list[dict[str, float]]:
    fresh, *stale = shares
    first = mismatch(0.001) | {"drift_clipped": fresh}
    return [first, *({"drift_clipped": share, "log_ratio_nats/variance": 1.44} for share in stale)]


@pytest.mark.parametrize(
    ("shares", "switches"),
    [
        ((0.0, 0.9, 0.9, 0.9), None),  # too few
        ((0.0, 0.9, 0.1, 0.9, 0.1, 0.1, 0.9, 0.1), None),  # single updates
        ((0.0, 0.1, 0.3, 0.3, 0.3), 5),
        ((0.0, 0.0, 0.0, 0.21, 0.21, 0.21, 0.0), 6),
    ],
)
def test_the_automatic_correction_follows_the_drift_of_several_updates(shares, switches):
    rule, decided = rule_of(**{"staleness.max_updates": 8}), {}
    assert (rule.plan.mode, rule.config.correction.mode) == ("unscaled", "bypass"), "it streams, whatever S"
    for update, metrics in enumerate(drifted(*shares), start=1):
        message = rule.learn(metrics)
        assert (rule.plan.mode == "collect") == rule.plan.proximal == (switches is not None and update >= switches)
        if message is not None:
            decided[update] = message
    assert decided.pop(1) == "algorithm.correction.mode auto stays bypass"
    assert [*decided] == [switches] * (switches is not None)
    for message in decided.values():
        assert "becomes decoupled with tempered weights from the next update on: " in message
        assert "of the rows are outside the clip range" in message and "spread by 1.2 nats" in message
        correction = rule.config.correction
        assert (correction.mode, correction.weights, correction.tempering) == ("decoupled", "tempered", "update")
    resumed = rule_of(**{"staleness.max_updates": 8})
    resumed.restore(rule.state())
    assert resumed.config == rule.config and resumed.plan == rule.plan and resumed.state() == rule.state()


@pytest.mark.parametrize(
    ("changes", "rounding", "drift"),
    [
        ({}, "rounding", "drift"),
        ({"trainer.optimizer.lr": 1e-3}, "rounding", None),
        ({"staleness.max_updates": 3}, "rounding", None),
        ({"staleness.reserve": "all"}, "rounding", None),
        ({"trainer.streaming": "on"}, "rounding", None),
        ({"rollout.compile": "off"}, None, None),
        ({"rollout.sampling.height": 128}, None, None),
        ({"rollout.sampling.true_cfg_scale": 4.0}, None, None),
        ({"rollout.sde.noise_level": 0.3}, None, None),
        ({"rollout.num_inference_steps": 12}, None, None),
        ({"algorithm.dual_clip": 2.0}, None, None),
        ({"algorithm.clip_range": [0.1, 0.3]}, None, None),
    ],
)
def test_a_resumed_run_keeps_what_its_keys_do_not_change(changes, rounding, drift):
    for metrics, kept in ((mismatch(0.03, clipped=0.5),), rounding), (drifted(*[0.9] * 5), drift):
        rule, resumed = rule_of(), rule_of(**changes)
        for one in metrics:
            rule.learn(one)
        resumed.restore(json.loads(json.dumps(rule.state())))
        assert resumed.state()["auto"]["reason"] == kept
        assert (resumed.config.correction.mode == "bypass") == (kept is None)


def test_drift_is_judged_after_rounding():
    """Rounding moves stale rows as far as drift does."""
    rule, stale = rule_of(), {**mismatch(0.03, clipped=0.65, fresh=0.1), "drift_clipped": 0.68}
    assert [rule.learn(stale) for _ in range(8)] == [None] * 8
    assert "becomes decoupled, ratios" in rule.learn(mismatch(0.03, clipped=0.65))


def test_drift_does_not_decide_where_streaming_is_demanded_or_rounding_has_decided():
    streams = rule_of(**{"trainer.streaming": "on"})
    assert [streams.learn(metrics) for metrics in drifted(*[0.9] * 9)][1:] == [None] * 8
    assert streams.plan.mode == "unscaled"
    rounds = rule_of()
    assert "becomes decoupled, ratios" in rounds.learn(mismatch(0.03, clipped=0.5))
    assert [rounds.learn(metrics) for metrics in drifted(*[0.9] * 9)] == [None] * 9
    assert (rounds.config.correction.weights, rounds.plan.mode) == ("none", "unscaled")


def test_a_run_that_drifts_collects_its_updates_and_weighs_their_rows(tmp_path):
    eight = {
        "staleness.max_updates": 8,
        "trainer.updates": 7,
        "checkpoint.keep": 9,
        "algorithm.advantage": {"std": "group"},
    }
    metrics = drifted(0.0, 0.4, 0.4, 0.4, 0.4, 0.0, 0.0)
    stage = Stage(tmp_path / "drifts", 14, metrics=metrics, **AUTO, **EACH, **eight)
    samples = [f"trajectory {group}.{i}" for group in range(14) for i in range(4)]
    drifts = dict.fromkeys(samples[::2], SampleDrift((0.5, -2.0), None, 24, (0, 1)))
    stage.ranks[0].drifts = drifts | dict.fromkeys(samples[1::2], SampleDrift((0.1, 1.0), None, 24, (0, 1)))
    stage.play()
    assert ratios(stage) == [False] * 10 + [True] * 4
    assert [batch.weights is not None for batch in stage.ranks[0].batches] == ratios(stage)
    [decided] = [phase for phase in stage.desk.phases if "tempered" in phase]
    assert decided.endswith(
        "; groups are trained on when the whole update is scored (the off-policy correction looks at the whole update)"
    )
    assert stage.desk.collects
    left = [report.metrics.get("proximal_ratio") for report in stage.desk.updates]
    assert left == [None] * 5 + [1.0] * 2
    found = stage.desk.updates[-1].metrics
    assert 0 < found["gamma"] < 1

    for version, collects in ((5, True), (4, False)):
        resumed = {"checkpoint.resume": str(tmp_path / "drifts" / f"update-{version:06d}")}
        again = Stage(tmp_path / f"resumed {version}", 0, metrics=metrics, **AUTO, **eight | resumed).play()
        assert again.desk.collects == collects
        assert again.desk.phases[0].startswith("groups are" if collects else "each group is")


async def test_samples_of_another_policy_fail_the_first_update(tmp_path):
    wrong = Stage(tmp_path / "wrong", 10, metrics=[{"engine_mismatch": 0.3}])
    refused = str(await failure_of(wrong.main()))
    assert "differ by up to 0.3 per latent element (trainer.max_mismatch is 0.01)" in refused and "parity" in refused
    later = [{"engine_mismatch": 0.002}, {"engine_mismatch": 0.3}]  # the policy's own drift, say
    await Stage(tmp_path / "later", 10, metrics=later).main()
    await Stage(tmp_path / "off", 10, metrics=[{"engine_mismatch": 0.3}], **{"trainer.max_mismatch": None}).main()


def test_several_ranks(tmp_path):
    stage = Stage(tmp_path, 2, ranks=4, **ONE, **{"trainer.shard": 2}).play()
    [(_, address)], *others = (rank.setup_calls for rank in stage.ranks)
    assert address.startswith("tcp://127.0.0.1:") and others == [[(None, address)]] * 3
    assert [rank.step_weights for rank in stage.ranks] == [pytest.approx([0.25])] * 4
    exported = [line for line in stage.ranks[1].log if line.startswith(("export", "share"))]
    assert exported == ["export 0", "share 0", "export 1", "share 1"]
    assert ["share 1" in rank.log for rank in stage.ranks] == [False, True, False, False]
    assert [snapshot.result().manifest().nbytes for snapshot in stage.publications.whole] == [1, 1]


def test_no_other_process_can_take_the_ranks_port(tmp_path, monkeypatch):
    """Another program tries before each rank joins. A lone rank opens no port."""
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
    monkeypatch.undo()
    opened = "omni_async.weights.transport.tcp_store.serve_store"
    monkeypatch.setattr(opened, lambda *_: pytest.fail("a port was opened"))
    assert Stage(tmp_path / "alone", 2, **ONE).play().ranks[0].setup_calls == [(None, None)]


def test_ready_groups_are_kept_and_taken_up(tmp_path):
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
    ((taken,),) = again.desk.taken_up
    assert taken.group == 9 and taken.rewards == kept.rewards
    for sample, before in zip(taken.samples, trajectories, strict=True):
        for name in ("latents", ("steps", "means")):
            assert torch.equal(sample.trajectory[name], before[name])


async def test_training_continues_while_a_checkpoint_is_written(tmp_path):
    stage = Stage(tmp_path, 6, prompts=1, **TRACKED, **EACH, **{"trainer.updates": 3})
    writing, written = asyncio.Event(), asyncio.Event()

    async def slowly() -> None:
        writing.set()
        await written.wait()

    hook(stage.ranks[0], "end_save", before=slowly)
    await stage.trainer.start()
    run = asyncio.create_task(stage.trainer.run())
    await writing.wait()
    await settle()
    assert "update 2" in stage.desk.log and "save update-000002" not in stage.desk.log
    written.set()
    await run
    assert stage.kept == ["update-000001", "update-000002", "update-000003"]
    remembered = [stage.state(name).rule["reward_history"]["0"][0] for name in stage.kept]
    assert remembered == [8, 16, 24], "rewards of the updates up to the checkpoint's"


@pytest.mark.parametrize(("failed", "why"), [(1, "OSError: no space left on device"), (2, "FileExistsError")])
def test_failed_checkpoints_are_reported(tmp_path, failed, why):
    stage = Stage(tmp_path, 6, **EACH, **{"trainer.updates": 3})
    stage.ranks[0].disk_is_full = failed == 1
    if failed == 2:
        (tmp_path / ".update-000002.partial").write_text("in the way of a folder")

    def space_is_back(_: None) -> None:
        if "could not be written" in stage.desk.phases[-1]:
            stage.ranks[0].disk_is_full = False

    hook(stage.desk, "phase", after=space_is_back)
    stage.play()
    (warning,) = [text for text in stage.desk.phases if text.startswith("warning")]
    assert f"checkpoint update-{failed:06d} could not be written ({why}" in warning
    kept = [f"update-{version:06d}" for version in (1, 2, 3) if version != failed]
    assert [name for name in stage.kept if failed == 1 or not name.startswith(".")] == kept


def test_weights_unknown_to_the_ledger_are_not_saved(tmp_path):
    """Ends the run before the update, whose groups are made again."""
    stage = Stage(tmp_path, 4, **EACH, **{"trainer.updates": 2})
    hook(stage.desk, "continuation", after=lambda state: replace(state, version=1))
    stage.play()
    assert stage.kept == ["update-000001"]


def test_a_failed_update_lets_a_checkpoint_finish(tmp_path):
    stage = Stage(tmp_path, 4, **EACH, **{"trainer.updates": 2})

    async def slowly() -> None:
        for _ in range(50):
            await settle()

    async def fails() -> None:
        if stage.trainer._version == 1:
            raise ValueError("a group that cannot be trained")

    hook(stage.ranks[0], "end_save", before=slowly)
    hook(stage.trainer, "_add", before=fails)
    with pytest.raises(ValueError, match="cannot be trained"):
        stage.play()
    assert stage.kept == ["update-000001"]


@pytest.mark.parametrize("group", [1, 2])
def test_preemption_abandons_the_update_and_saves(tmp_path, group):
    stage = Stage(tmp_path, 4, **{"trainer.streaming": "off", "trainer.updates": 2})
    fetched = stage.ranks[0].fetched

    async def preempt() -> None:
        if len(fetched) == group - 1:
            await stage.trainer.preempt()

    hook(stage.ranks[0], "fetch", before=preempt)
    stage.play()
    assert len(fetched) == group and stage.desk.updates == [] and stage.kept == ["update-000000"]


KNOWN = {"flops/sum": 8e12, "peak_tflops": 10.0}


@pytest.mark.parametrize(
    ("counted", "first", "later"),
    [
        (KNOWN, {"tflops/trainer": 2.0, "mfu/trainer": 0.2}, {"mfu/overall": pytest.approx(4 / 3 / 10)}),
        (KNOWN | {"peak_tflops": None}, {"tflops/trainer": 2.0}, {}),
        (KNOWN | {"flops/sum": 0.0}, {}, {}),
    ],
)
def test_operations_per_second(tmp_path, counted, first, later):
    """Two groups of a second each make an update's operations on two ranks; an export takes another second."""
    metrics = {key: value for key, value in counted.items() if value is not None}
    stage = Stage(tmp_path, 4, ranks=2, metrics=[metrics] * 2, **{"trainer.updates": 2})

    async def a_second() -> None:
        stage.trainer.clock.advance(1.0)

    for name in ("accumulate", "export"):
        hook(stage.ranks[0], name, before=a_second)
    found = [report.metrics for report in stage.play().desk.updates]
    assert found == [{"loss": 1.0, **first}, {"loss": 2.0, **first, **later}]
