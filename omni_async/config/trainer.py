"""Defines the section `trainer`: ranks, updates, optimizer, moving average."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta

from omni_async.config.section import MOST_UPDATES, MOST_WORKERS, Plain, Positive, Section, Updates, Workers, doc, most

Beta = Annotated[float, Meta(ge=0, lt=1)]


class Optimizer(Section, kw_only=True, frozen=True):
    name: Annotated[Literal["adamw", "sgd"], doc("Optimizer.")] = "adamw"
    lr: Annotated[float, doc("Learning rate after warm-up.", gt=0, most=1000)] = 3e-4
    betas: Annotated[tuple[Beta, Beta], doc("AdamW's betas.")] = (0.9, 0.999)
    eps: Annotated[
        float, doc("AdamW's epsilon: keep it <= 1e-8, gradients of mean log-ratios are small.", gt=0, most=1)
    ] = 1e-8
    weight_decay: Annotated[float, doc("Decoupled weight decay.", ge=0, most=1000)] = 1e-4
    momentum: Annotated[float, doc("SGD's momentum.", ge=0, lt=1)] = 0.0
    schedule: Annotated[Literal["constant", "linear", "cosine"], doc("Decay after warm-up, over trainer.updates.")] = (
        "constant"
    )
    warmup_steps: Annotated[int, doc("Optimizer steps of linear warm-up.", ge=0, most=MOST_UPDATES)] = 0
    max_grad_norm: Annotated[Positive | None, doc("Clip the gradient's global norm; null leaves it.")] = 1.0


class Ema(Section, kw_only=True, frozen=True):
    decay: Annotated[float, doc("Decay after warm-up.", ge=0, lt=1)] = 0.9
    warmup: Annotated[
        Literal["ratio", "linear"],
        doc("Decay of average t: `ratio` min((1 + t) / (10 + t), decay); `linear` min(.001 t, decay) (AWM)."),
    ] = "ratio"
    every: Annotated[Updates, doc("Optimizer steps between averages.")] = 8


class Trainer(Section, kw_only=True, frozen=True):
    backend: Annotated[
        Plain,
        doc(
            "How ranks hold the model: `fsdp2`, `plain` (one rank), or one of another package; `auto`: plain"
            " on one CPU rank (wrapping only costs time there), FSDP2 otherwise."
        ),
    ] = "auto"
    workers: Annotated[Workers, doc("Trainer ranks; each group's samples are dealt over them.")] = 1
    sequence_parallel: Annotated[
        int,
        doc("Ranks that compute each row together, every one a part of its tokens (Ulysses).", ge=1, most=MOST_WORKERS),
    ] = 1
    shard: Annotated[
        Annotated[int, most(MOST_WORKERS, ge=1)] | None,
        doc("Ranks that hold one copy of the weights together (HSDP); null spreads it over all of them."),
    ] = None
    offload: Annotated[bool, doc("Keep weights, gradients and optimizer state in host memory between their uses.")] = (
        False
    )
    compile: Annotated[bool, doc("Compile the repeated layers of each component with torch.compile.")] = False
    updates: Annotated[Updates, doc("Policy updates in this run.")] = 100
    groups_per_update: Annotated[
        int, doc("P: prompt groups per update.", "the groups of an update are alive at once", ge=1, most=10_000)
    ] = 4
    steps_per_update: Annotated[int, doc("Optimizer steps an update is cut into.", ge=1, most=10_000)] = 1
    micro_batch_size: Annotated[
        int,
        doc(
            "Rows (sample x trained step) per forward and backward on one rank.",
            "their activations are in memory at once",
            ge=1,
            most=100_000,
        ),
    ] = 8
    streaming: Annotated[
        Literal["auto", "on", "off"],
        doc(
            "Start a group's backward when it is ready instead of when the update is complete; `auto` does so wherever"
            " it is exact."
        ),
    ] = "auto"
    gradient_checkpointing: Annotated[bool, doc("Recompute activations in backward.")] = False
    ema: Annotated[
        Ema | None, doc("Keep an exponential moving average of the trained weights, saved with every checkpoint.")
    ] = None
    optimizer: Annotated[Optimizer, doc("Optimizer and schedule.")] = Optimizer()

    @property
    def fewest_ranks(self) -> int:
        """Return the least number of ranks that the degrees of sequences and copies divide."""
        return math.lcm(self.sequence_parallel, self.shard or 1)
