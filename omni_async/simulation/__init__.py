"""Runs a job in virtual time: the real control plane, and roles that take a profile's time in place of devices.

- `simulate.simulate` predicts a job and returns a `Simulated`; `times_of` returns the job's stage times by the law.
- `omni_async.commands.simulate` is `omni-async simulate`; `sweep` derives the configurations that it compares.
- `virtual_time.run` is an event loop that jumps, also for real roles with emulated devices.
- `simulated_engine` and `simulated_roles` are the fast path, used by `simulate`.
"""
