"""Contains the objectives: one pure function per file, on the inputs of `base`.

`omni_async.algorithms.registry` lists them."""
