"""Contains the objectives, pure functions on the inputs of `base`; `omni_async.algorithms.registry` lists them."""
