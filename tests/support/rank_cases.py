"""
Trainings for ranks of a distributed training, and for one process with the environments of all of them, with the same draws.

Run it: torchrun --nproc-per-node 2 tests/support/rank_cases.py OUTPUT [CASE ...]
With ``--all N`` and without torchrun, one process has the environments of N ranks.
"""

import argparse
import json
import sys
from copy import deepcopy
from pathlib import Path
from unittest import mock

import numpy as np
import torch as th
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.hybrid import SPACES
from support.simulated_device import simulated_device
from support.torch_envs import TorchPendulum
from support.toys import BOX_ACTION, DICT, VECTOR, ToyEnv

from sb3_ppo_ext import PPOExt, TensorVecNormalize, TorchVecEnv
from sb3_ppo_ext.distributed import ranks
from sb3_ppo_ext.distributed.launch import find_launch
from sb3_ppo_ext.update import minibatches, rollout_data

SMALL = dict(n_steps=16, batch_size=16, n_epochs=3, learning_rate=1e-2, seed=3)
MIRROR = {"obs": [0, [1, -1], [2, -1]], "action": [[0, -1], 1]}
OPTIONS = {
    "default": {},
    "advantages of the rollout": dict(advantage_norm="rollout"),
    "moving averages": dict(advantage_norm="ema"),
    "moving averages of ProtoMotions": dict(advantage_norm="ema", adv_ema_warm_start=False),
    "not normalized": dict(normalize_advantage=False),
    "target_kl": dict(target_kl=0.004, n_epochs=8),
    "kl_coef": dict(kl_coef=0.1, kl_target=0.01),
    "adaptive_lr_kl": dict(adaptive_lr_kl=0.01),
    "adaptive_lr_rule": dict(adaptive_lr_kl=0.01, adaptive_lr_rule="proportional"),
    "vtrace": dict(vtrace=True),
    "priority_alpha": dict(priority_alpha=0.8, priority_segment=4),
    "priorities with moving averages and V-trace": dict(priority_alpha=0.8, advantage_norm="ema", vtrace=True),
    "one segment": dict(priority_alpha=1.0, priority_segment=16, kl_coef=0.1, kl_target=0.01),
    "max_clip_fraction": dict(max_clip_fraction=0.3),
    "bad_gradients": dict(bad_gradients="skip"),
    "accumulate_grad": dict(accumulate_grad=2),
    "muon": dict(optimizer="muon", weight_decay=0.1),
    "critic_learning_rate": dict(critic_learning_rate=3e-2, lr_decay="linear", lr_warmup=0.1),
    "normalize_value": dict(normalize_value=True, clip_range_vf=0.5),
    "further losses": dict(bounds_coef=0.1, dual_clip=2.0, clip_range_vf=0.2, ent_coef=0.01),
    "spo": dict(surrogate="spo"),
    "squashed": dict(action_dist="squashed_gaussian"),
    "sgd": dict(optimizer="sgd", learning_rate=1e-2),
    "caps_temporal": dict(auxiliary_losses=dict(caps_temporal=0.1), accumulate_grad=2),
    "mirror": dict(auxiliary_losses={name: {"coef": 0.5, **MIRROR} for name in ("mirror", "mirror_augmentation")}),
    "uneven minibatches": dict(batch_size=24),
}
# Adam amplifies the rounding of convolutions. With the seed of the other cases, one of their units is so close to the edge of
# its ReLU that a single process without oneDNN differs from one with it by 2e-4.
OF_DICTIONARIES = {
    "different keys": dict(optimizer="sgd", policy_kwargs=dict(actor_keys=["joints"]), critic_learning_rate=3e-2, seed=4)
}
# Likewise, Adam amplifies the rounding of the rollout: with the seed of the other cases, noise that differs in its last bit
# moves the parameters of one process by 1e-5.
OF_TENSORS = {"not normalized": dict(normalize_advantage=False, seed=4)}
BACKENDS = ("eager", "fused", "native", "device")


class SameDraws:
    """Random numbers that each rank draws for the environments of all ranks, and of which it takes its own."""

    def __init__(self, rank, n_ranks, n_parts):
        self.rank, self.n_ranks, self.n_parts = rank, n_ranks, n_parts
        self.generator = np.random.RandomState(0)

    def normal(self, shape, axis):
        """Standard normal numbers with environments along an axis; one process stands for all parts."""
        shape = list(shape)
        n_own = shape[axis]
        shape[axis] = n_own * self.n_ranks
        numbers = self.generator.standard_normal(shape).astype(np.float32)
        own = slice(self.rank * n_own, (self.rank + 1) * n_own)
        return th.from_numpy(numbers[(slice(None),) * axis + (own,)].copy())

    def permutation(self, n, batch_size):
        """A permutation of the samples of this rank, or one with the minibatches of all ranks."""
        n_part = n // self.n_parts
        parts = [self.generator.permutation(n_part) for _ in range(self.n_ranks * self.n_parts)]
        if self.n_parts == 1:
            return parts[self.rank]
        size = batch_size // self.n_parts
        joined = []
        for start in range(0, n_part, size):
            joined += [part[start : start + size] + number * n_part for number, part in enumerate(parts)]
        return np.concatenate(joined)


def same_draws(draws, batch_size):
    """Patches that let all engines take the same draws."""

    def of_tensors(n, device):
        return th.from_numpy(draws.permutation(n, batch_size)).to(device)

    def standard_normal(shape, dtype, device):
        return draws.normal(shape, 0).to(device)

    segments = minibatches.PrioritizedSegments
    make = segments.epoch

    def with_same_draws(self, size):
        self.generator = th.Generator().manual_seed(1)
        return make(self, size)

    make_segments = segments.__init__

    def on_host(self, advantages, *arguments):
        make_segments(self, advantages.cpu(), *arguments)
        # Draws in blocks would be on the device.
        self.is_whole = False

    return (
        mock.patch.object(th, "randn", lambda *shape, **_: draws.normal(shape, 1)),
        mock.patch("torch.distributions.normal._standard_normal", standard_normal),
        mock.patch.object(rollout_data, "permutation", of_tensors),
        mock.patch("sb3_ppo_ext.memory.windows.permutation", of_tensors),
        mock.patch.object(segments, "__init__", on_host),
        mock.patch.object(segments, "epoch", with_same_draws),
    )


class Pendulum(TorchPendulum):
    """First states that depend on the number of the environment among those of all ranks."""

    first = 0

    def first_states(self):
        numbers = self.first + th.arange(self.num_envs, device=self.device)
        return th.stack([th.sin(1.0 + numbers + k) for k in range(self.n_states)]).to(self.state)


# The model itself normalises, with statistics of each step or of earlier rollouts.
OWN = {
    "own": dict(normalize_obs=True, normalize_reward=True),
    "by rollout": dict(normalize_obs=True, normalize_reward=True, normalize_freq="rollout"),
    "own tensors": dict(normalize_obs=True, normalize_reward=True),
}


def make_env(name, n_envs, first, device):
    if name in ("tensors", "own tensors"):
        pendulum = Pendulum(n_envs, device, max_episode_steps=7, has_own_generator=False)
        pendulum.first = first
        return TorchVecEnv(pendulum) if name in OWN else TensorVecNormalize(TorchVecEnv(pendulum))

    def make_toy():
        # Spaces draw observations, and are not shared by the environments of one process.
        # Of a hybrid space, only samples of boxes are drawn from what `same_draws` replaces.
        actions = SPACES["boxes"] if name == "hybrid" else BOX_ACTION
        return Monitor(ToyEnv(deepcopy(DICT if name == "dict" else VECTOR), deepcopy(actions), length=5))

    env = DummyVecEnv([make_toy] * n_envs)
    if name == "normalized":
        return VecNormalize(env)
    return VecNormalize(env, norm_obs_keys=["joints"]) if name == "dict" else env


def run(name, launch, n_parts, device):
    """Train one case, and return what it has learned and logged."""
    env_name, backend, option = name.split("/")
    options = {**SMALL, **{**OPTIONS, **OF_DICTIONARIES, **(OF_TENSORS if "tensors" in env_name else {})}[option]}
    options |= OWN.get(env_name, {})
    n_envs = 2 * n_parts
    draws = SameDraws(launch.rank, launch.size, n_parts)
    policy = "MultiInputPolicy" if env_name == "dict" else "MlpPolicy"
    env = make_env(env_name, n_envs, launch.rank * n_envs, device)
    model = PPOExt(policy, env, backend=backend, device=device, verbose=0, **options)
    th.manual_seed(0)
    with th.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(0.1 * th.randn(parameter.shape).to(parameter.device))
    patches = same_draws(draws, options["batch_size"])
    for patch in patches:
        patch.start()
    try:
        total = 2 * 16 * n_envs * launch.size
        model.learn(total)
    finally:
        for patch in patches:
            patch.stop()
    normalizer = model.normalizer or model.get_vec_normalize_env()
    statistics = [] if normalizer is None else [np.ravel(v).tolist() for v in _statistics(normalizer)]
    return {
        "parameters": {key: value.cpu().tolist() for key, value in model.policy.state_dict().items()},
        "logs": {k: float(v) for k, v in model.logger.name_to_value.items() if not k.startswith("time/")},
        "num_timesteps": model.num_timesteps,
        "episodes": [[float(e["r"]), int(e["l"])] for e in model.ep_info_buffer],
        "statistics": statistics,
    }


def _statistics(normalizer):
    kept = normalizer.obs_rms if isinstance(normalizer.obs_rms, dict) else {"": normalizer.obs_rms}
    for each in (*kept.values(), normalizer.ret_rms):
        yield from (each.mean, each.var, each.count)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--all", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gloo", action="store_true", help="without shared memory, as on several machines")
    arguments = parser.parse_args()
    th.set_num_threads(1)
    launch = find_launch("auto")
    if arguments.device == "simulated":
        arguments.device = simulated_device().name
    if arguments.gloo:
        ranks.on_one_machine = lambda group, size: False
    results = {}
    for name in arguments.cases:
        results[name] = run(name, launch, arguments.all, arguments.device)
    (arguments.output / f"{arguments.all}_{launch.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
