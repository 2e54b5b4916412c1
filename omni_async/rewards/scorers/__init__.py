"""Implements the scorers that are built in, a file for each, and what several of them share."""
