"""Holds the profiles that come with the package, a JSON file each; `omni_async.performance.profile` reads them."""
