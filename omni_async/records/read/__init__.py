"""Reads the folders of runs, for every command that shows or uses them."""
