"""Holds a rank's model, behind `base.TrainBackend`.

`base.build_backend` builds the backend that `trainer.backend` names: `fsdp2`, spread over ranks; `plain`, whole on the
only rank (in `omni_async.training.model`); or another package's.
"""
