"""Before any test file imports diffusers: the package prepares the import system for a mixed install (`omni_async.compat`)."""

import omni_async  # noqa: F401
