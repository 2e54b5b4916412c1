"""Reads a user's data: prompt files, preference files and the images that they name. Imports no torch.

The interface is `prompts.load_prompts` and `preferences.PreferencePairs`. A bad file raises ConfigError with one line
that names the place.
"""
