"""General asyncio tools that know nothing of a run.

Waits without lost wake-ups (`waiting`), pauses (`backoff`), a circuit breaker (`breaker`), batching of calls
(`coalescing`), injected time (`clock`), owners of tasks (`supervisor`).
"""
