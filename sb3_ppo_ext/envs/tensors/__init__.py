"""Vectorised environments that step in tensors, on any device."""
