"""Actor-critic policies and features extractors."""

from sb3_ppo_ext.policies.actor_critic import ActionLawMixin, CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_ppo_ext.policies.extractors import TransformerExtractor

__all__ = ["ActionLawMixin", "CnnPolicy", "MlpPolicy", "MultiInputPolicy", "TransformerExtractor"]
