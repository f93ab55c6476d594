"""Which engine is taken, what each refuses, and one training on several of them."""

import copy
import pickle
import re
import warnings
from functools import partial

import numpy as np
import pytest
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import DummyVecEnv
from support.engines import SMALL, make
from support.options import DEFAULTS
from support.parity import assert_equal
from support.toys import DICT, IMAGE, VECTOR, ToyEnv, make_toys
from torch import nn

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.algorithm import policy_updater
from sb3_ppo_ext.engines.native import extension
from sb3_ppo_ext.engines.native.engine import NativeEngine
from sb3_ppo_ext.engines.native.policy import unsupported_reason
from sb3_ppo_ext.engines.optimizer_steps import FusedAdamStepper, GradientMemory
from sb3_ppo_ext.engines.registry import choose_backend
from sb3_ppo_ext.engines.torch_engine import EagerEngine, FusedEngine
from sb3_ppo_ext.update.losses import PENALTIES

pytest.importorskip("sb3_ppo_ext.engines.native._mlp", reason="the extension module was not built")


def test_fused_is_refused():
    """`"fused"` refuses parameters that the extension module cannot read, and `"auto"` then takes `"eager"`."""
    with pytest.raises(ValueError, match=r"`backend='fused'`.*float32"):
        make(backend="fused", policy=Double)
    assert type(make(backend="auto", policy=Double)._find_engine()) is EagerEngine


def test_reproducible():
    """The same seed gives the same bits."""
    one, other = (make(action_dist="beta").learn(96) for _ in range(2))
    assert_equal(one.policy.state_dict(), other.policy.state_dict(), "policy")


@pytest.mark.parametrize("action_dist", ["gaussian", "beta"])
def test_engines_share_zips(action_dist, tmp_path):
    """A zip of one engine goes on in another, moments and steps of the optimiser included; SB3 loads it as well."""
    for first, second in [("native", "eager"), ("eager", "native")]:
        model = make(backend=first, action_dist=action_dist).learn(64)
        model.save(tmp_path / "model")
        loaded = PPOExt.load(tmp_path / "model", env=make_toys(), backend=second)
        assert_equal(model.policy.optimizer.state_dict(), loaded.policy.optimizer.state_dict(), "optimizer")
        loaded.learn(32, reset_num_timesteps=False)
        steps = {int(state["step"]) for state in loaded.policy.optimizer.state.values()}
        assert steps == {loaded._n_updates * 4}
    if action_dist == "gaussian":
        assert PPO.load(tmp_path / "model").num_timesteps == 64


def test_engine_can_change_in_the_middle():
    """The engine may change between two updates, and parameters may be replaced."""
    model = make()
    for backend in ("native", "eager", "native", "auto"):
        model.backend = backend
        model.learn(32, reset_num_timesteps=False)
    assert {int(state["step"]) for state in model.policy.optimizer.state.values()} == {4 * SMALL["n_epochs"] * 4}
    other = make(seed=4)
    with th.no_grad():
        for parameter in model.policy.parameters():
            parameter.data = parameter.data.clone()
    model.set_parameters(other.get_parameters())
    observations = VECTOR.sample()[np.newaxis]
    native = model._find_engine().native
    native.pack()
    expected = other.policy.predict_values(th.from_numpy(observations)).detach().numpy()
    np.testing.assert_allclose(native.critic(native.features(observations)), expected, rtol=1e-5)


def test_copies():
    """A model can be copied, and the copy finds its engines anew."""
    model = make()
    assert type(model._find_engine()) is NativeEngine
    model.env = model._vec_normalize_env = None
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied._engines == {}
        assert type(copied._find_engine()) is NativeEngine
        assert copied._find_engine().policy is copied.policy is not model.policy
    assert model._engines


class Double(ActorCriticPolicy):
    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.double()


class OwnForward(ActorCriticPolicy):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class OwnExtractor(FlattenExtractor):
    pass


class OwnNoise(ActorCriticPolicy):
    def _build(self, lr_schedule):
        self.action_dist.learn_features = True
        super()._build(lr_schedule)


class OwnLoss(PPOExt):
    def extra_actor_loss(self, rollout_data, distribution):
        return 0.0, {}


class OwnBuffer(RolloutBuffer):
    pass


REFUSED = {
    "gSDE of another kind": dict(policy=OwnNoise, use_sde=True),
    "CombinedExtractor": dict(env=dict(observation_space=DICT), policy="MultiInputPolicy"),
    "NatureCNN": dict(env=dict(observation_space=IMAGE), policy="CnnPolicy"),
    "OwnForward computes": dict(policy=OwnForward),
    "OwnExtractor": dict(policy_kwargs=dict(features_extractor_class=OwnExtractor)),
    "layer Mish.* activations": dict(policy_kwargs=dict(activation_fn=nn.Mish)),
    "ELU.* has other arguments": dict(policy_kwargs=dict(activation_fn=partial(nn.ELU, 0.5))),
    "OwnBuffer": dict(rollout_buffer_class=OwnBuffer),
    "too many layers": dict(policy_kwargs=dict(net_arch=[4] * 32)),
    "large layers": dict(policy_kwargs=dict(net_arch=[512, 512])),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_native_does_not_support(reason, capsys):
    """`"native"` refuses with the reason; `"auto"` says the reason and takes another engine."""
    with pytest.raises(ValueError, match=f"`backend='native'`.*{reason}.*; give \"auto\", which chooses a backend that fits"):
        make(**REFUSED[reason])
    model = make(backend="auto", verbose=1, **REFUSED[reason])
    assert "Backend: fused (not native: " in capsys.readouterr().out
    assert type(model._find_engine()) is FusedEngine


def test_loss_of_a_subclass():
    """`"native"` refuses a subclass with its own loss, which may differentiate what it likes."""
    with pytest.raises(ValueError, match="extra_actor_loss"):
        OwnLoss("MlpPolicy", ToyEnv(), backend="native")
    assert type(OwnLoss("MlpPolicy", ToyEnv(), **SMALL)._find_engine()) is FusedEngine


def test_reasons_that_come_later():
    """Double precision, frozen parameters, hooks and layers of another kind or size are found when they come."""

    def of(change):
        policy = make().policy
        change(policy)
        return unsupported_reason(policy)

    assert of(lambda policy: None) is None
    assert "float32" in of(lambda policy: policy.double())
    assert "frozen" in of(lambda policy: policy.value_net.weight.requires_grad_(False))
    assert "hooks" in of(lambda policy: policy.value_net.register_forward_hook(lambda *args: None))
    assert "nn.Linear" in of(lambda policy: setattr(policy, "value_net", nn.LazyLinear(1)))
    assert "without inputs" in of(lambda policy: setattr(policy, "value_net", nn.Linear(1, 0)))
    assert "own way" in of(lambda policy: setattr(policy, "forward", lambda obs: None))
    assert "its own" in of(lambda policy: policy.register_parameter("extra", nn.Parameter(th.ones(1))))
    assert "nn.Linear" in of(lambda policy: setattr(policy, "action_net", nn.Linear(64, 2, bias=False)))


class Meddling(ToyEnv):
    """Registers a hook on the policy of the model that it holds, in the middle of a training."""

    def step(self, action):
        if self.model.num_timesteps == 32:
            self.model.policy.mlp_extractor.register_forward_hook(lambda *_: None)
        return super().step(action)


def test_is_chosen_once(monkeypatch):
    """Without code of a user, the engine is chosen once in a training; what an environment replaces is noticed."""
    chosen = []
    monkeypatch.setattr(policy_updater, "choose_backend", lambda *args: chosen.append(args) or choose_backend(*args))
    model = make(backend="auto")
    counts = []
    for n_rollouts, callback in ((1, None), (4, None), (4, lambda *_: True)):
        chosen.clear()
        model.learn(32 * n_rollouts, callback)
        counts.append(len(chosen))
    assert counts[0] == counts[1] < counts[2]
    env = DummyVecEnv([Meddling])
    model = PPOExt("MlpPolicy", env, **{**SMALL, "batch_size": 16})
    env.envs[0].unwrapped.model = model
    model.learn(96)
    assert type(model._find_engine()) is FusedEngine
    assert set(model._engines) == {"native", "fused"}


def test_without_the_extension_module(monkeypatch, capsys):
    """Without the extension module all works on PyTorch, and a line says why."""
    monkeypatch.setattr(extension, "module", None)
    model = make(backend="auto", verbose=1)
    assert "Backend: eager (not native: the extension module was not built" in capsys.readouterr().out
    model.learn(32)
    with pytest.raises(ValueError, match="C compiler"):
        make()


def test_optimizers_that_torch_steps():
    """PyTorch makes the steps of optimisers that are not plainly Adam, or whose step somebody has replaced."""

    def takes(model):
        return FusedAdamStepper.takes(model.policy.optimizer, GradientMemory.of(model.policy))

    model = make()
    assert takes(model)
    th.optim.lr_scheduler.LambdaLR(model.policy.optimizer, lambda step: 1.0)
    assert not takes(model)
    model.learn(32)
    assert {int(state["step"]) for state in model.policy.optimizer.state.values()} == {4 * SMALL["n_epochs"]}
    for kwargs in (dict(amsgrad=True), dict(maximize=True)):
        assert not takes(make(policy_kwargs=dict(optimizer_kwargs=kwargs)))


def test_auto_takes_native(capsys):
    """By default the native engine is taken where it can be, and a line says so."""
    PPOExt("MlpPolicy", ToyEnv(), verbose=1, **SMALL)
    assert "Backend: native" in capsys.readouterr().out
    assert DEFAULTS["backend"] == "auto"


def test_a_backend_that_does_not_exist():
    """Set after the constructor has checked its argument, it is refused by name."""
    model = make()
    model.backend = "lean"
    with pytest.raises(ValueError, match=r"`backend='lean'`.*\"native\""):
        model.learn(32)


def test_a_loss_without_fallback(monkeypatch):
    """Where it reads the old distribution, and the family has no exact KL divergence, it is refused by name."""
    monkeypatch.setattr("sb3_ppo_ext.update.estimates.parameters", lambda distribution: None)
    monkeypatch.setitem(PENALTIES, "kl", PENALTIES["kl"]._replace(fallback=None))
    for backend in ("eager", "native"):
        with pytest.raises(ValueError, match=r"`kl_coef=0.5`.*KL divergence"):
            make(backend=backend, kl_coef=0.5).learn(32)


def test_missing_extension_module(monkeypatch):
    """Without the extension module, the first model says how to build it, unless the user wants `"eager"` anyway."""
    monkeypatch.setattr(extension, "module", None)
    monkeypatch.setattr(extension, "why_missing", "No module named _mlp")
    extension.warn_if_missing.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = dict(n_steps=8, batch_size=8, device="cpu")
        PPOExt("MlpPolicy", make_toys(), backend="eager", **options)
        assert not caught
        for _ in range(2):
            PPOExt("MlpPolicy", make_toys(), **options).learn(1)
    (warning,) = caught
    assert re.search("missing \\(No module named _mlp\\).*`pip install .*`", str(warning.message))
    assert warning.filename == __file__
    extension.warn_if_missing.cache_clear()
