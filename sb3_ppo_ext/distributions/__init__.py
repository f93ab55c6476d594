"""Action distributions: one file each, with the PyTorch and the NumPy implementation side by side, and a registry."""

from sb3_ppo_ext.distributions.base import BoundedDistribution, DeterministicAction, NumpyDistribution, bounded_part
from sb3_ppo_ext.distributions.beta import BoundedBetaDistribution
from sb3_ppo_ext.distributions.hybrid import HybridDistribution
from sb3_ppo_ext.distributions.registry import (
    ACTION_DISTS,
    FAMILIES,
    ActionDist,
    DistributionFamily,
    family_of,
    hybrid_distribution,
    kl_divergence,
    location,
    numpy_distribution,
    on_device,
    parameters,
    unsquashed_mean,
    why_not_numpy,
)
from sb3_ppo_ext.distributions.squashed_gaussian import TanhGaussianDistribution

__all__ = [
    "ACTION_DISTS",
    "FAMILIES",
    "ActionDist",
    "BoundedBetaDistribution",
    "BoundedDistribution",
    "DeterministicAction",
    "DistributionFamily",
    "HybridDistribution",
    "NumpyDistribution",
    "TanhGaussianDistribution",
    "bounded_part",
    "family_of",
    "hybrid_distribution",
    "kl_divergence",
    "location",
    "numpy_distribution",
    "on_device",
    "parameters",
    "unsquashed_mean",
    "why_not_numpy",
]
