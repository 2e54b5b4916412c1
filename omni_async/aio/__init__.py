"""Extends asyncio with tools that are independent of runs.

`waiting.Event`, `first_of` and `unless` wait without lost wake-ups, and `Coalescer` batches calls; `clock.Clock` is
injected time; `threads.in_daemon_thread` runs blocking calls; a `supervisor.Supervisor` owns tasks; `backoff.Backoff`
computes pauses, and its `Breaker` decides whether to call a service at all.
"""
