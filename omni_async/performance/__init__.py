"""Models how long stages take, and what a job made of them can reach at best. Pure: no torch, no Ray, no clock.

A `Profile` holds the `ServiceTime` of every stage: `load_profile` reads one, `measure` fits one to the spans of a run.
law.py makes `StageTimes` of it, the seconds per update, of which `async_step` says how fast updates can be.
`emulation.Device` takes such times on an event loop, as a worker's `Draws` deal them.
"""
