"""Trains the policy: the engine of a trainer rank, the backends that hold the model, and the rows of losses.

- `engine.TrainEngine`: the interface for the trainer's role.
- `backends`: hold the model (FSDP2, plain, or another package's).
- `row_loss.RowLoss`: builds the rows and losses of a kind of objective.
- `groups.GroupBatch`: a rank's part of a prompt group.
- `device`: joins the ranks' process group.
- `TrainingError`: ends a run.
"""


class TrainingError(RuntimeError):
    """Training cannot continue: non-finite gradients, a checkpoint that does not fit, engine calls out of order."""
