"""Measures a recipe: the schedules side by side, and what their difference is made of."""
