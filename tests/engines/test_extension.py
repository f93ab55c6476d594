"""The extension module computes what PyTorch and SB3 compute."""

import itertools

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from support.engines import relative_error
from support.toys import BOX_ACTION, VECTOR
from torch import nn

from sb3_ppo_ext.policies.networks import ResidualBlock

_mlp = pytest.importorskip("sb3_ppo_ext.engines.native._mlp", reason="the extension module was not built")


@pytest.fixture(params=_mlp.available())
def instruction_set(request):
    _mlp.use(request.param)
    yield request.param
    _mlp.use(_mlp.available()[0])


ACTIVATIONS = [("tanh", nn.Tanh), ("relu", nn.ReLU), ("elu", nn.ELU), ("silu", nn.SiLU), ("gelu", nn.GELU)]


def of_torch(modules):
    """A network of the extension module for modules of PyTorch, and its gradients; a block is preceded by its input."""
    names = {module: name for name, module in ACTIVATIONS}
    layers, gradients = [], []
    for module in modules:
        if isinstance(module, ResidualBlock):
            start = len(layers) - 1
            inner, own = of_torch(module.layers)
            layers, gradients = [*layers, *inner, start], [*gradients, *own]
        elif type(module) in names:
            layers.append(names[type(module)])
        else:
            own = [np.full(p.shape, 7, np.float32) for p in module.parameters()]
            layers.append((*(p.detach().numpy() for p in module.parameters()), *own))
            gradients += own
    return layers, gradients


def network_of(sizes, activation, module):
    """A module of PyTorch, the same as a network of the extension module, and the gradients of the latter."""
    linear = [nn.Linear(*ends) for ends in itertools.pairwise(sizes)]
    torch_net = nn.Sequential(*[part for layer in linear for part in (layer, module())][:-1])
    layers, gradients = of_torch(torch_net)
    return torch_net, _mlp.Network(layers), gradients


def check_outputs(torch_net, network, n, **tolerances):
    """Outputs are those of PyTorch in double precision, whose gradients are computed; return those of the outputs."""
    n_in, n_latents, n_out = torch_net[0].in_features, torch_net[-1].in_features, torch_net[-1].out_features
    x, d_out = th.randn(n, n_in), th.randn(n, n_out)
    out, latents = np.empty((n, n_out), np.float32), np.empty((n, n_latents), np.float32)
    network.forward(x.numpy(), out)
    network.latents(latents)
    torch_net.double()
    expected = torch_net(x.double())
    expected.backward(d_out.double())
    np.testing.assert_allclose(out, expected.detach().numpy(), **tolerances)
    np.testing.assert_allclose(latents, torch_net[:-1](x.double()).detach().numpy(), **tolerances)
    return d_out


def residual_net(module):
    """Blocks of two kinds of sizes, between them and around them what else a network may have."""
    return nn.Sequential(
        nn.Linear(5, 24),
        ResidualBlock(24, module),
        ResidualBlock(24, module),
        nn.LayerNorm(24),
        module(),
        nn.Linear(24, 19),
        nn.LayerNorm(19),
        nn.Linear(19, 33),
        ResidualBlock(33, module),
        nn.Linear(33, 3),
    )


def normalized_net(module):
    parts = [[nn.Linear(*ends), nn.LayerNorm(ends[1]), module()] for ends in ((5, 1), (1, 64), (64, 37))]
    return nn.Sequential(*itertools.chain(*parts), nn.Linear(37, 3))


@pytest.mark.parametrize(("activation", "module"), ACTIVATIONS)
@pytest.mark.parametrize("make_net", [residual_net, normalized_net])
def test_networks_with_normalisation_and_residual_blocks(instruction_set, make_net, activation, module):
    """Outputs and gradients are those of PyTorch in double precision, those of weights and biases of LayerNorm as well."""
    for n in (1, 65):
        check_network_with_normalisation(make_net, module, n)


def check_network_with_normalisation(make_net, module, n):
    th.manual_seed(0)
    torch_net = make_net(module)
    for norm in torch_net.modules():
        if isinstance(norm, nn.LayerNorm):
            nn.init.normal_(norm.weight, 1.0, 0.5)
            nn.init.normal_(norm.bias)
    layers, gradients = of_torch(torch_net)
    network = _mlp.Network(layers)
    d_out = check_outputs(torch_net, network, n, rtol=1e-4, atol=2e-5)
    for add in (False, True):
        network.backward(d_out.numpy(), add)
        for (name, parameter), gradient in zip(torch_net.named_parameters(), gradients, strict=True):
            error = np.abs(parameter.grad.numpy() * (1 + add) - gradient).max()
            assert error < 1e-4 * (1 + parameter.grad.abs().max()), name


def test_normalisation_of_large_and_of_equal_numbers(instruction_set):
    """LayerNorm takes numbers far from 0 and of any size, and numbers that are equal have the outputs ``bias``."""
    identity, zeros = np.eye(37, dtype=np.float32), np.zeros(37, np.float32)
    weight, bias = np.linspace(-1, 2, 37, dtype=np.float32), np.linspace(1, 2, 37, dtype=np.float32)
    linear = (identity, zeros, identity.copy(), zeros.copy())
    network = _mlp.Network([linear, (weight, bias, weight.copy(), bias.copy()), linear])
    x = np.random.default_rng(0).normal(size=(5, 37)).astype(np.float32)
    x[1] += 1000
    x[2] *= 1e12
    x[3] = 3
    x[4, 0] = np.nan
    out = np.empty_like(x)
    network.forward(x, out)
    tensors = (th.tensor(each, dtype=th.float64) for each in (x, weight, bias))
    expected = nn.functional.layer_norm(next(tensors), (37,), *tensors)
    np.testing.assert_allclose(out, expected.numpy(), rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(out[3], bias)
    assert np.isnan(out[4]).all()


def test_watch():
    """A change of any array is noticed once, and what is no array of float32 is refused."""
    arrays = [np.zeros((3, 2), np.float32), np.zeros((), np.float32), np.zeros(0, np.float32)]
    watch = _mlp.Watch(arrays)
    assert not watch.has_changed()
    for array in arrays[:2]:
        array.flat[-1] = -0.0
        assert watch.has_changed()
        assert not watch.has_changed()
    with pytest.raises(ValueError, match="float32"):
        _mlp.Watch([arrays[0], np.zeros(2)])
    with pytest.raises(TypeError, match="must be an array"):
        _mlp.Watch([None])


@pytest.mark.parametrize(("activation", "module"), ACTIVATIONS)
@pytest.mark.parametrize("sizes", [(3, 64, 64, 1), (17, 33, 6), (5, 7), (1, 1, 1), (40, 100, 19, 20, 2)])
def test_network(instruction_set, sizes, activation, module):
    """Outputs and gradients are those of PyTorch in double precision; gradients can be added up."""
    for n in (1, 63, 64, 65):
        check_network(sizes, activation, module, n)


def check_network(sizes, activation, module, n):
    th.manual_seed(0)
    torch_net, network, gradients = network_of(sizes, activation, module)
    network.pack()
    d_out = check_outputs(torch_net, network, n, rtol=1e-5, atol=2e-6)
    for add in (False, True):
        network.backward(d_out.numpy(), add)
        for parameter, gradient in zip(torch_net.parameters(), gradients, strict=True):
            assert relative_error(parameter.grad * (1 + add), th.from_numpy(gradient)) < 1e-5


@pytest.mark.parametrize(("activation", "module"), ACTIVATIONS)
def test_activations(instruction_set, activation, module):
    """For numbers of any size, activations and their derivatives are exact to rounding, and NaN comes through."""
    sizes = [0.0, 1e-30, 1e-6, 1e-3, 0.1, 0.34, 0.35, 0.5, 1.0, 2.0, 3.9, 4.1, 5.7, 9.0, 20.0, 86.9, 87.1, 100.0, 1e4, 1e18]
    x = th.tensor([sign * size for size in sizes for sign in (1, -1)] + list(th.randn(1000) * 3))
    exact = x.double().requires_grad_()
    expected = module()(exact)
    expected.sum().backward()
    one = np.ones((1, 1), np.float32)
    zero = np.zeros(1, np.float32)
    # The gradient of the second weight is the sum of the activations, and that of the first bias the sum of the derivatives.
    grads = [np.zeros_like(each) for each in (one, zero, one, zero)]
    network = _mlp.Network([(one, zero, *grads[:2]), activation, (one, zero, *grads[2:])])
    out, found = np.empty((1, 1), np.float32), []
    for number in x.numpy().reshape(-1, 1, 1):
        network.forward(number, out)
        network.backward(one, False)
        found.append((out.item(), grads[1].item()))
    values, slopes = np.transpose(found)
    np.testing.assert_allclose(values, expected.detach().numpy(), rtol=2e-6, atol=5e-7)
    np.testing.assert_allclose(slopes, exact.grad.numpy(), rtol=2e-6, atol=1e-6)
    network.forward(np.float32([[np.nan]]), out)
    assert np.isnan(out.item()) or activation == "relu"


def test_network_takes_over_parameters():
    """Changed parameters are taken over when `pack` says so; numbers out of range and NaN come through."""
    torch_net, network, _ = network_of((2, 4, 1), "tanh", nn.Tanh)
    out = np.empty((3, 1), np.float32)
    for scale in (1.0, -2.0):
        with th.no_grad():
            torch_net[0].weight.mul_(scale)
        network.pack()
        x = np.float32([[1, 2], [1e30, -1e30], [np.nan, 0]])
        network.forward(x, out)
        np.testing.assert_allclose(out, torch_net(th.from_numpy(x)).detach().numpy(), rtol=1e-5)
    assert np.isnan(out[2])


def test_network_refuses_arrays_that_do_not_fit():
    """Arrays of another shape or type raise a ValueError, and nothing outside of them is read."""
    _, network, _ = network_of((2, 4, 1), "tanh", nn.Tanh)
    ones = lambda *shape: np.ones(shape, np.float32)  # noqa: E731
    for x, out in [
        (ones(3, 3), ones(3, 1)),
        (ones(3, 2), ones(2, 1)),
        (ones(3, 2).astype(float), ones(3, 1)),
        (ones(2, 3).T, ones(3, 1)),
    ]:
        with pytest.raises((ValueError, BufferError)):
            network.forward(x, out)
    network.forward(ones(3, 2), ones(3, 1))
    with pytest.raises(ValueError, match="float32"):
        network.backward(ones(2, 1), False)
    with pytest.raises(ValueError, match="float32"):
        network.latents(ones(3, 5))
    with pytest.raises(ValueError, match="fit together"):
        _mlp.Network([(ones(3, 2), ones(3), ones(3, 2), ones(3)), (ones(1, 4), ones(1), ones(1, 4), ones(1))])
    with pytest.raises(ValueError, match="float32"):
        _mlp.Network([(ones(3, 2), ones(2), ones(3, 2), ones(3))])
    with pytest.raises(ValueError, match="activation"):
        _mlp.Network([(ones(3, 2), ones(3), ones(3, 2), ones(3)), "sine"])
    with pytest.raises(ValueError, match="layers"):
        _mlp.Network([])
    with pytest.raises(ValueError, match="float32"):
        _mlp.Adam([(ones(3), ones(2), ones(3), ones(3))])
    with pytest.raises(ValueError, match="float32"):
        _mlp.gae(ones(4, 2), ones(4, 2), ones(4, 2), ones(2), ones(2), 0.9, 0.9, ones(3, 2))
    with pytest.raises(ValueError, match="instruction set"):
        _mlp.use("abacus")


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("n", [1, 17, 64, 1030, 5000])
def test_adam(instruction_set, n, weight_decay):
    """Parameters and moments are those of PyTorch's Adam, and the norm is that of NumPy."""
    rng = np.random.default_rng(0)
    parameter, gradient, first, second = (rng.normal(size=n).astype(np.float32) for _ in range(4))
    first[:] = second[:] = 0
    theirs = nn.Parameter(th.tensor(parameter))
    optimizer = th.optim.Adam([theirs], lr=1e-3, eps=1e-5, weight_decay=weight_decay)
    ours = _mlp.Adam([(parameter, gradient, first, second)])
    for step in range(1, 20):
        gradient[:] = rng.normal(size=n)
        assert ours.norm() == pytest.approx(np.linalg.norm(gradient.astype(np.float64)), rel=1e-6)
        theirs.grad = th.tensor(gradient) * 0.5
        optimizer.step()
        ours.step(step, 0.5, 1e-3, 0.9, 0.999, 1e-5, weight_decay)
    state = optimizer.state[theirs]
    for expected, actual in [(theirs.detach(), parameter), (state["exp_avg"], first), (state["exp_avg_sq"], second)]:
        assert relative_error(expected, th.from_numpy(actual)) < 2e-6


@pytest.mark.parametrize("n_envs", [1, 3])
def test_gae(n_envs):
    """Advantages are those of SB3's buffer."""
    rng = np.random.default_rng(0)
    buffer = RolloutBuffer(32, VECTOR, BOX_ACTION, "cpu", 0.9, 0.97, n_envs)
    buffer.rewards, buffer.values = rng.normal(size=(2, 32, n_envs)).astype(np.float32)
    buffer.episode_starts = (rng.random((32, n_envs)) < 0.2).astype(np.float32)
    last_values, dones = rng.normal(size=n_envs).astype(np.float32), rng.random(n_envs) < 0.5
    buffer.compute_returns_and_advantage(th.from_numpy(last_values), dones)
    arrays = (buffer.rewards, buffer.values, buffer.episode_starts, last_values, dones.astype(np.float32))
    advantages = np.empty_like(buffer.rewards)
    _mlp.gae(*arrays, 0.97, 0.9, advantages)
    np.testing.assert_allclose(advantages, buffer.advantages, rtol=1e-5, atol=1e-6)
