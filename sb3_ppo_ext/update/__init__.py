"""The update of PPO, independent of the engine: advantages, minibatches, losses, optimisers, metrics."""
