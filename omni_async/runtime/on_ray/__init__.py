"""Runs the roles as Ray actors, on a Ray of this machine or a cluster by address.

`cluster.RayCluster` is the surface. `connection` joins or starts Ray (`local`, whose processes `head` keeps),
`resources` asks it for accelerators and room, `shell` hosts a role in an actor, `store` holds tensors, `processes` ends
an actor's process.
"""
