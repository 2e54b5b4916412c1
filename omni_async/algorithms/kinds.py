"""Finds kinds of trained rows by name.

What objectives of one kind have in common, known without importing torch, and the class that makes rows and losses of
them.

Built-in kinds are listed in `built_in_kinds`; other packages add theirs through the entry-point group
`omni_async.kinds` (each entry point is a `Kind`). Nothing outside a kind asks which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_async.config.schema import Config
from omni_async.entry_points import find_registered, load_named

if TYPE_CHECKING:
    from omni_async.algorithms.registry import Objective

ENTRY_POINT_GROUP = "omni_async.kinds"


def _of_the_objective(objective: Objective, config: Config) -> tuple[str, ...]:
    return objective.fields


def _nothing(objective: Objective, config: Config) -> Iterator[str]:
    yield from ()


@dataclass(frozen=True)
class Kind:
    """A kind of rows that a loss is computed of.

    summary: what an objective of this kind does, as the predicate of a message ("trains on final latents").
    loss: `module:Class`, an `omni_async.training.row_loss.RowLoss`, made with (config, objective, policy, model,
        metrics, layout), the last an `omni_async.layout.ParallelLayout`.
    rows_per_sample: the number of trained rows of one sample; the loss of an update is the mean over all of them.
    noisy: whether it trains denoising steps that were taken with noise, so that rollout.sde must name a window;
        otherwise the steps of a sample carry none.
    ratio: whether rows have an importance ratio to the policy that made them, which algorithm.clip_range clips and
        algorithm.correction corrects; its loss then recomputes proximal log-probs.
    paired: whether a group's best and worst sample alone are trained, as a pair: every rank then has both, and
        their rows are dealt. Preference files are made of such pairs.
    fields: the trajectory tensors that engines must return for an objective under a configuration.
    problems: combinations of an objective and the rest of the configuration that cannot work, one message each, beside
        those that follow from the above.
    """

    name: str
    summary: str
    loss: str
    rows_per_sample: Callable[[Config], int]
    noisy: bool = False
    ratio: bool = False
    paired: bool = False
    fields: Callable[[Objective, Config], tuple[str, ...]] = _of_the_objective
    problems: Callable[[Objective, Config], Iterator[str]] = _nothing

    def load_loss(self) -> Callable[..., Any]:
        """Load the class of the losses (imports torch)."""
        found: Callable[..., Any] = load_named(self.loss)
        return found


def find_kind(name: str) -> Kind:
    """Return the kind called `name`; ValueError lists the known ones. A built-in name cannot be taken."""
    from omni_async.algorithms.built_in_kinds import BUILT_IN

    known = {kind.name: kind for kind in BUILT_IN}
    return known.get(name) or find_registered(name, ENTRY_POINT_GROUP, Kind, "kinds of rows", known)
