"""A job in virtual time: the real control plane, and roles that take a profile's time in place of devices.

`virtual_time` is the event loop that jumps; real roles with emulated devices run on it too. `simulate` predicts a job,
`command` is `omni-async simulate`, and `sweep` derives what it compares. `simulated_roles` are the fast path that it
takes instead of the real roles.
"""
