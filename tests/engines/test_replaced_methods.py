"""Methods that users replace on parts of a model, or on their classes, act on every engine as they do in SB3's PPO."""

import functools
import itertools
from unittest import mock

import numpy as np
import pytest
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.distributions import DiagGaussianDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor, MlpExtractor
from support.cases import one_in
from support.toys import make_toys
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.engines.native.engine import NativeEngine
from sb3_ppo_ext.engines.registry import ENGINES

SMALL = dict(n_steps=16, batch_size=16, n_epochs=2, seed=3, device="cpu", ent_coef=0.1, policy_kwargs=dict(net_arch=[8, 8]))


def make(algorithm, **options):
    return algorithm("MlpPolicy", make_toys(), **{**SMALL, **options})


def after(method, change):
    """A method whose results are changed."""

    @functools.wraps(method)
    def changed(*args, **kwargs):
        return change(method(*args, **kwargs))

    return changed


def halved(result):
    return result * 0.5


def shifted(result):
    return result + 0.5


def with_halved_rewards(add):
    def changed(*args, **kwargs):
        *before, obs, action, reward, start, value, log_prob = args
        return add(*before, obs, action, reward * 0.5, start, value, log_prob, **kwargs)

    return changed


def with_halved_returns(estimate):
    def changed(*args, **kwargs):
        return estimate(*args, **{**kwargs, "last_values": kwargs["last_values"] * 0.5})

    return changed


def of_first_minibatch(get):
    def changed(*args, **kwargs):
        yield next(iter(get(*args, **kwargs)))

    return changed


def with_halved_targets(samples):
    return samples._replace(returns=samples.returns * 0.5)


def shifted_mean(distribution):
    distribution.distribution.loc = distribution.distribution.loc + 0.5
    return distribution


def nothing(method):
    return lambda *args, **kwargs: None


def by(change):
    return lambda method: after(method, change)


# Path of each part, its method, and what becomes of the method
PARTS = {
    "actor network": ("policy.mlp_extractor", "forward_actor", by(halved)),
    "critic network": ("policy.mlp_extractor", "forward_critic", by(halved)),
    "both networks": ("policy.mlp_extractor", "forward", by(lambda latents: (latents[0] * 0.5, latents[1]))),
    "features extractor": ("policy.features_extractor", "forward", by(halved)),
    "action net": ("policy.action_net", "forward", by(shifted)),
    "value net": ("policy.value_net", "forward", by(shifted)),
    "a layer": ("policy.mlp_extractor.policy_net.0", "forward", by(halved)),
    "log_prob": ("policy.action_dist", "log_prob", by(halved)),
    "entropy": ("policy.action_dist", "entropy", by(lambda entropy: entropy**2)),
    "distribution": ("policy.action_dist", "proba_distribution", by(shifted_mean)),
    "add": ("rollout_buffer", "add", with_halved_rewards),
    "returns": ("rollout_buffer", "compute_returns_and_advantage", with_halved_returns),
    "samples": ("rollout_buffer", "_get_samples", by(with_halved_targets)),
    "minibatches": ("rollout_buffer", "get", of_first_minibatch),
    "zero_grad": ("policy.optimizer", "zero_grad", nothing),
}


def part_of(model, path):
    for name in path.split("."):
        model = model[int(name)] if name.isdigit() else getattr(model, name)
    return model


def replace(model, name):
    path, method, change = PARTS[name]
    part = part_of(model, path)
    setattr(part, method, change(getattr(part, method)))
    return model


def assert_close(expected, actual):
    for name, value in expected.policy.state_dict().items():
        th.testing.assert_close(actual.policy.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def moved(one, other):
    pairs = zip(one.policy.parameters(), other.policy.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@functools.cache
def trained_by_sb3(name=None):
    """A model of SB3, of which a method may be replaced."""
    model = make(PPO)
    return (model if name is None else replace(model, name)).learn(64)


OTHER_BACKENDS = itertools.cycle(["fused", "eager", "device"])
ON_OBJECTS = [(name, backend) for name in PARTS for backend in ("auto", next(OTHER_BACKENDS))]


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(("name", "backend"), [case for case in ON_OBJECTS if case != ("add", "device")])  # It is refused.
def test_methods_replaced_on_objects(name, backend):
    """A training run is that of SB3's PPO with the same replaced method."""
    expected = trained_by_sb3(name)
    actual = replace(make(PPOExt, backend=backend), name).learn(64)
    assert_close(expected, actual)
    assert moved(expected, trained_by_sb3()) > 1e-4  # ten times the tolerance


CLASSES = {
    "actor network": (MlpExtractor, "forward_actor", by(halved)),
    "features extractor": (FlattenExtractor, "forward", by(halved)),
    "log_prob": (DiagGaussianDistribution, "log_prob", by(halved)),
    "values": (ActorCriticPolicy, "evaluate_actions", by(lambda results: (results[0] * 0.5, *results[1:]))),
    "add": (RolloutBuffer, "add", with_halved_rewards),
    "minibatches": (RolloutBuffer, "get", of_first_minibatch),
    "zero_grad": (th.optim.Adam, "zero_grad", nothing),
}


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("name", CLASSES)
def test_methods_replaced_on_classes(name, monkeypatch):
    """So it is where the class was changed, also with a wrapper that looks like what it wraps."""
    unchanged = make(PPO).learn(64)
    cls, method, change = CLASSES[name]
    monkeypatch.setattr(cls, method, change(getattr(cls, method)))
    expected = make(PPO).learn(64)
    assert_close(expected, make(PPOExt).learn(64))
    assert moved(expected, unchanged) > 1e-4  # ten times the tolerance


def test_hooks_before_the_gradient():
    """Hooks that are called with gradients are called."""

    def halve(module, gradients):
        return tuple(gradient * 0.5 for gradient in gradients)

    trained = []
    for algorithm in (PPO, PPOExt):
        model = make(algorithm)
        model.policy.action_net.register_full_backward_pre_hook(halve)
        trained.append(model.learn(64))
    assert_close(*trained)
    assert moved(trained[0], make(PPO).learn(64)) > 1e-4


def test_global_hooks():
    """So are hooks of all modules and of all optimisers."""
    calls = []
    for register in (register_module_forward_hook, register_optimizer_step_post_hook):
        counts = []
        for algorithm in (PPO, PPOExt):
            model = make(algorithm)
            hook = register(lambda *args: calls.append(1))
            calls.clear()
            try:
                model.learn(64)
            finally:
                hook.remove()
            counts.append(len(calls))
        assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("name", PARTS)
def test_native_is_refused(name):
    """The backend says which method it would not call, and is chosen as long as nothing was replaced."""
    model = make(PPOExt)
    assert type(model._find_engine()) is NativeEngine
    replace(model, name)
    model.backend = "native"
    with pytest.raises(ValueError, match=rf"backend='native'.*{PARTS[name][1]}` of the .* was replaced"):
        model.learn(16)


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(("backend", "name"), [*(("native", name) for name in PARTS), ("device", "add")])
def test_replaced_before_the_next_call_of_learn(backend, name):
    """A backend that was asked for is not replaced by another one without a word, and takes the model back."""
    model = replace(make(PPOExt, backend=backend).learn(16), name)
    with pytest.raises(ValueError, match=rf"backend='{backend}'.*{PARTS[name][1]}` of the .* was replaced.*\"auto\""):
        model.learn(16)
    assert model.num_timesteps == 32
    path, method, _ = PARTS[name]
    delattr(part_of(model, path), method)
    model.learn(16)
    assert type(model._find_engine()) is ENGINES[backend]


class ReplacesInARollout(BaseCallback):
    """Replaces a method of the rollout buffer in the middle of a rollout."""

    def _on_step(self):
        if self.n_calls == 5:
            replace(self.model, "add")
        return True


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_buffer_changed_in_the_middle_of_a_rollout(backend):
    """With the reference, it gets the rest of the rollout, otherwise the next one."""
    buffers = []
    for model in (make(PPO), make(PPOExt, backend=backend)):
        with th.no_grad():
            model.policy.log_std.fill_(-30.0)
        _, callback = model._setup_learn(32, ReplacesInARollout())
        for _ in range(1 if backend == "eager" else 2):
            model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
        buffers.append(model.rollout_buffer)
    for name in ("rewards", "advantages", "actions"):
        one, other = (getattr(buffer, name) for buffer in buffers)
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("name", PARTS)
def test_replaced_at_the_end_of_a_rollout(name):
    """A method may be replaced at any step, the last one included."""

    class Replaces(BaseCallback):
        def _on_step(self):
            if self.n_calls == 16:
                replace(self.model, name)
            return True

    model = make(PPOExt).learn(32, callback=Replaces())
    assert model.num_timesteps == 32
    assert type(model._find_engine()) is not NativeEngine
    with pytest.warns(UserWarning, match=rf"\"eager\"` takes over from \"native\".*{PARTS[name][1]}"):
        make(PPOExt, backend="native").learn(32, callback=Replaces())


def test_further_methods_are_no_reason(monkeypatch):
    """Methods that a user adds to an object or a class replace none."""
    monkeypatch.setattr(th.nn.Module, "n_numbers", lambda self: 0, raising=False)
    monkeypatch.setattr(RolloutBuffer, "mean_reward", lambda self: 0.0, raising=False)
    model = make(PPOExt)
    model.policy.action_net.extra_repr = lambda: "mine"
    model.policy.note = print
    assert type(model._find_engine()) is NativeEngine


OTHER_REPLACEMENTS = {
    "mock": lambda method: mock.MagicMock(side_effect=method),
    "partial": functools.partialmethod,
    "known wrapper": lambda method: th.no_grad()(functools.wraps(method)(lambda *args, **kwargs: method(*args, **kwargs))),
}


@pytest.mark.parametrize("kind", OTHER_REPLACEMENTS)
def test_other_objects_in_the_place_of_methods(kind, monkeypatch):
    """Whatever takes the place of a method of a class is found."""
    monkeypatch.setattr(MlpExtractor, "forward_critic", OTHER_REPLACEMENTS[kind](MlpExtractor.forward_critic))
    assert type(make(PPOExt)._find_engine()) is not NativeEngine


@pytest.mark.parametrize("options", [dict(priority_alpha=0.6), dict(accumulate_grad=2)], ids=str)
def test_options_that_need_indices(options):
    """Options that choose the samples of a minibatch are refused if the buffer chooses them, before the training starts."""
    model = make(PPOExt, **options).learn(32)
    replace(model, "minibatches")
    with pytest.raises(ValueError, match=next(iter(options))):
        model.learn(32)
    assert model.num_timesteps == 32
    del model.rollout_buffer.get
    model.learn(32)


@pytest.mark.integration
@pytest.mark.parametrize("options", one_in(3, [{}, *(dict(backend=name) for name in ("device", "eager"))]), ids=str)
def test_compiled_policy(options):
    """A policy in the wrapper of `torch.compile` trains as in SB3."""
    trained = []
    for algorithm, kwargs in ((PPO, {}), (PPOExt, options)):
        model = make(algorithm, **kwargs)
        model.policy = th.compile(model.policy, backend="eager")
        trained.append(model.learn(32))
    assert_close(*trained)


@pytest.mark.parametrize(
    ("options", "name"),
    [(dict(backend="compile"), "backend"), (dict(amp_dtype="bfloat16"), "amp_dtype"), (dict(backend="native"), "backend")],
    ids=str,
)
@pytest.mark.integration
def test_compiled_policy_is_refused(options, name):
    """A backend that compiles the policy itself, or cannot compute with it, says so before the training starts."""
    model = make(PPOExt, **options)
    model.policy = th.compile(model.policy, backend="eager")
    with pytest.raises(ValueError, match=rf"`{name}=.*(`torch.compile`|OptimizedModule)"):
        model.learn(32)
    assert model.num_timesteps == 0
