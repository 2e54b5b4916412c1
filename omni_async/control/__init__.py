"""Decides everything about prompt groups, samples and policy versions: admission, leases, retries, staleness.

`coordinator.Coordinator` is the surface that all roles call. The driver receives its `events.RunEvent`s, and a
checkpoint contains its `control_state.ControlState`. `plane.ControlPlane` owns the state machines beneath it, which use
no torch, no Ray and no clock. `ledger` is their auditor: every admitted group ends once.
"""
