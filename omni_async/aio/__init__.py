"""Extends asyncio, with tools that know nothing of a run.

`waiting.Event`, `first_of` and `unless` wait without lost wake-ups, and `Coalescer` batches calls; `clock.Clock` is
injected time; `threads.in_daemon_thread` calls what blocks; a `supervisor.Supervisor` owns tasks; `backoff.Backoff`
says how long to pause, its `Breaker` whether to ask at all.
"""
