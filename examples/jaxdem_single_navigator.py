"""
PPOExt in an environment of JaxDEM, side by side with JaxDEM's own trainer.

The environment, `single_navigator`, is a sphere that is to move to a target. `JaxVecEnv` takes it as two functions of one
copy. JaxDEM's trainer is PPO in the style of PufferLib: Muon, V-trace, and prioritised segments, which are options of
`PPOExt`. Both have the same hyperparameters, which are the defaults of JaxDEM's trainer, and layers of the same sizes. They
differ in this:

- JaxDEM corrects the advantages with V-trace after every minibatch, `PPOExt` before every epoch, and there is one epoch.
- JaxDEM's actor and critic share their layers; those of `PPOExt` have their own.
- The schedule of JaxDEM's learning rate counts minibatches, of which a rollout has four, and ends after a quarter of the
  training, while that of `PPOExt` ends with the training. With `--constant-rate` both are constant.

JaxDEM is not on PyPI: pip install 'sb3-ppo-ext[jax]' 'JaxDEM[rl] @ git+https://github.com/cdelv/JaxDEM'
Run it: python examples/jaxdem_single_navigator.py
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch as th
from gymnasium import spaces
from torch import nn

from sb3_ppo_ext import JaxVecEnv, PPOExt

try:
    import jaxdem.rl as rl
    from flax import nnx
except ImportError as error:
    sys.exit(f"{error}\nInstall JaxDEM: pip install 'JaxDEM[rl] @ git+https://github.com/cdelv/JaxDEM'")

N_STEPS, N_MINIBATCHES, MAX_FORCE = 64, 4, 6.0


def functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The environment as functions of one copy."""
    blank = rl.Environment.create("single_navigator")

    def reset(key: Any) -> Any:
        env = blank.reset(blank, key)
        return env.observation(env)[0], env

    def step(key: Any, env: Any, action: Any) -> Any:
        # As JaxDEM's action space `max_norm`: a force in the direction of the action, of a bounded norm
        norm = jnp.sqrt(jnp.sum(action**2) + 1e-12)
        env = env.step(env, MAX_FORCE * jnp.tanh(norm) / norm * action[None])
        return env.observation(env)[0], env, env.reward(env)[0], False, env.done(env)

    return reset, step


class Navigators(JaxVecEnv):
    """The environments, which keep the mean reward of each rollout. A method that replaces a step would be called at each."""

    def __init__(self, n_envs: int):
        box = spaces.Box(-np.inf, np.inf, (6,), np.float32)
        super().__init__(functions(), num_envs=n_envs, observation_space=box, action_space=spaces.Box(-5, 5, (2,), np.float32))
        self.rewards: list[float] = []

    def collector(self, *args: Any) -> Any:
        collect = super().collector(*args)
        assert collect is not None, "JAX could not compile the rollout"

        def collect_and_keep(masks: Any) -> Any:
            rollout = collect(masks)
            self.rewards.append(rollout.rewards.mean())
            return rollout

        return collect_and_keep


@cache
def navigators(n_envs: int) -> Navigators:
    """The same environments for all trainings, since it takes JAX long to compile them."""
    return Navigators(n_envs)


def train_ours(n_envs: int, n_rollouts: int, seed: int, constant_rate: bool, **options: Any) -> tuple[float, np.ndarray]:
    """
    :return: Samples per second, and the mean reward of each rollout, shape ``(n_rollouts,)``
    """
    env = navigators(n_envs)
    make = partial(
        PPOExt,
        "MlpPolicy",
        env,
        n_steps=N_STEPS,
        batch_size=n_envs * N_STEPS // N_MINIBATCHES,
        n_epochs=1,
        learning_rate=1e-2,
        lr_decay="constant" if constant_rate else "cosine",
        max_grad_norm=1.5,
        optimizer="muon",
        vtrace=True,
        priority_alpha=0.8,
        priority_beta=0.2,
        priority_segment=N_STEPS,
        clip_range_vf=0.2,
        vf_clip_mode="max",
        vf_coef=1.0,  # JaxDEM's is 2, of half the squared error
        ent_coef=0.001,
        seed=seed,
        device="cpu",
        **options,
    )
    make().learn(n_envs * N_STEPS)  # compiles the rollout
    env.rewards.clear()
    model = make()
    start = time.perf_counter()
    model.learn(n_rollouts * n_envs * N_STEPS)
    seconds = time.perf_counter() - start
    return n_rollouts * n_envs * N_STEPS / seconds, np.array(env.rewards)


def train_theirs(n_envs: int, n_rollouts: int, seed: int, constant_rate: bool) -> tuple[float, np.ndarray]:
    """
    :return: Samples per second, and the mean reward of each rollout, shape ``(n_rollouts,)``
    """
    env = rl.Environment.create("single_navigator")
    model = rl.Model.create(
        "SharedActorCritic",
        key=nnx.Rngs(seed),
        observation_space_size=env.observation_space_size,
        action_space_size=env.action_space_size,
        action_space=rl.ActionSpace.create("max_norm", max_norm=MAX_FORCE),
    )
    trainer = rl.Trainer.create(
        "PPO",
        env=env,
        model=model,
        seed=seed,
        num_envs=n_envs,
        num_steps_epoch=N_STEPS,
        num_epochs=n_rollouts,
        num_minibatches=N_MINIBATCHES,
        anneal_learning_rate=not constant_rate,
    )
    epoch = type(trainer).epoch
    jax.block_until_ready(epoch(trainer, jnp.asarray(0)))  # compiles
    start, rewards = time.perf_counter(), []
    for number in range(n_rollouts):
        trainer, trajectory, _ = epoch(trainer, jnp.asarray(number))
        rewards.append(trajectory.reward.mean())
    rewards = jax.block_until_ready(rewards)
    seconds = time.perf_counter() - start
    return n_rollouts * n_envs * N_STEPS / seconds, np.array(rewards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, default=256, help="number of copies (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=1_000_000, help="samples of each training (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="number of trainings of each (default: %(default)s)")
    parser.add_argument("--constant-rate", action="store_true", help="keep the learning rates constant")
    arguments = parser.parse_args()
    th.set_num_threads(1)
    n_rollouts = max(arguments.samples // (arguments.envs * N_STEPS), 4)
    gelu: Any = dict(policy_kwargs=dict(net_arch=[42, 42, 42], activation_fn=nn.GELU))
    tanh: Any = dict(policy_kwargs=dict(net_arch=[42, 42, 42]))
    trainings: dict[str, Callable[..., Any]] = {
        "JaxDEM, GELU": train_theirs,
        "PPOExt, GELU": lambda *args: train_ours(*args, **gelu),
        "PPOExt, tanh": lambda *args: train_ours(*args, **tanh),
    }
    found: dict[str, list[Any]] = {name: [] for name in trainings}
    for seed in range(arguments.seeds):
        for name, train in trainings.items():
            found[name].append(train(arguments.envs, n_rollouts, seed, arguments.constant_rate))
            print(f"seed {seed}, {name}: {found[name][-1][0]:.0f} samples/s", flush=True)
    quarters = [f"{(k + 1) * n_rollouts // 4 * arguments.envs * N_STEPS / 1e6:.2f}M" for k in range(4)]
    print(
        f"\n{'':14}samples/s   1000 x reward per step in the quarter that ends at {', '.join(quarters)}: mean ± std over seeds"
    )
    for name, results in found.items():
        parts = [np.array([part.mean() for part in np.array_split(rewards, 4)]) * 1000 for _, rewards in results]
        cells = [f"{column.mean():6.2f} ± {column.std(ddof=len(parts) > 1):.2f}" for column in np.transpose(parts)]
        print(f"{name:14}{np.median([speed for speed, _ in results]):9.0f}   {'   '.join(cells)}")


if __name__ == "__main__":
    main()
