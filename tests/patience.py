"""How long a test waits for something that a healthy machine does at once.

The bound only ends a test that hangs. A busy machine stalls a process for seconds, so a shorter bound fails by chance.
"""

PATIENCE = 60.0  # seconds
