"""PPOExt: the order of operations of PPO, what is logged and what is saved."""

import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, RolloutBufferSamples, TensorDict
from stable_baselines3.common.utils import FloatSchedule, explained_variance, obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.ppo.policies import CnnPolicy, MlpPolicy, MultiInputPolicy

from sb3_ppo_ext.advantages import normalize
from sb3_ppo_ext.guards import check_finite, restored_if_not_finite
from sb3_ppo_ext.losses import approximate_kl, clip_fraction, clipped_surrogate_loss, entropy_loss, value_loss
from sb3_ppo_ext.saving import SavedModel, check_saved_ppo
from sb3_ppo_ext.schedules import ScheduleLike, make_schedule
from sb3_ppo_ext.validation import (
    SUPPORTED_SPACES,
    assertions_as_value_errors,
    check_action_space,
    check_device,
    check_known_options,
    check_kwargs,
    check_number,
    check_observation_space,
    check_type,
    refuse,
)

SelfPPOExt = TypeVar("SelfPPOExt", bound="PPOExt")
# What is measured in each minibatch, by name. The values stay on the device until they are logged.
Metrics = defaultdict[str, list[th.Tensor]]


class PPOExt(OnPolicyAlgorithm):
    """
    Proximal Policy Optimization (PPO), as in Stable-Baselines3: with the same seed on a CPU it gives the same
    numbers as ``stable_baselines3.PPO``, to the bit.

    Paper: https://arxiv.org/abs/1707.06347

    Every argument is checked before anything is built. One that is not valid raises a ``ValueError`` with its name,
    its value and the remedy (it is an ``AssertionError`` as well where SB3 raises that).

    :param policy: The policy model to use (MlpPolicy, CnnPolicy, MultiInputPolicy, or a class)
    :param env: The environment to learn from (if registered in Gymnasium, can be str)
    :param learning_rate: The learning rate, at least 0: a number, a function of the current progress remaining
        (from 1 to 0), or ``"lin_3e-4"`` for a linear decay to 0
    :param n_steps: The number of steps to run for each environment per update, at least 1
        (the rollout holds ``n_steps * n_envs`` samples, which must be more than 1 with ``normalize_advantage``)
    :param batch_size: Minibatch size, at least 2 with ``normalize_advantage``
    :param n_epochs: Number of passes over the rollout in each update, at least 1
    :param gamma: Discount factor, in [0, 1]
    :param gae_lambda: Trade-off of bias and variance in Generalized Advantage Estimation, in [0, 1]
    :param clip_range: Clipping parameter of the probability ratio, at least 0; a number, a function of the progress
        remaining, or ``"lin_0.2"``
    :param clip_range_vf: Clipping parameter of the value function, in units of the reward, greater than 0; as
        ``clip_range``, or ``None`` (default) for no clipping
    :param normalize_advantage: Whether to normalize the advantage in each minibatch
    :param ent_coef: Entropy coefficient of the loss, at least 0
    :param vf_coef: Value function coefficient of the loss, at least 0
    :param max_grad_norm: The maximum norm of the gradient, at least 0 (``float("inf")`` for no clipping)
    :param use_sde: Whether to use generalized State Dependent Exploration (gSDE)
        instead of action noise exploration (default: False)
    :param sde_sample_freq: Sample a new noise matrix every n steps when using gSDE
        Default: -1 (only sample at the beginning of the rollout)
    :param rollout_buffer_class: Rollout buffer class to use. If ``None``, it will be automatically selected.
    :param rollout_buffer_kwargs: Keyword arguments to pass to the rollout buffer on creation
    :param target_kl: Stop the update early when the estimated KL divergence exceeds 1.5 times this, at least 0.
        ``None`` (default) for no limit
    :param stats_window_size: Number of episodes over which the logged success rate, mean episode length and mean
        reward are averaged
    :param tensorboard_log: the log location for tensorboard (if None, no logging)
    :param policy_kwargs: additional arguments to be passed to the policy on creation
    :param verbose: Verbosity level: 0 for no output, 1 for info messages (such as device or wrappers used), 2 for
        debug messages
    :param seed: Seed for the pseudo random generators
    :param device: Device (cpu, cuda, ...) on which the code should be run.
        Setting it to auto, the code will be run on the GPU if possible.
    :param _init_setup_model: Whether or not to build the network at the creation of the instance
    :raises ValueError: if an argument is unknown or not valid, or a space is not supported
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
    }

    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv | str,
        learning_rate: ScheduleLike = 3e-4,
        n_steps: int = 2048,
        batch_size: int = 64,
        n_epochs: int = 10,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: ScheduleLike = 0.2,
        clip_range_vf: ScheduleLike | None = None,
        normalize_advantage: bool = True,
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float = 0.5,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        rollout_buffer_class: type[RolloutBuffer] | None = None,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        target_kl: float | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
        **unknown_options: NoReturn,
    ):
        check_known_options(unknown_options, _option_names(type(self)), type(self).__name__)
        check_device(device)
        if env is None and _init_setup_model:
            refuse("env", env, "give an environment, or the id of one")
        with assertions_as_value_errors():
            super().__init__(
                policy,
                env,
                learning_rate=learning_rate,  # type: ignore[arg-type]  # `_setup_lr_schedule` takes strings as well
                n_steps=n_steps,
                gamma=gamma,
                gae_lambda=gae_lambda,
                ent_coef=ent_coef,
                vf_coef=vf_coef,
                max_grad_norm=max_grad_norm,
                use_sde=use_sde,
                sde_sample_freq=sde_sample_freq,
                rollout_buffer_class=rollout_buffer_class,
                rollout_buffer_kwargs=rollout_buffer_kwargs,
                stats_window_size=stats_window_size,
                tensorboard_log=tensorboard_log,
                policy_kwargs=policy_kwargs,
                verbose=verbose,
                device=device,
                seed=seed,
                _init_setup_model=False,
                supported_action_spaces=SUPPORTED_SPACES,
            )
        self.batch_size = batch_size
        self.n_epochs = n_epochs
        self.clip_range = clip_range
        self.clip_range_vf = clip_range_vf
        self.normalize_advantage = normalize_advantage
        self.target_kl = target_kl

        self._check_options()
        self._warn_about_truncated_minibatch()
        if _init_setup_model:
            self._setup_model()

    # Set up

    def _setup_model(self) -> None:
        # `load` sets what it is given between `__init__` and here.
        self._check_options()
        if self.seed is not None:
            self.seed = int(self.seed)  # Gymnasium does not take NumPy's integers
        for name, schedule in self._schedules().items():
            setattr(self, name, schedule)
        with assertions_as_value_errors():
            super()._setup_model()

    def _setup_lr_schedule(self) -> None:
        self.lr_schedule = make_schedule("learning_rate", self.learning_rate)
        if isinstance(self.learning_rate, str):
            # SB3's PPO would not load a zip with the string.
            self.learning_rate = self.lr_schedule

    def _schedules(self) -> dict[str, FloatSchedule]:
        """
        :raises ValueError: if the value of one is not valid
        """
        schedules = {"clip_range": make_schedule("clip_range", self.clip_range, infinite=True)}
        if self.clip_range_vf is not None:
            schedules["clip_range_vf"] = make_schedule("clip_range_vf", self.clip_range_vf, positive=True, infinite=True)
        return schedules

    def _check_options(self) -> None:
        """
        :raises ValueError: if the value of an option is not valid
        """
        for name in ("n_steps", "batch_size", "n_epochs"):
            check_number(name, getattr(self, name), 1, integer=True)
        for name in ("gamma", "gae_lambda"):
            check_number(name, getattr(self, name), 0, 1)
        for name in ("ent_coef", "vf_coef"):
            check_number(name, getattr(self, name), 0)
        check_number("max_grad_norm", self.max_grad_norm, 0, infinite=True)
        if self.target_kl is not None:
            check_number("target_kl", self.target_kl, 0, infinite=True)
        if self.seed is not None:
            check_number("seed", self.seed, 0, 2**32 - 1, integer=True)
        if self._stats_window_size is not None:
            check_number("stats_window_size", self._stats_window_size, 0, integer=True)
        if self.use_sde:
            check_number("sde_sample_freq", self.sde_sample_freq)
        for name in ("normalize_advantage", "use_sde"):
            check_type(name, getattr(self, name), (bool, int, np.bool_, type(None)), "give True or False")
        make_schedule("learning_rate", self.learning_rate)
        self._schedules()
        self._check_minibatches()
        self._check_classes()

    def _check_classes(self) -> None:
        given_to_policy = ("observation_space", "action_space", "lr_schedule", "use_sde")
        check_kwargs("policy_kwargs", self.policy_kwargs, self.policy_class, given_to_policy)
        buffer_class = self.rollout_buffer_class or RolloutBuffer
        if not callable(buffer_class):
            refuse("rollout_buffer_class", buffer_class, "give a class, or None")
        given_to_buffer = ("buffer_size", "observation_space", "action_space", "device", "gamma", "gae_lambda", "n_envs")
        check_kwargs("rollout_buffer_kwargs", self.rollout_buffer_kwargs, buffer_class, given_to_buffer)

    def _check_minibatches(self) -> None:
        if not self.normalize_advantage:
            return
        remedy = "with `normalize_advantage` the standard deviation of the advantages needs at least 2 samples"
        if self.batch_size < 2:
            refuse("batch_size", self.batch_size, f"{remedy}; give 2 or more, or `normalize_advantage=False`")
        if self.env is not None and self.env.num_envs * self.n_steps < 2:
            refuse("n_steps", self.n_steps, f"{remedy}, and n_envs={self.env.num_envs}; raise one of the two")

    def _warn_about_truncated_minibatch(self) -> None:
        if self.env is None:
            return
        buffer_size = self.env.num_envs * self.n_steps
        if buffer_size % self.batch_size > 0:
            warnings.warn(
                f"You have specified a mini-batch size of {self.batch_size},"
                f" but because the `RolloutBuffer` is of size `n_steps * n_envs = {buffer_size}`,"
                f" after every {buffer_size // self.batch_size} untruncated mini-batches,"
                f" there will be a truncated mini-batch of size {buffer_size % self.batch_size}\n"
                f"We recommend using a `batch_size` that is a factor of `n_steps * n_envs`.\n"
                f"Info: (n_steps={self.n_steps} and n_envs={self.env.num_envs})",
                stacklevel=3,
            )

    def _get_policy_from_name(self, policy_name: str) -> type[BasePolicy]:
        if policy_name not in self.policy_aliases:
            refuse("policy", policy_name, f"the names are {', '.join(self.policy_aliases)}; a class works as well")
        return super()._get_policy_from_name(policy_name)

    @staticmethod
    def _wrap_env(env: GymEnv, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        # Old Gym's spaces are another type, which SB3 converts before it checks them.
        if isinstance(observation_space := getattr(env, "observation_space", None), spaces.Space):
            check_observation_space(observation_space)
        if isinstance(action_space := getattr(env, "action_space", None), spaces.Space):
            check_action_space(action_space)
        return OnPolicyAlgorithm._wrap_env(env, verbose, monitor_wrapper)

    # Collect

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        """
        Collect experiences using the current policy and fill a ``RolloutBuffer``.

        :param env: The training environment
        :param callback: Callback that will be called at each step
            (and at the beginning and end of the rollout)
        :param rollout_buffer: Buffer to fill with rollouts
        :param n_rollout_steps: Number of experiences to collect per environment
        :return: True if function returned with at least `n_rollout_steps`
            collected, False if callback terminated rollout prematurely.
        :raises ValueError: if the environment returns NaN or infinity. The model is then left as it was before the
            rollout, with the statistics of ``VecNormalize``; the next call of ``learn`` resets the environment.
        """
        with restored_if_not_finite(self):
            return self._collect(env, callback, rollout_buffer, n_rollout_steps)

    def _collect(self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int) -> bool:
        # Callbacks read the local variables of this function: their names are SB3's.
        assert self._last_obs is not None, "No previous observation was provided"
        self.policy.set_training_mode(False)

        n_steps = 0
        rollout_buffer.reset()
        if self.use_sde:
            self.policy.reset_noise(env.num_envs)

        callback.on_rollout_start()

        while n_steps < n_rollout_steps:
            if self.use_sde and self.sde_sample_freq > 0 and n_steps % self.sde_sample_freq == 0:
                self.policy.reset_noise(env.num_envs)

            with th.no_grad():
                obs_tensor = obs_as_tensor(self._last_obs, self.device)  # type: ignore[arg-type]
                actions, values, log_probs = self.policy(obs_tensor)
            actions = actions.cpu().numpy()
            clipped_actions = self._actions_for_env(actions)

            new_obs, rewards, dones, infos = env.step(clipped_actions)
            check_finite(self, "observation", new_obs, n_steps)
            check_finite(self, "reward", rewards, n_steps)

            self.num_timesteps += env.num_envs

            callback.update_locals(locals())
            if not callback.on_step():
                return False

            self._update_info_buffer(infos, dones)
            n_steps += 1

            if isinstance(self.action_space, spaces.Discrete):
                actions = actions.reshape(-1, 1)

            self._bootstrap_truncated(rewards, dones, infos, n_steps - 1)

            rollout_buffer.add(
                self._last_obs,  # type: ignore[arg-type]
                actions,
                rewards,
                self._last_episode_starts,  # type: ignore[arg-type]
                values,
                log_probs,
            )
            self._last_obs = new_obs  # type: ignore[assignment]
            self._last_episode_starts = dones

        with th.no_grad():
            values = self.policy.predict_values(obs_as_tensor(new_obs, self.device))  # type: ignore[arg-type]

        rollout_buffer.compute_returns_and_advantage(last_values=values, dones=dones)

        callback.update_locals(locals())
        callback.on_rollout_end()

        return True

    def _actions_for_env(self, actions: np.ndarray) -> np.ndarray:
        """
        :param actions: As sampled, shape ``(n_envs, *action_shape)``
        :return: Within the bounds of the action space
        """
        if not isinstance(self.action_space, spaces.Box):
            return actions
        if self.policy.squash_output:
            return self.policy.unscale_action(actions)
        # An unbounded Gaussian sampled them
        return np.clip(actions, self.action_space.low, self.action_space.high)

    def _bootstrap_truncated(self, rewards: np.ndarray, dones: np.ndarray, infos: list[dict[str, Any]], step: int) -> None:
        """
        Add the discounted value of the terminal observation to the reward of each episode that was cut off by a time
        limit, for it would have gone on (`issue #633 <https://github.com/DLR-RM/stable-baselines3/issues/633>`_).

        :param rewards: Changed in place, shape ``(n_envs,)``
        :param dones: Shape ``(n_envs,)``
        :param infos: One per environment
        :param step: Of the rollout, for the message if an observation is not finite
        """
        truncated = [
            idx
            for idx, done in enumerate(dones)
            if done and infos[idx].get("terminal_observation") is not None and infos[idx].get("TimeLimit.truncated", False)
        ]
        if not truncated:
            return
        observations = [infos[idx]["terminal_observation"] for idx in truncated]
        for idx, observation in zip(truncated, observations, strict=True):
            check_finite(self, "terminal observation", observation, step, env_index=idx)
        # A batch changes the last bit of most values (it multiplies matrices, not vectors), so that the CPU takes them
        # one by one as SB3 does. Elsewhere one call for all saves a wait for the device per environment.
        values = self._terminal_values(observations, batched=self.device.type != "cpu")
        for idx, value in zip(truncated, values, strict=True):
            rewards[idx] += self.gamma * value

    def _terminal_values(self, observations: list[Any], batched: bool) -> th.Tensor:
        """
        :param observations: As the environments returned them
        :param batched: Whether to evaluate all of them in one call
        :return: Their values, shape ``(len(observations), 1)``, on the CPU
        """
        batches = [_stack(observations)] if batched else observations
        with th.no_grad():
            values = [self.policy.predict_values(self.policy.obs_to_tensor(batch)[0]) for batch in batches]
        return th.cat(values).cpu()

    def _setup_learn(self, *args: Any, **kwargs: Any) -> tuple[int, BaseCallback]:
        with restored_if_not_finite(self):
            results = super()._setup_learn(*args, **kwargs)
            # It has reset the environment.
            check_finite(self, "observation", self._last_obs, 0)
            return results

    # Update

    def train(self) -> None:
        """
        Update policy using the currently gathered rollout buffer.
        """
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        clip_range = self.clip_range(self._current_progress_remaining)  # type: ignore[operator]
        clip_range_vf = None
        if self.clip_range_vf is not None:
            clip_range_vf = self.clip_range_vf(self._current_progress_remaining)  # type: ignore[operator]

        metrics: Metrics = defaultdict(list)
        for epoch in range(self.n_epochs):
            # SB3 logs the mean over the last epoch alone
            metrics["approx_kl"].clear()
            go_on = self._train_epoch(epoch, clip_range, clip_range_vf, metrics)
            self._n_updates += 1
            if not go_on:
                break

        self._log_update(metrics, clip_range, clip_range_vf)

    def _train_epoch(self, epoch: int, clip_range: float, clip_range_vf: float | None, metrics: Metrics) -> bool:
        """
        :return: False if ``target_kl`` ended the update
        """
        for rollout_data in self.rollout_buffer.get(self.batch_size):
            loss = self._loss(rollout_data, clip_range, clip_range_vf, metrics)
            if self.target_kl is not None:
                approx_kl = metrics["approx_kl"][-1].cpu().numpy()
                if approx_kl > 1.5 * self.target_kl:
                    if self.verbose >= 1:
                        print(f"Early stopping at step {epoch} due to reaching max kl: {approx_kl:.2f}")
                    return False
            self._optimize(loss)
        return True

    def _loss(
        self, rollout_data: RolloutBufferSamples, clip_range: float, clip_range_vf: float | None, metrics: Metrics
    ) -> th.Tensor:
        """
        :param rollout_data: A minibatch
        :param metrics: Takes what is measured on the way
        :return: PPO's loss, a scalar
        """
        actions = rollout_data.actions
        if isinstance(self.action_space, spaces.Discrete):
            # The buffer holds floats of shape (batch_size, 1)
            actions = actions.long().flatten()

        values, log_prob, entropy = self.policy.evaluate_actions(rollout_data.observations, actions)
        advantages = rollout_data.advantages
        if self.normalize_advantage:
            advantages = normalize(advantages)

        log_ratio = log_prob - rollout_data.old_log_prob
        ratio = th.exp(log_ratio)

        policy_term = clipped_surrogate_loss(advantages, ratio, clip_range)
        value_term = value_loss(values.flatten(), rollout_data.old_values, rollout_data.returns, clip_range_vf)
        entropy_term = entropy_loss(entropy, log_prob)
        loss = policy_term + self.ent_coef * entropy_term + self.vf_coef * value_term

        metrics["policy_gradient_loss"].append(policy_term.detach())
        metrics["value_loss"].append(value_term.detach())
        metrics["entropy_loss"].append(entropy_term.detach())
        metrics["clip_fraction"].append(clip_fraction(ratio, clip_range))
        metrics["approx_kl"].append(approximate_kl(ratio, log_ratio))
        metrics["loss"].append(loss.detach())
        return loss

    def _optimize(self, loss: th.Tensor) -> None:
        self.policy.optimizer.zero_grad()
        loss.backward()
        th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
        self.policy.optimizer.step()

    def _log_update(self, metrics: Metrics, clip_range: float, clip_range_vf: float | None) -> None:
        """Record the update under SB3's keys."""
        for name in ("entropy_loss", "policy_gradient_loss", "value_loss", "clip_fraction"):
            # SB3 averages Python floats
            self.logger.record(f"train/{name}", _to_numpy(metrics[name]).astype(np.float64).mean())
        # ... but float32 here
        self.logger.record("train/approx_kl", _to_numpy(metrics["approx_kl"]).mean())
        self.logger.record("train/loss", metrics["loss"][-1].item())
        buffer = self.rollout_buffer
        self.logger.record("train/explained_variance", explained_variance(buffer.values.flatten(), buffer.returns.flatten()))
        if hasattr(self.policy, "log_std"):
            self.logger.record("train/std", th.exp(self.policy.log_std).mean().item())

        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/clip_range", clip_range)
        if clip_range_vf is not None:
            self.logger.record("train/clip_range_vf", clip_range_vf)

    def learn(
        self: SelfPPOExt,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "PPOExt",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfPPOExt:
        return super().learn(
            total_timesteps=total_timesteps,
            callback=callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )

    # Save and load

    @classmethod
    def load(
        cls: type[SelfPPOExt],
        path: SavedModel,
        env: GymEnv | None = None,
        device: th.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **kwargs: Any,
    ) -> SelfPPOExt:
        """
        Load the model from a zip-file, saved by ``PPOExt`` or by ``stable_baselines3.PPO``.
        Warning: ``load`` re-creates the model from scratch, it does not update it in-place!
        For an in-place load use ``set_parameters`` instead.

        :param path: path to the file (or a file-like) where to load the agent from
        :param env: the new environment to run the loaded model on
            (can be None if you only need prediction from a trained model) has priority over any saved environment
        :param device: Device on which the code should run.
        :param custom_objects: Dictionary of objects to replace upon loading.
        :param print_system_info: Whether to print system info from the saved model and the current system info
        :param force_reset: Force call to ``reset()`` before training to avoid unexpected behavior.
        :param kwargs: options to change when loading
        :return: new model instance with loaded parameters
        :raises ValueError: if the zip is damaged or of another algorithm, or an option is unknown or not valid
        """
        check_device(device)
        known = check_saved_ppo(path, cls.policy_aliases.values()) | _option_names(cls)
        check_known_options(kwargs, known, f"{cls.__name__}.load")
        if "stats_window_size" in kwargs:
            # The only option whose attribute has another name
            kwargs["_stats_window_size"] = kwargs.pop("stats_window_size")
        return super().load(path, env, device, custom_objects, print_system_info, force_reset, **kwargs)

    def set_parameters(
        self, load_path_or_dict: str | TensorDict, exact_match: bool = True, device: th.device | str = "auto"
    ) -> None:
        """
        Load parameters from a zip-file of ``PPOExt`` or ``stable_baselines3.PPO``, or from a nested dictionary
        (see ``get_parameters``).

        :param load_path_or_dict: Location of the saved data (path or file-like, see ``save``), or a dictionary that
            maps the names of objects to their state-dictionaries
        :param exact_match: If True, the given parameters should include parameters for each module and each of their
            parameters, otherwise raises an Exception. If set to False, this can be used to update only specific
            parameters.
        :param device: Device on which the code should run.
        :raises ValueError: if the zip is damaged or of another algorithm, or the names do not match
        """
        if not isinstance(load_path_or_dict, dict):
            check_saved_ppo(load_path_or_dict, self.policy_aliases.values())
        super().set_parameters(load_path_or_dict, exact_match, device)


def _option_names(algorithm: type[PPOExt]) -> set[str]:
    """Every named argument of the constructors of the class and its parents, for a subclass may pass some on."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    constructors = [inspect.signature(cls.__init__) for cls in algorithm.__mro__ if issubclass(cls, PPOExt)]
    parameters: Iterable[inspect.Parameter] = (p for signature in constructors for p in signature.parameters.values())
    return {p.name for p in parameters if p.kind in kinds} - {"self"}


def _stack(observations: list[Any]) -> Any:
    """Single observations to a batch of them."""
    if isinstance(observations[0], dict):
        return {key: np.stack([observation[key] for observation in observations]) for key in observations[0]}
    return np.stack(observations)


def _to_numpy(tensors: list[th.Tensor]) -> np.ndarray:
    """Scalars on the device to an array on the host, in one transfer."""
    return th.stack(tensors).cpu().numpy()
