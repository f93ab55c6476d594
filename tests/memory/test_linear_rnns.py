"""Linear recurrences: numbers by hand, scans against the loop, in C and without it, and policies whose first ratio is 1."""

import numpy as np
import pytest
import torch as th
from support.toys import make_toys

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.memory import scan
from sb3_ppo_ext.memory.linear_rnns import LRU, MinGRU

NETWORKS = {"mingru": MinGRU, "lru": LRU}
LENGTHS = th.tensor([1, 7, 3, 20, 1, 1])
FIRSTS = LENGTHS.cumsum(0) - LENGTHS


@pytest.fixture(params=["C", "PyTorch"])
def way(request, monkeypatch):
    """Both ways of a scan."""
    if request.param == "PyTorch":
        monkeypatch.setattr(scan, "module", None)
    elif scan.module is None:
        pytest.skip("the extension module was not built")
    return request.param


def assert_is_by_hand(network, inputs, before, expected):
    """Step by step and at once, for one sequence, shape ``(n_steps, n_units)``."""
    outputs, hidden = network(inputs[:, None], before.view(1, 1, -1))
    th.testing.assert_close(outputs[:, 0], expected)
    th.testing.assert_close(hidden[0], expected[-1:])
    at_once = network.over_sequences(inputs, th.tensor([0]), len(inputs), before.view(1, 1, -1))
    th.testing.assert_close(at_once, expected)


def test_mingru_by_hand(way):
    """One unit with update gates of 1/2, 3/4 and 1/4, and candidates of 2.5, 1/2 and 1/3."""
    network = MinGRU(2, 1)
    th.nn.init.eye_(network.layers[0].weight)
    th.nn.init.zeros_(network.layers[0].bias)
    inputs = th.tensor([[0.0, 2.0], [np.log(3.0), 0.0], [-np.log(3.0), -np.log(2.0)]], dtype=th.float32)
    # 1/2 * 4 + 1/2 * 2.5, then 1/4 * 3.25 + 3/4 * 1/2, then 3/4 * 1.1875 + 1/4 * 1/3
    expected = th.tensor([[3.25], [1.1875], [0.890625 + 1 / 12]])
    assert_is_by_hand(network, inputs, th.tensor([4.0]), expected)


def test_lru_by_hand(way):
    """One complex unit that is halved and turned by a right angle at each step; of the inputs, (2, 1) is scaled by 1/4."""
    network = LRU(1, 2)
    with th.no_grad():
        layer = network.layers[0]
        layer.weight.copy_(th.tensor([[2.0], [1.0]]))
        layer.bias.copy_(th.tensor([0.0, 4.0]))
        layer.log_nu.fill_(np.log(np.log(2.0)))
        layer.log_theta.fill_(np.log(np.pi / 2))
        layer.log_gamma.fill_(np.log(0.25))
    # i/2 * (4 + 2i) + (1/4) * (2 + 5i), then i/2 * (-1/2 + 13/4 i) + (1/4) * 4i
    expected = th.tensor([[-0.5, 3.25], [-1.625, 0.75]])
    assert_is_by_hand(network, th.tensor([[1.0], [0.0]]), th.tensor([4.0, 2.0]), expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("kind", NETWORKS)
def test_scan_equals_the_loop(kind, n_layers, bias, way):
    """Outputs and all gradients are those of steps one by one, where sequences of several lengths begin anywhere."""
    th.manual_seed(0)
    dtype = th.float64 if way == "PyTorch" else th.float32
    network = NETWORKS[kind](3, 4, n_layers, bias=bias).to(dtype)
    features = th.randn(int(LENGTHS.sum()), 3, dtype=dtype, requires_grad=True)
    hidden = th.rand(n_layers, len(LENGTHS), 4, dtype=dtype, requires_grad=True)
    weights = th.randn(len(features), 4, dtype=dtype)
    by_steps = th.cat(
        [network(part[:, None], hidden[:, n : n + 1])[0][:, 0] for n, part in enumerate(features.split(LENGTHS.tolist()))]
    )
    at_once = network.over_sequences(features, FIRSTS, int(LENGTHS.max()), hidden)
    tolerance = dict(rtol=1e-4, atol=1e-5) if dtype == th.float32 else {}
    th.testing.assert_close(at_once, by_steps, **tolerance)
    inputs = [features, hidden, *network.parameters()]
    gradients = [th.autograd.grad((outputs * weights).sum(), inputs) for outputs in (at_once, by_steps)]
    th.testing.assert_close(*gradients, **tolerance)


@pytest.mark.parametrize("factor", [0.0, 1e-30, 0.5, 1.0 - 2.0**-24, 1.0, 0.6 + 0.8j])
def test_long_sequences(factor, way):
    """Nothing overflows, and digits are kept, however much of the state is kept over 100 thousand steps."""
    parts = [factor.real, factor.imag] if isinstance(factor, complex) else [factor]
    shape = (100_000, *(len(parts),) * (len(parts) - 1), 1)
    kept, added, state = th.tensor(parts).view(shape[1:]).expand(shape).contiguous(), th.rand(shape), 0.0
    states = added.clone()
    scan.scan_(kept, states, len(kept))
    factors, summands, found = (
        np.squeeze(each.flatten(1).numpy().astype(float) @ [[1.0], [1.0j]][: len(parts)]) for each in (kept, added, states)
    )
    expected = np.empty(len(kept), complex)
    for step, (part, new) in enumerate(zip(factors, summands, strict=True)):
        expected[step] = state = part * state + new
    np.testing.assert_allclose(found, expected, rtol=1e-5 if len(parts) == 1 else 1e-2)


@pytest.mark.parametrize(
    "bad", [th.zeros(4, 3), th.zeros(5, 2), th.zeros(4), th.zeros(4, 2, dtype=th.float64), th.zeros(4, 2, 1)]
)
def test_arrays_that_do_not_fit(bad):
    """The module in C refuses arrays of other shapes and types."""
    if scan.module is None:
        pytest.skip("the extension module was not built")
    for arrays in ((th.zeros(4, 2), bad), (bad, th.zeros(4, 2))):
        with pytest.raises(ValueError, match="give arrays"):
            scan.module.scan(*(array.numpy() for array in arrays), False)


def test_saturated_gates(way):
    """Products that are large saturate the gates: the state is kept, or replaced, and slopes are finite."""
    network = MinGRU(2, 1, bias=False)
    th.nn.init.eye_(network.layers[0].weight)
    features = th.tensor([[-1e30, 5.0], [1e30, -1e30], [1e30, 1e30]], requires_grad=True)
    outputs = network.over_sequences(features, th.tensor([0]), 3, th.full((1, 1, 1), 4.0))
    assert outputs.flatten().tolist() == [4.0, 0.0, pytest.approx(1e30)]
    assert th.autograd.grad(outputs.sum(), features)[0].isfinite().all()


def test_initial_states_of_an_lru():
    """At first, states are as large as unrelated inputs, and no unit keeps everything, however it is turned."""
    th.manual_seed(0)
    outputs = LRU(8, 64, bias=False)(th.randn(2000, 1, 8), th.zeros(1, 1, 64))[0][500:].detach()
    assert outputs.square().mean() == pytest.approx(0.5, abs=0.1)
    layer = LRU(8, 64).layers[0]
    th.nn.init.constant_(layer.log_nu, -30.0)
    assert layer.terms(th.zeros(1, 8), th.float32)[0].abs().max() <= 1.0


def test_an_lru_needs_pairs():
    """An odd number of units is refused."""
    with pytest.raises(ValueError, match=r"`lstm_hidden_size=7`.*even number"):
        PPOExt("MlpLstmPolicy", make_toys(2), policy_kwargs=dict(rnn="lru", lstm_hidden_size=7))


def test_weight_decay_spares_logarithms():
    """What an LRU keeps is not pulled towards a rate of its own; its weights are, as others."""
    kwargs = dict(rnn="lru", lstm_hidden_size=8)
    model = PPOExt("MlpLstmPolicy", make_toys(2), policy_kwargs=kwargs, optimizer="adamw", weight_decay=0.1)
    decay = {
        parameter: group["weight_decay"] for group in model.policy.optimizer.param_groups for parameter in group["params"]
    }
    layer = model.policy.lstm_critic.layers[0]
    assert [decay[each] for each in (layer.log_nu, layer.log_theta, layer.log_gamma, layer.weight)] == [0.0, 0.0, 0.0, 0.1]


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("rnn", NETWORKS)
@pytest.mark.parametrize("length", [1, 2, 7, 50, 200])
def test_first_ratios(length, rnn):
    """In the first epoch, the ratio is 1 and values are those of the rollout, wherever episodes end and sequences are cut."""
    policy_kwargs = dict(lstm_hidden_size=8, net_arch=[8], rnn=rnn, n_lstm_layers=2)
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
