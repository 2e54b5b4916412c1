"""Defines the `reward` section: scorers, and the handling of scores that fail."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from omni_async.config.section import Pause, Retries, Seconds, Section, Workers, doc


class Scorer(Section, kw_only=True, frozen=True):
    name: Annotated[str, doc("A registered scorer; `omni-async list` shows them.")]
    weight: Annotated[float, doc("Factor in the weighted sum (weights are not normalised).", ge=-1e6, most=1e6)] = 1.0
    params: Annotated[dict[str, Any], doc("The scorer's own options.")] = msgspec.field(default_factory=dict)


class Reward(Section, kw_only=True, frozen=True):
    workers: Annotated[Workers, doc("Number of reward workers.")] = 1
    batch: Annotated[
        int,
        doc(
            "Most samples a worker scores at once; it never waits to fill a batch.",
            "a worker holds them all in memory",
            ge=1,
            most=100_000,
        ),
    ] = 8
    streaming: Annotated[
        bool,
        doc(
            "Score samples as they appear; false: only once everything that may be generated now is generated, as an"
            " in-step loop does."
        ),
    ] = True
    timeout_s: Annotated[Seconds, doc("Longest one call of a scorer may take.")] = 60.0
    hedge_s: Annotated[
        Seconds | None,
        doc(
            "A second call is made beside one that takes longer, and the first answer counts: for scorers that are"
            " `concurrent`. null: never."
        ),
    ] = None
    retries: Annotated[Retries, doc("Times a failed score is tried again before its group is rejected.")] = 3
    backoff_s: Annotated[
        Pause,
        doc(
            "Pause before a failed score is tried again, and before a scorer that is down is called again; it doubles"
            " every time."
        ),
    ] = 1.0
    backoff_max_s: Annotated[Seconds, doc("Longest such pause.")] = 30.0
    outage_s: Annotated[
        Pause,
        doc("How long samples wait for a scorer that is down (every call fails); then their groups are rejected."),
    ] = 600.0
    max_abs: Annotated[
        float,
        doc(
            "Largest absolute reward: a group with a larger one, or with a scorer whose weighted value is larger, is"
            " rejected with the reason.",
            gt=0,
            le=1e12,
        ),
    ] = 1e6
    probe: Annotated[
        bool,
        doc(
            "Let every scorer score a synthetic sample before samples are drawn, and end the run if it fails twice"
            " with the same error that is no outage. false: a scorer that has scored nothing yet counts as down."
        ),
    ] = True
    scorers: Annotated[tuple[Scorer, ...], doc("The reward is the weighted sum of these.")] = ()
