"""Defines the section `trainer`: ranks, optimizer and averages."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta

from omni_async.config.section import (
    MOST_UPDATES,
    MOST_WORKERS,
    Alive,
    InMemory,
    Plain,
    Positive,
    Section,
    Updates,
    Workers,
    most,
)

Beta = Annotated[float, Meta(ge=0, lt=1)]


class StepSize(Section, kw_only=True, frozen=True):
    by: Literal["drift", "ess"]
    """What is measured on the rows of an optimizer step, before it is taken. `drift`: D kappa, as half the variance of
    the log-ratios in nats; the rate has the factor sqrt(target / drift). `ess`: effective sample size of the steps'
    importance weights; the factor is sqrt(ess / target), as in VCPO."""
    target: Positive
    """Drift in nats, or effective sample size in (0, 1]. The rate is unchanged until it is missed."""


class Optimizer(Section, kw_only=True, frozen=True):
    name: Literal["adamw", "sgd"] = "adamw"
    """Optimizer."""
    lr: Annotated[float, most(1000, gt=0)] = 3e-4
    """Learning rate after warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's betas."""
    eps: Annotated[float, most(1, gt=0)] = 1e-8
    """AdamW's epsilon: keep it <= 1e-8, gradients of mean log-ratios are small."""
    weight_decay: Annotated[float, most(1000, ge=0)] = 1e-4
    """Decoupled weight decay."""
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """SGD's momentum."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after warm-up, over trainer.updates."""
    warmup_steps: Annotated[int, most(MOST_UPDATES, ge=0)] = 0
    """Optimizer steps of linear warm-up."""
    max_grad_norm: Positive | None = 1.0
    """Clip the gradient's global norm; null does not clip."""
    max_alignment: Annotated[float, Meta(ge=0, lt=1)] | None = None
    """Largest cosine between the gradient and the optimizer's momentum, an average of earlier gradients: the part of
    the gradient along the momentum that exceeds it is removed. null: any."""
    step_size: StepSize | None = None
    """Lower the learning rate of optimizer steps whose samples' policy is far from the trained one; null: never."""
    fused: bool | None = None
    """Use AdamW in one kernel, without temporary copies of the weights; its last bits differ. Null: on accelerators
    whose torch has the kernel."""


class Ema(Section, kw_only=True, frozen=True):
    decay: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """Decay after warm-up."""
    warmup: Literal["ratio", "linear"] = "ratio"
    """Decay of average t: `ratio` min((1 + t) / (10 + t), decay); `linear` min(.001 t, decay) (AWM)."""
    every: Updates = 8
    """Optimizer steps between averages."""


class Trainer(Section, kw_only=True, frozen=True):
    backend: Plain = "auto"
    """Distribution of the model over ranks: `fsdp2`, `plain` (one rank), or a backend of another package; `auto`: plain
    on one CPU rank (wrapping only costs time there), FSDP2 otherwise."""
    workers: Workers = 1
    """Trainer ranks; each group's samples are dealt over them."""
    sequence_parallel: Annotated[int, most(MOST_WORKERS, ge=1)] = 1
    """Ranks that compute each row together, each a part of its tokens (Ulysses)."""
    shard: Annotated[int, most(MOST_WORKERS, ge=1)] | None = None
    """Ranks that hold one copy of the weights together (HSDP); null spreads it over all ranks."""
    offload: bool = False
    """Keep weights, gradients and optimizer state in host memory between their uses."""
    gather: Literal["layer", "step"] = "layer"
    """Time at which ranks gather the sharded weights. `layer`: before every pass of a layer, freed after it. `step`:
    once per optimizer step, kept until it; a device then holds all weights in `model.dtype`. Both give the same
    bits."""
    compile: bool = False
    """Compile the repeated layers of each component with torch.compile."""
    updates: Updates = 100
    """Policy updates in this run."""
    groups_per_update: Alive = 4
    """P: prompt groups per update."""
    steps_per_update: Annotated[int, most(10_000, ge=1)] = 1
    """Optimizer steps per update."""
    micro_batch_size: InMemory = 8
    """Rows (sample x trained step) per forward and backward on one rank."""
    micro_batch_tokens: Annotated[int, most(2**24, ge=1)] = 8192
    """Tokens of prompts and answers in a forward and backward on one rank, for objectives on tokens; a longer sequence
    is computed alone. Answers to one prompt share its images."""
    groups_per_micro_batch: Alive = 1
    """Prompt groups whose rows share micro-batches, for a `micro_batch_size` above a rank's rows of one group. Groups
    wait for each other. It must divide the groups of an optimizer step; groups of different buckets never share."""
    max_mismatch: Positive | None = 0.01
    """Largest difference per latent element, or mean difference per token, between log-probs of engine and trainer in
    the first update, when both hold the same weights. Rounding, even bfloat16's, is far below it; above it the run
    fails. Null: only warn."""
    streaming: Literal["auto", "on", "off"] = "auto"
    """Start a group's backward when it is ready instead of when the update is complete; `auto`: whenever that is
    exact."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward."""
    peak_tflops: Annotated[float, most(1_000_000, gt=0)] | None = None
    """Peak TFLOP/s of a rank's device in `model.dtype`, the reference of `mfu`. Null: the data sheet's, if the device
    is known and computes in bfloat16."""
    ema: Ema | None = None
    """Keep an exponential moving average of the trained weights, saved with every checkpoint."""
    optimizer: Optimizer = Optimizer()
    """Optimizer and schedule."""

    @property
    def fewest_ranks(self) -> int:
        """Return the least number of ranks that both `sequence_parallel` and `shard` divide."""
        return math.lcm(self.sequence_parallel, self.shard or 1)
