"""Takes a run from the command line to its summary: the process that owns every other.

`train.train` runs attempts one after another, each a `session.Session` on a cluster of `omni_async.runtime`. The
`observer` turns events into console lines, metrics and sample files; `results` writes the final files. The commands
for a running job (`status`, `scale`, `stop`) are in `omni_async.commands.operate` and use its `control_socket`.
"""
