"""Implements `omni-async init`: a commented recipe for a model, prompts and a reward."""
