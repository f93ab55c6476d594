"""The parts of PPOExt: how it is set up, how it updates the policy, what of it is saved."""
