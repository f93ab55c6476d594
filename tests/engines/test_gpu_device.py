"""``backend="device"`` on CUDA: the training of the CPU, with few transfers, and zips that go on everywhere."""

import math
from functools import partial

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv
from support.device_training import SMALL, assert_same, logs_of, same_draws
from support.device_waits import assert_within, counted
from support.options import SINGLE
from support.torch_envs import Broken, TorchCartPole, TorchPendulum
from support.toys import DICT, IMAGE, ToyEnv, make_toys

from sb3_ppo_ext import JaxVecEnv, PPOExt, TensorVecNormalize, TorchVecEnv
from sb3_ppo_ext.common.guards import NonFiniteDataError, NonFinitePolicyError
from sb3_ppo_ext.engines.masked_steps import MaskedAdamStepper
from sb3_ppo_ext.rollout import buffer as rollout_buffers
from sb3_ppo_ext.rollout.actors import DeviceActor
from sb3_ppo_ext.rollout.buffer import TensorRolloutBuffer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not th.cuda.is_available(), reason="no CUDA"),
    pytest.mark.filterwarnings("ignore:You are trying to run PPOExt on the GPU"),
]
CUDA = "cuda"
WITH_TENSORS = {**SMALL, "batch_size": 64}
SPACES = {
    "MlpPolicy": {},
    "CnnPolicy": dict(observation_space=IMAGE),
    "MultiInputPolicy": dict(observation_space=DICT),
}
ACTIONS = {
    "gaussian": {},
    "beta": dict(action_dist="beta"),
    "squashed Gaussian": dict(action_dist="squashed_gaussian", bounds_coef=0.1),
    "categorical": dict(env=dict(action_space=spaces.Discrete(4))),
    "multi-categorical": dict(env=dict(action_space=spaces.MultiDiscrete([3, 2]))),
    "Bernoulli": dict(env=dict(action_space=spaces.MultiBinary(3))),
    "gSDE": dict(use_sde=True, sde_sample_freq=4),
}
NOT_HERE = {"backend", "action_dist", "amp_dtype"}
OPTIONS = {str(options): options for options in SINGLE if not options.keys() & NOT_HERE}
OPTIONS |= {name: dict(options, ent_coef=0.01) for name, options in ACTIONS.items()}
BUDGET = 10


same_draws = pytest.fixture(same_draws)
# CUDA rounds in another order.
assert_same = partial(assert_same, atol=1e-4, atol_of_logs=1e-3)


@pytest.fixture(autouse=True)
def _in_float32(monkeypatch):
    """Convolutions are computed in float32, as on the CPU, instead of TF32."""
    monkeypatch.setattr(th.backends.cudnn, "allow_tf32", False)


def make(device=CUDA, backend="device", policy="MlpPolicy", env=None, **options):
    toys = make_toys(**{"length": 5, **(env or {})})
    return PPOExt(policy, toys, device=device, backend=backend, **{**SMALL, **options})


def copied(source, target):
    """Copy a rollout, and what follows from it, from one model to another one on another device."""
    one, other = source.rollout_buffer, target.rollout_buffer
    for name in rollout_buffers.ARRAYS:
        values = getattr(one, name)
        setattr(other, name, {key: part.copy() for key, part in values.items()} if isinstance(values, dict) else values.copy())
    other.pos, other.full = one.pos, one.full
    target._last_obs, target._last_episode_starts = source._last_obs, source._last_episode_starts
    target.num_timesteps = source.num_timesteps


def updated_from_one_rollout(env=None, **options):
    """Models on the CPU and on the GPU, updated from the same rollout, which the CPU has collected."""
    # Episodes are not truncated, since the last observations that V-trace would value are not copied.
    env = {"p_end": 0.2, "length": 100, **(env or {})}
    models = [make("cpu", "eager", env=env, **options), make(env=env, **options)]
    models[1].policy.load_state_dict(models[0].policy.state_dict())
    callbacks = [model._setup_learn(10_000)[1] for model in models]
    models[0].collect_rollouts(models[0].env, callbacks[0], models[0].rollout_buffer, models[0].n_steps)
    copied(*models)
    for model in models:
        np.random.seed(0)
        th.manual_seed(0)  # of the prioritised segments, which `same_draws` draws on the CPU
        model.train()
    return models


def is_finite(model):
    numbers = [value for name, value in logs_of(model).items() if isinstance(value, float)]
    return all(map(math.isfinite, numbers)) and all(th.isfinite(part).all() for part in model.policy.parameters())


# Equal updates


@pytest.mark.usefixtures("same_draws")
@pytest.mark.parametrize("policy", SPACES)
def test_policies(policy):
    """From the same rollout, each policy is updated as on the CPU, and then trains."""
    models = updated_from_one_rollout(policy=policy, env=SPACES[policy])
    assert isinstance(models[1].rollout_buffer, TensorRolloutBuffer)
    assert {parameter.device.type for parameter in models[1].policy.parameters()} == {CUDA}
    assert_same(*models)
    assert is_finite(models[1].learn(64))


@pytest.mark.usefixtures("same_draws")
@pytest.mark.parametrize("options", OPTIONS)
def test_options(options):
    """From the same rollout, each action distribution and each option acts as on the CPU, and then trains."""
    models = updated_from_one_rollout(**OPTIONS[options])
    assert_same(*models)
    assert is_finite(models[1].learn(64))


def test_recorded_rollout():
    """Values and log probabilities of a rollout are those that the CPU computes for its observations and actions."""
    model = make(policy="CnnPolicy", env=SPACES["CnnPolicy"])
    _, callback = model._setup_learn(32)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, 16)
    data = model.rollout_buffer._get_samples(th.arange(32))
    on_cpu = make("cpu", "eager", policy="CnnPolicy", env=SPACES["CnnPolicy"]).policy
    on_cpu.load_state_dict({name: tensor.cpu() for name, tensor in model.policy.state_dict().items()})
    values, log_probs, _ = on_cpu.evaluate_actions(data.observations.cpu(), data.actions.cpu())
    th.testing.assert_close(data.old_values.cpu(), values.flatten(), rtol=1e-3, atol=1e-4)
    th.testing.assert_close(data.old_log_prob.cpu(), log_probs, rtol=1e-3, atol=1e-4)


# Copies from page-locked memory


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (84, 84, 4), np.uint8),
        spaces.Box(0, 255, (4, 84, 84), np.uint8),
        spaces.Box(-np.inf, np.inf, (5000,), np.float64),
        spaces.Dict({"big": spaces.Box(-np.inf, np.inf, (5000,), np.float32), "few": spaces.Box(-1e9, 1e9, (2,), np.float32)}),
    ],
    ids=["images", "channels first", "float64", "dict"],
)
def test_observations_arrive_in_their_rows(space):
    """Observations that are copied while the host goes on are those of their step, in each of many steps."""
    is_dict = isinstance(space, spaces.Dict)

    class Counter(ToyEnv):
        def reset(self, **kwargs):
            self.n = 0
            return self.counted(), {}

        def step(self, action):
            return self.counted(), 0.0, False, False, {}

        def counted(self):
            self.n += 1
            filled = [np.full(part.shape, self.n, part.dtype) for part in (space.spaces.values() if is_dict else [space])]
            return dict(zip(space.spaces, filled, strict=True)) if is_dict else filled[0]

    envs = DummyVecEnv([lambda: Counter(observation_space=space)] * 4)
    options = dict(n_steps=64, n_epochs=1, batch_size=256, device=CUDA, backend="device")
    model = PPOExt("MultiInputPolicy" if is_dict else "MlpPolicy", envs, **options).learn(2 * 64 * 4)
    expected = th.arange(65.0, 129.0).unsqueeze(1)
    tensors = model.rollout_buffer.tensors["observations"]
    for part in tensors.values() if is_dict else [tensors]:
        rows = part.cpu().float().flatten(1)
        assert th.equal(rows, expected.expand_as(rows))


def test_page_locked_memory_is_used(monkeypatch):
    """Observations of environments in NumPy go to the GPU by way of page-locked memory."""
    seen, staged = [], DeviceActor._staged

    def noted(actor, observations):
        result = staged(actor, observations)
        seen.append((actor.staging.is_pinned(), result.device.type))
        return result

    monkeypatch.setattr(DeviceActor, "_staged", noted)
    make().learn(32)
    assert set(seen) == {(True, CUDA)}


# Tensor environments and transfers


def tensor_env(device=CUDA, env_class=TorchPendulum, n=16, **kwargs):
    return TorchVecEnv(env_class(n, device=device, max_episode_steps=12, **kwargs))


def iteration(model):
    """Functions that collect a rollout and update from it, after some of each."""
    _, callback = model._setup_learn(10**6)
    callback.on_training_start({}, {})  # A plain dictionary, as in a training loop of the user's

    def collect():
        model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)

    for _ in range(2):
        collect()
        model.train()
    return collect, model.train


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(n_epochs=20),
        dict(action_dist="beta"),
        dict(action_dist="squashed_gaussian", bounds_coef=0.1, kl_coef=0.1, kl_target=0.01),
        dict(advantage_norm="ema", target_kl=10.0, n_epochs=10),
        dict(vtrace=True, priority_alpha=0.5, priority_segment=4),
        dict(optimizer="muon", max_clip_fraction=0.5, bad_gradients="skip", clip_range_vf=0.2),
        dict(amp_dtype="bfloat16"),
        dict(amp_dtype="float16"),
    ],
    ids=str,
)
def test_transfers(options):
    """The host waits at most ten times in a rollout, whatever its length, and in an update, whatever its epochs."""
    model = PPOExt("MlpPolicy", tensor_env(), device=CUDA, **{**WITH_TENSORS, "n_steps": 32, **options})
    for phase in iteration(model):
        assert_within(BUDGET, phase)


@pytest.mark.parametrize("env_class", [TorchPendulum, TorchCartPole])
def test_no_wait_in_the_steps_of_a_rollout(env_class):
    """A rollout of more steps does not make the host wait more often."""
    found = []
    for n_steps in (16, 48):
        model = PPOExt("MlpPolicy", tensor_env(env_class=env_class), device=CUDA, **{**WITH_TENSORS, "n_steps": n_steps})
        found.append(counted(iteration(model)[0]))
    assert found[0] == found[1]


def test_no_wait_after_loading(tmp_path):
    """A zip that is loaded goes on with the fast steps of the optimiser, and waits no more often than before."""
    model = PPOExt("MlpPolicy", tensor_env(), device="cpu", **WITH_TENSORS).learn(256)
    model.save(tmp_path / "model")
    loaded = PPOExt.load(tmp_path / "model", env=tensor_env(), device=CUDA)
    assert MaskedAdamStepper.takes(loaded.policy)
    assert_within(BUDGET, iteration(loaded)[1])


def test_normalised_tensors():
    """``TensorVecNormalize`` waits for nothing in the steps of a rollout, and its statistics are those of the CPU."""
    found = []
    for n_steps in (16, 48):
        model = PPOExt("MlpPolicy", TensorVecNormalize(tensor_env()), device=CUDA, **{**WITH_TENSORS, "n_steps": n_steps})
        found.append(counted(iteration(model)[0]))
    assert found[0] == found[1]
    actions = th.rand(20, 16, 1) * 2 - 1
    statistics = []
    for device in ("cpu", CUDA):
        inner = TorchPendulum(16, device=device, max_episode_steps=12)
        env = TensorVecNormalize(TorchVecEnv(inner))
        env.reset_tensors()
        inner.state.copy_(th.linspace(-1, 1, 32).reshape(2, 16))
        for each in actions[:10]:
            env.step_tensors(each.to(device))
        statistics.append(env.ret_rms.var)
    np.testing.assert_allclose(*statistics, rtol=1e-4)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_jax_on_cuda(monkeypatch):
    """JAX and PyTorch share the memory of a GPU: what was recorded is what the environments returned."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    pytest.importorskip("gymnax")
    if jax.default_backend() not in ("gpu", "cuda"):
        pytest.skip("JAX has no GPU")
    envs = [JaxVecEnv("CartPole-v1", num_envs=64, device=device) for device in ("cpu", CUDA)]
    for env in envs:
        env.seed(0)
    first = [env.reset_tensors().cpu() for env in envs]
    th.testing.assert_close(*first)
    generator = th.Generator().manual_seed(0)
    for _ in range(30):
        actions = th.randint(0, 2, (64,), generator=generator)
        steps = [env.step_tensors(actions.to(env.device)) for env in envs]
        for one, other in zip(steps[0][:5], steps[1][:5], strict=True):
            th.testing.assert_close(other.cpu(), one, rtol=1e-3, atol=1e-4)
    model = PPOExt("MlpPolicy", envs[1], backend="device", **{**WITH_TENSORS, "n_steps": 32, "batch_size": 512})
    assert model.device.type == CUDA
    assert is_finite(model.learn(3 * 32 * 64))
    assert_within(BUDGET, iteration(model)[1])
    # Each observation follows from the one before it by the dynamics of the pole.
    rollout = {name: tensor.cpu() for name, tensor in model.rollout_buffer.tensors.items()}
    position, velocity = rollout["observations"][..., 0], rollout["observations"][..., 1]
    goes_on = rollout["episode_starts"][1:] == 0
    th.testing.assert_close(position[1:][goes_on], (position + 0.02 * velocity)[:-1][goes_on], rtol=1e-4, atol=1e-5)


# Lower precision, and numbers that are not finite


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("policy", SPACES)
def test_lower_precision(dtype, policy, tmp_path):
    """Networks in lower precision train, parameters stay in float32, and the zip goes on on both devices."""
    env = make_toys(length=5, **SPACES[policy])
    model = PPOExt(policy, env, device=CUDA, amp_dtype=dtype, **SMALL).learn(64)
    assert is_finite(model)
    assert {parameter.dtype for parameter in model.policy.parameters()} == {th.float32}
    model.save(tmp_path / "model")
    for device in ("cpu", CUDA):
        loaded = PPOExt.load(tmp_path / "model", env=env, device=device)
        assert is_finite(loaded.learn(64))
        assert loaded.policy.device.type == device


@pytest.mark.parametrize("what", ["reward", "observation"])
def test_data_that_are_not_finite_are_refused(monkeypatch, what):
    """The error names environment and step; the GPU can be used afterwards, and the model goes on."""
    monkeypatch.setattr(Broken, "what", what)
    model = PPOExt("MlpPolicy", tensor_env(env_class=Broken), device=CUDA, **WITH_TENSORS)
    with pytest.raises(NonFiniteDataError, match=f"Environment 3: the {what} is not finite.*at step 4 of the rollout"):
        model.learn(256)
    assert model.num_timesteps == 0
    model.learn(256)


@pytest.mark.parametrize("env_class", [TorchPendulum, TorchCartPole])
def test_policies_that_are_not_finite_are_refused(env_class):
    """Parameters that are not finite are named, for continuous and for discrete actions, and the GPU goes on."""
    model = PPOExt("MlpPolicy", tensor_env(env_class=env_class), device=CUDA, **WITH_TENSORS)
    with th.no_grad():
        model.policy.action_net.bias.fill_(math.nan)
    with pytest.raises(NonFinitePolicyError, match=r"step 0 of the rollout.*action_net.bias"):
        model.learn(256)
    th.cuda.synchronize()


# Zips and the choice of the device


@pytest.mark.parametrize(
    "options", [{}, dict(optimizer="muon"), dict(use_sde=True), dict(kl_coef=0.5, kl_target=0.01)], ids=str
)
def test_zips_go_on_everywhere(options, tmp_path):
    """A zip of each device goes on on each device, with tensor environments, and predicts the same."""
    observations = np.linspace(-1, 1, 30, dtype=np.float32).reshape(10, 3)
    for source in ("cpu", CUDA):
        model = PPOExt("MlpPolicy", tensor_env(source), device=source, **{**WITH_TENSORS, **options}).learn(512)
        model.save(tmp_path / source)
        expected, _ = model.predict(observations, deterministic=True)
        for device in ("cpu", CUDA):
            loaded = PPOExt.load(tmp_path / source, env=tensor_env(device), device=device)
            np.testing.assert_allclose(loaded.predict(observations, deterministic=True)[0], expected, rtol=1e-3, atol=1e-4)
            loaded.learn(512, reset_num_timesteps=False)
            assert is_finite(loaded)
            assert loaded.num_timesteps == 1024
            assert {parameter.device.type for parameter in loaded.policy.parameters()} == {device}


def test_automatic_device(capsys):
    """``device="auto"`` is the GPU for images and for environments that step there, and the CPU for a small policy."""
    for policy, env, expected in (
        ("MlpPolicy", make_toys(), "cpu"),
        ("CnnPolicy", make_toys(observation_space=IMAGE), CUDA),
        ("MlpPolicy", tensor_env(), CUDA),
        ("MlpPolicy", tensor_env("cpu"), "cpu"),
    ):
        model = PPOExt(policy, env, verbose=1, **WITH_TENSORS)
        assert f"Using {model.device} device: " in capsys.readouterr().out
        assert model.device.type == model.policy.device.type == expected
        model.verbose = 0
        assert is_finite(model.learn(256))


@pytest.mark.parametrize(("backend", "expected"), [("device", CUDA), ("auto", "cpu")])
def test_loading_a_zip_of_the_gpu_decides_anew(backend, expected, tmp_path):
    """A zip of the GPU is loaded to the fastest device, unless its `backend` says where, with the state of the optimiser."""
    make(backend=backend).learn(32).save(tmp_path / "model")
    loaded = PPOExt.load(tmp_path / "model", env=make_toys(length=5))
    # As with PyTorch, the number of steps is on the host.
    kinds = [state.items() for state in loaded.policy.optimizer.state.values()]
    states = [value for kind in kinds for name, value in kind if name != "step"]
    assert {tensor.device.type for tensor in (*loaded.policy.parameters(), *states)} == {expected}
    loaded.learn(32)
    steps = [state["step"] for state in loaded.policy.optimizer.state.values()]
    assert {step.device.type for step in steps} == {"cpu"}
