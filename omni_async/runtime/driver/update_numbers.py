"""Names the numbers of an update, as in `metrics.jsonl` and in the charts of trackers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from omni_async.config import Config


def update_numbers(
    config: Config,
    data: Mapping[str, Any],
    *,
    images_per_s: float,
    wall_s: float,
    stages: Mapping[str, float],
    busy: Mapping[str, float],
    devices: Mapping[str, float],
) -> dict[str, float]:
    """Return the numbers of an update by metric name; `records/write/metrics.py` has their meanings.

    Args:
        config: the recipe.
        data: the data of the coordinator's event `update`.
        images_per_s: recent training samples per second.
        wall_s: seconds of the run.
        stages: seconds per stage since the last update, by metric name.
        busy: recent busy shares by role.
        devices: numbers of accelerators, by metric name."""
    staleness, buffers, admission = data["staleness"], data["buffers"], data["admission"]
    several_buckets = bool(config.rollout.buckets) and not config.unscored
    return {
        **({} if config.unscored else {"reward": data["reward"]}),
        **{f"reward/{name}": value for name, value in data["parts"].items()},
        **({f"reward/bucket{number}": mean for number, mean in data["buckets"].items()} if several_buckets else {}),
        "staleness/mean": sum(staleness) / len(staleness),
        "staleness/max": max(staleness),
        "images": data["images"],
        "images_per_s": images_per_s,
        **answer_numbers(data.get("answers", ()), images_per_s),
        "encoder/calls": data["encoded"],
        **({"encoder/hits": 1 - data["encoded"] / data["drawn"]} if data["drawn"] else {}),
        **({"prefix/shared": data["shared_steps"] / data["steps"]} if _shares_prefix(config, data) else {}),
        "score_cache/hits": data["cached"],
        **_of_scorers(data["scorers"]),
        "admission/lead_s": admission.lead_s,
        "admission/work_s": admission.work_s,
        "admission/reserve_s": admission.reserve_s,
        "admission/starved_s": admission.starved_s,
        "update_s": data["finished"] - data["started"],
        "wall_s": wall_s,
        **data["metrics"],
        **stages,
        **{f"busy/{role}": share for role, share in busy.items()},
        **{f"buffers/{name}": held["reserved"] for name, held in buffers.items() if "reserved" in held},
        "buffers/bytes_held/max": buffers["bytes"]["most"],
        **devices,
    }


def _shares_prefix(config: Config, data: Mapping[str, Any]) -> bool:
    return config.rollout.share_prefix and bool(data["steps"])


def answer_numbers(answers: Sequence[tuple[int, int]], answers_per_s: float) -> dict[str, float]:
    """Return the numbers of an update's answers; none for a model that draws latents.

    Args:
        answers: tokens and versions of each trained answer.
        answers_per_s: of all generated answers, whose mean length is taken to be that of the trained ones."""
    if not answers:
        return {}
    lengths = sorted(length for length, _ in answers)
    return {
        "tokens_per_s": answers_per_s * fmean(lengths),
        "answer_tokens/median": median(lengths),
        "answer_tokens/p95": lengths[math.ceil(0.95 * len(lengths)) - 1],
        "answer_versions": fmean(versions for _, versions in answers),
    }


def _of_scorers(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the cost of every scorer since the last update, by metric name."""
    return {f"scorer/{label}/{name}": value for label, one in found.items() for name, value in one.items()}
