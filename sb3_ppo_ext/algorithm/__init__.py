"""Base classes of PPOExt: setup, updates of the policy, saving and loading."""
