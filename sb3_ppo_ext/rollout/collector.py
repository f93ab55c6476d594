"""How rollouts are collected: SB3's loop, which refuses what is not finite, in steps that a subclass can change."""

import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv

from sb3_ppo_ext.common.guards import check_finite, restored_if_not_finite
from sb3_ppo_ext.common.observations import stack
from sb3_ppo_ext.memory.rollout_memory import RolloutMemory
from sb3_ppo_ext.memory.sequences import SequenceBufferMixin


class RolloutCollector(OnPolicyAlgorithm):
    """An on-policy algorithm which collects as SB3's PPO does, to the bit."""

    # Steps that a time limit cut off in the last rollout: step, environment, terminal observation and its value; None if
    # nobody will ask for them
    _truncations: list[tuple[int, int, Any, float]] | None = None
    # Whether the policy samples what the action is made of, and not the action
    _samples_latents = False

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
        start = time.perf_counter()
        with restored_if_not_finite(self):
            go_on = self._collect(env, callback, rollout_buffer, n_rollout_steps)
        self.logger.record("time/rollout_seconds", time.perf_counter() - start)
        return go_on

    def _collect(self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int) -> bool:
        # Callbacks read the local variables of this function: their names are SB3's.
        assert self._last_obs is not None, "No previous observation was provided"
        self.policy.set_training_mode(False)

        n_steps = 0
        rollout_buffer.reset()
        if self._truncations is not None:
            self._truncations.clear()
        if self.use_sde:
            self.policy.reset_noise(env.num_envs)

        callback.on_rollout_start()
        memory = self._make_memory()

        while n_steps < n_rollout_steps:
            if self.use_sde and self.sde_sample_freq > 0 and n_steps % self.sde_sample_freq == 0:
                self.policy.reset_noise(env.num_envs)

            with th.no_grad():
                obs_tensor = obs_as_tensor(self._last_obs, self.device)  # type: ignore[arg-type]
                if memory is None:
                    samples, values, log_probs = self.policy(obs_tensor)
                else:
                    samples, values, log_probs = memory.act(obs_tensor, self._last_episode_starts, n_steps)  # type: ignore[arg-type]
            samples = samples.cpu().numpy()
            clipped_actions = self._actions_for_env(samples)
            actions = clipped_actions if self._samples_latents else samples

            new_obs, rewards, dones, infos = env.step(clipped_actions)
            check_finite(self, "observation", new_obs, n_steps)
            check_finite(self, "reward", rewards, n_steps)

            self.num_timesteps += env.num_envs

            callback.update_locals(locals())
            if not callback.on_step():
                return False

            self._update_info_buffer(infos, dones)
            if memory is not None:
                memory.keep_outcome(clipped_actions, rewards, n_steps)
            n_steps += 1

            if isinstance(self.action_space, spaces.Discrete):
                samples = actions = samples.reshape(-1, 1)

            self._bootstrap_truncated(rewards, dones, infos, n_steps - 1)

            rollout_buffer.add(
                self._last_obs,  # type: ignore[arg-type]
                samples,
                rewards,
                self._last_episode_starts,  # type: ignore[arg-type]
                values,
                log_probs,
            )
            self._last_obs = new_obs  # type: ignore[assignment]
            self._last_episode_starts = dones

        with th.no_grad():
            values = self.predict_last_values()

        rollout_buffer.compute_returns_and_advantage(last_values=values, dones=dones)

        callback.update_locals(locals())
        callback.on_rollout_end()

        return True

    def _make_memory(self) -> RolloutMemory | None:
        """What a policy with a memory is evaluated with, ``None`` for one without."""
        buffer = self.rollout_buffer
        return RolloutMemory(self.policy, buffer) if isinstance(buffer, SequenceBufferMixin) else None

    def predict_last_values(self) -> th.Tensor:
        """
        :return: Values of the observations after the rollout, shape ``(n_envs, 1)``
        """
        n_envs, n_steps = self.n_envs, self.n_steps
        observations = obs_as_tensor(self._last_obs, self.device)  # type: ignore[arg-type]
        steps = np.full(n_envs, n_steps - 1)
        return self.policy.predict_values(self._after(observations, steps, np.arange(n_envs), self._last_episode_starts))

    def _after(self, observations: PyTorchObs, steps: Any, environments: Any, starts: Any) -> Any:
        """
        What the policy reads of observations.

        :param observations: A batch of them
        :param steps: Of the rollout, after which they came
        :param environments: In which
        :param starts: Whether they begin an episode
        """
        if not isinstance(buffer := self.rollout_buffer, SequenceBufferMixin):
            return observations
        return buffer.sequences_after(np.array(steps), np.array(environments), observations, np.array(starts, bool))

    def _actions_for_env(self, actions: np.ndarray) -> np.ndarray:
        """
        :param actions: As the policy sampled them, shape ``(n_envs, *action_shape)``
        :return: Within the bounds of the action space
        """
        if not isinstance(self.action_space, spaces.Box):
            return actions
        if self.policy.squash_output:
            return self.policy.unscale_action(actions)
        # An unbounded Gaussian sampled them. The same as `np.clip`, in a third of its time
        return np.minimum(np.maximum(actions, self.action_space.low), self.action_space.high)

    def _bootstrap_truncated(self, rewards: np.ndarray, dones: np.ndarray, infos: list[dict[str, Any]], step: int) -> None:
        """
        Add the discounted value of the terminal observation to the reward of each episode that was cut off by a time
        limit, for it would have gone on (`issue #633 <https://github.com/DLR-RM/stable-baselines3/issues/633>`_).

        :param rewards: Changed in place, shape ``(n_envs,)``
        :param dones: Shape ``(n_envs,)``
        :param infos: One per environment
        :param step: Of the rollout, for the message if an observation is not finite
        """
        truncated = list(self.truncated_episodes(dones, infos, step))
        if not truncated:
            return
        environments, observations = zip(*truncated, strict=True)
        # A batch changes the last bit of most values (it multiplies matrices, not vectors), so that the CPU takes them
        # one by one as SB3 does. Elsewhere one call for all saves a wait for the device per environment.
        steps = [step] * len(truncated)
        values = self._terminal_values(steps, environments, observations, batched=self.device.type != "cpu")
        for idx, value in zip(environments, values, strict=True):
            rewards[idx] += self.gamma * value
        self.keep_truncations(steps, environments, observations, values.flatten().tolist())

    def truncated_episodes(self, dones: np.ndarray, infos: list[dict[str, Any]], step: int) -> Iterator[tuple[int, Any]]:
        """
        :param dones: Shape ``(n_envs,)``
        :param infos: One per environment
        :param step: Of the rollout, for the message if an observation is not finite
        :return: Environments whose episode was cut off by a time limit, with a copy of its last observation
        """
        for idx in np.flatnonzero(dones).tolist():
            observation = infos[idx].get("terminal_observation")
            if observation is not None and infos[idx].get("TimeLimit.truncated", False):
                check_finite(self, "terminal observation", observation, step, env_index=idx)
                # A copy, for an environment may write its next observation into the same array.
                yield idx, deepcopy(observation)

    def keep_truncations(
        self, steps: Sequence[int], environments: Sequence[int], observations: Sequence[Any], values: Sequence[float]
    ) -> None:
        """
        :param steps: Of the rollout, at which episodes were cut off
        :param environments: In which
        :param observations: Their last ones
        :param values: Of these
        """
        if self._truncations is not None:
            self._truncations += zip(steps, environments, observations, values, strict=True)

    def change_of_terminal_values(self) -> np.ndarray:
        """
        :return: What the rewards of the rollout would change by if the current critic had valued the terminal observations
            of the episodes that a time limit cut off, shape ``(n_steps, n_envs)``
        """
        change = np.zeros_like(self.rollout_buffer.rewards)
        if self._truncations:
            steps, environments, observations, old_values = zip(*self._truncations, strict=True)
            values = self._terminal_values(steps, environments, observations, batched=True).numpy().flatten()
            change[list(steps), list(environments)] = self.gamma * (values - np.array(old_values))
        return change

    def _terminal_values(
        self, steps: Sequence[int], environments: Sequence[int], observations: Sequence[Any], batched: bool
    ) -> th.Tensor:
        """
        :param steps: Of the rollout, at which episodes were cut off
        :param environments: In which
        :param observations: Their last ones, as the environments returned them
        :param batched: Whether to evaluate all of them in one call
        :return: Their values, shape ``(len(observations), 1)``, on the CPU
        """
        n, values = len(observations), []
        for part in [slice(n)] if batched else [slice(i, i + 1) for i in range(n)]:
            tensors = self.policy.obs_to_tensor(stack(observations[part]))[0]
            going_on = [False] * len(steps[part])
            with th.no_grad():
                values.append(self.policy.predict_values(self._after(tensors, steps[part], environments[part], going_on)))
        return th.cat(values).cpu()

    def _setup_learn(self, *args: Any, **kwargs: Any) -> tuple[int, BaseCallback]:
        with restored_if_not_finite(self):
            results = super()._setup_learn(*args, **kwargs)
            # It has reset the environment.
            check_finite(self, "observation", self._last_obs, 0)
            return results
