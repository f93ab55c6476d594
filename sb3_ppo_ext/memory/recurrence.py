"""Recurrent networks over sequences of samples: step by step, packed, and padded as sb3-contrib's RecurrentPPO pads them."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch as th
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import nn
from torch.nn.utils.rnn import PackedSequence

# Hidden state, and cell state of an LSTM, each of shape (n_layers, n_sequences, hidden_size)
State: TypeAlias = tuple[th.Tensor, ...]


class RecurrentStates(NamedTuple):
    """
    States of the recurrent networks, with the names of sb3-contrib's ``RNNStates``.

    :param pi: State of the actor's network: hidden and cell state of an LSTM, the hidden state alone of a GRU, each of shape
        ``(n_layers, n_sequences, hidden_size)``
    :param vf: State of the critic's network; that of the actor if the critic has none of its own
    """

    pi: State
    vf: State


class RecurrentSequences(NamedTuple):
    """
    Input of a recurrent policy: samples of one or more sequences, each a part of an episode.

    :param observations: Observations of all sequences, one sequence after the other, shape ``(n_samples, *obs_shape)``
    :param lengths: Number of samples of each sequence, shape ``(n_sequences,)``
    :param starts: 1 where a sequence begins an episode, so that its states are those of no memory, else 0, shape
        ``(n_sequences,)``
    :param states: States before the first sample of each sequence
    :param is_padded: Whether the sequences are to be padded for the networks, as RecurrentPPO does. The results are the same
        up to rounding; without padding, they are computed several times faster
    """

    observations: PyTorchObs
    lengths: np.ndarray
    starts: th.Tensor
    states: RecurrentStates
    is_padded: bool = False


def padded(observations: Any) -> Any:
    """
    :param observations: Observations of a minibatch
    :return: The same, to be computed as RecurrentPPO does if they are sequences
    """
    return observations._replace(is_padded=True) if isinstance(observations, RecurrentSequences) else observations


class Padding(NamedTuple):
    """
    Sequences of different lengths as rows of a matrix, flattened.

    :param sources: Index of the sample in each row, that of the last sample of the sequence in rows of padding
    :param is_sample: Whether each row is a sample
    :param samples: Index of the row of each sample, shape ``(n_samples,)``
    """

    sources: th.Tensor
    is_sample: th.Tensor
    samples: th.Tensor

    @classmethod
    def of(cls, lengths: np.ndarray, device: th.device) -> Padding:
        """
        :param lengths: Number of samples of each sequence, shape ``(n_sequences,)``
        :param device: Device of the result
        :return: Rows of all sequences, each as long as the longest one
        """
        steps = np.arange(lengths.max())
        firsts = np.cumsum(lengths) - lengths
        is_sample = steps < lengths[:, np.newaxis]
        sources = firsts[:, np.newaxis] + np.minimum(steps, lengths[:, np.newaxis] - 1)
        parts = (sources.flatten(), is_sample.flatten(), np.flatnonzero(is_sample))
        return cls(*(th.from_numpy(part).to(device) for part in parts))


def without_memory(state: State, starts: th.Tensor) -> State:
    """
    :param state: State of a network
    :param starts: 1 where an episode begins, else 0, shape ``(n_sequences,)``
    :return: The state, with zeros where an episode begins
    """
    return tuple((1.0 - starts).view(1, -1, 1) * part for part in state)


def step(network: nn.RNNBase, features: th.Tensor, state: State) -> tuple[th.Tensor, State]:
    """
    :param network: LSTM or GRU
    :param features: Features of one step of each sequence, shape ``(n_sequences, features_dim)``
    :param state: State before the step
    :return: Outputs, shape ``(n_sequences, hidden_size)``, and the state after the step
    """
    outputs, state = _call(network, features.unsqueeze(0), state)
    return outputs.squeeze(0), state


def over_packed(network: nn.RNNBase, features: th.Tensor, lengths: np.ndarray, state: State) -> th.Tensor:
    """
    Run a network over sequences of any lengths in one call.

    :param network: LSTM or GRU
    :param features: Features of all sequences, one sequence after the other, shape ``(n_samples, features_dim)``
    :param lengths: Number of samples of each sequence, shape ``(n_sequences,)``
    :param state: State before the first sample of each sequence
    :return: Outputs in the order of the features, shape ``(n_samples, hidden_size)``
    """
    order = np.argsort(-lengths, kind="stable")
    firsts, steps = (np.cumsum(lengths) - lengths)[order], np.arange(lengths.max())[:, np.newaxis]
    is_sample = steps < lengths[order]
    rows = (firsts + steps)[is_sample]
    back = np.empty_like(rows)
    back[rows] = np.arange(len(rows))
    device = features.device
    to_packed, from_packed, sorted_first = (th.from_numpy(part).to(device) for part in (rows, back, order))
    packed = PackedSequence(features[to_packed], th.from_numpy(is_sample.sum(axis=1)))
    outputs, _ = _call(network, packed, tuple(part[:, sorted_first] for part in state))
    return outputs.data[from_packed]


def over_padded(network: nn.RNNBase, features: th.Tensor, n_sequences: int, has_starts: bool, state: State) -> th.Tensor:
    """
    Run a network over sequences of one length with the operations of RecurrentPPO: step by step where a sequence begins an
    episode, else in one call.

    :param network: LSTM or GRU
    :param features: Features of all sequences, shape ``(n_sequences * n_steps, features_dim)``
    :param n_sequences: Number of sequences
    :param has_starts: Whether a sequence begins an episode
    :param state: State before the first sample of each sequence
    :return: Outputs in the order of the features, shape ``(n_sequences * n_steps, hidden_size)``
    """
    by_time = features.reshape(n_sequences, -1, network.input_size).swapaxes(0, 1)
    if not has_starts:
        outputs, _ = _call(network, by_time, state)
    else:
        parts = []
        for of_step in by_time:
            part, state = _call(network, of_step.unsqueeze(0), state)
            parts.append(part)
        outputs = th.cat(parts)
    return outputs.transpose(0, 1).flatten(0, 1)


def _call(network: nn.RNNBase, inputs: Any, state: State) -> tuple[Any, State]:
    if isinstance(network, nn.LSTM):
        outputs, after = network(inputs, state)
        return outputs, after
    outputs, hidden = network(inputs, state[0])
    return outputs, (hidden,)
