"""Collection of rollouts, and vectorised environments."""
