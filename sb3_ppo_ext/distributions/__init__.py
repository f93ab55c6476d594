"""Action distributions."""

from sb3_ppo_ext.distributions.torch_distributions import (
    BoundedBetaDistribution,
    BoundedDistribution,
    TanhGaussianDistribution,
)

__all__ = ["BoundedBetaDistribution", "BoundedDistribution", "TanhGaussianDistribution"]
