"""History-based policies for partially observable tasks (POMDPs): transformers, and rollouts as sequences."""
