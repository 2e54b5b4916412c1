"""Models the duration of stages, and the best throughput of a job. Pure: no torch, no Ray, no clock.

A `Profile` holds the `ServiceTime` of every stage: `load_profile` reads one, `measure` fits one to the spans of a run.
`law` computes `StageTimes` from it, the seconds per update; `async_step` returns the least seconds between updates.
`emulation.Device` replays such times on an event loop; a worker's `Draws` samples them.
"""
