"""Models how long stages take, and what a job made of them can reach at best. Pure: no torch, no Ray, no clock.

`Profile` holds the `ServiceTime` of every stage, `measure` fits one to the spans of a run; law.py counts the jobs of an
update and says how fast it can be; `Device` emulates one on an event loop.
"""
