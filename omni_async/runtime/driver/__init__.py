"""Takes a run from the command line to its summary: the process that owns every other.

`train.train` runs it, attempt after attempt, each a `session.Session` on a cluster of `omni_async.runtime`; the
`observer` turns events into console, metrics and sample files, and `results` writes what is left at the end. `operate`
has the commands that speak to a running job (`status`, `scale`, `stop`) over its `control_socket`.
"""
