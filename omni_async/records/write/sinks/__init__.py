"""Sends a run to the trackers that `tracking` enables: MLflow, Weights & Biases, TensorBoard, Prometheus.

`base` has the protocol that each of them implements. `feed` gives each its own thread and handles its failures.
`registry` opens the sinks of a configuration.
"""
