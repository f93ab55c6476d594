"""On a simulated device, which refuses what CUDA would refuse: the same training as on the CPU, whatever is trained."""

from functools import partial

import pytest
import torch as th
from gymnasium import spaces
from support.cases import one_in
from support.device_training import assert_same_training, trained
from support.hybrid import SPACES
from support.toys import DICT, IMAGE

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You are trying to run PPOExt on the GPU"),
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
]
TRANSFORMER = dict(context_length=6, d_model=16, n_heads=2, use_last_action=True, use_last_reward=True)
KEYS = dict(actor_keys=["joints", "gear"])
POLICIES = {
    "MlpPolicy": {},
    "MlpPolicy, simba": dict(policy_kwargs=dict(net_type="simba", net_arch=[16])),
    "CnnPolicy": dict(env=dict(observation_space=IMAGE)),
    "MultiInputPolicy, different keys": dict(env=dict(observation_space=DICT), policy_kwargs=KEYS),
    "MlpTransformerPolicy": dict(policy_kwargs=TRANSFORMER),
}
ACTIONS = {
    "gaussian": {},
    "gaussian, mean_tanh": dict(policy_kwargs=dict(mean_tanh=True, learn_std=False)),
    "beta": dict(action_dist="beta"),
    "squashed Gaussian": dict(action_dist="squashed_gaussian", bounds_coef=0.1),
    "categorical": dict(env=dict(action_space=spaces.Discrete(4))),
    "multi-categorical": dict(env=dict(action_space=spaces.MultiDiscrete([3, 2]))),
    "Bernoulli": dict(env=dict(action_space=spaces.MultiBinary(3))),
    "hybrid": dict(env=dict(action_space=SPACES["all kinds"]), bounds_coef=0.1, kl_coef=0.1),
    "hybrid, Beta": dict(env=dict(action_space=SPACES["nested"]), action_dist="beta", kl_coef=0.1),
    "gSDE": dict(use_sde=True, sde_sample_freq=4),
    "gSDE, squashed": dict(use_sde=True, policy_kwargs=dict(squash_output=True, use_expln=True, full_std=False)),
}
OF_SEQUENCES = dict(advantage_norm="ema", vtrace=True, priority_alpha=0.6, priority_segment=4, accumulate_grad=2)


assert_same_training = partial(assert_same_training, backend="eager")


@pytest.mark.parametrize("policy", POLICIES)
def test_policies(sim, policy):
    """Each policy is trained as on the CPU."""
    assert_same_training(sim, policy=policy.split(",")[0], **POLICIES[policy])


@pytest.mark.parametrize("actions", one_in(3, ACTIONS))
def test_actions(sim, actions):
    """Each action distribution is trained as on the CPU, together with the losses that depend on it."""
    assert_same_training(sim, **{"ent_coef": 0.01, **ACTIONS[actions]})


def test_options_with_sequences(sim):
    """Options that treat sequences of a history-based policy differently act as on the CPU."""
    assert_same_training(sim, policy="MlpTransformerPolicy", policy_kwargs=TRANSFORMER, **OF_SEQUENCES)


def test_device_refuses_and_counts(sim):
    """Operations on tensors of both devices, and NumPy of a tensor on the device, are refused; what waits is counted."""
    on_device, on_host = th.ones(3, device=sim.name), th.ones(3)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        on_device + on_host
    with pytest.raises(TypeError, match="numpy"):
        on_device.numpy()
    with sim.counting() as counts:
        (on_device + 1).cpu()
        on_device.copy_(on_host)
        with sim.counting() as inner:
            assert on_device[0].item() == 1
    assert (counts.to_host, counts.to_device, counts.items, counts.operations) == (1, 1, 1, 1)
    assert (inner.to_host, inner.to_device, inner.items) == (0, 0, 1)


def test_device_leaves_the_cpu_alone(sim):
    """New tensors lie on the CPU, and a training there does nothing on the device."""
    assert th.ones(1).device.type == th.get_default_device().type == "cpu"
    with sim.counting() as counts:
        model = trained("auto", "eager")
    assert model.device.type == "cpu"
    assert (counts.to_host, counts.to_device, counts.items, counts.operations) == (0, 0, 0, 0)
