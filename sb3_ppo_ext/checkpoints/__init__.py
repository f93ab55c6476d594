"""Checkpoints of a training run, from which it continues as if it had not been interrupted."""
