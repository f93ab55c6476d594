"""What PPO computes from a rollout, on any engine: advantages, minibatches, losses, optimisers, metrics."""
