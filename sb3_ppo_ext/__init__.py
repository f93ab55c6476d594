"""PPOExt: Stable-Baselines3's PPO with more to offer, under the same names."""

from importlib.metadata import PackageNotFoundError, version

from sb3_ppo_ext.extractors import TransformerExtractor
from sb3_ppo_ext.policies import CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_ppo_ext.ppo_ext import PPOExt
from sb3_ppo_ext.transformer_policies import CnnTransformerPolicy, MlpTransformerPolicy, MultiInputTransformerPolicy
from sb3_ppo_ext.vec_env import LeanDummyVecEnv, VectorEnvAdapter

try:
    __version__ = version("sb3-ppo-ext")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "unknown"

__all__ = [
    "CnnPolicy",
    "CnnTransformerPolicy",
    "LeanDummyVecEnv",
    "MlpPolicy",
    "MlpTransformerPolicy",
    "MultiInputPolicy",
    "MultiInputTransformerPolicy",
    "PPOExt",
    "TransformerExtractor",
    "VectorEnvAdapter",
    "__version__",
]
