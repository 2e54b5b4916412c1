"""Lists the published arrangements that the shipped profiles reproduce, as overrides of the recipe that uses each.

`law_s` is the law's step of an arrangement. `docs/profiles.md` explains them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omni_async.config import load
from omni_async.performance.law import async_step
from omni_async.performance.profile import Profile, load_profile
from omni_async.simulation.result import times_of

RECIPES = Path(__file__).parents[1] / "recipes" / "emulated"


@dataclass(frozen=True)
class Reproduced:
    """A published step, and the recipe with overrides for the published arrangement.

    `hand_overs`: a GPU's changes of roles in a step of the arrangement that the keys cannot express."""

    profile: str
    title: str
    seconds: float
    overrides: tuple[str, ...]
    hand_overs: int = 0


_IN_STEP = (
    "schedule=null",
    "staleness.max_updates=0",
    "trainer.streaming=off",
    "buffer.groups=512",
    "buffer.trajectories=512",
)
_ON_FOUR = ("rollout.workers=4", "trainer.workers=4")

REPRODUCED = (
    Reproduced(
        "qwen_image_lora_h800",
        "4 H800, reward on the same GPUs",
        420.0,
        (
            *_IN_STEP,
            *_ON_FOUR,
            "rollout.max_batch=1",
            "reward.workers=4",
            "reward.streaming=false",
            "placement.colocated=true",
        ),
    ),
    Reproduced(
        "qwen_image_lora_h800",
        "4 H800, reward on a fifth while samples are generated",
        360.0,
        (*_IN_STEP, *_ON_FOUR, "rollout.max_batch=1", "reward.workers=1", "reward.streaming=true"),
        hand_overs=2,
    ),
    Reproduced(
        "qwen_image_full_h200",
        "4 H200, reward on the same GPUs",
        250.0,
        (*_IN_STEP, *_ON_FOUR, "reward.workers=4", "reward.streaming=false", "placement.colocated=true"),
    ),
    Reproduced(
        "qwen_image_full_h100_64",
        "64 H100, reward on the same GPUs",
        100.0,
        (
            *_IN_STEP,
            "rollout.workers=8",
            "trainer.workers=8",
            "reward.workers=8",
            "reward.streaming=false",
            "placement.colocated=true",
        ),
    ),
    Reproduced(
        "wan22_dance",
        "8 NPUs, one reward worker beside them",
        2160.4,
        (
            *_IN_STEP,
            "rollout.workers=8",
            "rollout.max_batch=1",
            "trainer.workers=8",
            "reward.workers=1",
            "reward.streaming=true",
            "placement.colocated=true",
            "placement.reward.gpus=0",  # not on the NPUs that the others share
        ),
    ),
    Reproduced(
        "qwen3_omni_thinker",
        "4 H100, trainer and engine in turn",
        1260.0,
        (*_IN_STEP, "reward.streaming=false", "placement.colocated=true"),
    ),
)


def law_s(arrangement: Reproduced, profile: Profile | None = None) -> float:
    """Return the law's seconds per step of a published arrangement."""
    config = load(RECIPES / f"{arrangement.profile}.yaml", arrangement.overrides)
    profile = profile or load_profile(arrangement.profile)
    return async_step(times_of(config, profile), 0) + arrangement.hand_overs * profile.switch.mean()


def table(profiles: dict[str, Profile] | None = None) -> str:
    """Return published steps and the law's, as markdown."""
    lines = ["| profile | published arrangement | published s | law s | difference |", "|---|---|---|---|---|"]
    for arrangement in REPRODUCED:
        seconds = law_s(arrangement, (profiles or {}).get(arrangement.profile))
        difference = abs(seconds / arrangement.seconds - 1)
        lines.append(
            f"| {arrangement.profile} | {arrangement.title} | {arrangement.seconds:g} | {seconds:.1f} |"
            f" {difference:.1%} |"
        )
    return "\n".join(lines)
