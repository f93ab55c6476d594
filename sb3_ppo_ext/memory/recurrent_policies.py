"""Recurrent policies for partially observable tasks (POMDPs), with the names and parameters of sb3-contrib's."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch as th
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import (
    ActorCriticCnnPolicy,
    ActorCriticPolicy,
    BasePolicy,
    MultiInputActorCriticPolicy,
)
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn

from sb3_ppo_ext.common.hybrid_actions import structured
from sb3_ppo_ext.common.observations import images_in_channels_last, map_observations, takes_channels_last
from sb3_ppo_ext.common.plain_data import python_numbers
from sb3_ppo_ext.common.saved_models import OF_RECURRENT_PPO
from sb3_ppo_ext.common.type_aliases import Arrays, Kwargs
from sb3_ppo_ext.common.validation import (
    BadArgumentError,
    check_choice,
    check_dictionary,
    check_number,
    check_sizes,
    check_type,
    refuse,
)
from sb3_ppo_ext.memory.history import HistoryPolicy, episode_starts_of
from sb3_ppo_ext.memory.linear_rnns import LRU, LinearRNN, MinGRU
from sb3_ppo_ext.memory.recurrence import (
    Network,
    Padding,
    Plan,
    RecurrentSequences,
    RecurrentStates,
    State,
    over_padded,
    over_sequences,
    over_windows,
    step,
    without_memory,
)
from sb3_ppo_ext.memory.states import StateMemory

Rnn = Literal["lstm", "gru", "mingru", "lru"]
NETWORKS: dict[str, type[Network]] = {"lstm": nn.LSTM, "gru": nn.GRU, "mingru": MinGRU, "lru": LRU}
# What one more call of an LSTM costs on the CPU, as a number of rows: so many at least, as its weights are rearranged, and as
# many as there are in this number of products
ROWS_OF_CALL, PRODUCTS_OF_CALL = 64, 2**19
# Outputs of the networks for actor and critic, with one row for each row of features
Latents = tuple[th.Tensor, th.Tensor]


class RecurrentPolicyMixin(HistoryPolicy):
    """
    Mixin that makes an actor-critic policy of SB3 recurrent; it comes before that policy among the base classes. A recurrent
    network reads the features of each observation, and its outputs go to the networks of actor and critic. Names, parameters
    and their order are those of the policies of sb3-contrib's RecurrentPPO.

    ``evaluate_actions``, ``get_distribution`` and ``predict_values`` take
    :class:`~sb3_ppo_ext.memory.recurrence.RecurrentSequences`, which the rollout buffer returns. ``predict`` takes and returns
    the state of the actor's network, a tuple of arrays.

    Papers: https://doi.org/10.1162/neco.1997.9.8.1735 (LSTM), https://arxiv.org/abs/1406.1078 (GRU),
    https://arxiv.org/abs/2410.01201 (MinGRU), https://arxiv.org/abs/2303.06349 (LRU)

    :param args: Positional arguments of SB3's policy
    :param lstm_hidden_size: Number of hidden units of each layer; even for LRUs
    :param n_lstm_layers: Number of layers
    :param shared_lstm: Whether the critic reads the outputs of the actor's network, without changing that network. Needs
        ``enable_critic_lstm=False`` and ``share_features_extractor=True``
    :param enable_critic_lstm: Whether the critic has a recurrent network of its own. If not, and nothing is shared, a linear
        layer takes its place, and the critic has no memory
    :param lstm_kwargs: Further keyword arguments of the networks: ``bias`` (whether they have biases) and ``dropout`` (between
        layers, in [0, 1])
    :param rnn: Kind of the networks, ``"lstm"``, ``"gru"``, ``"mingru"`` or ``"lru"``. A GRU has three quarters of the
        parameters of an LSTM, and one state. So have the others: the gates of a MinGRU do not read it, and Linear Recurrent
        Units, a state-space model, have no gates, so that all steps of a sequence are computed at once, in a third of the time
    :param kwargs: Keyword arguments of SB3's policy and of :class:`~sb3_ppo_ext.policies.ActionDistributionMixin`
    :raises ValueError: if a keyword is not valid
    """

    lstm_actor: Network
    lstm_critic: Network | None
    critic: nn.Linear | None

    def __init__(
        self,
        *args: Any,
        lstm_hidden_size: int = 256,
        n_lstm_layers: int = 1,
        shared_lstm: bool = False,
        enable_critic_lstm: bool = True,
        lstm_kwargs: Kwargs | None = None,
        rnn: Rnn = "lstm",
        **kwargs: Any,
    ):
        check_sizes(dict(lstm_hidden_size=lstm_hidden_size, n_lstm_layers=n_lstm_layers))
        check_choice("rnn", rnn, get_args(Rnn))
        if rnn == "lru" and lstm_hidden_size % 2 == 1:
            refuse("lstm_hidden_size", lstm_hidden_size, "the units of an LRU are pairs of numbers; give an even number")
        check_lstm_kwargs(lstm_kwargs)
        flags = dict(shared_lstm=shared_lstm, enable_critic_lstm=enable_critic_lstm)
        for name, flag in flags.items():
            check_type(name, flag, (bool, np.bool_), "give True or False")
        if shared_lstm and enable_critic_lstm:
            refuse("shared_lstm", shared_lstm, "the critic has its own network; give `enable_critic_lstm=False` as well")
        if shared_lstm and not kwargs.get("share_features_extractor", True):
            refuse("shared_lstm", shared_lstm, "the features extractors are not shared; give `shared_lstm=False`")
        self.lstm_hidden_size, self.n_lstm_layers, self.rnn = int(lstm_hidden_size), int(n_lstm_layers), rnn
        self.shared_lstm, self.enable_critic_lstm = bool(shared_lstm), bool(enable_critic_lstm)
        self.lstm_kwargs = python_numbers(lstm_kwargs or {})
        self.lstm_output_dim = self.lstm_hidden_size
        # Shape of a state of one environment, for `predict`
        self.lstm_hidden_state_shape = (self.n_lstm_layers, 1, self.lstm_hidden_size)
        super().__init__(*args, **kwargs)

    # Networks

    def _build_mlp_extractor(self) -> None:
        self.mlp_extractor = self.make_networks(self.lstm_output_dim, self.lstm_output_dim)

    def _build(self, lr_schedule: Schedule) -> None:
        if self.shared_lstm and not self.share_features_extractor:
            refuse("shared_lstm", True, "actor and critic read different keys of the observations; give `shared_lstm=False`")
        # The order of RecurrentPPO's policies, also of the random numbers
        super()._build(lr_schedule)
        for_actor, for_critic = self.pi_features_extractor.features_dim, self.vf_features_extractor.features_dim
        self.lstm_actor = self._make_network(for_actor)
        self.critic = self.lstm_critic = None
        if self.enable_critic_lstm:
            self.lstm_critic = self._make_network(for_critic)
        elif not self.shared_lstm:
            self.critic = nn.Linear(for_critic, self.lstm_hidden_size)
        make_optimizer: Any = self.optimizer_class
        self.optimizer = make_optimizer(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)

    def _make_network(self, n_inputs: int) -> Network:
        make: Any = NETWORKS[self.rnn]
        network: Network = make(int(n_inputs), self.lstm_hidden_size, num_layers=self.n_lstm_layers, **self.lstm_kwargs)
        return network

    @property
    def n_states(self) -> int:
        """Number of states of a network: hidden and cell state of an LSTM, the hidden state of others."""
        return 2 if self.rnn == "lstm" else 1

    def make_memory(self) -> StateMemory:
        n_networks = 1 + (self.lstm_critic is not None)
        return StateMemory((n_networks, self.n_states, self.n_lstm_layers, self.lstm_hidden_size))

    def _get_constructor_parameters(self) -> Kwargs:
        names = ("lstm_hidden_size", "n_lstm_layers", "shared_lstm", "enable_critic_lstm", "lstm_kwargs", "rnn")
        return {**super()._get_constructor_parameters(), **{name: getattr(self, name) for name in names}}

    def _actor_arguments(self) -> Kwargs:
        return {**super()._actor_arguments(), "shared_lstm": True, "enable_critic_lstm": False}

    # From sequences to latents

    def _extract(self, observations: PyTorchObs) -> Latents:
        """Features for actor and critic of single observations, shape ``(n, features_dim)``."""
        of_actor = self.features_of(observations, self.pi_features_extractor)
        if self.share_features_extractor:
            return of_actor, of_actor
        return of_actor, self.features_of(observations, self.vf_features_extractor)

    def _of_actor(self, features: th.Tensor, sequences: RecurrentSequences) -> th.Tensor:
        return self._run(self.lstm_actor, features, sequences, sequences.states.pi)

    def _of_critic(self, features: th.Tensor, sequences: RecurrentSequences) -> th.Tensor:
        """Latents of the critic if it does not share those of the actor."""
        if self.critic is not None:
            return self.critic(features)
        assert self.lstm_critic is not None
        return self._run(self.lstm_critic, features, sequences, sequences.states.vf)

    def _run(self, network: Network, features: th.Tensor, sequences: RecurrentSequences, state: State) -> th.Tensor:
        lengths, starts = sequences.lengths, sequences.starts
        state = without_memory(state, starts)
        if sequences.is_padded:
            return over_padded(network, features, len(lengths), bool((starts != 0).any()), state)
        if isinstance(network, LinearRNN):
            return over_sequences(network, features, lengths, state)
        if sequences.plan is not None:
            return over_windows(network, features, sequences.plan, state)
        return step(network, features, state)[0]

    def _masks_of(self, obs: object) -> th.Tensor:
        return super()._masks_of(obs.observations if isinstance(obs, RecurrentSequences) else obs)

    def _planned(self, sequences: object) -> RecurrentSequences:
        """The sequences with a plan, if one is needed."""
        if not isinstance(sequences, RecurrentSequences):
            raise BadArgumentError(
                f"A {type(self).__name__} reads `RecurrentSequences`, which PPOExt's rollout buffer returns; single "
                "observations lack the states: use `predict` with its `state`."
            )
        if sequences.is_padded or sequences.lengths.max() == 1 or isinstance(self.lstm_actor, LinearRNN):
            return sequences
        size = self.lstm_hidden_size
        rows_of_call = ROWS_OF_CALL + PRODUCTS_OF_CALL / (size * (size + self.features_dim))
        return sequences._replace(plan=Plan.of(sequences.lengths, rows_of_call, self.device))

    def _packed(self, sequences: object) -> RecurrentSequences:
        """The sequences without padding, which serves only to add up what RecurrentPPO adds up in the same order."""
        planned = self._planned(sequences)
        return self._planned(planned._replace(is_padded=False)) if planned.is_padded else planned

    def _latents(self, sequences: RecurrentSequences) -> Latents:
        """Inputs of the output layers of actor and critic."""
        for_actor, for_critic = self._extract(sequences.observations)
        latent_pi = self._of_actor(for_actor, sequences)
        latent_vf = latent_pi.detach() if self.shared_lstm else self._of_critic(for_critic, sequences)
        return self.mlp_extractor.forward_actor(latent_pi), self.mlp_extractor.forward_critic(latent_vf)

    def _evaluate_latents(self, latents: Latents, samples: th.Tensor) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        distribution = self._get_action_dist_from_latent(latents[0])
        log_prob = distribution.log_prob(samples)
        return self.value_net(latents[1]), log_prob, distribution.entropy()

    def evaluate_samples(self, obs: object, samples: th.Tensor) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        """
        :param obs: Sequences
        :param samples: Samples of the policy, shape ``(n_samples, action_dim)``
        :return: Estimated values, log probabilities of the actions, and entropies of the action distributions
        """
        sequences = self._planned(obs)
        if sequences.is_padded:
            return self._evaluate_padded(sequences, samples)
        self.use_masks(sequences)
        if takes_channels_last(self.pi_features_extractor, self.vf_features_extractor):
            sequences = sequences._replace(observations=images_in_channels_last(sequences.observations))
        return self._evaluate_latents(self._latents(sequences), samples)

    def _evaluate_padded(
        self, sequences: RecurrentSequences, samples: th.Tensor
    ) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        """
        Evaluate padded sequences, and leave out the rows of padding last: all sums then have the order of RecurrentPPO.
        """
        padding = Padding.of(sequences.lengths, samples.device)

        def pad(part: th.Tensor) -> th.Tensor:
            is_sample = padding.is_sample.view(-1, *(1 for _ in part.shape[1:]))
            return part[padding.sources] * is_sample.to(part.dtype)

        latents = self._latents(sequences._replace(observations=map_observations(pad, sequences.observations)))
        self.use_masks(map_observations(lambda part: part[padding.sources], sequences.observations))
        evaluated = self._evaluate_latents(latents, samples[padding.sources])
        # The distribution that losses read
        self.use_masks(sequences)
        self._get_action_dist_from_latent(latents[0][padding.samples])
        values, log_prob, entropy = (None if part is None else part[padding.samples] for part in evaluated)
        assert values is not None
        assert log_prob is not None
        return values, log_prob, entropy

    def get_distribution(self, obs: Arrays) -> Distribution:
        """
        :param obs: Sequences
        :return: Action distribution of the samples
        """
        sequences = self._packed(obs)
        features = self.features_of(sequences.observations, self.pi_features_extractor)
        latent_pi = self._of_actor(features, sequences)
        self.use_masks(sequences)
        return self._get_action_dist_from_latent(self.mlp_extractor.forward_actor(latent_pi))

    def predict_values(self, obs: object) -> th.Tensor:
        """
        :param obs: Sequences
        :return: Estimated values of the samples, shape ``(n_samples, 1)``
        """
        sequences = self._packed(obs)
        features = self.features_of(sequences.observations, self.vf_features_extractor)
        latent_vf = self._of_actor(features, sequences) if self.shared_lstm else self._of_critic(features, sequences)
        return self.value_net(self.mlp_extractor.forward_critic(latent_vf))

    # Step by step

    def forward(  # type: ignore[override]
        self, obs: Arrays, lstm_states: RecurrentStates, episode_starts: th.Tensor, deterministic: bool = False
    ) -> tuple[th.Tensor, th.Tensor, th.Tensor, RecurrentStates]:
        """
        Act for one step, with the arguments of RecurrentPPO's policies.

        :param obs: Observations of all environments, shape ``(n_envs, *obs_shape)``
        :param lstm_states: States before the step
        :param episode_starts: 1 where an observation begins an episode, else 0, shape ``(n_envs,)``
        :param deterministic: Whether to return the deterministic action instead of a sample
        :return: Actions, shape ``(n_envs, *action_shape)``, values, shape ``(n_envs, 1)``, log probabilities, shape
            ``(n_envs,)``, and the states after the step
        """
        for_actor, for_critic = self._extract(obs)
        latent_pi, of_actor = step(self.lstm_actor, for_actor, without_memory(lstm_states.pi, episode_starts))
        latent_vf, of_critic = latent_pi, of_actor
        if self.lstm_critic is not None:
            latent_vf, of_critic = step(self.lstm_critic, for_critic, without_memory(lstm_states.vf, episode_starts))
        elif self.critic is not None:
            latent_vf = self.critic(for_critic)
        values = self.value_net(self.mlp_extractor.forward_critic(latent_vf))
        self.use_masks(obs)
        distribution = self._get_action_dist_from_latent(self.mlp_extractor.forward_actor(latent_pi))
        actions = distribution.get_actions(deterministic=deterministic)
        log_prob = distribution.log_prob(actions)
        shaped = actions.reshape(-1, *self.action_space.shape)
        return shaped, values, log_prob, RecurrentStates(of_actor, of_critic)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[Arrays, tuple[np.ndarray, ...] | None]:
        """
        Get the policy's action from an observation and the state of the actor's network.

        :param observation: Observation of one environment, shape ``obs_shape``, or of several, shape ``(n_envs, *obs_shape)``
        :param state: State that the last call returned, ``None`` in the first call: hidden and cell state of an LSTM, the
            hidden state of others, each of shape ``(n_lstm_layers, n_envs, lstm_hidden_size)``
        :param episode_start: Whether each environment has begun an episode with this observation, shape ``(n_envs,)``;
            ``None`` if none has since the last call
        :param deterministic: Whether to return the deterministic action instead of a sample
        :return: Action of each environment, and the next state
        :raises ValueError: if the state is that of another policy, or for another number of environments
        """
        self.set_training_mode(False)
        tensor, is_vectorized = self.obs_to_tensor(self.seen_by_actor(observation))
        n_envs = len(next(iter(tensor.values()))) if isinstance(tensor, dict) else len(tensor)
        starts = episode_starts_of(episode_start, n_envs)
        with th.no_grad():
            before = self._state_of(state, n_envs)
            features = self.features_of(tensor, self.pi_features_extractor)
            begins = th.as_tensor(starts, dtype=th.float32, device=self.device)
            latent_pi, after = step(self.lstm_actor, features, without_memory(before, begins))
            self.use_masks(tensor)
            distribution = self._get_action_dist_from_latent(self.mlp_extractor.forward_actor(latent_pi))
            samples = distribution.get_actions(deterministic=deterministic).cpu().numpy()
        actions = self._within_bounds(samples.reshape(n_envs, *self.action_space.shape))
        chosen = structured(self.action_space, actions if is_vectorized else actions.squeeze(axis=0))
        return chosen, tuple(part.cpu().numpy() for part in after)

    def _state_of(self, state: tuple[np.ndarray, ...] | None, n_envs: int) -> State:
        """State of the actor's network from an argument of ``predict``."""
        n_layers, _, n_units = self.lstm_hidden_state_shape
        shape = (n_layers, n_envs, n_units)
        if state is None:
            state = self.n_states * (np.zeros(shape),)
        found = [np.shape(part) for part in state] if isinstance(state, tuple | list) else type(state).__name__
        if found != self.n_states * [shape]:
            refuse(
                "state", found, f"give what `predict` has returned, {self.n_states} of shape {shape}, or None to start anew"
            )
        return tuple(th.tensor(part, dtype=th.float32, device=self.device) for part in state)


def with_own_recurrence(policy_class: Any) -> Any:
    """
    :param policy_class: Policy class
    :return: The class of this package for one of RecurrentPPO's; other classes are returned unchanged
    """
    names = {MlpLstmPolicy.__name__: MlpLstmPolicy, CnnLstmPolicy.__name__: CnnLstmPolicy}
    names[MultiInputLstmPolicy.__name__] = MultiInputLstmPolicy
    return names.get(_our_name(policy_class), policy_class)


def check_recurrence(policy_class: type[BasePolicy]) -> None:
    """
    :param policy_class: Policy class
    :raises ValueError: if it inherits a class of RecurrentPPO, whose methods have other arguments
    """
    for parent in getattr(policy_class, "__mro__", ()):
        if (name := _our_name(parent)) is not None:
            refuse(
                "policy", policy_class, f"it inherits RecurrentPPO's {parent.__name__}; let it inherit `sb3_ppo_ext.{name}`"
            )


def _our_name(policy_class: type) -> Any:
    return OF_RECURRENT_PPO.get((getattr(policy_class, "__module__", ""), getattr(policy_class, "__name__", "")))


def check_lstm_kwargs(lstm_kwargs: Any) -> None:
    """
    :param lstm_kwargs: Further keyword arguments of recurrent networks, ``None`` for none
    :raises ValueError: if one is unknown or not valid, or would change the shape of outputs or states
    """
    if lstm_kwargs is None:
        return
    check_dictionary("lstm_kwargs", lstm_kwargs)
    for name, value in lstm_kwargs.items():
        if name == "bias":
            check_type("lstm_kwargs['bias']", value, (bool, np.bool_), "give True or False")
        elif name == "dropout":
            check_number("lstm_kwargs['dropout']", value, 0.0, 1.0)
        else:
            refuse("lstm_kwargs", lstm_kwargs, f"{name!r} is not supported; give `bias` or `dropout`")


class MlpLstmPolicy(RecurrentPolicyMixin, ActorCriticPolicy):
    """Recurrent policy for vectors, see :class:`RecurrentPolicyMixin`."""


class CnnLstmPolicy(RecurrentPolicyMixin, ActorCriticCnnPolicy):
    """Recurrent policy for images, see :class:`RecurrentPolicyMixin`."""


class MultiInputLstmPolicy(RecurrentPolicyMixin, MultiInputActorCriticPolicy):
    """Recurrent policy for dictionaries, see :class:`RecurrentPolicyMixin`."""
