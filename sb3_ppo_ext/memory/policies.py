"""History-based policies for partially observable tasks (POMDPs): they act on the last observations of the episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import (
    ActorCriticCnnPolicy,
    ActorCriticPolicy,
    MultiInputActorCriticPolicy,
)
from stable_baselines3.common.preprocessing import get_flattened_obs_dim, preprocess_obs
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs
from torch import nn

from sb3_ppo_ext.common.bounds import bounds_on_device, middle_and_half
from sb3_ppo_ext.common.hybrid_actions import kinds_of, structured
from sb3_ppo_ext.common.observations import in_channels_last, map_observations, takes_channels_last
from sb3_ppo_ext.common.type_aliases import Arrays, Kwargs
from sb3_ppo_ext.common.validation import BadArgumentError, check_sizes, check_type, refuse
from sb3_ppo_ext.common.weight_watch import are_equal, copies, tensors_of
from sb3_ppo_ext.memory.history import HistoryPolicy, episode_starts_of
from sb3_ppo_ext.memory.transformer import Cache, Transformer
from sb3_ppo_ext.memory.windows import Sequences, WindowMemory

# Number of observations that are preprocessed at once where no gradient is needed
MAX_IMAGES = 64


class KnownSteps:
    """
    What the transformer of the actor has computed of the steps of a :class:`Memory`. It is not changed, so that states that
    follow one state can share it, and it is not pickled, since it can be computed again.

    :param cache: Cache with ``context_length`` steps, the last one being that of the last ``predict``
    :param weights: Copies of the parameters and buffers that it was computed with
    """

    def __init__(self, cache: Cache, weights: Sequence[th.Tensor]):
        self.cache, self.weights = cache, weights

    def __deepcopy__(self, memo: object) -> KnownSteps:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return type(None), ()


class Memory(NamedTuple):
    """
    The state that ``predict`` returns and takes at the next step: the last observations of each environment, and what the
    policy has computed of them. If its parameters have changed since then, it computes that anew from the observations.
    To change anything but the last action and reward, use ``_replace`` with ``known_steps=None``.

    :param observations: Last observations, shape ``(n_envs, context_length - 1, *obs_shape)``
    :param known: Whether each observation belongs to the current episode, shape ``(n_envs, context_length - 1)``
    :param starts: Whether each observation began an episode, shape ``(n_envs, context_length - 1)``
    :param last_actions: Encoded actions before each of these observations and before the next one, shape
        ``(n_envs, context_length, n_action_features)``; ``None`` without ``use_last_action``
    :param last_rewards: Rewards of these actions, shape ``(n_envs, context_length)``, NaN where the reward has not been given;
        as the policy reads them, but for the last ones, which are not normalised yet; ``None`` without ``use_last_reward``
    :param known_steps: What has been computed of these observations, ``None`` to compute it anew
    """

    observations: PyTorchObs
    known: np.ndarray
    starts: np.ndarray
    last_actions: np.ndarray | None
    last_rewards: np.ndarray | None
    known_steps: KnownSteps | None = None

    def with_rewards(self, rewards: np.ndarray) -> Memory:
        """
        :param rewards: Rewards of the last step as environments like those of the training return them, shape ``(n_envs,)``;
            ``predict`` normalises them if the model does. With a ``VecNormalize`` around the environments, what that returns
        :return: State with these rewards for the next step; the same state without ``use_last_reward``
        :raises ValueError: if there is not one for each environment
        """
        if self.last_rewards is None:
            return self
        last_rewards = self.last_rewards.copy()
        if np.size(rewards) != len(last_rewards):
            refuse("rewards", rewards, f"give one for each of {len(last_rewards)} environments")
        last_rewards[:, -1] = np.reshape(rewards, -1)
        return self._replace(last_rewards=last_rewards)


class TransformerPolicyMixin(HistoryPolicy):
    """
    Mixin that makes an actor-critic policy of SB3 history-based; it comes before that policy among the base classes. A
    transformer reads the features of the last observations of the episode, and its outputs go to the networks of actor and
    critic.

    ``evaluate_actions``, ``get_distribution`` and ``predict_values`` take
    :class:`~sb3_ppo_ext.memory.windows.Sequences`, which the rollout buffer returns.
    ``predict`` takes and returns a :class:`Memory` as its state.

    :param args: Positional arguments of SB3's policy
    :param context_length: Number of observations that the policy sees, including the current one
    :param d_model: Size of a token, the embedding of a step, a multiple of ``n_heads``
    :param n_heads: Number of attention heads
    :param n_layers: Number of layers. The earlier steps of the context are divided among them: the more layers, the less far
        each of them looks back, and information from the distant past must pass from one layer to the next
    :param ffn_dim: Hidden size of feed-forward networks behind the attention of each layer, ``None`` for none: the networks of
        actor and critic follow. Where observations are noisy, such networks learn the noise of a rollout
    :param n_stacked: Number of observations that actor and critic see as they are, as in frame stacking, and that the token of
        the current step is made from, so that it contains velocities; at most as many as the first layer sees. Give 1 where
        successive observations are unrelated
    :param gate: Whether the gates of GTrXL join the inputs and outputs of the layers; otherwise they are added
    :param use_last_action: Whether the policy also sees the last action: scaled to [-1, 1] if the action space has bounds, as
        ones and zeros (one-hot) if it is discrete
    :param use_last_reward: Whether the policy also sees the last reward. ``predict`` then needs the rewards, see
        :meth:`Memory.with_rewards`. SB3's ``evaluate_policy`` and RL Zoo's ``enjoy`` do not pass them: for these, wrap the
        environments in :class:`~sb3_ppo_ext.LastRewardWrapper` instead
    :param kwargs: Keyword arguments of SB3's policy and of :class:`~sb3_ppo_ext.policies.ActionDistributionMixin`. With
        ``share_features_extractor=False``, the default of :class:`MlpTransformerPolicy`, actor and critic have separate
        transformers; with ``True``, the default of the others, they share one
    :raises ValueError: if a keyword is not valid
    """

    UNCALLED = (*HistoryPolicy.UNCALLED, "forward")

    def __init__(
        self,
        *args: Any,
        context_length: int = 32,
        d_model: int = 64,
        n_heads: int = 4,
        n_layers: int = 1,
        ffn_dim: int | None = None,
        n_stacked: int = 4,
        gate: bool = False,
        use_last_action: bool = False,
        use_last_reward: bool = False,
        **kwargs: Any,
    ):
        sizes: Kwargs = dict(context_length=context_length, d_model=d_model, n_heads=n_heads, n_layers=n_layers)
        sizes |= dict(n_stacked=n_stacked) | ({} if ffn_dim is None else dict(ffn_dim=ffn_dim))
        check_sizes(sizes)
        flags = dict(gate=gate, use_last_action=use_last_action, use_last_reward=use_last_reward)
        for name, flag in flags.items():
            check_type(name, flag, (bool, np.bool_), "give True or False")
        if d_model % n_heads != 0:
            refuse("d_model", d_model, f"it must be a multiple of n_heads={n_heads}")
        self.memory_kwargs: Kwargs = {**sizes, "ffn_dim": ffn_dim, **flags}
        self.context_length = context_length
        self.use_last_action, self.use_last_reward = use_last_action, use_last_reward
        super().__init__(*args, **kwargs)

    # Networks

    def _build_mlp_extractor(self) -> None:
        self.pi_transformer = self.vf_transformer = self._make_transformer(self.pi_features_extractor)
        if not self.share_features_extractor:
            self.vf_transformer = self._make_transformer(self.vf_features_extractor)
        self.mlp_extractor = self.make_networks(self.pi_transformer.n_outputs, self.vf_transformer.n_outputs)

    def _make_transformer(self, extractor: BaseFeaturesExtractor) -> Transformer:
        size = extractor.features_dim + self.n_action_features + self.use_last_reward
        names = ("context_length", "d_model", "n_heads", "n_layers", "ffn_dim", "n_stacked", "gate")
        return Transformer(size, **{name: self.memory_kwargs[name] for name in names})

    @property
    def n_action_features(self) -> int:
        """Number of inputs that encode the last action, 0 without ``use_last_action``."""
        kinds = kinds_of(self.action_space) if self.use_last_action else []
        return sum(get_flattened_obs_dim(kind) for kind, _ in kinds)

    def _get_constructor_parameters(self) -> Kwargs:
        return {**super()._get_constructor_parameters(), **self.memory_kwargs}

    def make_memory(self) -> WindowMemory:
        return WindowMemory(self.context_length, self.n_action_features, keeps_rewards=self.use_last_reward)

    # From sequences to features

    def inputs(self, sequences: Sequences, extractor: nn.Module) -> th.Tensor:
        """
        :param sequences: Sequences of observations, with the last actions and rewards if the policy sees them
        :param extractor: Features extractor of the actor or of the critic
        :return: Inputs of the transformer at each step, shape ``(n_sequences, n_steps, size)``
        """
        flat = map_observations(lambda part: part.flatten(0, 1), sequences.observations)
        parts = [self._extract(flat, extractor).unflatten(0, sequences.episodes.shape)]
        begins = sequences.starts.unsqueeze(-1)
        if sequences.last_actions is not None:
            parts.append(sequences.last_actions.masked_fill(begins, 0.0))
        if sequences.last_rewards is not None:
            parts.append(sequences.last_rewards.unsqueeze(-1).masked_fill(begins, 0.0))
        return th.cat(parts, dim=-1)

    def _extract(self, observations: PyTorchObs, extractor: nn.Module) -> th.Tensor:
        """Features of single observations, in chunks where no gradient is needed: intermediate results of images are large."""
        n = len(next(iter(observations.values()))) if isinstance(observations, dict) else len(observations)
        size = n if th.is_grad_enabled() else MAX_IMAGES
        features: list[Any] = []
        layout = in_channels_last if takes_channels_last(extractor) else th.Tensor.contiguous
        for start in range(0, max(n, 1), max(size, 1)):
            some = map_observations(lambda part, start=start: layout(part[start : start + size]), observations)
            features.append(self.features_of(some, extractor))
        return th.cat(features)

    def encode_actions(self, actions: np.ndarray) -> np.ndarray:
        """
        :param actions: Actions as the environments got them, shape ``(n_envs, *action_shape)``; vectors for a ``Dict`` or
            ``Tuple``
        :return: Actions as the policy sees them: scaled to [-1, 1] where there are bounds, as ones and zeros (one-hot) if they
            are discrete, shape ``(n_envs, n_action_features)``, float32
        """
        kinds = kinds_of(self.action_space)
        return np.concatenate([_encoded(actions[columns], kind) for kind, columns in kinds], axis=1)

    def encode_action_tensors(self, actions: th.Tensor) -> th.Tensor:
        """
        :meth:`encode_actions` on the device of the actions.

        :param actions: Actions as the environments got them, shape ``(n_envs, *action_shape)``; vectors for a ``Dict`` or
            ``Tuple``
        :return: Actions as the policy sees them, shape ``(n_envs, n_action_features)``, float32
        """
        kinds = kinds_of(self.action_space)
        return th.cat([_encoded_tensors(actions[columns], kind) for kind, columns in kinds], dim=1)

    def _features(self, sequences: PyTorchObs, extractor: nn.Module, transformer: Transformer) -> th.Tensor:
        """Features of the samples, shape ``(n_samples, n_outputs)``."""
        if not isinstance(sequences, Sequences):
            raise BadArgumentError(
                f"A {type(self).__name__} reads `Sequences`, which PPOExt's rollout buffer returns; single observations lack "
                "the history: use `predict` with its `state`."
            )
        return transformer(self.inputs(sequences, extractor), sequences.episodes).flatten(0, 1)

    def _masks_of(self, obs: object) -> th.Tensor:
        if not isinstance(obs, Sequences):
            return super()._masks_of(obs)
        masks = super()._masks_of(obs.observations)
        n_before = 0 if masks.shape[1] == 1 else self.context_length - 1
        return masks[:, n_before:].flatten(0, 1)

    def extract_features(self, obs: Arrays, features_extractor: BaseFeaturesExtractor | None = None) -> Any:
        """
        :param obs: Sequences of observations
        :param features_extractor: Not used: actor and critic use their own
        :return: Features of the samples, shape ``(n_samples, n_outputs)``; a pair of them, for actor and critic, if each has
            its own transformer
        """
        of_actor = self._features(obs, self.pi_features_extractor, self.pi_transformer)
        if self.share_features_extractor:
            return of_actor
        return of_actor, self._features(obs, self.vf_features_extractor, self.vf_transformer)

    def get_distribution(self, obs: PyTorchObs) -> Distribution:
        """
        :param obs: Sequences of observations
        :return: Action distribution of the samples
        """
        self.use_masks(obs)
        features = self._features(obs, self.pi_features_extractor, self.pi_transformer)
        return self._get_action_dist_from_latent(self.mlp_extractor.forward_actor(features))

    def predict_values(self, obs: PyTorchObs) -> th.Tensor:
        """
        :param obs: Sequences of observations
        :return: Estimated values of the samples, shape ``(n_samples, 1)``
        """
        features = self._features(obs, self.vf_features_extractor, self.vf_transformer)
        return self.value_net(self.mlp_extractor.forward_critic(features))

    # Step by step

    def act(self, sequences: Sequences, caches: Sequence[Cache]) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """
        Like ``forward`` of SB3's policies, for the next step of each environment.

        :param sequences: Sequences of this step alone, shape ``(n_envs, 1, ...)``
        :param caches: Caches of the earlier steps, one for each of the :meth:`transformers`
        :return: Actions, shape ``(n_envs, *action_shape)``, values, shape ``(n_envs, 1)``, and log probabilities, shape
            ``(n_envs,)``
        """
        episodes, known = sequences.episodes[:, 0], []
        for (extractor, transformer), cache in zip(self.transformers(), caches, strict=True):
            known.append(transformer.step(self.inputs(sequences, extractor)[:, 0], episodes, cache))
        self.use_masks(sequences)
        distribution = self._get_action_dist_from_latent(self.mlp_extractor.forward_actor(known[0]))
        values = self.value_net(self.mlp_extractor.forward_critic(known[-1]))
        actions = distribution.get_actions()
        return actions.reshape(-1, *self.action_space.shape), values, distribution.log_prob(actions)

    def transformers(self) -> list[tuple[nn.Module, Transformer]]:
        """:return: Features extractor and transformer of the actor, and those of the critic unless they are shared"""
        pairs: Any = [(self.pi_features_extractor, self.pi_transformer), (self.vf_features_extractor, self.vf_transformer)]
        return pairs[:1] if self.share_features_extractor else pairs

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: Any = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[Any, Any]:
        """
        Get the policy's action from an observation and the last observations of the episode.

        :param observation: Observation of one environment, shape ``obs_shape``, or of several, shape ``(n_envs, *obs_shape)``
        :param state: State that the last call returned, ``None`` in the first call
        :param episode_start: Whether each environment has begun an episode with this observation, shape ``(n_envs,)``;
            ``None`` if none has since the last call
        :param deterministic: Whether to return the deterministic action instead of a sample
        :return: Action of each environment, and a :class:`Memory` as the next state
        :raises ValueError: if the state is for another number of environments or another ``context_length``, or lacks the
            rewards of the last step
        """
        self.set_training_mode(False)
        tensor, is_vectorized = self.obs_to_tensor(self.seen_by_actor(observation))
        now = map_observations(lambda part: part.unsqueeze(1).cpu().numpy(), tensor)
        n_envs = len(next(iter(now.values()))) if isinstance(now, dict) else len(now)
        begins = episode_starts_of(episode_start, n_envs).astype(bool)
        if state is None:
            state, begins = self._empty_memory(now, n_envs), np.ones(n_envs, bool)
        self._check_memory(state, n_envs, begins)
        memory = _append(self._with_read_rewards(state), now, begins[:, np.newaxis])
        with th.no_grad():
            features, known_steps = self._last_features(memory)
            self.use_masks(tensor)
            distribution = self._get_action_dist_from_latent(self.mlp_extractor.forward_actor(features))
            samples = distribution.get_actions(deterministic=deterministic)
        actions = self._within_bounds(samples.cpu().numpy().reshape(n_envs, *self.action_space.shape))
        memory = memory._replace(known_steps=known_steps)
        memory = self._forget_oldest(memory, actions)
        return structured(self.action_space, actions if is_vectorized else actions.squeeze(axis=0)), memory

    def _empty_memory(self, now: VecEnvObs, n_envs: int) -> Memory:
        n_before = self.context_length - 1
        return Memory(
            map_observations(lambda part: np.zeros((n_envs, n_before, *part.shape[2:]), part.dtype), now),
            np.zeros((n_envs, n_before), bool),
            np.zeros((n_envs, n_before), bool),
            np.zeros((n_envs, self.context_length, self.n_action_features), np.float32) if self.use_last_action else None,
            np.zeros((n_envs, self.context_length), np.float32) if self.use_last_reward else None,
        )

    def _check_memory(self, state: object, n_envs: int, begins: np.ndarray) -> None:
        if not isinstance(state, Memory):
            refuse("state", type(state).__name__, "give the state that `predict` has returned, or None in the first call")
        if len(state.known) != n_envs:
            refuse("state", f"of {len(state.known)} environments", f"there are {n_envs} observations; give None to start anew")
        if state.known.shape[1] != self.context_length - 1:
            refuse("state", f"of {state.known.shape[1] + 1} steps", f"this policy has context_length={self.context_length}")
        if state.last_rewards is not None and np.isnan(state.last_rewards[~begins, -1]).any():
            remedy = (
                "`use_last_reward` needs the rewards of the last step: give `state.with_rewards(rewards)`. Where that cannot "
                "be done, as in `evaluate_policy` and RL Zoo, train without it, in environments with `LastRewardWrapper`"
            )
            refuse("state", "without rewards", remedy)

    def _with_read_rewards(self, state: Memory) -> Memory:
        """The last rewards as the policy was trained with them; those before have been normalised at their step."""
        if state.last_rewards is None or self.normalizer is None:
            return state
        last_rewards = state.last_rewards.copy()
        last_rewards[:, -1] = self.normalizer.rewards(last_rewards[:, -1])
        return state._replace(last_rewards=last_rewards)

    def _last_features(self, memory: Memory) -> tuple[th.Tensor, KnownSteps]:
        """Features for the actor at the last step, shape ``(n_envs, n_outputs)``, and what is known for the next one."""
        extractor, transformer, known_steps = self.pi_features_extractor, self.pi_transformer, memory.known_steps
        weights = tensors_of(extractor, transformer)
        # By value: the extension module, CUDA graphs and `.data` change parameters without torch's version counters.
        if known_steps is not None and are_equal(known_steps.weights, weights):
            sequences = self._sequences(memory, slice(-1, None))
            cache = known_steps.cache.without_oldest(self._to_device(_episodes(memory)))
            features = transformer.step(self.inputs(sequences, extractor)[:, 0], sequences.episodes[:, 0], cache)
            return features, KnownSteps(cache, known_steps.weights)
        sequences = self._sequences(memory)
        cache = Cache(transformer, len(memory.known), self.context_length)
        features = transformer(self.inputs(sequences, extractor), sequences.episodes, cache)[:, 0]
        return features, KnownSteps(cache, copies(weights))

    def _sequences(self, memory: Memory, steps: slice = slice(None)) -> Sequences:
        arrays = (memory.observations, _episodes(memory), memory.starts, memory.last_actions, memory.last_rewards)
        return Sequences(*(map_observations(lambda part: self._to_device(part, steps), array) for array in arrays))

    def _to_device(self, array: np.ndarray | None, steps: slice = slice(None)) -> Any:
        return None if array is None else th.as_tensor(array[:, steps], device=self.device)

    def _forget_oldest(self, memory: Memory, actions: np.ndarray) -> Memory:
        """The memory for the next step: without the oldest observation, and with the actions of this step."""
        last_actions, last_rewards = memory.last_actions, memory.last_rewards
        if last_actions is not None:
            last_actions = np.concatenate([last_actions[:, 1:], self.encode_actions(actions)[:, np.newaxis]], axis=1)
        if last_rewards is not None:
            last_rewards = np.concatenate([last_rewards[:, 1:], np.full((len(actions), 1), np.nan, np.float32)], axis=1)
        observations = map_observations(lambda part: part[:, 1:], memory.observations)
        known, starts = memory.known[:, 1:], memory.starts[:, 1:]
        return Memory(observations, known, starts, last_actions, last_rewards, memory.known_steps)


def _encoded(actions: np.ndarray, space: spaces.Space) -> np.ndarray:
    encoded: Any = preprocess_obs(th.as_tensor(actions), space, normalize_images=False)
    flat = encoded.reshape(len(actions), -1).double().numpy()
    if isinstance(space, spaces.Box):
        middle, half = middle_and_half(space)
        flat = (flat - middle) / half
    return flat.astype(np.float32)


def _encoded_tensors(actions: th.Tensor, space: spaces.Space) -> th.Tensor:
    encoded: Any = preprocess_obs(actions, space, normalize_images=False)
    flat = encoded.reshape(len(actions), -1).float()
    if not isinstance(space, spaces.Box):
        return flat
    centre, scale = bounds_on_device(*middle_and_half(space), flat.device)
    return (flat - centre) / scale


def _episodes(memory: Memory) -> np.ndarray:
    """Episode numbers: 0 for steps before the current episode, so that no step of the episode sees them."""
    return memory.known.astype(np.int64)


def _append(memory: Memory, observations: object, begins: np.ndarray) -> Memory:
    """The memory with the current observations; where one begins an episode, the earlier ones are no longer known."""
    return memory._replace(
        observations=map_observations(lambda *parts: np.concatenate(parts, axis=1), memory.observations, observations),
        known=np.concatenate([memory.known & ~begins, np.ones_like(begins)], axis=1),
        starts=np.concatenate([memory.starts, begins], axis=1),
    )


class MlpTransformerPolicy(TransformerPolicyMixin, ActorCriticPolicy):
    """
    Transformer policy for vectors, see :class:`TransformerPolicyMixin`.

    :param args: Positional arguments of SB3's policy
    :param share_features_extractor: Whether actor and critic share a transformer. By default they do not: the updates of the
        critic would change what the actor reads, and with it the actions
    :param kwargs: Keyword arguments of :class:`TransformerPolicyMixin`
    """

    def __init__(self, *args: Any, share_features_extractor: bool = False, **kwargs: Any):
        super().__init__(*args, share_features_extractor=share_features_extractor, **kwargs)


class CnnTransformerPolicy(TransformerPolicyMixin, ActorCriticCnnPolicy):
    """
    Transformer policy for images, see :class:`TransformerPolicyMixin`. By default, actor and critic share a CNN and a
    transformer, because most of the computation is that of the CNN.
    """


class MultiInputTransformerPolicy(TransformerPolicyMixin, MultiInputActorCriticPolicy):
    """
    Transformer policy for dictionaries, see :class:`TransformerPolicyMixin`. By default, actor and critic share a transformer,
    because dictionaries often contain images, unless they read different keys.
    """
