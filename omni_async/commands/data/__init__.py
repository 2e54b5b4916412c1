"""Examines and converts the tables of prompts that a user brings, for `omni-async data`."""
