"""Recurrent networks over sequences of samples: step by step, in few calls, or padded as RecurrentPPO pads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch as th
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from sb3_ppo_ext.memory import gru
from sb3_ppo_ext.memory.linear_rnns import LinearRNN

Network: TypeAlias = nn.RNNBase | LinearRNN
# Hidden state, and cell state of an LSTM, each of shape (n_layers, n_sequences, hidden_size)
State: TypeAlias = tuple[th.Tensor, ...]


class RecurrentStates(NamedTuple):
    """
    States of the recurrent networks, with the names of sb3-contrib's ``RNNStates``.

    :param pi: State of the actor's network: hidden and cell state of an LSTM, the hidden state alone of others, each of shape
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
    :param plan: Plan for the calls of the networks, ``None`` if the sequences are padded or have one sample each
    """

    observations: PyTorchObs
    lengths: np.ndarray
    starts: th.Tensor
    states: RecurrentStates
    is_padded: bool = False
    plan: Plan | None = None


def padded(observations: PyTorchObs) -> PyTorchObs:
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


def step(network: Network, features: th.Tensor, state: State) -> tuple[th.Tensor, State]:
    """
    :param network: Recurrent network
    :param features: Features of one step of each sequence, shape ``(n_sequences, features_dim)``
    :param state: State before the step
    :return: Outputs, shape ``(n_sequences, hidden_size)``, and the state after the step
    """
    outputs, state = _call(network, features.unsqueeze(0), state)
    return outputs.squeeze(0), state


class Window(NamedTuple):
    """
    Successive steps of the sequences that are long enough, for one call of a network. Sequences that end in a window extend to
    its end, with outputs that are not used.

    :param rows: Index of the sample of each step and sequence, flattened, shape ``(n_steps * n_sequences,)``
    :param n_sequences: Number of sequences
    """

    rows: th.Tensor
    n_sequences: int


class Plan(NamedTuple):
    """
    Division of sequences of different lengths into few calls of a network, with little padding.

    :param order: Indices of the sequences, the longest first, shape ``(n_sequences,)``
    :param windows: Windows, one after the other in time
    :param outputs: Index of the output of each sample among the outputs of all windows, shape ``(n_samples,)``
    """

    order: th.Tensor
    windows: list[Window]
    outputs: th.Tensor

    @classmethod
    def of(cls, lengths: np.ndarray, rows_of_call: float, device: th.device) -> Plan:
        """
        :param lengths: Number of samples of each sequence, shape ``(n_sequences,)``
        :param rows_of_call: Number of steps of one sequence that take as long as one more call
        :param device: Device of the result
        :return: Plan for these sequences
        """
        order = np.argsort(-lengths, kind="stable")
        firsts, lasts = (np.cumsum(lengths) - lengths)[order], (np.cumsum(lengths) - 1)[order]
        n_going_on = np.searchsorted(-lengths[order], -np.arange(lengths.max()), side="left")
        sizes, rows, outputs, n_rows = [], [], np.empty(lengths.sum(), np.int64), 0
        for start, end in _split(n_going_on, 0, len(n_going_on), rows_of_call):
            n = n_going_on[start]
            steps = firsts[:n] + np.arange(start, end)[:, np.newaxis]
            is_sample = steps <= lasts[:n]
            outputs[steps[is_sample]] = n_rows + np.flatnonzero(is_sample)
            sizes.append(int(n))
            rows.append(np.minimum(steps, lasts[:n]).flatten())
            n_rows += steps.size
        on_device = together(device, order, outputs, *rows)
        return cls(on_device[0], list(map(Window, on_device[2:], sizes)), on_device[1])


def together(device: th.device, *arrays: np.ndarray) -> list[th.Tensor]:
    """
    :param device: Device
    :param arrays: Arrays of indices
    :return: The same on the device, copied at once and without waiting for it
    """
    joined = th.from_numpy(np.concatenate(arrays)).to(device, non_blocking=True)
    return list(joined.split([len(array) for array in arrays]))


def _split(n_going_on: np.ndarray, start: int, end: int, rows_of_call: float) -> Iterator[tuple[int, int]]:
    """Split a window where that saves the most padding, as long as it saves more than the time of a call."""
    saved = (n_going_on[start] - n_going_on[start:end]) * np.arange(end - start, 0, -1)
    best = int(saved.argmax())
    if saved[best] <= rows_of_call:
        yield start, end
        return
    yield from _split(n_going_on, start, start + best, rows_of_call)
    yield from _split(n_going_on, start + best, end, rows_of_call)


def over_windows(network: Network, features: th.Tensor, plan: Plan, state: State) -> th.Tensor:
    """
    Run a network over sequences of any lengths, in a call for each window. PyTorch's calls for packed sequences of different
    lengths take several times as long.

    :param network: Recurrent network
    :param features: Features of all sequences, one sequence after the other, shape ``(n_samples, features_dim)``
    :param plan: Plan for the lengths of the sequences
    :param state: State before the first sample of each sequence
    :return: Outputs in the order of the features, shape ``(n_samples, hidden_size)``
    """
    state = tuple(part.index_select(1, plan.order) for part in state)
    outputs = []
    for rows, n in plan.windows:
        inputs = features.index_select(0, rows).unflatten(0, (-1, n))
        before = tuple(part[:, :n].contiguous() for part in state)
        if gru.is_faster(network):
            of_window, hidden = gru.over_time(network, inputs, before[0])
            state = (hidden,)
        else:
            of_window, state = _call(network, inputs, before)
        outputs.append(of_window.flatten(0, 1))
    return th.cat(outputs).index_select(0, plan.outputs)


def over_sequences(network: LinearRNN, features: th.Tensor, lengths: np.ndarray, state: State) -> th.Tensor:
    """
    Run a network over sequences of any lengths in one call.

    :param network: Network that computes all steps at once
    :param features: Features of all sequences, one sequence after the other, shape ``(n_samples, features_dim)``
    :param lengths: Number of samples of each sequence, shape ``(n_sequences,)``
    :param state: State before the first sample of each sequence
    :return: Outputs in the order of the features, shape ``(n_samples, hidden_size)``
    """
    (firsts,) = together(features.device, np.cumsum(lengths) - lengths)
    return network.over_sequences(features, firsts, int(lengths.max()), state[0])


def over_padded(network: Network, features: th.Tensor, n_sequences: int, has_starts: bool, state: State) -> th.Tensor:
    """
    Run a network over sequences of one length with the operations of RecurrentPPO: step by step where a sequence begins an
    episode, else in one call.

    :param network: Recurrent network
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


def _call(network: Network, inputs: th.Tensor | PackedSequence, state: State) -> tuple[Any, State]:
    if isinstance(network, nn.LSTM):
        outputs, after = network(inputs, state)
        return outputs, after
    outputs, hidden = network(inputs, state[0])
    return outputs, (hidden,)
