"""Decides everything about prompt groups, samples and policy versions: admission, leases, retries, staleness.

`coordinator.Coordinator` is the surface, which all roles call; the driver hears `events.RunEvent`s of it, and a
checkpoint keeps its `control_state.ControlState`. Beneath it are state machines without torch, Ray or a clock of their
own. `ledger` is their auditor: every admitted group ends once.
"""
