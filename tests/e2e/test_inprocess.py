"""Tests whole runs with a setting, an objective or a correction away from the defaults: they end and train."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from omni_async_pipelines.qwen_image.sampling import QwenImageSampling
from omni_async_pipelines.qwen_image.tiny import build
from PIL import Image

from omni_async import cli
from omni_async.config import load
from omni_async.data.prompts import load_prompts
from omni_async.plugins.families import MediaShape
from omni_async.roles import trajectories
from recipes.quickstart import build_preferences
from tests.support.job_world import Run, run, trained

_EMULATED = ("rollout.engine=emulated", "rollout.emulated.step_s=0.002", "trainer.optimizer.lr=1e-6")
_ADAMW = ("trainer.optimizer={name: adamw, lr: 1e-2}",)
_KEPT = ("trainer.optimizer={name: adamw, lr: 1e-3}", "staleness.max_updates=1", "checkpoint.every=1")
_LORA = "model.lora={rank: 2, alpha: 4}"


def _done(finished: Run, updates: int = 3) -> Run:
    assert finished.check_every_group_ended_once().summary.status == "done", finished.summary.reason
    assert [line["update"] for line in finished.metrics] == list(range(1, updates + 1))
    assert finished.summary.counters.dropped == 0
    logs = {log.name: log.read_text() for log in (finished.path / "logs").iterdir()}
    assert not [name for name, text in logs.items() if "Traceback" in text], "its ends are orderly"
    return finished


def moved(finished: Run) -> bool:
    first, last = finished.weights(1), finished.weights(3)
    assert all(torch.isfinite(weight).all() for weight in last.values())
    return any(not torch.equal(first[name], last[name]) for name in first)


# ---- how the loop runs -----------------------------------------------------------------------------------------------


@pytest.mark.sliced(floor=2)
@pytest.mark.parametrize(
    ("engine", "swap", "batching"),
    [
        *((engine, swap, "step") for swap in ("step", "request", "drain") for engine in ("diffusers", "emulated")),
        *(("diffusers", swap, "request") for swap in ("request", "drain")),
    ],
)
def test_every_swap_mode_ends_and_keeps_the_budget(recipe: Path, engine: str, swap: str, batching: str) -> None:
    emulated = _EMULATED if engine == "emulated" else ()
    buffers = ("staleness.max_updates=2", "trainer.updates=5", "rollout.max_inflight=6", "rollout.max_batch=3")
    # Slow enough that an engine is busy whenever a version arrives, and hardly ever between two samples.
    steps = ("rollout.emulated.step_s=0.02", "rollout.num_inference_steps=12", "rollout.sde.window.range=[0, 11]")
    slow = steps if emulated and swap == "step" else ()
    modes = (f"weights.swap={swap}", f"rollout.batching={batching}")
    finished = _done(run(recipe, *emulated, *buffers, *slow, *modes), 5)
    swapped = [span["version"] for span in finished.spans("swap")]
    assert swapped == sorted(swapped) and swapped[0] == 0 and swapped[-1] == 5
    mixed = [span for span in finished.spans("generate") if ".." in span["versions"]]
    assert swap == "step" or not mixed, "only a swap between two steps may fall inside a sample"
    assert mixed or not slow


def test_no_port_and_the_umasks_permissions(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listens at a unix socket alone: the run's `control.sock`."""
    families, listen = list[socket.AddressFamily](), socket.socket.listen

    def remembered(self: socket.socket, *backlog: int) -> None:
        families.append(self.family)
        listen(self, *backlog)

    monkeypatch.setattr(socket.socket, "listen", remembered)
    before = os.umask(0o026)
    try:
        finished = _done(run(recipe, "trainer.updates=1", "checkpoint.every=1", "tracking.images_every=1"), 1)
    finally:
        os.umask(before)
    assert families == [socket.AF_UNIX]
    modes = {path.relative_to(finished.path): path.stat().st_mode & 0o777 for path in finished.path.rglob("*")}
    assert len(modes) > 10
    others = {path: mode for path, mode in modes.items() if mode not in (0o640, 0o751)}
    assert others == {Path("logs"): 0o700}, "what workers print may hold anything"


LOOPS = {
    "window": ("buffer.window=3", "staleness.max_updates=1"),
    "publish_every, last update odd": ("weights.publish_every=2", "staleness.max_updates=1", "trainer.updates=5"),
    "smallest S for publish_every": ("weights.publish_every=3", "staleness.max_updates=2"),
    "steps_per_update, global std": ("trainer.steps_per_update=2",),
    "steps_per_update, group std": ("trainer.steps_per_update=2", "algorithm.advantage.std=group"),
    "tight buffers": ("buffer.trajectories=2", "buffer.groups=2", "staleness.max_updates=3"),
    "tightest buffers": ("buffer.trajectories=1", "buffer.groups=1", "staleness.max_updates=1"),
    "several workers": ("rollout.workers=3", "rollout.max_inflight=2", "reward.workers=2", "staleness.max_updates=1"),
    "one update, large budget": ("trainer.updates=1", "trainer.groups_per_update=1", "staleness.max_updates=4"),
    "shared noise, guidance": ("rollout.share_initial_noise=true", "rollout.sampling.true_cfg_scale=2"),
    "shared prefix": ("rollout.share_initial_noise=true", "rollout.share_prefix=true", "staleness.max_updates=2"),
    "bytes": ("buffer.max_bytes=256KiB", "staleness.max_updates=3"),
}


@pytest.mark.sliced(floor=2)
@pytest.mark.parametrize("name", LOOPS)
def test_loop_settings(recipe: Path, name: str) -> None:
    _done(run(recipe, *LOOPS[name]), load(recipe, LOOPS[name]).trainer.updates)


def test_exact_staleness_is_exact_and_repeatable(recipe: Path) -> None:
    exact = ("staleness={max_updates: 2, exact: true}", "trainer.updates=5", "buffer.groups=6")
    first, again = (run(recipe, *exact, "trainer.optimizer.lr=1.0", f"run.name={name}") for name in ("first", "again"))
    ages = {line["group"]: line["staleness"] for line in first.ledger}
    assert [ages[group] for group in sorted(ages)] == [0, 0, 1, 1, 2, 2, 2, 2, 2, 2]
    weights, expected = again.weights(), first.weights()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_shared_conditioning_trains_the_same(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("staleness.max_updates=0", "buffer.window=1", "trainer.updates=2", "trainer.optimizer.lr=1.0")
    alone = run(recipe, *settings, "run.name=alone")
    monkeypatch.setattr(trajectories, "SHARED_BYTES", 1)
    shared = run(recipe, *settings, "run.name=shared")
    weights, expected = shared.weights(), alone.weights()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("engine", ["diffusers", "emulated"])
def test_several_resolutions(recipe: Path, engine: str) -> None:
    buckets = "rollout.buckets=[{}, {sampling: {height: 48, true_cfg_scale: 2}, weight: 2}, {sampling: {width: 64}}]"
    overrides = (buckets, "trainer.groups_per_update=6", "staleness.max_updates=1", "validation=null")
    finished = _done(run(recipe, *(_EMULATED if engine == "emulated" else ()), *overrides))
    rewards = {name for line in finished.metrics for name in line if name.startswith("reward/bucket")}
    assert rewards == {f"reward/bucket{number}" for number in range(3)}
    if engine == "diffusers":  # every group was recomputed in its own shape, and with its own guidance
        assert finished.metrics[0]["engine_mismatch_nats"] < 0.01
        # Sizes share what is encoded; guidance has a branch more.
        num_prompts = len(load_prompts(load(recipe).data.prompts or "", "data.prompts", 1000))
        assert 0 < sum(line.get("encoder/calls", 0) for line in finished.metrics) <= 2 * num_prompts
        assert finished.metrics[-1].get("encoder/hits", 1) > 0.5


def test_validation_curve_and_images(recipe: Path) -> None:
    held_out = recipe.with_name("held_out.txt")
    held_out.write_text("a blue digit\nthe digit 9\n")
    rounds = f"validation={{every: 2, prompts: {held_out}, samples_per_prompt: 2, num_inference_steps: 5}}"
    kept = f"reward.cache.path={recipe.with_name('scores.sqlite')}"
    finished = _done(run(recipe, rounds, "staleness.max_updates=1", "tracking.images_every=2", kept))
    assert [point.version for point in finished.summary.validation] == [0, 2, 3]
    assert [line["update"] for line in finished.validation] == [0, 2, 3]
    first, *_, last = finished.summary.validation
    assert first.value == -first.parts["jpeg_kb"] != last.value
    images = {path.stem: Image.open(path) for path in (finished.path / "samples").glob("*.png")}
    assert {"train-000001", "train-000002", "train-000003", "validation-000000", "validation-000003"} <= images.keys()
    for image in images.values():
        image.load()
        assert min(image.size) >= 32
    grids = [name for name in images if re.fullmatch(r"\w+-\d{6}", name)]
    found = recipe.with_name("found.json")
    assert cli.main(["score", str(recipe), str(finished.path), "--json", str(found), kept]) == 0
    scored = json.loads(found.read_text())
    assert scored["samples"] == scored["cached"] == len(images) - len(grids) > 10
    assert "score_cache/hits" in finished.metrics[0]


class FilmSampling(QwenImageSampling, frozen=True, kw_only=True):
    """Samples of a video model with sound, of which emulated engines make media."""

    def media(self) -> tuple[MediaShape, ...]:
        return MediaShape("video", (5, 3, self.height, self.width), 8), MediaShape("audio", (1, 800), 8000)


def test_videos_with_sound_are_scored_and_written(recipe: Path) -> None:
    scorers = 'reward.scorers=[{name: "tests.e2e.scorers:Redness"}]'
    config = load(recipe, [*_EMULATED, "trainer.updates=2", scorers])
    film = FilmSampling(height=config.rollout.sampling.height, width=config.rollout.sampling.width)
    finished = _done(run(replace(config, rollout=replace(config.rollout, sampling=film))), 2)
    files = {path.name for path in (finished.path / "samples").iterdir()}
    assert {"train-000001.png", "train-000001-00.mp4", "train-000001-00.wav", "train-000002-00.mp4"} <= files


# ---- what is trained -------------------------------------------------------------------------------------------------

_FORWARD = ("rollout.sde=null", "algorithm.clip_range_nats=null", "algorithm.forward.draws=2")
_PROGRESSIVE = "rollout.sde.window={size: 2, range: [0, 3], schedule: progressive, updates_per_position: 1}"
OBJECTIVES = {
    "flow_grpo": (),
    "dance_grpo": ("rollout.sde.kind=dance",),
    "mix_grpo": (_PROGRESSIVE, "algorithm.mix.log_ratio_coef=0.1"),
    "grpo_guard": ("algorithm.kl_coef=0.01", "algorithm.clip_range_nats=null"),
    "flow_dppo": ("algorithm.clip_range_nats=null",),
    "gspo": ("rollout.sde.kind=cps",),
    "reinforce": ("algorithm.clip_range_nats=null", "algorithm.correction={mode: bypass, weights: importance}"),
    "diffusion_nft": (*_FORWARD, "algorithm.kl_coef=1e-4"),
    "awm": (*_FORWARD, "algorithm.awm={ema_coef: 0.1, ratio: sum_first}", "trainer.ema={every: 1}"),
    "diffusion_dpo": _FORWARD,
}


@pytest.mark.sliced(floor=2)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_trains(recipe: Path, name: str) -> None:
    finished = _done(run(recipe, f"algorithm.name={name}", *_KEPT, *OBJECTIVES[name]))
    assert moved(finished)
    assert all(line["grad_norm"] > 0 for line in finished.metrics)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_forward_process_objective_on_ray_and_vllm_omni(recipe: Path) -> None:
    real = ("run.runtime=ray", "rollout.engine=vllm_omni")
    assert moved(_done(trained(recipe, "algorithm.name=diffusion_nft", *_FORWARD, *_KEPT, *real)))


CORRECTIONS = {
    "none": "{mode: none}",
    "decoupled": "{mode: decoupled, weights: importance, kappa_nats: 5.0}",
    "tempered": "{mode: decoupled, weights: tempered, kappa_nats: 5.0}",
    "m2po": "{mode: decoupled, m2: 0.5}",
    "interpolated": "{mode: interpolated, weights: importance, band: [0.2, 5.0]}",
    "trajectory": "{mode: decoupled, weights: importance, level: trajectory, k1: [0.1, 10.0], reject_level: sum}",
    "rejection": "{mode: bypass, k3: 1.0}",
}
DRIFT = {"log_ratio_nats/variance", "ess", "engine_mismatch_nats", "fresh_fraction", "row_staleness/mean"}


@pytest.mark.sliced(floor=2)
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_trains(recipe: Path, correction: str, steps: int) -> None:
    overrides = (f"algorithm.correction={CORRECTIONS[correction]}", f"trainer.steps_per_update={steps}")
    finished = run(recipe, *_KEPT, *overrides, "staleness.reserve=all")
    assert finished.summary.status == "done" and moved(finished), finished.summary.reason
    for line in finished.metrics:
        assert line.keys() >= DRIFT
        assert 0 < line["ess"] <= 1
        assert ("weight/mean" in line) == ("masked" in line) == (correction != "none")
    fresh = finished.metrics[0]
    assert fresh["fresh_fraction"] == 1 and fresh["engine_mismatch_nats"] < 1e-2
    assert finished.metrics[-1]["row_staleness/max"] == 1


_EIGHT = ("staleness={max_updates: 8, exact: true}", "buffer.groups=18", "validation=null")


def _drifting(recipe: Path, lr: float, *overrides: str) -> Run:
    auto = ("algorithm.correction.mode=auto", f"trainer.optimizer={{name: adamw, lr: {lr}}}")
    return run(recipe, *_EIGHT, *auto, "trainer.updates=12", "checkpoint.every=1", "checkpoint.keep=20", *overrides)


def test_the_automatic_correction_follows_the_drift_and_survives_a_resume(recipe: Path) -> None:
    finished = _done(_drifting(recipe, 1e-2), 12)
    left = [int(line.get("proximal_ratio", 0)) for line in finished.metrics]
    first = left.index(1)
    assert 5 <= first < 12 and left == [0] * first + [1] * (12 - first), "once, for the rest of the run"
    for line, decoupled in zip(finished.metrics, left, strict=True):
        assert line["log_ratio_nats/variance"] >= 0 and 0 <= line["k3_nats"] < 1e9 and line["chi2"] >= -1
        assert ("drift_clipped" in line) == (not decoupled)
        assert ("gamma" in line) == ("weight/mean" in line) == bool(decoupled)
    last = finished.metrics[-1]
    assert 0 < last["gamma"] < 1
    assert abs(last["weight/mean"] - 1) < 1e-6, "normalised, over whole updates"
    resume = str(finished.path / "checkpoints" / f"update-{first + 1:06d}")
    again = _drifting(recipe, 1e-2, f"checkpoint.resume={resume}", "run.name=again")
    assert again.summary.status == "done", again.summary.reason
    assert [line["proximal_ratio"] for line in again.metrics] == [1] * (11 - first)
    weights, expected = again.weights(), finished.weights()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.thorough
def test_the_automatic_correction_stays_while_drift_is_small_at_any_budget(recipe: Path) -> None:
    finished = _done(_drifting(recipe, 1e-6), 12)
    assert finished.metrics[-1]["row_staleness/max"] == 8
    assert all("proximal_ratio" not in line and line["drift_clipped"] < 0.1 for line in finished.metrics)
    assert not finished.spans("proximal")


@pytest.mark.sliced(floor=1)
@pytest.mark.parametrize("lora", [(), (_LORA,)], ids=["full", "lora"])
def test_a_kl_term_needs_the_reference_policy(recipe: Path, lora: tuple[str, ...]) -> None:
    finished = _done(run(recipe, "algorithm.kl_coef=0.1", *lora, *_ADAMW))
    drift = [line["kl_ref"] for line in finished.metrics]
    assert drift[0] < 1e-9 < drift[-1], "the first update starts at the reference, later ones have moved away"


@pytest.mark.sliced(floor=1)
@pytest.mark.parametrize(
    ("lora", "guided", "closer"),
    [((), "{}", 0.8), ((_LORA,), "{true_cfg_scale: 2.0}", 1.1)],  # a rank of 2 hardly moves in 6 updates
    ids=["full", "lora, guided teacher"],
)
def test_a_policy_comes_closer_to_its_teacher_without_scorers(
    recipe: Path, tmp_path: Path, lora: tuple[str, ...], guided: str, closer: float
) -> None:
    teacher = f"algorithm.teacher={{path: {build(tmp_path / 'teacher', layers=1, seed=1)}, sampling: {guided}}}"
    distill = ("algorithm.name=distill", teacher, "algorithm.clip_range_nats=null")
    alone = ("reward.scorers=[]", "rollout.group_size=1", "trainer.updates=6", "staleness.max_updates=1")
    same = ("algorithm.kl_form=exact", "rollout.sde.window.size=3")  # steps of every update
    finished = _done(run(recipe, *distill, *alone, *same, *lora, *_ADAMW), 6)
    distances = [line["kl_teacher"] for line in finished.metrics]
    assert distances[-1] < closer * distances[0]
    assert all(line["grad_norm"] > 0 for line in finished.metrics)
    assert all("reward" not in line for line in finished.metrics) and finished.summary.last_reward is None
    assert finished.actors == {"publisher", "rollout-0", "trainer"}, "no reward worker"
    assert finished.summary.counters.rejected == 0


def test_lora_gives_the_same_policy_whatever_travels(recipe: Path) -> None:
    full, lora = (_done(run(recipe, _LORA, *_ADAMW, f"weights.payload={payload}")) for payload in ("full", "lora"))
    names = full.weights().keys()
    assert names and all(".lora_" in name for name in names)
    # The same merged weights in the engine, so the same samples and rewards.
    assert [line["reward"] for line in full.metrics] == [line["reward"] for line in lora.metrics]
    # They do depend on the adapters:
    untrained = _done(run(recipe, _LORA, "trainer.optimizer.lr=1e-30"))
    assert [line["reward"] for line in untrained.metrics] != [line["reward"] for line in full.metrics]


# ---- preference files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["inprocess", pytest.param("ray", marks=[pytest.mark.thorough, pytest.mark.slow])])
def test_offline_dpo(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str) -> None:
    pairs = tmp_path / "pairs.parquet"
    monkeypatch.setattr("sys.argv", ["build_preferences", "--out", str(pairs), "--pairs", "8"])
    build_preferences.main()
    offline = ("rollout.group_size=2", "data.prompts=null", "reward.scorers=[]", f"data.preferences={pairs}")
    objective = ("algorithm.name=diffusion_dpo", *_FORWARD, "algorithm.dpo.beta=100", f"run.runtime={runtime}")
    finished = (run if runtime == "inprocess" else trained)(recipe, *objective, *offline, *_KEPT)
    assert finished.summary.status == "done" and moved(finished), finished.summary.reason
    ledger = finished.ledger
    assert [line["event"] for line in ledger] == ["trained"] * 6
    assert all(line["reward"] == 0.5 and line["staleness"] <= 1 and line["step_versions"] is None for line in ledger)
    assert finished.actors == {"reader", "trainer"}, "no engine, no reward worker, nothing published"
