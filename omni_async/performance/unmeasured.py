"""Finds stages that a job needs and its profile has no time for: a run that never did something could not measure it.

Only the trainer's proximal pass follows from something else that was measured; the others count as nothing, which can
only be reported. Pure.
"""

from __future__ import annotations

from msgspec.structs import replace

from omni_async.config import Config
from omni_async.performance.profile import Profile
from omni_async.performance.service import NOTHING


def with_estimates(profile: Profile, config: Config) -> Profile:
    """Return the profile with `proximal`, a forward pass, estimated from `train` where it has no time for it.

    The same profile if it has, or has none for either."""
    if profile.proximal != NOTHING or profile.train == NOTHING:
        return profile
    return replace(profile, proximal=profile.train.scaled(1 / _passes(config)))


def _passes(config: Config) -> int:
    """Count a group's training in forward passes.

    Backward costs two, or one through weights that are frozen; with gradient checkpointing activations are computed a
    second time."""
    backward = 1 if config.model.lora is not None else 2
    return 1 + config.trainer.gradient_checkpointing + backward


def unmeasured(profile: Profile, config: Config, *, recomputes_proximal: bool) -> list[str]:
    """Return a sentence for every stage that the job needs and the profile has no time for.

    `profile`: as it was read, without estimates. `recomputes_proximal`: the trainer recomputes log-probs."""
    sentences: list[str] = []
    if recomputes_proximal and profile.proximal == NOTHING and profile.train != NOTHING:
        sentences.append(
            f"profile {profile.name} has no time for proximal, the pass that recomputes log-probs for the correction:"
            f" estimated as 1/{_passes(config)} of a group's training; a run that needs the pass measures it"
        )
    needed = ["generate", "score", "train", "step", "export", "publish", "swap"]
    needed += ["switch"] if config.placement.colocated else []
    stages = profile.stages()
    if missing := [stage for stage in needed if stages[stage] == NOTHING]:
        sentences.append(f"profile {profile.name} has no time for {', '.join(missing)}: counted as 0 s")
    return sentences
