"""Train on the CPU and on a simulated device with the same draws, and compare."""

from unittest.mock import patch

import numpy as np
import torch as th
from support.torch_envs import TorchPendulum
from support.toys import make_toys

from sb3_ppo_ext import PPOExt, TorchVecEnv
from sb3_ppo_ext.rollout.buffer import TensorRolloutBuffer
from sb3_ppo_ext.update import rollout_data
from sb3_ppo_ext.update.minibatches import PrioritizedSegments

SMALL = dict(n_steps=16, batch_size=8, n_epochs=2, seed=3)


def same_draws(monkeypatch):
    """Let the device draw the minibatches that the CPU draws."""

    class HostSegments(PrioritizedSegments):
        """Prioritised segments that are drawn on the CPU, and copied to the device."""

        def __init__(self, advantages, *args):
            super().__init__(advantages.cpu(), *args)
            self.device = advantages.device

        def epoch(self, batch_size):
            for draw in super().epoch(batch_size):
                yield tuple(part.to(self.device) for part in draw)

    draw = lambda n, device: th.from_numpy(np.random.permutation(n)).to(device)  # noqa: E731
    monkeypatch.setattr("sb3_ppo_ext.rollout.buffer.permutation", draw)
    monkeypatch.setattr(rollout_data, "permutation", draw)
    monkeypatch.setattr("sb3_ppo_ext.memory.windows.permutation", draw)
    monkeypatch.setattr("sb3_ppo_ext.update.estimates.PrioritizedSegments", HostSegments)


def trained(device, backend, policy="MlpPolicy", env=None, timesteps=64, make_env=make_toys, **options):
    toys = make_env(length=5, **(env or {}))
    return PPOExt(policy, toys, device=device, backend=backend, **{**SMALL, **options}).learn(timesteps)


def logs_of(model):
    return {key: value for key, value in model.logger.name_to_value.items() if "time/" not in key}


def assert_same(expected, actual, atol=5e-5, atol_of_logs=1e-4):
    """Parameters, the optimiser's counts and logs of two models are the same, to rounding."""
    on_cpu = {name: tensor.cpu() for name, tensor in actual.policy.state_dict().items()}
    for name, tensor in expected.policy.state_dict().items():
        th.testing.assert_close(on_cpu[name], tensor, rtol=1e-3, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
    one, other = logs_of(expected), logs_of(actual)
    assert one.keys() == other.keys()
    np.testing.assert_allclose([*other.values()], [*one.values()], rtol=1e-2, atol=atol_of_logs)
    counts = [[float(s["step"]) for s in m.policy.optimizer.state.values() if "step" in s] for m in (expected, actual)]
    assert counts[0] == counts[1]


def assert_same_training(sim, backend="device", **kwargs):
    """Parameters, optimiser and logs after two updates on a simulated device equal those of the CPU, to rounding."""
    # Muon computes in bfloat16, which processors round differently: here it computes in float32.
    with patch.object(th.Tensor, "bfloat16", th.Tensor.clone):
        expected, actual = trained("cpu", "eager", **kwargs), trained(sim.name, backend, **kwargs)
    assert backend != "device" or isinstance(actual.rollout_buffer, TensorRolloutBuffer)
    assert {parameter.device for parameter in actual.policy.parameters()} == {th.device(sim.name)}
    assert_same(expected, actual)


def tensor_env(sim_or_cpu, env_class=TorchPendulum, n=16, **kwargs):
    return TorchVecEnv(env_class(n, device=sim_or_cpu, has_own_generator=False, max_episode_steps=12, **kwargs))
