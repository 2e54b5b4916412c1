"""Holds a rank's model, behind `base.TrainBackend`.

`base.build_backend` builds the one that `trainer.backend` names: `fsdp2`, spread over ranks, or `plain`, whole on the
only rank, which is in `omni_async.training.model`, or another package's.
"""
