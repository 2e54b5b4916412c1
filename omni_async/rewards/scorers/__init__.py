"""Implements the built-in scorers, a file for each, and their shared code."""
