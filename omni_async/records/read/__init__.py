"""Reads what runs left behind, for every command that shows or uses it."""
