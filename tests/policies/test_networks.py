"""Kinds of hidden layers, ``net_type``: what is computed, on every engine, with every kind of policy, and what is refused."""

import copy

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from support.cases import one_in
from support.engines import KEYS, VECTORS, assert_same_update
from support.options import assert_continues
from support.parity import assert_equal_runs, train
from support.toys import BOX_ACTION, DICT, IMAGE, VECTOR, ToyEnv, make_toys
from torch import nn

from sb3_ppo_ext import MlpPolicy, PPOExt
from sb3_ppo_ext.policies.networks import ResidualBlock
from sb3_ppo_ext.update.optimizers import critic_parameters, hidden_matrices

NORM = dict(net_type="layer_norm", net_arch=dict(pi=[8], vf=[16, 12]))
SIMBA = dict(net_type="simba", net_arch=dict(pi=[8], vf=[12, 12]))
KINDS = {"layer_norm": NORM, "simba": SIMBA}
SMALL = dict(n_steps=16, batch_size=8, n_epochs=2, seed=3, device="cpu")
TRANSFORMER = dict(context_length=5, d_model=8, n_heads=2)
POLICIES = {
    "MlpPolicy": ({}, {}),
    "CnnPolicy": (dict(observation_space=IMAGE), {}),
    "MultiInputPolicy": (dict(observation_space=VECTORS), {}),
    "MultiInputPolicy, different keys": (dict(observation_space=VECTORS), KEYS),
    "MultiInputPolicy, images": (dict(observation_space=DICT), {}),
    "MlpTransformerPolicy": ({}, TRANSFORMER),
    "MlpLstmPolicy": ({}, dict(lstm_hidden_size=8)),
    "MultiInputLstmPolicy, different keys": (dict(observation_space=VECTORS), dict(lstm_hidden_size=8, **KEYS)),
}


def of(kind, policy="MlpPolicy", **options):
    env, keywords = POLICIES[policy]
    kwargs = {**keywords, **KINDS[kind], **options.pop("keywords", {})}
    return PPOExt(policy.split(",")[0], make_toys(**env), policy_kwargs=kwargs, **{**SMALL, **options})


# Networks


def test_layer_norm_is_before_each_activation():
    """A hidden layer is f(LayerNorm(W x + b)), computed here by hand from the parameters."""
    networks = of("layer_norm").policy.mlp_extractor
    assert [type(layer) for layer in networks.policy_net] == [nn.Linear, nn.LayerNorm, nn.Tanh]
    assert [type(layer) for layer in networks.value_net] == [nn.Linear, nn.LayerNorm, nn.Tanh] * 2
    x = th.randn(5, VECTOR.shape[0])
    linear, norm, _ = networks.policy_net
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    h = x @ linear.weight.T + linear.bias
    h = (h - h.mean(1, keepdim=True)) / (h.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    th.testing.assert_close(networks.forward_actor(x), th.tanh(h * norm.weight + norm.bias))
    assert (networks.latent_dim_pi, networks.latent_dim_vf) == (8, 12)


def test_simba_is_residual():
    """With zeros in the last layers of the blocks, what is left is the LayerNorm of the first layer; with others, the sum."""
    networks = of("simba").policy.mlp_extractor
    x = th.randn(5, VECTOR.shape[0])
    first, *blocks, norm = networks.value_net
    assert [type(block) for block in blocks] == [ResidualBlock] * 2
    assert [type(layer) for layer in blocks[0].layers] == [nn.LayerNorm, nn.Linear, nn.ReLU, nn.Linear]
    assert blocks[0].layers[1].out_features == 48
    latents = networks.forward_critic(x)
    for block in blocks:
        nn.init.zeros_(block.layers[-1].weight)
    th.testing.assert_close(networks.forward_critic(x), norm(first(x)))
    assert not th.allclose(latents, networks.forward_critic(x))
    assert (networks.latent_dim_pi, networks.latent_dim_vf) == (8, 12)


def test_sizes_of_simba():
    """By default there is a block each, the one of the critic wider; a list is for both; no sizes mean no hidden layers."""

    def widths(**keywords):
        networks = of("simba", keywords={"net_arch": None, **keywords}).policy.mlp_extractor
        nets = (networks.policy_net, networks.value_net)
        return [[block.layers[0].normalized_shape[0] for block in net if type(block) is ResidualBlock] for net in nets]

    assert widths() == [[64], [128]]
    assert widths(net_arch=[8, 8]) == [[8, 8], [8, 8]]
    assert widths(net_arch=dict(vf=[8])) == [[], [8]]
    assert widths(net_arch=[dict(pi=[4], vf=[8])]) == [[4], [8]]
    assert any(isinstance(module, nn.SiLU) for module in of("simba", keywords=dict(activation_fn=nn.SiLU)).policy.modules())


def test_positional_arguments():
    """A policy that is made by hand takes `net_arch` and `activation_fn` at their places."""
    policy = MlpPolicy(VECTOR, BOX_ACTION, lambda _: 1e-3, [8, 8], nn.ELU, net_type="simba")
    assert policy.net_arch == {"pi": [8, 8], "vf": [8, 8]}
    assert policy.activation_fn is nn.ELU


@pytest.mark.parametrize("keywords", [{}, dict(net_type="mlp")])
def test_nothing_changes_by_default(keywords):
    """Without `net_type`, and with SB3's networks named, parameters and random numbers are those of SB3, and so are zips."""
    expected = train(PPO("MlpPolicy", make_toys(), **SMALL), 64)
    actual = train(PPOExt("MlpPolicy", make_toys(), policy_kwargs=keywords, backend="eager", **SMALL), 64)
    assert_equal_runs(expected, actual)
    assert "net_type" not in actual.model.policy._get_constructor_parameters()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (dict(net_type="resnet"), "`net_type='resnet'`.*layer_norm"),
        (dict(net_type=None), "`net_type=None`"),
        (dict(net_type="simba", net_arch=[64, 32]), "`net_arch=.*64, 32.*`.*all equal"),
        (dict(net_type="simba", net_arch=dict(pi=[64, 32], vf=[8])), "`net_arch=.*all equal"),
        (dict(net_type="simba", net_arch=[-1]), "net_arch"),
    ],
)
def test_refused(keywords, message):
    """Unknown kinds, and blocks of different sizes, are refused with the argument, its value and the remedy."""
    with pytest.raises(ValueError, match=message):
        PPOExt("MlpPolicy", ToyEnv(), policy_kwargs=keywords)


# Engines


@pytest.mark.parametrize(("kind", "activation_fn"), [("layer_norm", nn.Tanh), ("simba", nn.GELU), ("simba", nn.ELU)])
def test_native_update(kind, activation_fn):
    """The native engine's update equals the reference's, and it is the one that is chosen."""
    pytest.importorskip("sb3_ppo_ext.engines.native._mlp")
    keywords = dict(KINDS[kind], activation_fn=activation_fn)
    assert_same_update(policy_kwargs=keywords, ent_coef=0.01, rtol=1e-4)
    assert type(of(kind, backend="auto")._find_engine()).__name__ == "NativeEngine"


NATIVE = {
    "Discrete": dict(env=dict(action_space=spaces.Discrete(4)), rtol=1e-4),
    "Beta": dict(action_dist="beta", kl_coef=0.5, rtol=1e-4),
    "gSDE": dict(use_sde=True, rtol=1e-4),
    "keys": dict(env=dict(observation_space=VECTORS), policy="MultiInputPolicy", keywords=KEYS, rtol=1e-4),
    "critic learns faster": dict(critic_learning_rate=1e-2, learning_rate=1e-3, rtol=1e-4),
    "Muon": dict(optimizer="muon", rtol=1e-3),
    "threads": dict(native_threads=2, n_steps=64, batch_size=64, rtol=1e-4),
}


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("name", NATIVE)
def test_update_with_options(name):
    """An update with other distributions, keys and optimisers equals the reference's."""
    kind = [*KINDS][[*NATIVE].index(name) % 2]
    options = dict(NATIVE[name])
    keywords = {**KINDS[kind], "net_arch": [16, 16], **options.pop("keywords", {})}
    assert_same_update(policy_kwargs=keywords, **options)


def test_native_refuses_other_blocks():
    """Layers that somebody has put into a network in the place of others are computed by PyTorch, or natively if known."""
    extension = pytest.importorskip("sb3_ppo_ext.engines.native.extension")
    from sb3_ppo_ext.engines.native.policy import unsupported_reason

    if extension.module is None:
        pytest.skip("the extension module was not built")

    def reason(change):
        policy = of("simba").policy
        change(policy.mlp_extractor.policy_net)
        return unsupported_reason(policy)

    assert reason(lambda net: None) is None
    assert "other arguments" in reason(lambda net: setattr(net[-1], "eps", 1e-3))
    assert "other arguments" in reason(lambda net: net.__setitem__(2, nn.LayerNorm(8, elementwise_affine=False)))
    assert "Dropout" in reason(lambda net: net.append(nn.Dropout()))
    assert "ResidualBlock" in reason(lambda net: net[1].layers.append(nn.Tanh()))
    assert "frozen" in reason(lambda net: net[-1].weight.requires_grad_(False))
    assert "follows no linear" in reason(lambda net: net.insert(2, nn.Tanh()))
    assert "begin with" in reason(lambda net: net.insert(0, nn.LayerNorm(3)))
    assert reason(lambda net: net.append(nn.ReLU())) is None


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("kind", one_in(len(KINDS), KINDS))
def test_compiled_update(kind, quick_compiler):
    """A compiled update equals the reference's."""
    assert_same_update(other="compile", policy_kwargs=KINDS[kind], rtol=1e-4)


# Policies, files


@pytest.mark.many(one_in=5)
@pytest.mark.parametrize("policy", one_in(2, POLICIES))
@pytest.mark.parametrize(("kind", "backend"), [*zip(KINDS, ["eager", "auto"], strict=True)])
def test_policies(kind, policy, backend, tmp_path):
    """Each policy has the networks, trains all of their parameters, and acts the same after it was saved and loaded."""
    model = of(kind, policy, backend=backend)
    norms = [module for module in model.policy.mlp_extractor.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == (3 if kind == "layer_norm" else 5)
    before = copy.deepcopy(model.policy.mlp_extractor.state_dict())
    model.learn(64)
    assert not [name for name, value in model.policy.mlp_extractor.state_dict().items() if th.equal(value, before[name])]
    model.save(tmp_path / "model")
    loaded = PPOExt.load(tmp_path / "model")
    assert loaded.policy.net_type == kind
    observation = model.get_env().reset()
    for name, parameter in model.policy.state_dict().items():
        th.testing.assert_close(parameter, loaded.policy.state_dict()[name], rtol=0, atol=0)
    expected, actual = (each.predict(observation, deterministic=True)[0] for each in (model, loaded))
    np.testing.assert_array_equal(expected, actual)
    model.policy.save(tmp_path / "policy")
    assert type(model.policy).load(tmp_path / "policy").net_type == kind


@pytest.mark.parametrize("kind", KINDS)
def test_training_continues(kind):
    """A training that was stopped, saved and loaded goes on as one that was not."""
    assert_continues(dict(policy_kwargs=KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_roles_of_parameters(kind):
    """The critic's optimiser has the critic's layers; Muon has the hidden matrices, no LayerNorm and no first layer."""
    policy = of(kind).policy
    networks = policy.mlp_extractor
    of_critic = {*networks.value_net.parameters(), *policy.value_net.parameters()}
    assert critic_parameters(policy) == of_critic
    linear = [[m for m in net.modules() if isinstance(m, nn.Linear)] for net in (networks.policy_net, networks.value_net)]
    assert hidden_matrices(policy) == {layer.weight for net in linear for layer in net[1:]}


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision(kind):
    """In bfloat16, the networks train, and parameters stay in float32."""
    model = of(kind, amp_dtype="bfloat16").learn(64)
    assert all(p.dtype == th.float32 and p.isfinite().all() for p in model.policy.parameters())
