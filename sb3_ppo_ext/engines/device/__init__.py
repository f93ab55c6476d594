"""The engine that keeps rollouts and updates on the device of the policy."""
