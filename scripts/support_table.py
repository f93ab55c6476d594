"""
The table "Can I use?" of README.md and docs/index.md: which engine computes which policy and which actions, as the engines
themselves say.

Run it: python scripts/support_table.py (seconds)
"""

import contextlib
import warnings
from collections.abc import Collection, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.engines.registry import ENGINES

COLUMNS = ("native", "fused", "device", "compile", "eager")
NUMBERS, IMAGE = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(0, 255, (3, 36, 36), np.uint8)
PARTS = spaces.Dict(numbers=NUMBERS, flags=spaces.MultiBinary(2))
FORCE = spaces.Box(-1, 1, (2,), np.float32)
CHOICE = spaces.Discrete(3)
HYBRID = spaces.Dict(choice=CHOICE, force=FORCE)
# Rows: policy, observation space, action space, and options
POLICIES: dict[str, tuple[str, spaces.Space, dict[str, Any]]] = {
    "`MlpPolicy`": ("MlpPolicy", NUMBERS, {}),
    "`CnnPolicy`": ("CnnPolicy", IMAGE, {}),
    "`MultiInputPolicy`": ("MultiInputPolicy", PARTS, {}),
    "transformer policies": ("MlpTransformerPolicy", NUMBERS, {}),
    "LSTM, GRU, MinGRU and LRU policies": ("MlpLstmPolicy", NUMBERS, {}),
}
ACTIONS: dict[str, tuple[spaces.Space, dict[str, Any]]] = {
    "`Box`": (FORCE, {}),
    "every `action_dist`": (FORCE, {"action_dist": "beta"}),
    "`use_sde`": (FORCE, {"use_sde": True}),
    "`Discrete`": (CHOICE, {}),
    "`MultiDiscrete`": (spaces.MultiDiscrete([3, 2]), {}),
    "`MultiBinary`": (spaces.MultiBinary(3), {}),
    "hybrid (`Dict`, `Tuple`)": (HYBRID, {}),
}


class Still(gym.Env[Any, Any]):
    """An environment in which nothing happens."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space):
        self.observation_space, self.action_space = observation_space, action_space


def supported(policy: str, observation_space: spaces.Space, action_space: spaces.Space, **options: Any) -> set[str]:
    """:return: Names of the engines that support a model"""
    env: Any = Still(observation_space, action_space)
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        model = PPOExt(policy, env, n_steps=16, batch_size=16, device="cpu", **options)
    setup = model._engine_setup()
    return {name for name in COLUMNS if ENGINES[name].unsupported_reason(setup) is None}


def lines() -> Iterator[str]:
    """:return: Lines of the table in Markdown"""
    yield "| | " + " | ".join(f"`{name}`" for name in COLUMNS) + " |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for title, (policy, space, options) in POLICIES.items():
        yield _line(title, supported(policy, space, FORCE, **options))
    groups: dict[frozenset[str], list[str]] = {}
    for title, (actions, options) in ACTIONS.items():
        groups.setdefault(frozenset(supported("MlpPolicy", NUMBERS, actions, **options)), []).append(title)
    for names, titles in groups.items():
        yield _line(f"actions: {', '.join(titles)}", names)


def _line(title: str, names: Collection[str]) -> str:
    return f"| {title} | " + " | ".join("✔️" if name in names else "✘" for name in COLUMNS) + " |"


if __name__ == "__main__":
    print("\n".join(lines()))
