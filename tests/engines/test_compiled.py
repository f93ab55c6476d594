"""`backend="compile"` computes what the reference computes, compiles once, and leaves nothing behind in what is saved."""

import copy
import subprocess
import zipfile

import pytest
import torch as th
from gymnasium import spaces
from support.engines import FUSED, SMALL, UPDATES, VECTORS, assert_same_update, make, relative_error, updated
from support.hybrid import TensorPassing
from support.options import assert_continues
from support.parity import assert_equal
from support.toys import DICT, IMAGE, make_toys
from torch import nn

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.engines.compiled import CompiledAct
from sb3_ppo_ext.engines.native import extension
from sb3_ppo_ext.engines.optimizer_steps import TorchStepper
from sb3_ppo_ext.engines.torch_engine import CompiledEngine

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:.*lru_cache", "ignore:.*torch.jit")]


def n_compiled():
    """Graphs that torch has compiled in this process."""
    return th._dynamo.utils.counters["stats"]["unique_graphs"]


def compiled(**options):
    return make(backend="compile", **options)


# Updates

EVERYTHING = dict(
    **dict(action_dist="squashed_gaussian", bounds_coef=0.1, bounds_limit=0.0, kl_coef=0.5, dual_clip=3.0, ent_coef=0.01),
    **dict(clip_range_vf=0.01, vf_clip_mode="max", advantage_norm="ema", vtrace=True, priority_alpha=0.6, priority_segment=4),
    **dict(max_clip_fraction=0.9, accumulate_grad=2, learning_rate=1e-3, normalize_value=True),
)


def check_update(**kwargs):
    before = n_compiled()
    assert_same_update(other="compile", **kwargs)
    assert n_compiled() > before


def test_update(quick_compiler):
    """An update with many options at once equals the reference's."""
    check_update(**EVERYTHING)


@pytest.mark.slow
def test_hybrid_update(quick_compiler, recwarn):
    """The distribution of hybrid actions is compiled as one function with the loss."""
    check_update(**MANY["hybrid, Beta"])
    assert not [warning for warning in recwarn if "stays eager" in str(warning.message)]


def test_hybrid_actions_in_tensors(quick_compiler, recwarn):
    """The policy acts in hybrid actions as one compiled function."""
    model = PPOExt("MlpPolicy", TensorPassing(), backend="compile", **SMALL)
    model.learn(2 * 8 * SMALL["n_steps"])
    assert not [warning for warning in recwarn if "eager" in str(warning.message)]


def test_update_in_cpp():
    """An update that is compiled all the way to C++ equals the reference's."""
    check_update(policy_kwargs=dict(net_arch=[8]))  # Each layer takes the compiler two seconds.


TRANSFORMER = dict(context_length=4, d_model=8, n_heads=2)
IMAGES = dict(env=dict(observation_space=IMAGE), policy="CnnPolicy", rtol=1e-4)
MANY = {
    "Dict, Beta, AdamW": dict(
        **dict(env=dict(observation_space=VECTORS), policy="MultiInputPolicy", action_dist="beta", optimizer="adamw"),
        **dict(weight_decay=0.01, critic_learning_rate=1e-3, ent_coef=0.1),
    ),
    "gSDE": dict(use_sde=True, target_kl=1e-3, learning_rate=3e-3),
    **UPDATES,
    **FUSED,
    "Muon": dict(optimizer="muon", rtol=1e-4),
    "SGD": dict(optimizer="sgd"),
    "gSDE, squashed": dict(use_sde=True, policy_kwargs=dict(squash_output=True), kl_coef=0.1),
    "gSDE, all losses": dict(
        use_sde=True, kl_coef=0.1, bounds_coef=0.1, policy_kwargs=dict(full_std=False, use_expln=True), ent_coef=0.1
    ),
    "images, squashed": {**IMAGES, **dict(action_dist="squashed_gaussian", kl_coef=0.5, ent_coef=0.1)},
    "images, two extractors": {**IMAGES, **dict(policy_kwargs=dict(share_features_extractor=False))},
    "images, transformer": {**IMAGES, **dict(policy="CnnTransformerPolicy", policy_kwargs=TRANSFORMER)},
    "dict, transformer": dict(
        env=dict(observation_space=DICT), policy="MultiInputTransformerPolicy", policy_kwargs=TRANSFORMER, rtol=1e-4
    ),
    "dict, Beta": dict(env=dict(observation_space=DICT), policy="MultiInputPolicy", rtol=1e-4, action_dist="beta"),
    "KL, multi-discrete": dict(env=dict(action_space=spaces.MultiDiscrete([3, 2])), kl_coef=0.5),
    "KL, multi-binary": dict(env=dict(action_space=spaces.MultiBinary(3)), kl_coef=0.5),
    "accumulated, a remainder": dict(accumulate_grad=3, batch_size=5),
    "a frozen actor": dict(max_clip_fraction=0.01, clip_range=0.01, learning_rate=1e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_many_updates(name, recwarn):
    """Updates with each option equal the reference's, each compiled as one function."""
    check_update(**MANY[name])
    assert not [warning for warning in recwarn if "stays eager" in str(warning.message)]


@pytest.mark.slow
def test_goes_on_from_a_zip():
    """Training, saving, loading and training equals training straight through, to the bit."""
    assert_continues(dict(backend="compile"))


@pytest.mark.slow
def test_tied_parameters_and_frozen_ones(quick_compiler):
    """A parameter that two layers share gets the gradient of both; a frozen one stays."""
    models = []
    for backend in ("eager", "compile"):
        model = make(backend="eager", policy_kwargs=dict(net_arch=[8, 8])).learn(32)
        net = model.policy.mlp_extractor
        net.value_net[2].weight = net.policy_net[2].weight
        net.value_net[0].bias.requires_grad_(False)
        models.append(updated(model, backend))
    for name, expected in models[0].policy.state_dict().items():
        assert relative_error(expected, models[1].policy.state_dict()[name]) < 1e-5, name


# Compilation


def test_compiles_once(tmp_path, capsys, quick_compiler):
    """
    Nothing that changes from update to update compiles again, and neither the zip nor a global setting keeps anything of it.
    """
    options = dict(clip_range="lin_0.2", clip_range_vf="lin_0.2", ent_coef="lin_0.1", kl_coef=0.1, kl_target=1e-9)
    model = compiled(env=dict(action_space=spaces.Discrete(4)), batch_size=12, adaptive_lr_kl=0.01, verbose=1, **options)
    assert "Backend: compile" in capsys.readouterr().out
    settings = (th._dynamo.config.get_config_copy(), th._inductor.config.get_config_copy(), th.get_float32_matmul_precision())
    names = model.policy.state_dict().keys()
    model.learn(96, callback=lambda local, _: local["self"].num_timesteps <= 64)
    before = n_compiled()
    assert type(model._find_engine()) is CompiledEngine
    model.vf_coef = 0.7
    model.learn(96, reset_num_timesteps=False)
    for backend in ("eager", "compile", "fused", "compile"):
        model.backend = backend
        model.learn(32, reset_num_timesteps=False)
    assert n_compiled() == before
    after = (th._dynamo.config.get_config_copy(), th._inductor.config.get_config_copy(), th.get_float32_matmul_precision())
    assert settings == after
    assert model.policy.state_dict().keys() == names
    assert model.policy.action_dist.distribution is None or not model.policy.action_dist.distribution.logits.requires_grad

    model.save(tmp_path / "model")
    with zipfile.ZipFile(tmp_path / "model.zip") as file:
        assert "_engines" not in file.read("data").decode()
    loaded = PPOExt.load(tmp_path / "model", env=make_toys(action_space=spaces.Discrete(4)), backend="eager")
    assert_equal(model.policy.state_dict(), loaded.policy.state_dict(), "policy")
    assert_equal(model.policy.optimizer.state_dict(), loaded.policy.optimizer.state_dict(), "optimizer")
    loaded.learn(32, reset_num_timesteps=False)

    assert model.__getstate__()["_engines"] == {}


class Hooked(PPOExt):
    """A loss that torch can trace, two that it cannot, or one whose log has a name that is taken."""

    kind = "traced"

    def extra_actor_loss(self, rollout_data, distribution):
        mirrored = self.policy.get_distribution(-rollout_data.observations).distribution.mean
        term = 0.1 * (distribution.distribution.mean + mirrored).square().mean()
        self.n_calls = getattr(self, "n_calls", 0) + 1
        if self.kind == "number":
            return term, dict(asymmetry=float(term.detach().numpy()))
        if self.kind == "slope":
            observations = rollout_data.observations.clone().requires_grad_()
            values = self.policy.predict_values(observations)
            (slope,) = th.autograd.grad(values.sum(), observations, create_graph=True)
            term = term + slope.square().mean()
        return term, {"loss" if self.kind == "taken" else "asymmetry": term}


@pytest.mark.parametrize("kind", ["number", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("traced", "slope"))])
def test_loss_of_a_subclass(kind, monkeypatch, recwarn, quick_compiler):
    """A subclass's loss equals the reference's; where torch cannot trace it, with a warning; a bad one is refused as usual."""
    monkeypatch.setattr(Hooked, "kind", kind)
    models = []
    for backend in ("eager", "compile"):
        models.append(Hooked("MlpPolicy", make_toys(), backend="eager", **SMALL).learn(32))
        updated(models[-1], backend)
    for name, expected in models[0].policy.state_dict().items():
        assert relative_error(expected, models[1].policy.state_dict()[name]) < 1e-5, name
    logs = [model.logger.name_to_value["train/asymmetry"] for model in models]
    assert logs[0] == pytest.approx(logs[1], rel=1e-4)
    assert models[0].n_calls == models[1].n_calls
    assert (models[1]._find_engine().compiled.differentiate is not None) == (kind == "traced")
    assert any("stays eager" in str(warning.message) for warning in recwarn) == (kind != "traced")
    monkeypatch.setattr(Hooked, "kind", "taken")
    with pytest.raises(ValueError, match="`extra_actor_loss='loss'`"):
        models[1].learn(32, reset_num_timesteps=False)


# Where it cannot serve


def test_without_a_compiler(monkeypatch, capsys):
    """Without a C++ compiler it is refused before anything is trained, and `"auto"` never takes it."""

    def fail():
        raise RuntimeError("No working C++ compiler found")

    make(backend="auto", verbose=1, policy_kwargs=dict(activation_fn=nn.Mish))
    assert "Backend: fused" in capsys.readouterr().out
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", fail)
    with pytest.raises(ValueError, match=r"`backend='compile'` is not valid: .*needs a C\+\+ compiler.*auto"):
        compiled()


def failures_of_a_compiler():
    """What torch raises where a compiler, a library or room on the disk is missing, and what has to be said of it."""
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import CppCompileError, InductorError

    without_headers = CppCompileError(
        ["g++", "-O3"], "In file included\nmain.cpp:1: fatal error: Python.h: No such file\nmore"
    )
    caused = RuntimeError("Failed to find C compiler.")
    caused.__cause__ = FileNotFoundError(2, "No such file or directory", "gcc")
    return {
        "C++": (InductorError(without_headers, None), r"Python\.h: No such file"),
        "Triton": (BackendCompilerFailed("inductor", AssertionError("libcuda.so cannot found!"), None), "libcuda"),
        "cause": (BackendCompilerFailed("inductor", caused, None), "'gcc'"),
        "launch": (subprocess.CalledProcessError(1, ["gcc", "main.c"]), "gcc"),
        "disk": (OSError(28, "No space left on device"), "No space left"),
    }


@pytest.mark.parametrize("kind", ["C++", "Triton", "cause", "launch", "disk"])
def test_compiler_that_fails(kind, monkeypatch):
    """The first update says that the compiler has failed, with the innermost cause, and changes nothing."""
    error, said = failures_of_a_compiler()[kind]

    def fail(*args):
        raise error

    monkeypatch.setattr("torch.compile", lambda *args, **kwargs: fail)
    model = compiled()
    before = copy.deepcopy(model.policy.state_dict())
    with pytest.raises(ValueError, match=rf"the compiler has failed.*{said}.*auto"):
        model.learn(32)
    assert_equal(before, model.policy.state_dict(), "policy")
    with pytest.raises(ValueError, match=rf"the compiler has failed.*{said}.*auto"):
        CompiledAct(model.policy)(th.zeros(1, 3))


def test_without_the_extension_module(monkeypatch):
    """Without the extension module PyTorch makes the steps of Adam."""
    monkeypatch.setattr(extension, "module", None)
    model = compiled()
    assert type(model._find_engine().make_stepper(model._update_config())) is TorchStepper


@pytest.mark.integration
def test_distributions_are_checked_as_before(quick_compiler):
    """Compiling leaves PyTorch's checks of distributions as they are, which torch itself switches off for the process."""
    assert th.distributions.Distribution._validate_args
    PPOExt("MlpPolicy", "CartPole-v1", backend="compile", n_steps=16, batch_size=16, n_epochs=1, device="cpu").learn(32)
    assert th.distributions.Distribution._validate_args
