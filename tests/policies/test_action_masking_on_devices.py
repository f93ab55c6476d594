"""Masks of invalid actions on a simulated device, and in environments that step in tensors."""

from functools import partial

import pytest
import torch as th
from gymnasium import spaces
from support.device_training import SMALL, assert_same, assert_same_training, same_draws, tensor_env
from support.masks import ACTIONS, make_masked
from support.torch_envs import TorchCartPole

from sb3_ppo_ext import PPOExt

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You are trying to run PPOExt on the GPU"),
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
]
same_draws = pytest.fixture(same_draws)


@pytest.mark.usefixtures("same_draws")
@pytest.mark.parametrize(
    ("name", "options"),
    [("multi-discrete", {}), ("discrete", dict(policy="MlpTransformerPolicy", vtrace=True, kl_coef=0.5))],
    ids=str,
)
def test_training(sim, name, options):
    """The training on a device is that on the CPU."""
    assert_same_training(sim, make_env=make_masked, env=dict(action_space=ACTIONS[name]), action_masking=True, **options)


class MaskedCartPole(TorchCartPole):
    """Where the cart is on the left, it cannot be pushed to the left."""

    single_observation_space = spaces.Dict(
        {"observation": TorchCartPole.single_observation_space, "action_mask": spaces.MultiBinary(2)}
    )

    def __init__(self, *args, is_empty_at=-1, **kwargs):
        super().__init__(*args, **kwargs)
        self.n_invalid = th.zeros((), dtype=th.int64, device=self.device)
        self.n_steps, self.is_empty_at = 0, is_empty_at

    def observe(self, state):
        is_right = state[0] > -0.01
        mask = th.stack([is_right, th.ones_like(is_right)], dim=1)
        if self.n_steps == self.is_empty_at:
            mask[2] = False
        return {"observation": super().observe(state), "action_mask": mask.to(th.int8)}

    def move(self, state, actions):
        self.n_invalid += ((actions == 0) & (state[0] <= -0.01)).sum()
        self.n_steps += 1
        return super().move(state, actions)


MASKS = dict(action_masking=True, action_mask_key="action_mask", **{**SMALL, "batch_size": 64})


@pytest.mark.usefixtures("same_draws")
def test_tensor_environments(sim):
    """Masks in the observations of tensor environments give the training of NumPy's loop on the CPU."""
    expected = PPOExt("MlpPolicy", tensor_env("cpu", MaskedCartPole), backend="eager", **MASKS).learn(16 * 16 * 2)
    for device in ("cpu", sim.name):
        env = tensor_env(device, MaskedCartPole)
        actual = PPOExt("MlpPolicy", env, device=device, backend="device", **MASKS).learn(16 * 16 * 2)
        assert_same(expected, actual)
        assert env.env.n_invalid.item() == 0


def test_transfers(sim):
    """With masks, an update waits for the device as seldom as without."""
    env = tensor_env(sim.name, MaskedCartPole)
    model = PPOExt("MlpPolicy", env, device=sim.name, **MASKS).learn(16 * 16)
    with sim.counting() as counts:
        model.learn(16 * 16, reset_num_timesteps=False)
    assert counts.to_host <= 10
    assert counts.items == 0


@pytest.mark.parametrize("backend", ["device", "native"])
def test_empty_masks(backend):
    """A mask that leaves no choice is refused with environment and step."""
    env = tensor_env("cpu", partial(MaskedCartPole, is_empty_at=5))
    model = PPOExt("MlpPolicy", env, device="cpu", backend=backend, **MASKS)
    with pytest.raises(ValueError, match="Environment 2: all actions are masked at step 5 of the rollout"):
        model.learn(16 * 16)


def test_methods_are_refused():
    """Environments that step in tensors have their masks in the observations."""
    with pytest.raises(ValueError, match="give `action_mask_key` as well"):
        PPOExt("MlpPolicy", tensor_env("cpu", TorchCartPole), action_masking=True, device="cpu")
