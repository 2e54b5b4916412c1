"""Defines the `reward` section: scorers, and the handling of scores that fail."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from omni_async.config.section import A_PROCESS_EACH, MOST_SECONDS, MOST_WORKERS, Seconds, Section
from omni_async.config.section import doc as _doc


class Scorer(Section, kw_only=True, frozen=True):
    name: Annotated[str, _doc("A registered scorer; `omni-async list` shows them.")]
    weight: Annotated[float, _doc("Factor in the weighted sum (weights are not normalised).", ge=-1e6, most=1e6)] = 1.0
    params: Annotated[dict[str, Any], _doc("The scorer's own options.")] = msgspec.field(default_factory=dict)


class Reward(Section, kw_only=True, frozen=True):
    workers: Annotated[int, _doc("Number of reward workers.", A_PROCESS_EACH, ge=1, most=MOST_WORKERS)] = 1
    batch: Annotated[
        int,
        _doc(
            "Most samples a worker scores at once; it never waits to fill a batch.",
            "a worker holds them all in memory",
            ge=1,
            most=100_000,
        ),
    ] = 8
    streaming: Annotated[
        bool,
        _doc(
            "Score samples as they appear; false: only once everything that may be generated now is generated, as an"
            " in-step loop does."
        ),
    ] = True
    timeout_s: Annotated[float, _doc("Longest one call of a scorer may take.", gt=0, most=MOST_SECONDS)] = 60.0
    hedge_s: Annotated[
        Seconds | None,
        _doc(
            "A second call is made beside one that takes longer, and the first answer counts: for scorers that are"
            " `concurrent`. null: never."
        ),
    ] = None
    retries: Annotated[
        int, _doc("Times a failed score is tried again before its group is rejected.", ge=0, most=1000)
    ] = 3
    backoff_s: Annotated[
        float,
        _doc(
            "Pause before a failed score is tried again, and before a scorer that is down is called again; it doubles"
            " every time.",
            ge=0,
            most=MOST_SECONDS,
        ),
    ] = 1.0
    backoff_max_s: Annotated[float, _doc("Longest such pause.", gt=0, most=MOST_SECONDS)] = 30.0
    outage_s: Annotated[
        float,
        _doc(
            "How long samples wait for a scorer that is down (every call fails); then their groups are rejected.",
            ge=0,
            most=MOST_SECONDS,
        ),
    ] = 600.0
    max_abs: Annotated[
        float,
        _doc(
            "Largest absolute reward: a group with a larger one, or with a scorer whose weighted value is larger, is"
            " rejected with the reason.",
            gt=0,
            le=1e12,
        ),
    ] = 1e6
    probe: Annotated[
        bool,
        _doc(
            "Let every scorer score a synthetic sample before samples are drawn, and end the run if it fails twice"
            " with the same error that is no outage. false: a scorer that has scored nothing yet counts as down."
        ),
    ] = True
    scorers: Annotated[tuple[Scorer, ...], _doc("The reward is the weighted sum of these.")] = ()
