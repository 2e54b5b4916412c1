"""Finds settings of `algorithm.correction` that contradict each other. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from omni_async.config.algorithm import Correction

_KS = ("k1", "k2", "k3")


def problems(settings: Correction) -> Iterator[str]:
    """Yield one message per combination that cannot work: the key, the reason, and what to use instead."""
    yield from _of_mode(settings)
    if settings.mode == "auto":
        return
    for name in ("band", "k1"):
        pair = getattr(settings, name)
        if pair is not None and pair[0] >= pair[1]:
            yield _problem(name, f"[{pair[0]}, {pair[1]}] is no interval", "lo < hi, such as [0.5, 2.0]")
    if settings.band is not None and settings.weights == "tempered":
        yield _problem(
            "band",
            "tempering already bounds the spread of the weights, and tempered ratios mean nothing to a band",
            "cap, or weights: importance",
        )
    if settings.level == "sequence" and settings.log_ratio == "sum":
        yield _problem(
            "level",
            "sequence is the sum over steps of log-ratios per element, and log_ratio is sum",
            "log_ratio: mean, or level: trajectory",
        )
    if settings.weights == "none":
        if settings.band is not None:
            yield _problem(
                "band",
                "it is a rule on importance weights and weights is none",
                "k1, which needs no weights, or weights: importance",
            )
        if settings.normalise:
            yield _problem(
                "normalise", "weights is none, so there is nothing to normalise", "denominator: kept, or weights"
            )


def _of_mode(settings: Correction) -> Iterator[str]:
    mode = settings.mode
    if mode == "auto":
        for name in settings.__struct_fields__:
            if name != "mode" and getattr(settings, name) != getattr(Correction(), name):
                yield _problem(
                    name, "mode auto decides on weights and masks itself", "mode: decoupled, or mode: bypass"
                )
    elif mode == "none":
        if settings.weights != "none":
            yield _problem(
                "weights", "mode none takes samples as if they were fresh", "mode: decoupled, or weights: none"
            )
        for name in ("kappa_nats", "m2", *_KS):
            if getattr(settings, name) is not None:
                yield _problem(
                    name, "mode none takes samples as if they were fresh and masks nothing", "mode: decoupled, or null"
                )
    elif mode == "bypass":
        if settings.weights != "none":
            yield _problem(
                "weights",
                "with mode bypass the ratio is taken to the behaviour policy already, whose distance a weight would"
                " count twice",
                "mode: decoupled, or weights: none",
            )
        for name in ("kappa_nats", "m2"):
            if getattr(settings, name) is not None:
                yield _problem(
                    name,
                    "it measures the proximal policy against the behaviour policy, and mode bypass knows no proximal"
                    " policy",
                    "mode: decoupled, or k1, k2 or k3",
                )
    elif mode == "interpolated" and settings.kappa_nats is not None:
        yield _problem(
            "kappa_nats",
            "mode interpolated estimates the proximal log-prob and has no proximal mean",
            "mode: decoupled, or k1, k2 or k3",
        )


def _problem(name: str, reason: str, instead: str) -> str:
    return f"algorithm.correction.{name}: {reason}; use {instead}"
