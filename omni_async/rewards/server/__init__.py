"""Serves scorers over HTTP, for `omni-async serve-reward` and for workers of pools (`omni_async.roles.pool`)."""
