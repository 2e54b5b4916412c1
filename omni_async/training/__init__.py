"""Trains: the engine of one trainer rank, how ranks hold the model, and what losses are computed of.

`engine.TrainEngine` is what the trainer's role calls; `backends` hold the model (FSDP2, plain, or another package's);
`row_loss.RowLoss` makes rows and losses of a kind of objective; `groups.GroupBatch` is a rank's part of a prompt group;
`device` joins the ranks' process group; `TrainingError` ends a run.
"""


class TrainingError(RuntimeError):
    """Training cannot go on: non-finite gradients, a checkpoint that does not fit, engine calls out of order."""
