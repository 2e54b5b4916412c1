"""Reads what a user brings: prompt files, preference files and the images that they name. Imports no torch.

`prompts.load_prompts` and `preferences.PreferencePairs` are the surface; what is wrong with a file is a ConfigError of
one line that says where.
"""
