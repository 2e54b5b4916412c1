"""Implements `omni-async export`: a checkpoint as a folder or an adapter that diffusers loads."""
