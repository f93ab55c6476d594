"""Actor-critic policies and features extractors."""

from sb3_ppo_ext.policies.actor_critic import ActionDistributionMixin, CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_ppo_ext.policies.extractors import TransformerExtractor

__all__ = ["ActionDistributionMixin", "CnnPolicy", "MlpPolicy", "MultiInputPolicy", "TransformerExtractor"]
