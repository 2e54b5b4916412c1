"""Measures a recipe: the schedules side by side, and the parts of their difference."""
