"""Defines a diffusion policy: its model family's Protocol, a checkpoint's components, and the maths of its SDE."""
