"""Tests whole runs in one process, each with one setting away from the defaults: they end, and every admitted group
ends once."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from PIL import Image

from omni_async.config import load
from omni_async.driver.train import train
from omni_async.families import MediaShape
from omni_async.preflight.check import preflight
from pipelines.qwen_image.sampling import QwenImageSampling
from tests.e2e.runs import Run, check_every_group_ended_once, run

_EMULATED = ("rollout.engine=emulated", "rollout.emulated.step_s=0.002", "trainer.optimizer.lr=1e-6")
_ADAMW = ("trainer.optimizer.name=adamw", "trainer.optimizer.lr=1e-2")
_LORA = "model.lora={rank: 2, alpha: 4}"


def _done(finished: Run, updates: int) -> Run:
    assert finished.summary.status == "done", finished.summary.reason
    check_every_group_ended_once(finished)
    assert [line["update"] for line in finished.metrics] == list(range(1, updates + 1))
    assert finished.summary.counters.dropped == 0
    return finished


@pytest.mark.parametrize(
    ("engine", "swap", "batching"),
    [
        *((engine, swap, "step") for swap in ("step", "request", "drain") for engine in ("diffusers", "emulated")),
        *(("diffusers", swap, "request") for swap in ("request", "drain")),
    ],
)
def test_every_swap_mode_ends_and_keeps_the_budget(recipe: Path, engine: str, swap: str, batching: str) -> None:
    emulated = _EMULATED if engine == "emulated" else ()
    overrides = (
        "staleness.max_updates=2",
        "trainer.updates=5",
        "rollout.max_inflight=6",
        "rollout.max_batch=3",
        f"weights.swap={swap}",
        f"rollout.batching={batching}",
    )
    finished = _done(run(recipe, *emulated, *overrides), 5)
    events = [event for event in finished.trace if event["ph"] == "X"]
    swapped = [event["args"]["version"] for event in events if event["name"] == "swap"]
    assert swapped == sorted(swapped) and swapped[0] == 0 and swapped[-1] == 5
    mixed = [event for event in events if event["name"] == "generate" and ".." in event["args"]["versions"]]
    assert swap == "step" or not mixed, "only a swap between two steps may fall inside a sample"


def test_a_swap_between_two_steps_mixes_versions_within_samples(recipe: Path) -> None:
    # Slow enough that the engine is busy whenever a version arrives, and hardly ever just between two samples.
    slow = (
        "rollout.emulated.step_s=0.02",
        "rollout.num_inference_steps=12",
        "rollout.sde.window={size: 4, range: [0, 11]}",
    )
    finished = _done(
        run(recipe, *_EMULATED, *slow, "staleness.max_updates=2", "trainer.updates=5", "rollout.max_batch=3"), 5
    )
    generated = [event for event in finished.trace if event["name"] == "generate" and event["ph"] == "X"]
    assert [event for event in generated if ".." in event["args"]["versions"]]


@pytest.mark.parametrize(
    ("overrides", "updates"),
    [
        pytest.param(("buffer.window=3", "staleness.max_updates=1"), 3, id="window"),
        pytest.param(
            ("weights.publish_every=2", "staleness.max_updates=1", "trainer.updates=5"),
            5,
            id="publish_every, last update odd",
        ),
        pytest.param(
            ("weights.publish_every=3", "staleness.max_updates=2", "trainer.updates=3"),
            3,
            id="smallest S for publish_every",
        ),
        pytest.param(("trainer.steps_per_update=2",), 3, id="steps_per_update, global std"),
        pytest.param(
            ("trainer.steps_per_update=2", "algorithm.advantage.std=group"), 3, id="steps_per_update, group std"
        ),
        pytest.param(("buffer.trajectories=2", "buffer.groups=2", "staleness.max_updates=3"), 3, id="tight buffers"),
        pytest.param(("buffer.trajectories=1", "buffer.groups=1", "staleness.max_updates=1"), 3, id="tightest buffers"),
        pytest.param(
            ("rollout.workers=3", "rollout.max_inflight=2", "staleness.max_updates=1", "reward.workers=2"),
            3,
            id="several workers",
        ),
        pytest.param(
            ("trainer.updates=1", "trainer.groups_per_update=1", "staleness.max_updates=4"),
            1,
            id="one update, large budget",
        ),
        pytest.param(
            ("rollout.share_initial_noise=true", "rollout.sampling.true_cfg_scale=2"), 3, id="shared noise, guidance"
        ),
        pytest.param(("buffer.max_bytes=256KiB", "staleness.max_updates=3"), 3, id="bytes"),
    ],
)
def test_loop_settings(recipe: Path, overrides: tuple[str, ...], updates: int) -> None:
    _done(run(recipe, *overrides), updates)


@pytest.mark.parametrize("engine", ["diffusers", "emulated"])
def test_groups_of_several_resolutions_are_trained_in_one_update(recipe: Path, engine: str) -> None:
    buckets = "rollout.buckets=[{}, {sampling: {height: 48, true_cfg_scale: 2}, weight: 2}, {sampling: {width: 64}}]"
    overrides = (buckets, "trainer.groups_per_update=6", "staleness.max_updates=1", "validation=null")
    finished = _done(run(recipe, *(_EMULATED if engine == "emulated" else ()), *overrides), 3)
    rewards = [name for line in finished.metrics for name in line if name.startswith("reward/bucket")]
    assert set(rewards) == {f"reward/bucket{number}" for number in range(3)}
    if engine == "diffusers":
        assert finished.metrics[0]["engine_mismatch_nats"] < 0.01, (
            "every group was recomputed in its own shape, and with its own guidance"
        )


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("algorithm.kl_coef=0.1",), id="full"),
        pytest.param(("algorithm.kl_coef=0.1", _LORA), id="lora"),
    ],
)
def test_a_kl_term_needs_the_reference_policy(recipe: Path, overrides: tuple[str, ...]) -> None:
    finished = _done(run(recipe, *overrides, *_ADAMW), 3)
    drift = [line["kl_ref"] for line in finished.metrics]
    assert drift[0] < 1e-9 < drift[-1], "the first update starts at the reference, later ones have moved away"


def test_lora_gives_the_same_policy_whatever_travels(recipe: Path) -> None:
    full, lora = (_done(run(recipe, _LORA, *_ADAMW, f"weights.payload={payload}"), 3) for payload in ("full", "lora"))
    names = full.weights().keys()
    assert names and all(".lora_" in name for name in names)
    # The same merged weights in the engine, so the same samples and rewards.
    assert [line["reward"] for line in full.metrics] == [line["reward"] for line in lora.metrics]
    # They do depend on the adapters:
    untrained = _done(run(recipe, _LORA, "trainer.optimizer.lr=1e-30"), 3)
    assert [line["reward"] for line in untrained.metrics] != [line["reward"] for line in full.metrics]


def test_validation_curve_and_images(recipe: Path) -> None:
    (recipe.parent / "held_out.txt").write_text("a blue digit\nthe digit 9\n")
    validation = "validation={every: 2, prompts: %s, samples_per_prompt: 2, num_inference_steps: 5}" % (
        recipe.parent / "held_out.txt"
    )
    finished = _done(
        run(recipe, validation, "trainer.updates=3", "staleness.max_updates=1", "tracking.images_every=2"), 3
    )
    assert [point.version for point in finished.summary.validation] == [0, 2, 3]
    assert [line["update"] for line in finished.validation] == [0, 2, 3]
    first, *_, last = finished.summary.validation
    assert first.value == -first.parts["jpeg_kb"] != last.value
    images = {path.stem: Image.open(path) for path in (finished.path / "samples").iterdir()}
    assert {"train-000001", "train-000002", "train-000003", "validation-000000", "validation-000003"} <= images.keys()
    for image in images.values():
        image.load()
        assert min(image.size) >= 32


class FilmSampling(QwenImageSampling, frozen=True, kw_only=True):
    """Samples of a video model with sound, of which emulated engines make media."""

    def media(self) -> tuple[MediaShape, ...]:
        return MediaShape("video", (5, 3, self.height, self.width), 8), MediaShape("audio", (1, 800), 8000)


def test_videos_with_sound_are_scored_and_written(recipe: Path) -> None:
    scorers = 'reward.scorers=[{name: "tests.e2e.scorers:Redness"}]'
    config = load(recipe, [*_EMULATED, "trainer.updates=2", scorers])
    size = config.rollout.sampling
    film = FilmSampling(height=size.height, width=size.width)
    config = replace(config, rollout=replace(config.rollout, sampling=film))
    summary = train(preflight(config))
    finished = _done(Run(config, Path(config.run.dir) / summary.run, summary), 2)
    files = {path.name for path in (finished.path / "samples").iterdir()}
    assert {"train-000001.png", "train-000001-00.mp4", "train-000001-00.wav", "train-000002-00.mp4"} <= files
