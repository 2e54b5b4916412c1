"""Builds, places, watches and replaces the roles of a run, in one process or on Ray.

The driver uses `cluster.Cluster`, with its errors `StartError` and `PeerLost`. Two classes implement it:
`inprocess.InProcessCluster` and `on_ray.cluster.RayCluster`. Both share:
- `RunInputs` of `omni_async.roles`, the input of the builders of every role of `omni_async.config.role_table`,
- `plan_placements`, which assigns resources to actors,
- `keeper.Keeper`, which replaces lost workers.
"""
