"""Qwen-Image: the text-to-image family the quickstart trains."""
