"""Environments in few processes, with many environments each."""
