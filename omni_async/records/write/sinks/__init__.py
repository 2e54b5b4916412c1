"""Sends a run to the trackers that `tracking` enables: MLflow, Weights & Biases, TensorBoard, Prometheus.

`base` has the protocol that each of them implements; `feed` gives each a thread of its own and what happens when one
fails; `registry` opens those of a configuration.
"""
