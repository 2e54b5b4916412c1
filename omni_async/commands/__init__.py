"""Implements the commands of `omni-async`, a module or a package for each."""
