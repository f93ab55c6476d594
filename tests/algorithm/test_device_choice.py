"""`device="auto"` is the fastest device, and the user is told why."""

import pytest
import torch as th
from support.toys import IMAGE, make_toys
from torch import nn

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.algorithm import device_choice
from sb3_ppo_ext.algorithm.device_choice import WIDE, Situation, choose_device

SMALL_MLP, WIDE_MLP = nn.Linear(3, 64), nn.Linear(1024, WIDE // 1024)
SHAPES = dict(n_steps=16, batch_size=16, n_epochs=1)


class TensorEnv:
    """Environments that step in tensors."""

    def __init__(self, device):
        self.device = device

    def step_tensors(self, actions):
        raise NotImplementedError


class Wrapper:
    """Forwards attributes, as SB3's wrappers do, but not the steps in tensors."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        return getattr(self.env, name)


@pytest.fixture
def cuda(monkeypatch):
    """Decisions of a machine with CUDA."""
    monkeypatch.setattr(th.cuda, "is_available", lambda: True)


@pytest.fixture
def gpu(sim, cuda, monkeypatch):
    """A machine with CUDA, whose place is taken by the simulated device."""
    monkeypatch.setattr(device_choice, "_CUDA", th.device(sim.name))


@pytest.mark.parametrize(
    ("policy", "env", "is_native", "device", "reason"),
    [
        (SMALL_MLP, None, True, "cpu", "native engine"),
        (SMALL_MLP, None, False, "cpu", "small"),
        (WIDE_MLP, None, False, "cuda", "wide"),
        (WIDE_MLP, None, True, "cuda", "wide"),
        (nn.Sequential(nn.Conv2d(1, 1, 3), nn.Flatten()), None, False, "cuda", "images"),
        (SMALL_MLP, TensorEnv("cuda:1"), True, "cuda:1", "environments step there"),
        (SMALL_MLP, TensorEnv(th.device("cpu")), True, "cpu", "native engine"),
        (SMALL_MLP, Wrapper(TensorEnv("cuda:1")), True, "cpu", "native engine"),
    ],
)
def test_rules(cuda, policy, env, is_native, device, reason):
    """With CUDA, each rule sends a policy to the device that is fastest for it."""
    choice = choose_device(Situation(policy, env, is_native))
    assert choice.device == th.device(device)
    assert reason in choice.reason


@pytest.mark.parametrize(("batch_size", "device"), [(64, "cpu"), (10**7, "cuda")])
def test_large_minibatches(cuda, batch_size, device):
    """A small policy is sent to the GPU if its minibatches are large."""
    assert choose_device(Situation(SMALL_MLP, None, True, batch_size=batch_size)).device == th.device(device)


def test_without_cuda(monkeypatch):
    """Without CUDA everything is on the CPU, as with SB3."""
    monkeypatch.setattr(th.cuda, "is_available", lambda: False)
    for policy in (SMALL_MLP, WIDE_MLP):
        assert choose_device(Situation(policy, None, False)) == (th.device("cpu"), "there is no CUDA")


@pytest.mark.integration
@pytest.mark.filterwarnings("error:You are trying to run PPOExt on the GPU")
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_model_on_the_chosen_device(gpu, sim, capsys):
    """Policy, buffer and optimiser are on the chosen device, and so after loading; one line says which and why."""
    cases = {
        "MlpPolicy": ({}, {}, "cpu", "Using cpu device: the native engine"),
        "CnnPolicy": (dict(observation_space=IMAGE), {}, sim.name, "Using sim:0 device: the policy reads images"),
        "MlpTransformerPolicy": ({}, dict(policy_kwargs=dict(context_length=4)), "cpu", "Using cpu device: a GPU would be"),
    }
    for policy, (env, options, device, line) in cases.items():
        model = PPOExt(policy, make_toys(**env), verbose=1, seed=0, **SHAPES, **options)
        printed = capsys.readouterr().out
        assert printed.count(" device: ") == 1, printed
        assert line in printed
        assert model.device == model.policy.device == model.rollout_buffer.device == th.device(device)
        model.verbose = 0
        before = [parameter.detach().cpu().clone() for parameter in model.policy.parameters()]
        model.learn(32)
        assert all(not th.equal(old, new.cpu()) for old, new in zip(before, model.policy.parameters(), strict=True))


@pytest.mark.integration
def test_given_device(gpu, sim, capsys):
    """A device that is given is taken, whatever would be faster, with SB3's line and SB3's hint to prefer the CPU."""
    model = PPOExt("CnnPolicy", make_toys(observation_space=IMAGE), device="cpu", verbose=1, **SHAPES)
    assert model.device == model.policy.device == th.device("cpu")
    assert capsys.readouterr().out.startswith("Using cpu device\n")
    with pytest.warns(UserWarning, match="trying to run PPOExt on the GPU"):
        model = PPOExt("MlpPolicy", make_toys(), device=sim.name, **SHAPES)
    assert model.device == model.policy.device == th.device(sim.name)


def test_loading_decides_anew(tmp_path, monkeypatch):
    """A zip is loaded to the fastest device of the machine, unless a device is given."""
    PPOExt("MlpPolicy", make_toys(), device="auto", **SHAPES).save(tmp_path / "model")
    asked = []

    def record(situation):
        asked.append(situation)
        return choose_device(situation)

    monkeypatch.setattr("sb3_ppo_ext.algorithm.model_setup.choose_device", record)
    PPOExt.load(tmp_path / "model", device="cpu")
    assert not asked
    assert PPOExt.load(tmp_path / "model").device == th.device("cpu")
    assert len(asked) == 1


@pytest.mark.parametrize("backend", ["native", "fused"])
def test_backends_that_need_the_cpu(cuda, backend):
    """``backend="native"`` and ``"fused"`` take the CPU, whatever the policy: elsewhere they would be refused."""
    images = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Flatten())
    for policy in (SMALL_MLP, WIDE_MLP, images):
        assert choose_device(Situation(policy, None, False, backend)).device == th.device("cpu")


def test_backend_that_is_made_for_a_gpu(cuda):
    """``backend="device"`` takes CUDA where it exists, also for a small policy."""
    assert choose_device(Situation(SMALL_MLP, None, False, "device")).device == th.device("cuda")
