"""Simulates a job in virtual time: the real control plane, with simulated roles that take a profile's time in place
of devices. Imports no torch and no Ray."""
