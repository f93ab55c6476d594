"""PPOExt: Stable-Baselines3's PPO with more options and faster engines, under the same names."""

from importlib.metadata import PackageNotFoundError, version

from sb3_ppo_ext.algorithm.hparams import HParamCallback, hyperparameters
from sb3_ppo_ext.checkpoints.training_checkpoint import TrainingCheckpoint
from sb3_ppo_ext.common.workers import WorkerError
from sb3_ppo_ext.envs.action_mask_wrapper import ActionMaskWrapper
from sb3_ppo_ext.envs.checked_subproc_vec_env import CheckedSubprocVecEnv
from sb3_ppo_ext.envs.encode_text import EncodeText
from sb3_ppo_ext.envs.envpool_vec_env import EnvPoolVecEnv
from sb3_ppo_ext.envs.fast_dummy_vec_env import FastDummyVecEnv
from sb3_ppo_ext.envs.last_reward_wrapper import LastRewardWrapper
from sb3_ppo_ext.envs.parallel.vec_env import ParallelVecEnv
from sb3_ppo_ext.envs.rnd_reward import RNDReward
from sb3_ppo_ext.envs.staggered_start import StaggeredStart
from sb3_ppo_ext.envs.tensors.jax_vec_env import JaxVecEnv
from sb3_ppo_ext.envs.tensors.tensor_vec_env import TensorStep, TensorVecEnv
from sb3_ppo_ext.envs.tensors.tensor_vec_normalize import TensorVecNormalize
from sb3_ppo_ext.envs.tensors.torch_vec_env import TorchVecEnv
from sb3_ppo_ext.envs.vector_env_adapter import VectorEnvAdapter
from sb3_ppo_ext.memory.policies import CnnTransformerPolicy, MlpTransformerPolicy, MultiInputTransformerPolicy
from sb3_ppo_ext.memory.recurrent_policies import CnnLstmPolicy, MlpLstmPolicy, MultiInputLstmPolicy
from sb3_ppo_ext.policies import CnnPolicy, MlpPolicy, MultiInputPolicy, TransformerExtractor
from sb3_ppo_ext.ppo_ext import PPOExt
from sb3_ppo_ext.schedules import DecaySchedule, HoldThenLinearToZero, KLAdaptive, LinearToZero
from sb3_ppo_ext.update.mirror import Mirror
from sb3_ppo_ext.zoo.presets import make, presets

try:
    __version__ = version("sb3-ppo-ext")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "unknown"

__all__ = [
    "ActionMaskWrapper",
    "CheckedSubprocVecEnv",
    "CnnLstmPolicy",
    "CnnPolicy",
    "CnnTransformerPolicy",
    "EncodeText",
    "EnvPoolVecEnv",
    "FastDummyVecEnv",
    "HParamCallback",
    "JaxVecEnv",
    "LastRewardWrapper",
    "Mirror",
    "MlpLstmPolicy",
    "MlpPolicy",
    "MlpTransformerPolicy",
    "MultiInputLstmPolicy",
    "MultiInputPolicy",
    "MultiInputTransformerPolicy",
    "PPOExt",
    "ParallelVecEnv",
    "RNDReward",
    "StaggeredStart",
    "TensorStep",
    "TensorVecEnv",
    "TensorVecNormalize",
    "TorchVecEnv",
    "TrainingCheckpoint",
    "TransformerExtractor",
    "VectorEnvAdapter",
    "WorkerError",
    "__version__",
    "hyperparameters",
    "make",
    "presets",
]

# Zips and pickles refer to a class by its module. It is this one, so that files can move.
for _class in (*map(globals().get, __all__), DecaySchedule, HoldThenLinearToZero, KLAdaptive, LinearToZero):
    if isinstance(_class, type):
        _class.__module__ = __name__
del _class
