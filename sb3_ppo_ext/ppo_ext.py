"""PPOExt: constructor, order of the setup, and ``learn``."""

from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import (
    ActorCriticCnnPolicy,
    ActorCriticPolicy,
    BasePolicy,
    MultiInputActorCriticPolicy,
)
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import VecCheckNan, VecEnv, VecNormalize, VecTransposeImage, is_vecenv_wrapped
from stable_baselines3.common.vec_env.patch_gym import _patch_env

from sb3_ppo_ext.algorithm.training_loop import TrainingLoop
from sb3_ppo_ext.common.guards import check_predicted
from sb3_ppo_ext.common.hybrid_actions import is_hybrid
from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.common.validation import (
    assertions_as_value_errors,
    check_action_space,
    check_environment,
    check_observation_space,
    refuse,
)
from sb3_ppo_ext.distributed.launch import find_launch
from sb3_ppo_ext.envs.fast_dummy_vec_env import FastDummyVecEnv
from sb3_ppo_ext.envs.tensors.tensor_vec_transpose_image import TensorVecTransposeImage, steps_in_tensors
from sb3_ppo_ext.export import export_actor
from sb3_ppo_ext.memory.policies import (
    CnnTransformerPolicy,
    MlpTransformerPolicy,
    MultiInputTransformerPolicy,
)
from sb3_ppo_ext.memory.recurrent_policies import CnnLstmPolicy, MlpLstmPolicy, MultiInputLstmPolicy
from sb3_ppo_ext.policies.action_masking import masked_observation

SelfPPOExt = TypeVar("SelfPPOExt", bound="PPOExt")


class PPOExt(TrainingLoop):
    """
    Proximal Policy Optimization (PPO) as in Stable-Baselines3, with more options and faster engines. With
    ``backend="eager"`` and otherwise default options, results on the CPU are equal to those of ``stable_baselines3.PPO``, bit
    for bit. The other engines, one of which is the default where it supports the policy, compute the same algorithm, but round
    differently, and ``"native"`` may draw other random numbers: the same seed gives another training than with SB3.

    Paper: https://arxiv.org/abs/1707.06347

    All arguments are checked first. One that is not valid raises a ``ValueError`` that names the argument, its value and the
    remedy (and is also an ``AssertionError`` where SB3 raises one).

    ``docs/options.md`` explains when to use the options that PPOExt adds, with the formulas; ``docs/options_reference.md`` is
    a table of all options. The constructor is in ``options/constructor.py``.
    """

    # SB3's classes, so that SB3 can load saved models. `with_action_distributions` replaces them if an option needs ours.
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": ActorCriticPolicy,
        "CnnPolicy": ActorCriticCnnPolicy,
        "MultiInputPolicy": MultiInputActorCriticPolicy,
        "MlpTransformerPolicy": MlpTransformerPolicy,
        "CnnTransformerPolicy": CnnTransformerPolicy,
        "MultiInputTransformerPolicy": MultiInputTransformerPolicy,
        "MlpLstmPolicy": MlpLstmPolicy,
        "CnnLstmPolicy": CnnLstmPolicy,
        "MultiInputLstmPolicy": MultiInputLstmPolicy,
    }

    def _setup_model(self) -> None:
        # Not only in the constructor, because `load` sets attributes after it.
        self._check_options()
        self._choose_discount()
        # What the policy and SB3's rollout buffer are made from
        self._check_masks()
        self._setup_normalizer()
        self._check_observations()
        self._forget_adaptation()
        self._setup_schedules()
        self._setup_kl_coefficient()
        # SB3 makes the learning rate, the seeds, the rollout buffer and the policy, in this order.
        self._setup_policy()
        # What changes the policy: the device first, which all that follows is made for
        self._check_noise()
        self._share_normalizer()
        self._setup_device()
        self._setup_validation()
        self._setup_precision()
        # What reads the policy
        self._adapt_rollout_buffer()
        self._setup_optimizer()
        self._setup_extra_losses()
        self._setup_advantages()
        self._setup_truncations()
        self._setup_statistics()
        # What reads the rollout buffer as well
        self._place_rollout_buffer()
        self._remember_buffer()
        self._setup_engine()
        self._remember_options()

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: np.ndarray | None = None,
    ) -> tuple[Arrays, tuple[np.ndarray, ...] | None]:
        """
        Get the policy action from an observation (and optional hidden state).

        :param observation: Observation of one environment or of several
        :param state: Hidden state that the last call returned, of a history-based policy
        :param episode_start: Whether each environment has begun an episode with this observation, of a history-based policy
        :param deterministic: Whether to return the deterministic action instead of a sample
        :param action_masks: With ``action_masking``, whether each choice of each action is valid, shape ``(n_choices,)`` or
            ``(n_envs, n_choices)``; ``None`` for masks that are in the observation. Without them all actions are valid
        :return: Action of each environment, and the next hidden state. With a ``Dict`` or ``Tuple`` action space, the actions
            are a dictionary or tuple, or for several environments a list of them
        :raises ValueError: if the outputs of the policy are not finite, or the masks do not fit
        """
        if self.action_masking:
            observation = masked_observation(self.policy, observation, action_masks, in_observation=bool(self.action_mask_key))
        elif action_masks is not None:
            refuse("action_masks", action_masks, "the model has none; make it with `action_masking=True`")
        actions: Any
        actions, state = super().predict(observation, state, episode_start, deterministic)
        # On the CPU, PyTorch validates the parameters of the distribution. Those that become dictionaries have been checked.
        if self.device.type != "cpu" and self._sample_space is self.action_space:
            check_predicted(self.policy, np.asarray(actions))
        return actions, state

    def export(
        self,
        path: str | Path,
        deterministic: bool = True,
        vec_normalize: VecNormalize | str | Path | None = None,
        channels_last: bool | None = None,
    ) -> None:
        """
        Write the actor into one file that acts without this package. Its inputs are observations as the environment gives
        them, its outputs are actions as the environment takes them: the normalisation of observations, the networks, masks,
        and the scaling or clipping to the bounds of the action space are inside. The size of the batch is free. A policy with
        a memory has its state and ``episode_start`` as further inputs and the next state as outputs. See docs/export.md.

        The file is compared with ``predict`` before it is written: if it acts differently, nothing is written.

        :param path: Path of the file: ``.onnx``, or ``.pt`` for a program of ``torch.export``
        :param deterministic: Whether the file acts deterministically. If not, the random numbers of a sample are inputs
        :param vec_normalize: ``VecNormalize`` with the statistics of the observations, or the file that it was saved to, which
            can execute code, as all pickles can; ``None`` for that of the model's environment, if it has one
        :param channels_last: Whether the environment gives images with the channels last, so that ``VecTransposeImage``
            transposes them; ``None`` for whether the model's environment does
        :raises ValueError: if an argument is not valid, or the policy cannot be exported
        :raises ImportError: if onnx, onnxscript or onnxruntime is not installed: ``pip install "sb3-ppo-ext[export]"``
        """
        export_actor(self, path, deterministic, vec_normalize, channels_last)

    def _get_policy_from_name(self, policy_name: str) -> type[BasePolicy]:
        if policy_name not in self.policy_aliases:
            refuse("policy", policy_name, f"the names are {', '.join(self.policy_aliases)}; a class works as well")
        return super()._get_policy_from_name(policy_name)

    def set_random_seed(self, seed: int | None = None) -> None:
        """
        Seed the generators of Python, NumPy, PyTorch and the environments. In a distributed training, each rank gets a seed of
        its own, and its environments the seeds that they would have among the environments of all ranks.

        :param seed: Seed, ``None`` for none
        """
        rank = find_launch(self.distributed).rank
        super().set_random_seed(seed if seed is None or rank == 0 else (seed + rank * self.n_envs) % 2**32)

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        self._check_normalization(env)
        with assertions_as_value_errors():
            super().set_env(env, force_reset)
        self._place_normalizer()

    @staticmethod
    def _wrap_env(env: GymEnv, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        check_environment(env)
        # Spaces of the old Gym are of another type, which SB3 converts before checking.
        if isinstance(observation_space := getattr(env, "observation_space", None), spaces.Space):
            check_observation_space(observation_space)
        if isinstance(action_space := getattr(env, "action_space", None), spaces.Space):
            check_action_space(action_space)
        if not isinstance(env, VecEnv):
            # The same as SB3, but with `FastDummyVecEnv`
            env = _patch_env(env)
            if monitor_wrapper and not is_wrapped(env, Monitor):
                if verbose >= 1:
                    print("Wrapping the env with a `Monitor` wrapper")
                env = Monitor(env)
            if verbose >= 1:
                print("Wrapping the env in a DummyVecEnv.")
            single = env
            env = FastDummyVecEnv([lambda: single])
        env = OnPolicyAlgorithm._wrap_env(env, verbose, monitor_wrapper)
        if is_hybrid(env.action_space) and is_vecenv_wrapped(env, VecCheckNan):
            refuse("env", env, "`VecCheckNan` cannot read such actions; leave it out, PPOExt finds NaN, too")
        if type(env) is VecTransposeImage and steps_in_tensors(env.venv):
            return TensorVecTransposeImage(env.venv)
        return env
