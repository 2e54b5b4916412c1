"""Serves scorers over HTTP: `omni-async serve-reward`, and the workers of pools; and runs vLLM servers for judges."""
