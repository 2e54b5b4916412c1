"""Runs a job in virtual time: the real control plane, and roles that take a profile's time in place of devices.

`simulate.simulate` predicts a job and returns a `Simulated`; `times_of` has the stage times that the law gives it.
`command` is `omni-async simulate`, and `sweep` derives what it compares. `virtual_time.run` is an event loop that
jumps, for real roles with emulated devices too; `simulated_engine` and `simulated_roles` are the fast path that
`simulate` takes instead.
"""
