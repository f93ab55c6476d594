"""Our policies beside SB3's: users' classes, other algorithms, callbacks."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import TRPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.policies import ActorCriticPolicy
from support.parity import assert_equal
from support.policies import BOUNDED, SMALL, make
from support.toys import BOX_ACTION, Silent, ToyEnv, make_toys

import sb3_ppo_ext
from sb3_ppo_ext import MlpPolicy, PPOExt
from sb3_ppo_ext.policies.actor_critic import ActionDistributionMixin


class Sb3Policy(ActorCriticPolicy):
    pass


class AnyKeyword(ActorCriticPolicy):
    """Takes the names of our keywords with meanings of its own."""

    def __init__(self, *args, learn_std="own", **kwargs):
        self.mine = learn_std, kwargs.pop("mean_tanh", None)
        super().__init__(*args, **kwargs)


class Tight(MlpPolicy):
    def __init__(self, observation_space, action_space, lr_schedule, use_sde=False):
        super().__init__(observation_space, action_space, lr_schedule, use_sde=use_sde)


class Stubborn(MlpPolicy):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "action_dist": "beta"})


class OurPolicy(MlpPolicy):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "net_arch": [5]})


class Mixed(ActionDistributionMixin, Sb3Policy):
    pass


@pytest.mark.parametrize("action_dist", BOUNDED)
def test_own_policy_classes(action_dist):
    """Classes that inherit our mixin have the action distributions; for others the message says how to get them."""
    for policy_class in (Sb3Policy, AnyKeyword, Tight):
        with pytest.raises(ValueError, match=f"`action_dist=.*{policy_class.__name__} does not take it; let it inherit"):
            PPOExt(policy_class, ToyEnv(), action_dist=action_dist)
    for policy_class in (Sb3Policy, Tight):
        with pytest.raises(ValueError, match=f"`mean_tanh=True`.*{policy_class.__name__} does not take it; let it inherit"):
            PPOExt(policy_class, ToyEnv(), policy_kwargs=dict(mean_tanh=True))
    # One that decides by itself must be told so.
    with pytest.raises(ValueError, match=r"`action_dist='gaussian'`.*Stubborn makes it 'beta'"):
        PPOExt(Stubborn, ToyEnv())
    if action_dist != "beta":
        with pytest.raises(ValueError, match=f"`action_dist='{action_dist}'`.*Stubborn makes it 'beta'"):
            PPOExt(Stubborn, ToyEnv(), action_dist=action_dist)
    assert PPOExt(Stubborn, ToyEnv(), action_dist="beta").policy.squash_output
    for policy_class in (OurPolicy, Mixed):
        model = PPOExt(policy_class, make_toys(), action_dist=action_dist, n_steps=16, batch_size=8).learn(32)
        assert type(model.policy) is policy_class
        assert model.policy.squash_output
    # SB3's classes stand for their names.
    assert type(PPOExt(ActorCriticPolicy, ToyEnv(), action_dist=action_dist).policy) is MlpPolicy


def test_keywords_of_other_policies():
    """A user's policy may give our names another meaning."""
    model = PPOExt(AnyKeyword, ToyEnv(), policy_kwargs=dict(learn_std=0.5, mean_tanh="yes", net_arch=[3]))
    assert model.policy.mine == (0.5, "yes")


@pytest.mark.many(one_in=3)
def test_without_action_dist_it_is_sb3():
    """By name the policy is SB3's class, so that SB3 loads what is saved; our classes give the same numbers."""
    model = make()
    assert type(model.policy) is ActorCriticPolicy
    for policy_class in (MlpPolicy, Mixed):
        ours = make(policy=policy_class, backend="eager").learn(64)
        theirs = PPO("MlpPolicy", make_toys(), **SMALL).learn(64)
        assert_equal(theirs.policy.state_dict(), ours.policy.state_dict(), "policy")
    sde = dict(use_sde=True, policy_kwargs=dict(squash_output=True))
    ours = make(policy=MlpPolicy, backend="eager", **sde).learn(64)
    theirs = PPO("MlpPolicy", make_toys(), **{**SMALL, **sde, "policy_kwargs": dict(net_arch=[8, 8], squash_output=True)})
    assert_equal(theirs.learn(64).policy.state_dict(), ours.policy.state_dict(), "policy")
    np.testing.assert_array_equal(theirs.policy.scale_action(BOX_ACTION.high), ours.policy.scale_action(BOX_ACTION.high))


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("action_dist", BOUNDED)
@pytest.mark.parametrize("algorithm", [A2C, PPO, TRPO])
def test_other_algorithms(action_dist, algorithm, tmp_path):
    """Algorithms of SB3 and SB3-Contrib train with these policies; the environment checks the actions."""
    policy_kwargs = dict(action_dist=action_dist, net_arch=[8])
    model = algorithm(MlpPolicy, make_toys(), n_steps=16, policy_kwargs=policy_kwargs, device="cpu", seed=0).learn(128)
    model.save(tmp_path / "model")
    observation = np.zeros((2, 3), np.float32)
    expected = model.predict(observation, deterministic=True)[0]
    # PPOExt finds the action distribution among the `policy_kwargs` of SB3's PPO, and goes on with it.
    for loader in (algorithm, PPOExt) if algorithm is PPO else (algorithm,):
        loaded = loader.load(tmp_path / "model", env=make_toys(), device="cpu")
        np.testing.assert_array_equal(loaded.predict(observation, deterministic=True)[0], expected)
        loaded.learn(64)
    if algorithm is PPO:
        assert loaded.action_dist == action_dist
        assert loaded.policy_kwargs == dict(net_arch=[8])
    assert BOX_ACTION.contains(expected[0])


def test_exports():
    """Our policies have SB3's names, and are SB3's kind."""
    assert sb3_ppo_ext.MlpPolicy is MlpPolicy
    assert issubclass(MlpPolicy, ActorCriticPolicy)


@pytest.mark.parametrize("action_dist", ["gaussian", *BOUNDED])
def test_hint_to_prefer_the_cpu(action_dist):
    """SB3's hint to prefer the CPU, which goes by the name of the policy, is given for ours."""
    model = make(action_dist)
    model.device = th.device("cuda")
    with pytest.warns(UserWarning, match="trying to run PPOExt on the GPU"):
        model._maybe_recommend_cpu()


@pytest.mark.parametrize("action_dist", BOUNDED)
def test_parameters_with_noise(action_dist):
    """As in SB3's example of an evolution strategy, every tensor takes noise, and partial parameters can be loaded."""
    model = make(action_dist)
    parameters = {
        k: v + 0.1 * th.randn_like(v) for k, v in model.policy.state_dict().items() if "action" in k or "policy" in k
    }
    model.policy.load_state_dict(parameters, strict=False)
    assert th.equal(model.policy.action_net.weight, parameters["action_net.weight"])
    {k: v + th.randn_like(v) for k, v in model.policy.state_dict().items()}


def test_locals_at_the_end_of_a_rollout():
    """The locals at the end of a rollout have SB3's shapes, with discrete actions too."""

    class Shapes(Silent):
        def _on_rollout_end(self):
            self.shapes = {k: v.shape for k, v in self.locals.items() if k in ("actions", "clipped_actions", "values")}

    for space in (BOX_ACTION, spaces.Discrete(3), spaces.MultiBinary(2)):
        ours, theirs = Shapes(), Shapes()
        PPOExt("MlpPolicy", make_toys(action_space=space), **SMALL).learn(32, callback=ours)
        PPO("MlpPolicy", make_toys(action_space=space), **SMALL).learn(32, callback=theirs)
        assert ours.shapes == theirs.shapes
