"""Checkpoints of a training, from which it goes on as if it had not been interrupted."""
