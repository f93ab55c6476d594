"""Actor that fills a rollout on the device from NumPy environments."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_ppo_ext.common.observations import map_observations, stack
from sb3_ppo_ext.engines.engine import Engine
from sb3_ppo_ext.memory.policies import TransformerPolicyMixin
from sb3_ppo_ext.policies.normalized_observations import inputs_of
from sb3_ppo_ext.rollout.actors import Action, Actor, CachedPolicy, RolloutConfig, Transition
from sb3_ppo_ext.update.tensor_rollout import TensorRolloutBuffer, TruncatedEpisodes
from sb3_ppo_ext.update.tensor_sequences import TensorSequenceBuffer


class DeviceActor(Actor):
    """
    Calls the policy at each step, as SB3 does. Observations are copied to the device, and actions from it; everything else
    stays where it is. Rewards and ends of episodes are copied at the end of the rollout.

    :param buffer: Buffer to fill
    :param config: Options of the rollout
    :param engine: Engine of the policy at the beginning of the rollout
    """

    buffer: TensorRolloutBuffer

    def __init__(self, buffer: RolloutBuffer, config: RolloutConfig, engine: Engine):
        assert isinstance(buffer, TensorRolloutBuffer)
        self.buffer, self.config = buffer, config
        self.policy, self.compute = engine.policy, engine.make_act()
        self.rewards = np.zeros((buffer.buffer_size, buffer.n_envs), np.float32)
        self.starts = np.zeros_like(self.rewards)
        self.gamma = buffer.gamma
        # Rows and terminal observations of truncated episodes
        self.rows: list[int] = []
        self.terminal_observations: list[Any] = []
        self.values: list[th.Tensor] = []
        self.staging: Any = None
        # Observations of the last step, already in the buffer
        self.observations: Any = None
        self.cached = CachedPolicy(buffer, config.is_watched) if isinstance(buffer, TensorSequenceBuffer) else None

    def act(self, policy: ActorCriticPolicy, observations: Any, starts: np.ndarray, step: int) -> Action:
        with th.no_grad():
            # Without a memory, the starts of episodes are copied at the end of the rollout.
            known = None if self.cached is None else np.asarray(starts, np.float32)
            obs_tensor = self.buffer.observe(self._staged(observations), known)
            self.observations = observations
            samples, values, log_probs = self._compute(policy, obs_tensor, step)
        self.buffer.record(samples, values, log_probs)
        return Action(obs_tensor, samples.cpu().numpy(), values, log_probs)

    def _compute(self, policy: ActorCriticPolicy, obs_tensor: Any, step: int) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        if self.cached is not None:
            return self.cached(policy, step)
        compute = self.compute if policy is self.policy else policy  # which a callback has replaced
        return compute(obs_tensor)

    def _staged(self, observations: Any) -> Any:
        """Observations on a GPU, by way of page-locked memory, from which it copies them while the host continues."""
        if self.config.device.type != "cuda":
            return observations
        if self.staging is None:
            # Arrays keep their strides, as those of transposed images, which the GPU then brings into order.
            self.staging = map_observations(lambda part: th.from_numpy(np.array(part)).pin_memory(), observations)
        # The copy of the step before has ended, since the host has waited for its actions.
        map_observations(lambda pinned, part: np.copyto(pinned.numpy(), part), self.staging, observations)
        return map_observations(lambda pinned: pinned.to(self.config.device, non_blocking=True), self.staging)

    def record(self, policy: ActorCriticPolicy, transition: Transition) -> None:
        buffer, step = self.buffer, transition.step
        self.gamma = transition.gamma
        if transition.observations is not self.observations:
            buffer.observe(transition.observations, None if self.cached is None else np.asarray(transition.starts, np.float32))
        self.rewards[step], self.starts[step] = transition.rewards, transition.starts
        if isinstance(buffer, TensorSequenceBuffer):
            assert isinstance(policy, TransformerPolicyMixin)
            encoded = th.from_numpy(policy.encode_actions(transition.env_actions)) if policy.use_last_action else None
            buffer.keep_outcome(step, encoded, transition.rewards)
        if self.config.is_watched:
            # User code may have written into its arrays, and may read all of them at the next step.
            _, samples, values, log_probs = transition.action
            assert values is not None
            assert log_probs is not None
            buffer.record(th.from_numpy(samples), values, log_probs)
            buffer.tensors["rewards"][step].copy_(th.from_numpy(self.rewards[step]))
            buffer.tensors["episode_starts"][step].copy_(th.from_numpy(self.starts[step]))
        for environment, observation in transition.truncated:
            self.rows.append(step * buffer.n_envs + environment)
            self.terminal_observations.append(observation)
        if self.config.is_watched and transition.truncated:
            # User code may change the parameters before the end of the rollout, and read the rewards.
            rows, _, values = self._values(policy, -len(transition.truncated))
            self.values.append(values)
            buffer.tensors["rewards"].view(-1)[rows] += transition.gamma * values
        buffer.pos, buffer.full = step + 1, step + 1 == buffer.buffer_size

    def _values(self, policy: ActorCriticPolicy, first: int) -> tuple[th.Tensor, Any, th.Tensor]:
        """Rows, terminal observations and their values, of the truncated episodes from an index on."""
        rows = th.tensor(self.rows[first:]).to(self.buffer.device)
        tensors = inputs_of(policy, stack(self.terminal_observations[first:]))[0]
        with th.no_grad():
            inputs = self.buffer.after(rows, tensors, th.zeros_like(rows, dtype=th.bool))
            return rows, tensors, policy.predict_values(inputs).flatten()

    def finish(self, policy: ActorCriticPolicy, observations: Any, dones: np.ndarray) -> th.Tensor:
        buffer, device = self.buffer, self.buffer.device
        last = np.asarray(dones, np.float32)[np.newaxis]
        from_host = th.from_numpy(np.stack([self.rewards, self.starts, np.broadcast_to(last, self.starts.shape)])).to(device)
        if not self.config.is_watched:  # User code may have written into the buffer, which has them already.
            buffer.tensors["rewards"].copy_(from_host[0])
            buffer.tensors["episode_starts"].copy_(from_host[1])
        if self.rows:
            rows, tensors, values = self._values(policy, 0)
            if self.config.is_watched:
                buffer.truncated = TruncatedEpisodes(rows, tensors, th.cat(self.values))
            else:
                buffer.bootstrap(TruncatedEpisodes(rows, tensors, values), self.gamma)
        with th.no_grad():
            last_observations = map_observations(lambda part: th.as_tensor(part, device=device), observations)
            inputs = buffer.after_step(buffer.buffer_size - 1, last_observations, from_host[2, 0])
            values = policy.predict_values(inputs)
        if isinstance(buffer, TensorSequenceBuffer):
            buffer.context_watch.note(self.starts, dones, self.config.num_timesteps)
        buffer.compute_returns_and_advantage(last_values=values, dones=from_host[2, 0])
        return values
