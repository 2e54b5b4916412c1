"""Holds the arithmetic of denoising that engines and trainer share: transitions, sigma schedules, and noise."""
