"""General asyncio tools that know nothing of a run.

Waits without lost wake-ups and batching of calls (`waiting`), pauses and a circuit breaker (`backoff`), injected time
(`clock`), owners of tasks (`supervisor`).
"""
