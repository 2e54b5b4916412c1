"""Makes media of images as scorers see them, and has a whole reward score them."""

from __future__ import annotations

from functools import partial

import numpy as np

from omni_async.media import Media
from omni_async.rewards.base import require_media, require_scores, shown_to
from omni_async.rewards.failures import call_discreetly
from omni_async.rewards.loaded import LoadedReward
from omni_async.types import Prompt, Score


def as_media(pixels: np.ndarray) -> Media:
    """Makes the media of an image (height, width, 3) uint8."""
    return Media(image=np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def score_all(reward: LoadedReward, media: list[Media], prompts: list[Prompt]) -> list[Score]:
    """Scores without threads, retries and waiting; what a scorer raises is raised."""
    require_media(media, prompts)
    rows = []
    for label, (scorer, secrets, _) in zip(reward.formula.labels, reward.scorers, strict=True):
        shown = shown_to(label, scorer, media)
        scores = call_discreetly(partial(scorer.score, shown, prompts), secrets)
        rows.append(require_scores(label, scores, prompts))
    return [reward.formula.combine(dict(enumerate(row))) for row in zip(*rows, strict=True)]
