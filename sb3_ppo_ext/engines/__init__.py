"""Engines that compute rollouts and updates: one module or folder for each backend."""
