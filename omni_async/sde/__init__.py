"""Computes denoising steps: transitions and their log-probs, sigma schedules, noise.

No other package has that arithmetic: engines and the trainer compute the same numbers from the same functions.
"""
