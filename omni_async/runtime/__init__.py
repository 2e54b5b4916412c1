"""Builds, places, watches and replaces the roles of a run, in one process or on Ray.

`cluster.Cluster` is what the driver sees of either, with its `StartError` and `PeerLost`; `inprocess.InProcessCluster`
and `on_ray.cluster.RayCluster` are the two. What they share: `inputs.RunInputs`, from which `builders` builds every
role of `omni_async.config.role_table`, `plan_placements` (who gets which resources) and `keeper.Keeper` (lost workers
are replaced).
"""
