"""Vectorised environments, wrappers and adapters."""
