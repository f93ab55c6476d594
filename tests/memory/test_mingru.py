"""MinGRU: numbers by hand, the scan against the loop, and policies whose first ratio is 1."""

import numpy as np
import pytest
import torch as th
from support.toys import make_toys

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.memory.mingru import MinGRU, scan_

LENGTHS = th.tensor([1, 7, 3, 20, 1, 1])
FIRSTS = LENGTHS.cumsum(0) - LENGTHS


def test_by_hand():
    """One unit with update gates of 1/2, 3/4 and 1/4, and candidates of 2.5, 1/2 and 1/3."""
    network = MinGRU(2, 1)
    th.nn.init.eye_(network.layers[0].weight)
    th.nn.init.zeros_(network.layers[0].bias)
    inputs = th.tensor([[0.0, 2.0], [np.log(3.0), 0.0], [-np.log(3.0), -np.log(2.0)]], dtype=th.float32)
    # 1/2 * 4 + 1/2 * 2.5, then 1/4 * 3.25 + 3/4 * 1/2, then 3/4 * 1.1875 + 1/4 * 1/3
    expected = th.tensor([3.25, 1.1875, 0.890625 + 1 / 12])
    outputs, hidden = network(inputs[:, None], th.full((1, 1, 1), 4.0))
    th.testing.assert_close(outputs.flatten(), expected)
    th.testing.assert_close(hidden.flatten(), expected[-1:])
    at_once = network.over_sequences(inputs, th.tensor([0]), 3, th.full((1, 1, 1), 4.0))
    th.testing.assert_close(at_once.flatten(), expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n_layers", [1, 2])
def test_scan_equals_the_loop(n_layers, bias):
    """Outputs and all gradients are those of steps one by one, where sequences of several lengths begin anywhere."""
    th.manual_seed(0)
    network = MinGRU(3, 4, n_layers, bias=bias).double()
    features = th.randn(int(LENGTHS.sum()), 3, dtype=th.float64, requires_grad=True)
    hidden = th.rand(n_layers, len(LENGTHS), 4, dtype=th.float64, requires_grad=True)
    weights = th.randn(len(features), 4, dtype=th.float64)
    by_steps = th.cat(
        [network(part[:, None], hidden[:, n : n + 1])[0][:, 0] for n, part in enumerate(features.split(LENGTHS.tolist()))]
    )
    at_once = network.over_sequences(features, FIRSTS, int(LENGTHS.max()), hidden)
    th.testing.assert_close(at_once, by_steps)
    inputs = [features, hidden, *network.parameters()]
    gradients = [th.autograd.grad((outputs * weights).sum(), inputs) for outputs in (at_once, by_steps)]
    th.testing.assert_close(*gradients)


@pytest.mark.parametrize("factor", [0.0, 1e-30, 0.5, 1.0 - 2.0**-24, 1.0])
def test_long_sequences(factor):
    """Nothing overflows, and digits are kept, however much of the state is kept over 100 thousand steps."""
    kept, added, state = th.full((100_000, 1), factor), th.rand(100_000, 1), 0.0
    states = added.clone()
    scan_(kept, states, len(kept))
    expected = np.empty(len(kept))
    for step, (part, new) in enumerate(zip(kept.flatten().tolist(), added.flatten().tolist(), strict=True)):
        expected[step] = state = part * state + new
    np.testing.assert_allclose(states.flatten(), expected, rtol=1e-5)


def test_saturated_gates():
    """Products that are large saturate the gates: the state is kept, or replaced, and slopes are finite."""
    network = MinGRU(2, 1, bias=False)
    th.nn.init.eye_(network.layers[0].weight)
    features = th.tensor([[-1e30, 5.0], [1e30, -1e30], [1e30, 1e30]], requires_grad=True)
    outputs = network.over_sequences(features, th.tensor([0]), 3, th.full((1, 1, 1), 4.0))
    assert outputs.flatten().tolist() == [4.0, 0.0, pytest.approx(1e30)]
    assert th.autograd.grad(outputs.sum(), features)[0].isfinite().all()


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("length", [1, 2, 7, 50, 200])
def test_first_ratios(length):
    """In the first epoch, the ratio is 1 and values are those of the rollout, wherever episodes end and sequences are cut."""
    policy_kwargs = dict(lstm_hidden_size=8, net_arch=[8], rnn="mingru", n_lstm_layers=2)
    options = dict(n_steps=64, batch_size=50, n_epochs=1, learning_rate=0.0, seed=0, device="cpu", backend="fused")
    env = make_toys(2, length=length, p_end=0.0)
    model = PPOExt("MlpLstmPolicy", env, policy_kwargs=policy_kwargs, **options).learn(256)
    buffer, n = model.rollout_buffer, 128
    rng = np.random.default_rng(length)
    assert (buffer.episode_starts.sum() > 0) == (length < 64)
    for indices in (np.arange(n), np.roll(np.arange(n), 50)[:50], rng.permutation(n)):
        data = buffer._get_samples(indices)
        values, log_prob, _ = model.policy.evaluate_actions(data.observations, data.actions)
        th.testing.assert_close((log_prob - data.old_log_prob).exp(), th.ones(len(indices)), rtol=0, atol=1e-5)
        th.testing.assert_close(values.flatten(), data.old_values, rtol=1e-4, atol=1e-5)
