"""The distribution of hybrid actions is that of independent parts: sums, samples, gradients, and its NumPy side."""

import copy
import math

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    MultiCategoricalDistribution,
)
from support.hybrid import SPACES, WITH_BOXES

from sb3_ppo_ext.common.hybrid_actions import FlatActionSpace
from sb3_ppo_ext.distributions import (
    ACTION_DISTS,
    bounded_part,
    hybrid_distribution,
    kl_divergence,
    numpy_distribution,
    on_device,
    parameters,
    unsquashed_mean,
)
from sb3_ppo_ext.distributions.torch_fallback import TorchFallback

CASES = [(name, "gaussian") for name in SPACES]
CASES += [(name, dist) for name in WITH_BOXES for dist in ("squashed_gaussian", "beta")]


@pytest.fixture(autouse=True)
def _same_numbers():
    th.manual_seed(0)
    np.random.seed(0)


def make(name, action_dist="gaussian", deterministic_action="mean"):
    """A distribution, and its parameter `log_std`."""
    distribution = hybrid_distribution(FlatActionSpace(SPACES[name]), action_dist, deterministic_action)
    log_std = th.nn.Parameter(th.linspace(-1.0, 0.5, n, dtype=th.float64)) if (n := distribution.n_stds) else None
    return distribution, log_std


def of(distribution, outputs, log_std):
    return copy.copy(distribution).proba_distribution(outputs, *(() if log_std is None else (log_std,)))


def outputs_for(distribution, n=6):
    return 2 * th.randn(n, sum(distribution.n_outputs), dtype=th.float64)


def parts_by_hand(space, action_dist, outputs, log_std):
    """The distribution of each part of the space on its own, and its columns in a sample: written down anew."""
    flat, family = FlatActionSpace(space), ACTION_DISTS[action_dist]
    n_box, starts = flat.n_continuous, {"box": 0, "categories": 0, "binary": 0}
    n_of_box = 2 * n_box if action_dist == "beta" else n_box
    of_box, rest = outputs[:, :n_of_box], outputs[:, n_of_box:]
    of_categories, of_binary = rest[:, : sum(flat.n_values)], rest[:, sum(flat.n_values) :]
    for part, columns in zip(flat.parts, flat.columns, strict=True):
        if isinstance(part, spaces.Box):
            size = int(np.prod(part.shape))
            own = slice(starts["box"], starts["box"] + size)
            starts["box"] += size
            if action_dist == "beta":
                alpha, beta = of_box.chunk(2, dim=1)
                made = family.torch_class(size).proba_distribution(th.cat([alpha[:, own], beta[:, own]], dim=1))
            else:
                make_part = DiagGaussianDistribution if action_dist == "gaussian" else family.torch_class
                made = make_part(size).proba_distribution(of_box[:, own], log_std[own])
        elif isinstance(part, spaces.MultiBinary):
            own = slice(starts["binary"], starts["binary"] + part.n)
            starts["binary"] += part.n
            made = BernoulliDistribution(part.n).proba_distribution(of_binary[:, own])
        else:
            nvec = [int(part.n)] if isinstance(part, spaces.Discrete) else [int(n) for n in part.nvec]
            own = slice(starts["categories"], starts["categories"] + sum(nvec))
            starts["categories"] += sum(nvec)
            if isinstance(part, spaces.Discrete):
                made = CategoricalDistribution(nvec[0]).proba_distribution(of_categories[:, own])
            else:
                made = MultiCategoricalDistribution(nvec).proba_distribution(of_categories[:, own])
        yield made, columns, isinstance(part, spaces.Discrete)


@pytest.mark.parametrize(("name", "action_dist"), CASES)
def test_sums_of_the_parts(name, action_dist):
    """Log probability, entropy and KL divergence are the sums of those of the parts, each on its own."""
    distribution, log_std = make(name, action_dist)
    first, second = outputs_for(distribution), outputs_for(distribution)
    made, other = of(distribution, first, log_std), of(distribution, second, log_std)
    samples = made.sample().detach()
    log_prob, entropy, divergence = (th.zeros(len(first), dtype=th.float64) for _ in range(3))
    others = parts_by_hand(SPACES[name], action_dist, second, log_std)
    for (part, columns, is_discrete), (of_other, _, _) in zip(
        parts_by_hand(SPACES[name], action_dist, first, log_std), others, strict=True
    ):
        taken = samples[:, columns]
        log_prob += part.log_prob(taken[:, 0] if is_discrete else taken)
        entropy += part.entropy()
        divergence += kl_divergence(parameters(part), of_other)
    th.testing.assert_close(made.log_prob(samples), log_prob, rtol=1e-6, atol=1e-8)
    th.testing.assert_close(made.entropy(), entropy, rtol=1e-6, atol=1e-8)
    th.testing.assert_close(kl_divergence(parameters(made), other), divergence, rtol=1e-6, atol=1e-8)
    assert (kl_divergence(parameters(made), other) > 0).all()
    th.testing.assert_close(kl_divergence(parameters(made), made), th.zeros(6, dtype=th.float64), atol=1e-6, rtol=0)


def test_numbers_by_hand():
    """A standard Gaussian at 0, one of four equal categories, and a coin."""
    space = spaces.Dict(box=spaces.Box(-1.0, 1.0, (1,)), category=spaces.Discrete(4), coin=spaces.MultiBinary(1))
    distribution = hybrid_distribution(FlatActionSpace(space), "gaussian", "mean")
    distribution.proba_distribution(th.zeros(1, 6), th.zeros(1))
    log_prob = -0.5 * math.log(2 * math.pi) - math.log(4) - math.log(2)
    assert distribution.log_prob(th.tensor([[0.0, 3.0, 1.0]])).item() == pytest.approx(log_prob)
    assert distribution.entropy().item() == pytest.approx(-log_prob + 0.5)
    distribution.proba_distribution(th.tensor([[2.0, 0.0, 0.0, math.log(3), 0.0, math.log(4)]]), th.tensor([math.log(2.0)]))
    # (3 - 2) / 2 standard deviations; 3 of 6; 1 of 5
    log_prob = -0.125 - math.log(2) - 0.5 * math.log(2 * math.pi) + math.log(3 / 6) + math.log(1 / 5)
    assert distribution.log_prob(th.tensor([[3.0, 2.0, 0.0]])).item() == pytest.approx(log_prob)
    assert distribution.mode().tolist() == [[2.0, 2.0, 1.0]]


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(("name", "action_dist"), CASES)
def test_samples_and_modes(name, action_dist):
    """Each column has the marginal distribution of its part, and the mode is that of each part."""
    distribution, log_std = make(name, action_dist)
    outputs = outputs_for(distribution, 1).expand(20000, -1)
    made = of(distribution, outputs, log_std)
    samples, modes = made.sample().detach(), made.mode()
    assert samples.shape == modes.shape == (20000, distribution.action_dim)
    for part, columns, _ in parts_by_hand(SPACES[name], action_dist, outputs, log_std):
        mode = part.get_actions(deterministic=True).double().reshape(20000, -1)
        th.testing.assert_close(modes[:, columns].double(), mode, rtol=1e-5, atol=1e-6)
        expected, found = part.sample().detach().double().reshape(20000, -1), samples[:, columns].double()
        spread = expected.std(dim=0) + 1e-3
        assert ((found.mean(dim=0) - expected.mean(dim=0)).abs() < 0.05 * spread).all()
        assert ((found.std(dim=0) - expected.std(dim=0)).abs() < 0.05 * spread).all()


def test_parts_are_independent():
    """No column of a sample says anything about another one."""
    distribution, log_std = make("all kinds")
    samples = of(distribution, outputs_for(distribution, 1).expand(40000, -1) / 4, log_std).sample().detach()
    correlations = np.corrcoef(samples.numpy().T) - np.eye(distribution.action_dim)
    assert np.abs(correlations).max() < 0.03


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(("name", "action_dist"), CASES)
def test_gradients(name, action_dist):
    """Gradients of everything that a loss reads are those of finite differences."""
    distribution, log_std = make(name, action_dist)
    at, other = outputs_for(distribution, 2).requires_grad_(), outputs_for(distribution, 2)
    other = parameters(of(distribution, other, log_std))
    samples = of(distribution, at.detach(), log_std).sample().detach()

    def function(outputs, *own):
        made = of(distribution, outputs, *(own or (None,)))
        return made.log_prob(samples), made.entropy(), kl_divergence(other.detach(), made)

    assert th.autograd.gradcheck(function, (at,) if log_std is None else (at, log_std))


def test_shallow_copies_keep_their_parts():
    """As of all distributions, a copy is what it was after the policy has evaluated other observations."""
    distribution, log_std = make("all kinds", "beta")
    kept = copy.copy(distribution.proba_distribution(outputs_for(distribution)))
    before = parameters(kept).clone()
    distribution.proba_distribution(outputs_for(distribution))
    th.testing.assert_close(parameters(kept), before, rtol=0, atol=0)
    assert log_std is None


def test_output_layer():
    """The layer has an output for each number that a part needs; those of Beta distributions begin nearly uniform."""
    distribution, _ = make("dict", "beta")
    layer = distribution.proba_distribution_net(5)
    assert layer.weight.shape == (2 * 2 + 3, 5)
    assert (layer.bias[:4] == -1.0).all()
    assert (layer.bias[4:] != -1.0).all()
    layer, log_std = make("dict")[0].proba_distribution_net(5, log_std_init=-2.0)
    assert layer.weight.shape == (2 + 3, 5)
    assert log_std.tolist() == [-2.0, -2.0]


def test_what_losses_read():
    """The mean and the latents are those of the boxes alone; without boxes there are none."""
    distribution, log_std = make("dict")
    outputs = outputs_for(distribution)
    made = of(distribution, outputs, log_std)
    th.testing.assert_close(unsquashed_mean(made), outputs[:, :2])
    assert bounded_part(made) is None
    bounded = bounded_part(make("dict", "beta")[0])
    assert type(bounded).__name__ == "BoundedBetaDistribution"
    assert bounded.action_dim == 2
    assert bounded_part(make("integers")[0]) is None
    for name, action_dist in (("dict", "beta"), ("integers", "gaussian")):
        made = of(*make(name, action_dist)[:1], outputs_for(make(name, action_dist)[0]), None)
        with pytest.raises(ValueError, match=r"no part .* has a mean"):
            unsquashed_mean(made)


@pytest.mark.parametrize("deterministic_action", ["mean", "mode"])
def test_deterministic_action(deterministic_action):
    """The deterministic action of a Beta distribution is the one that is asked for."""
    distribution, _ = make("boxes", "beta", deterministic_action)
    made = of(distribution, outputs_for(distribution), None)
    th.testing.assert_close(made.mode(), getattr(made.continuous, deterministic_action)())
    assert not th.allclose(made.continuous.mean(), made.continuous.mode())


def test_on_device():
    """Without waiting, the same numbers are drawn, and NaN says that outputs are not finite, in every column."""
    distribution, log_std = make("all kinds")
    outputs, log_std = outputs_for(distribution).float(), log_std.detach().float()
    replaced = on_device(distribution, th.device("cpu"))
    assert [type(each).__name__ for each in replaced.distributions] == [
        "GaussianOnDevice",
        "MultiCategoricalOnDevice",
        "BernoulliOnDevice",
    ]
    drawn = []
    for each in (distribution, replaced):
        th.manual_seed(1)
        made = of(each, outputs, log_std)
        drawn.append((made.sample(), made.mode(), made.log_prob(made.mode())))
    for expected, actual in zip(*drawn, strict=True):
        th.testing.assert_close(actual, expected, rtol=0, atol=0)
    made = of(replaced, th.full_like(outputs, th.nan), log_std)
    assert made.sample().isnan().all()
    assert made.log_prob(made.sample()).isnan().all()


@pytest.mark.parametrize("fallback", [False, True], ids=["numpy", "fallback"])
@pytest.mark.parametrize("ent_coef", [0.0, 0.3])
@pytest.mark.parametrize(("name", "action_dist"), CASES)
def test_numpy(name, action_dist, ent_coef, fallback):
    """Log probabilities, entropies, descriptions and gradients in NumPy are those of autograd in double precision."""
    distribution, log_std = make(name, action_dist)
    numpy_side = (TorchFallback if fallback else numpy_distribution)(distribution, log_std)
    outputs, d_log_prob = outputs_for(distribution), th.randn(6, dtype=th.float64)
    samples = of(distribution, outputs, log_std).sample().detach()
    log_prob = numpy_side.log_prob(outputs.numpy(), samples.numpy())
    gradient = numpy_side.gradient(d_log_prob.numpy(), ent_coef)

    leaf = outputs.clone().requires_grad_()
    made = of(distribution, leaf, log_std)
    expected, entropies = made.log_prob(samples), made.entropy()
    np.testing.assert_allclose(log_prob, expected.detach().numpy(), rtol=1e-6)
    described = numpy_side.described(outputs.numpy())
    np.testing.assert_allclose(numpy_side.entropies(described), entropies.detach().numpy(), rtol=1e-6)
    if (bounded := bounded_part(made)) is None:
        assert numpy_side.parameters(described) is None
    else:
        np.testing.assert_allclose(numpy_side.parameters(described), bounded.parameters().detach().numpy())
    (expected @ d_log_prob - ent_coef * entropies.mean()).backward()
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-8, atol=1e-8)
    if log_std is not None:
        np.testing.assert_allclose(numpy_side.d_log_std, log_std.grad.numpy(), rtol=1e-8, atol=1e-10)
        numpy_side.log_prob(outputs.numpy(), samples.numpy())
        numpy_side.gradient(d_log_prob.numpy(), ent_coef, accumulate=True)
        np.testing.assert_allclose(numpy_side.d_log_std, 2 * log_std.grad.numpy(), rtol=1e-8, atol=1e-10)


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(("name", "action_dist"), CASES)
def test_numpy_samples(name, action_dist):
    """Samples in NumPy have the means and standard deviations of PyTorch's, from the noise of all steps or of each."""
    distribution, log_std = make(name, action_dist)
    if log_std is not None:
        log_std = th.nn.Parameter(log_std.detach().float())
    numpy_side = numpy_distribution(distribution, log_std)
    outputs = outputs_for(distribution, 1).float()
    noise = numpy_side.noise(3, 8000, sum(distribution.n_outputs))
    repeated = outputs.expand(8000, -1).contiguous().numpy()
    at_once = numpy_side.scaled(noise)
    samples = np.concatenate([numpy_side.sample(repeated, at_once[step]) for step in range(3)])
    assert samples.dtype == np.float32
    assert samples.shape == (24000, distribution.action_dim)
    np.random.seed(5)
    th.manual_seed(5)
    of_step = numpy_side.sample(repeated, numpy_side.scaled(noise[1]))
    np.random.seed(5)
    th.manual_seed(5)
    np.testing.assert_array_equal(of_step, numpy_side.sample(repeated, at_once[1]))
    expected = of(distribution, outputs.expand(24000, -1), log_std).sample().detach().numpy()
    spread = expected.std(axis=0) + 1e-3
    assert (np.abs(samples.mean(axis=0) - expected.mean(axis=0)) < 0.05 * spread).all()
    assert (np.abs(samples.std(axis=0) - expected.std(axis=0)) < 0.05 * spread).all()
