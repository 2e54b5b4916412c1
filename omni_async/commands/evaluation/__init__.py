"""Implements `omni-async sample` and `omni-async eval`: draws samples, and compares models on equal noise."""
