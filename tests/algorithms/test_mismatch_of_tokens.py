"""Tests the mismatch of engine and trainer on tokens, which have log-ratios and no velocity."""

from omni_async.algorithms.mismatch import AutomaticCorrection, Mismatch


def metrics_of(clipped: float) -> dict[str, float]:
    nats = {"engine_mismatch_nats/mean": -0.5, "engine_mismatch_nats/variance": 4.0}
    return {**nats, "engine_mismatch_clipped": clipped, "fresh_fraction": 1.0, "drift_clipped": clipped}


def test_the_mismatch_of_tokens_has_no_velocity() -> None:
    found = Mismatch.of(metrics_of(0.25))
    assert found is not None and found.velocity is None
    assert found.shown == "log-ratio -0.5 ± 2 nats, 25% of the rows outside the clip range before any update"


def test_rounding_of_tokens_ends_bypass() -> None:
    kept, left = AutomaticCorrection(), AutomaticCorrection()
    kept.learn(metrics_of(0.01))
    left.learn(metrics_of(0.25))
    assert (kept.reason, left.reason) == (None, "rounding") and left.correction.mode == "decoupled"
