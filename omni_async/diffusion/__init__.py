"""Defines a diffusion policy: the model family's Protocol, a checkpoint's components, and the maths of the SDE."""
