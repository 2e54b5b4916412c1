"""Runs the roles as Ray actors, on a Ray of this machine or a cluster by address.

`cluster.RayCluster` is the surface, and asks for accelerators and room. `connection.connect` joins or starts Ray
(`local`, whose processes `head` keeps), `shell` hosts a role in an actor, `store` holds tensors. Before anything
imports Ray, `local.prepare_driver` sets what it reads then.
"""
