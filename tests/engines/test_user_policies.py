"""Policies that users write: on each engine they train as on the reference, or the engine steps aside."""

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import SquashedDiagGaussianDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from support.device_training import trained as trained_on
from support.toys import make_toys
from support.zips import Zip
from torch import nn

from sb3_ppo_ext import MlpPolicy, PPOExt
from sb3_ppo_ext.engines.registry import ENGINES

SMALL = dict(n_steps=16, batch_size=16, n_epochs=2, seed=3, device="cpu")
MAPS = spaces.Box(0.0, 1.0, (3, 5, 4))
IMAGES = spaces.Box(0, 255, (3, 8, 8), np.uint8)


class Tied(ActorCriticPolicy):
    """Actor and critic share their hidden layers."""

    def _build_mlp_extractor(self):
        super()._build_mlp_extractor()
        self.mlp_extractor.value_net = self.mlp_extractor.policy_net


class WithHead(ActorCriticPolicy):
    """A part that no loss of PPO reaches, for an optimiser of the user."""

    def _build(self, lr_schedule):
        self.head = nn.Linear(4, 4)
        super()._build(lr_schedule)


class Squashed(ActorCriticPolicy):
    """SB3's own squashed Gaussian, whose entropy has no closed form."""

    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.action_dist = SquashedDiagGaussianDistribution(self.action_space.shape[0])


class Viewing(BaseFeaturesExtractor):
    """Reads its observations by ``view``, which needs them to be contiguous."""

    def __init__(self, space):
        super().__init__(space, 8)
        self.linear = nn.Linear(int(np.prod(space.shape)), 8)

    def forward(self, observations):
        return self.linear(observations.view(len(observations), -1))


class ViewingConvolutions(Viewing):
    """Convolutions, whose results are viewed."""

    def __init__(self, space):
        super().__init__(spaces.Box(0, 1, (2, *(n - 2 for n in space.shape[1:]))))
        self.convolution = nn.Conv2d(space.shape[0], 2, 3)

    def forward(self, observations):
        return super().forward(self.convolution(observations))


def keep_first_column(model):
    """A mask on the gradients of a layer."""
    weight = model.policy.mlp_extractor.policy_net[0].weight
    weight.register_hook(lambda gradient: gradient * (th.arange(gradient.shape[1]) > 0))


POLICIES = {
    "shared layers": dict(policy=Tied),
    "unused layers, decay": dict(policy=WithHead, policy_kwargs=dict(optimizer_kwargs=dict(weight_decay=0.1, eps=1e-5))),
    "no entropy": dict(policy=Squashed, ent_coef=0.1),
    "view of maps": dict(env=dict(observation_space=MAPS), policy_kwargs=dict(features_extractor_class=Viewing)),
    "view of convolutions": dict(
        policy="CnnPolicy",
        env=dict(observation_space=IMAGES),
        policy_kwargs=dict(features_extractor_class=ViewingConvolutions),
    ),
    "hook of a gradient": dict(change=keep_first_column),
}


def trained(backend, policy="MlpPolicy", env=None, change=lambda model: None, **options):
    model = PPOExt(policy, make_toys(**(env or {})), backend=backend, **{**SMALL, **options})
    change(model)
    return model.learn(48)


@pytest.mark.parametrize("name", POLICIES)
def test_policies_of_users(name):
    """With ``backend="auto"`` each trains as on the reference; "native" alone would draw other actions."""
    expected, actual = (trained(backend, **POLICIES[name]).policy.state_dict() for backend in ("eager", "auto"))
    for key, tensor in expected.items():
        th.testing.assert_close(actual[key], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("policy", ["CnnLstmPolicy", "CnnTransformerPolicy"])
def test_view_of_convolutions_with_memory(policy):
    """Features extractors of users also read contiguous images in policies with a memory."""
    lstm, transformer = dict(lstm_hidden_size=8), dict(d_model=8, n_heads=1, context_length=4)
    of_policy = lstm if policy == "CnnLstmPolicy" else transformer
    options = {**POLICIES["view of convolutions"], "policy": policy}
    kwargs = {**options["policy_kwargs"], **of_policy}
    expected, actual = (
        trained(backend, **{**options, "policy_kwargs": kwargs}).policy.state_dict() for backend in ("eager", "auto")
    )
    for key, tensor in expected.items():
        th.testing.assert_close(actual[key], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.integration
def test_hooks_of_gradients():
    """Engines that do not compute gradients with autograd's engine do not take parameters with hooks."""
    model = PPOExt("MlpPolicy", make_toys(), backend="auto", **SMALL)
    for name in ("native", "compile"):
        assert ENGINES[name].unsupported_reason(model._engine_setup()) is None
    keep_first_column(model)
    for name in ("native", "compile"):
        assert "hooks" in ENGINES[name].unsupported_reason(model._engine_setup())
    assert ENGINES["fused"].unsupported_reason(model._engine_setup()) is None
    weight = model.policy.mlp_extractor.policy_net[0].weight
    before = weight.detach().clone()
    model.learn(48)
    assert th.equal(weight[:, 0], before[:, 0])
    assert not th.equal(weight, before)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize("max_clip_fraction", [None, 0.9])
@pytest.mark.filterwarnings("ignore:You are trying to run PPOExt on the GPU")
@pytest.mark.integration
def test_decay_on_a_device(sim, optimizer, max_clip_fraction):
    """What no loss reaches is not decayed on a device either, all else is, and nobody watches the gradients afterwards."""
    options = dict(policy=WithHead, weight_decay=0.5, optimizer=optimizer, max_clip_fraction=max_clip_fraction)
    before, model = (trained_on(sim.name, "device", timesteps=n, **options) for n in (0, 64))
    assert th.equal(before.policy.head.weight.cpu(), model.policy.head.weight.cpu())
    assert not th.equal(before.policy.action_net.weight.cpu(), model.policy.action_net.weight.cpu())
    undecayed = trained_on(sim.name, "device", **{**options, "weight_decay": 0.0})
    assert not th.equal(undecayed.policy.value_net.weight.cpu(), model.policy.value_net.weight.cpu())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.policy.parameters())


class Thermostat(gym.Env):
    """Whole degrees as actions."""

    observation_space, action_space = spaces.Box(-1.0, 1.0, (2,)), spaces.Box(-3, 3, (2,), np.int32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def _observe(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def step(self, action):
        return self._observe(), -float(np.square(action).sum()), self.np_random.random() < 0.1, False, {}


def test_rounded_actions():
    """Actions that the buffer rounds are learned from in the same way whether or not a callback looks on."""
    alone, watched = (
        PPOExt("MlpPolicy", Thermostat(), **SMALL).learn(32, callback=callback) for callback in (None, lambda *_: True)
    )
    for one, other in zip(alone.policy.parameters(), watched.policy.parameters(), strict=True):
        assert th.equal(one, other)
    assert "int32" in ENGINES["native"].unsupported_reason(alone._engine_setup())


def test_fixed_standard_deviations_by_dimension():
    """A standard deviation for each dimension that is not learned is saved and loaded."""
    kwargs = dict(learn_std=False, log_std_init=th.tensor([-1.0, -2.0]))
    model = trained("auto", policy_kwargs=kwargs)
    assert th.equal(Zip(model).load().policy.log_std.detach(), kwargs["log_std_init"])


class OtherNames(nn.Module):
    """SB3's documented custom networks, with names of the user."""

    def __init__(self, n_features):
        super().__init__()
        self.latent_dim_pi = self.latent_dim_vf = 8
        self.of_actor, self.of_critic = nn.Linear(n_features, 8), nn.Linear(n_features, 8)

    def forward(self, features):
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features):
        return self.of_actor(features)

    def forward_critic(self, features):
        return self.of_critic(features)


class WithOtherNames(ActorCriticPolicy):
    def _build_mlp_extractor(self):
        self.mlp_extractor = OtherNames(self.features_dim)


@pytest.mark.parametrize("options", [dict(critic_learning_rate=1e-3), dict(max_clip_fraction=0.1)], ids=str)
def test_critics_with_other_names(options):
    """Options of the critic alone need to know its layers."""
    (name,) = options
    with pytest.raises(ValueError, match=f"`{name}=.*OtherNames.*`policy_net` and `value_net`"):
        trained("auto", policy=WithOtherNames, **options)
    trained("auto", policy=WithOtherNames)


@pytest.mark.parametrize("name", ["obs_to_tensor", "evaluate_samples"])
def test_methods_that_the_extension_module_does_not_call(name):
    """The engine in C steps aside for a policy that overrides them; a policy that does not is computed by it."""

    def method(self, *args, **kwargs):
        return getattr(super(own, self), name)(*args, **kwargs)

    own = type("Own", (MlpPolicy,), {name: method, "__module__": __name__})
    with pytest.raises(ValueError, match="Own computes in its own way"):
        PPOExt(own, make_toys(), backend="native", **SMALL).learn(16)
    PPOExt(own, make_toys(), **SMALL).learn(16)
    PPOExt(type("Own", (MlpPolicy,), {}), make_toys(), backend="native", **SMALL).learn(16)
