"""Runs the roles as Ray actors, on a Ray of this machine or a cluster by address.

- `cluster.RayCluster` is the interface, and requests accelerators and other resources.
- `connection.connect` joins or starts Ray (`local`, whose processes `head` keeps).
- `shell` hosts a role in an actor; `store` stores tensors.
- `local.prepare_driver` sets Ray's environment variables, before anything imports Ray.
"""
