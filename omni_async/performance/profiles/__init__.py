"""Profiles that come with the package."""
