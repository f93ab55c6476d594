"""Action distributions."""

from sb3_ppo_ext.distributions.torch_distributions import (
    BoundedBetaDistribution,
    BoundedDistribution,
    TanhGaussianDistribution,
    kl_divergence,
    parameters,
    unsquashed_mean,
)

__all__ = [
    "BoundedBetaDistribution",
    "BoundedDistribution",
    "TanhGaussianDistribution",
    "kl_divergence",
    "parameters",
    "unsquashed_mean",
]
