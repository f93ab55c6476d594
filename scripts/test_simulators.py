"""
Train, evaluate, resume and export on the real packages of simulators, one after the other, and print a table::

    make test-simulators
    python scripts/test_simulators.py brax pgx    # only these

Each runs in a process of its own. Those that are not installed are left out, and named. The exit status is 1 if one fails.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv, VecMonitor

from sb3_ppo_ext import EncodeText, FastDummyVecEnv, JaxVecEnv, PPOExt, TrainingCheckpoint, VectorEnvAdapter

N_ENVS, N_STEPS = 4, 32
TIMESTEPS = 4 * N_ENVS * N_STEPS


def brax() -> VecEnv:
    """Environments of brax as they are"""
    envs = importlib.import_module("brax.envs")
    return JaxVecEnv(envs.create("fast", episode_length=20, auto_reset=False), num_envs=N_ENVS, device="cpu")


def gymnax() -> VecEnv:
    """By name"""
    return JaxVecEnv("CartPole-v1", {"max_steps_in_episode": 20}, num_envs=N_ENVS, device="cpu")


def craftax() -> VecEnv:
    """In the style of gymnax, with spaces of its own"""
    make = importlib.import_module("craftax.craftax_env").make_craftax_env_from_name
    env = make("Craftax-Classic-Symbolic-v1", auto_reset=False)
    return JaxVecEnv(env, {"max_timesteps": 20}, num_envs=N_ENVS, device="cpu")


def playground(impl: str = "jax") -> VecEnv:
    """MuJoCo Playground with the engine in JAX"""
    registry = importlib.import_module("mujoco_playground").registry
    env = registry.load("CartpoleBalance", config_overrides={"impl": impl, "episode_length": 20})
    return JaxVecEnv(env, num_envs=N_ENVS, device="cpu")


def playground_warp() -> VecEnv:
    """MuJoCo Playground with its default engine"""
    return playground("warp")


def pgx() -> VecEnv:
    """A pair of functions around a game of MinAtar"""
    game: Any = importlib.import_module("pgx").make("minatar-breakout")
    jax = importlib.import_module("jax")

    def reset(key: Any) -> Any:
        state = game.init(key)
        return state.observation.astype("float32"), state

    def step(key: Any, state: Any, action: Any) -> Any:
        state = game.step(state, action.astype(jax.numpy.int32), key)
        return state.observation.astype("float32"), state, state.rewards[0], state.terminated, False

    space = spaces.Box(0, 1, game.observation_shape, np.float32)
    actions = spaces.Discrete(game.num_actions)
    copies: dict[str, Any] = {"num_envs": N_ENVS, "device": "cpu", "max_episode_steps": 20}
    return JaxVecEnv((reset, step), observation_space=space, action_space=actions, **copies)


def jumanji() -> VecEnv:
    """A pair of functions around a game"""
    game: Any = importlib.import_module("jumanji").make("Snake-v1")

    def reset(key: Any) -> Any:
        state, timestep = game.reset(key)
        return timestep.observation.grid, state

    def step(key: Any, state: Any, action: Any) -> Any:
        state, timestep = game.step(state, action)
        return timestep.observation.grid, state, timestep.reward, timestep.last(), False

    space = spaces.Box(-np.inf, np.inf, game.observation_spec.grid.shape, np.float32)
    copies: dict[str, Any] = {"num_envs": N_ENVS, "device": "cpu", "max_episode_steps": 20}
    return JaxVecEnv((reset, step), observation_space=space, action_space=spaces.Discrete(4), **copies)


def navix() -> VecEnv:
    """A pair of functions around a grid"""
    module: Any = importlib.import_module("navix")
    grid = module.make("Navix-Empty-5x5-v0", observation_fn=module.observations.symbolic)

    def reset(key: Any) -> Any:
        timestep = grid.reset(key)
        return timestep.observation.astype("float32"), timestep

    def step(key: Any, timestep: Any, action: Any) -> Any:
        timestep = grid._step(timestep, action)
        return timestep.observation.astype("float32"), timestep, timestep.reward, timestep.is_termination(), False

    space = spaces.Box(-np.inf, np.inf, grid.observation_space.shape, np.float32)
    actions = spaces.Discrete(int(grid.action_space.n))
    copies: dict[str, Any] = {"num_envs": N_ENVS, "device": "cpu", "max_episode_steps": 20}
    return JaxVecEnv((reset, step), observation_space=space, action_space=actions, **copies)


def envpool() -> VecEnv:
    """Arrays"""
    make: Any = importlib.import_module("envpool").make
    venv = make("CartPole-v1", env_type="gymnasium", num_envs=N_ENVS, max_episode_steps=20, seed=0)
    return VecMonitor(VectorEnvAdapter(venv))


def envpool_dictionaries() -> VecEnv:
    """Dictionaries, of dm_control"""
    make: Any = importlib.import_module("envpool").make
    venv = make("CartpoleBalance-v1", env_type="gymnasium", num_envs=N_ENVS, max_episode_steps=20, seed=0)
    return VecMonitor(VectorEnvAdapter(venv))


def gymnasium_wrappers() -> VecEnv:
    """Gymnasium's vectorised environments in its own wrappers"""
    wrappers = gym.wrappers.vector
    venv = gym.make_vec("Pendulum-v1", N_ENVS, "sync", wrappers=[lambda env: gym.wrappers.TimeLimit(env, 20)])
    return VectorEnvAdapter(wrappers.DictInfoToList(wrappers.RecordEpisodeStatistics(venv)))


def minigrid() -> VecEnv:
    """Strings and a small image"""
    importlib.import_module("minigrid")
    wrap = gym.wrappers.FlattenObservation
    return _copies(lambda: wrap(EncodeText(gym.make("MiniGrid-Empty-5x5-v0", max_episode_steps=20))))


def mo_gymnasium() -> VecEnv:
    """Rewards for several objectives, weighted"""
    module: Any = importlib.import_module("mo_gymnasium")
    weight = np.array([0.5, 0.5])
    return _copies(lambda: module.wrappers.LinearReward(module.make("deep-sea-treasure-v0"), weight=weight))


def highway() -> VecEnv:
    """An environment of Gymnasium"""
    importlib.import_module("highway_env")
    return _copies(lambda: gym.make("highway-fast-v0"))


def supersuit() -> VecEnv:
    """PettingZoo's environments with a policy that agents share"""
    module: Any = importlib.import_module("supersuit")
    agents = importlib.import_module("mpe2.simple_spread_v3").parallel_env(max_cycles=20)
    venv = module.pettingzoo_env_to_vec_env_v1(agents)
    return VecMonitor(module.concat_vec_envs_v1(venv, 1, base_class="stable_baselines3"))


MAKERS: dict[str, Callable[[], VecEnv]] = {
    each.__name__: each
    for each in (
        *(brax, gymnax, craftax, playground, playground_warp, pgx, jumanji, navix),
        *(envpool, envpool_dictionaries, gymnasium_wrappers),
        *(minigrid, mo_gymnasium, highway, supersuit),
    )
}


def _copies(make: Callable[[], gym.Env]) -> VecEnv:
    return FastDummyVecEnv([lambda: Monitor(gym.wrappers.TimeLimit(make(), 20))] * N_ENVS)


def train(name: str) -> None:
    """
    Train, evaluate, resume and export on one of them.

    :param name: Key of :data:`MAKERS`
    """
    env = MAKERS[name]()
    policy = "MultiInputPolicy" if isinstance(env.observation_space, spaces.Dict) else "MlpPolicy"
    with tempfile.TemporaryDirectory() as folder:
        batch = env.num_envs * N_STEPS // 4
        # SuperSuit's environments have no `seed`, which SB3 calls as well.
        seed = None if name == "supersuit" else 0
        model = PPOExt(policy, env, n_steps=N_STEPS, batch_size=batch, n_epochs=2, seed=seed, device="cpu")
        model.learn(TIMESTEPS, callback=TrainingCheckpoint(save_freq=N_STEPS, save_path=folder))
        assert len(model.ep_info_buffer or []) > 0, "no episode has ended"
        mean, _ = evaluate_policy(model, env, n_eval_episodes=4, warn=False)
        assert np.isfinite(mean)
        newest = max(Path(folder).glob("*.zip"), key=lambda path: path.stat().st_mtime)
        resumed = PPOExt.resume(newest, MAKERS[name]())
        resumed.learn(TIMESTEPS, reset_num_timesteps=False)
        model.export(str(Path(folder) / "actor.onnx"))
        print(f"returns {mean:.3g}, {len(model.ep_info_buffer or [])} episodes")


def _is_installed(name: str) -> str | None:
    """What is missing, ``None`` if nothing is."""
    packages = {"playground": "mujoco_playground", "highway": "highway_env", "gymnasium_wrappers": "gymnasium"}
    name = name.removesuffix("_dictionaries").removesuffix("_warp")
    package = packages.get(name, name)
    return None if importlib.util.find_spec(package) else f"{package} is not installed"


def main() -> int:
    """
    :return: Exit status
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*MAKERS, []], default=[], metavar="NAME", help=", ".join(MAKERS))
    parser.add_argument("--here", action="store_true", help="in this process, with tracebacks")
    arguments = parser.parse_args()
    if arguments.here:
        for name in arguments.names:
            train(name)
        return 0
    has_failed = False
    print("| simulator | result | seconds |\n| --- | --- | --- |")
    for name in arguments.names or MAKERS:
        start, missing = time.perf_counter(), _is_installed(name)
        if missing is None:
            command = [sys.executable, __file__, "--here", name]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = (run.stdout if run.returncode == 0 else run.stderr).strip().splitlines() or ["no output"]
            has_failed |= run.returncode != 0
            missing = lines[-1] if run.returncode == 0 else f"FAILED: {lines[-1]}"
        print(f"| {name} | {missing} | {time.perf_counter() - start:.0f} |", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
