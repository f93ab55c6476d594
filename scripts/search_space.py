"""
What `search_default.py` samples: levers, each with a few levels, and the configurations that are always run. Not a script.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from default_split import DEVELOPMENT
from returns_suites import FITTED, entries

# Seeds of the search; no published run has one of them.
FIRST_SEED = 1000
# Levels of each lever. The first one is that of SB3's defaults or of today's `default`; the others are compared with it.
# `rule` says what sets the learning rate: `rate` itself, or the KL divergence, with `rate` as its first value and `kl` as its
# target; `decay` acts on the rate or on the target.
LEVERS: dict[str, tuple[Any, ...]] = {
    "normalize_obs": (True, False),
    "normalize_reward": (True, False),
    "normalize_value": (False, True),
    "rule": ("rate", "threshold", "proportional"),
    "decay": ("constant", "hold", "lin"),
    "rate": (3e-4, 1e-3),
    "kl": (0.01, 0.02),
    "betas": ((0.9, 0.999), (0.9, 0.9), (0.99, 0.99)),
    "critic_rate": (None, 1e-3),
    "n_envs": (2, 8, 32),
    "rollout": (2048, 1024, 4096),
    "batch_size": (64, 256),
    "n_epochs": (10, 4),
    "gamma": (0.99, 0.98, 0.995),
    "gae_lambda": (0.95, 0.9, 0.98),
    "clip_range": (0.2, 0.1, 0.3),
    "ent_coef": (0.0, 0.01),
    "vtrace": (False, True),
    "log_std_init": (0.0, -1.0),
    "net_type": ("mlp", "layer_norm", "simba"),
    "activation_fn": ("nn.Tanh", "nn.ReLU"),
}
# Levers that change nothing for some levels of another one
ACTIVE = {"kl": ("rule", {"threshold", "proportional"})}
# Levers that act on tasks with continuous actions only
CONTINUOUS_ONLY = {"log_std_init"}
# Configurations at fixed points, with more seeds than the sampled ones have
REFERENCES: dict[str, dict[str, Any]] = {
    "SB3's defaults": {"policy": "MlpPolicy"},
    "SB3's defaults + VecNormalize": {"policy": "MlpPolicy", "normalize": True},
    "default": {**entries("ppo_ext")["default"]},
}


def sample(number: int) -> dict[str, Any]:
    """
    :param number: Number of a configuration
    :return: Its level of each lever: each one is drawn on its own, and all are equally likely
    """
    rng = np.random.default_rng([FIRST_SEED, number])
    return {name: levels[rng.integers(len(levels))] for name, levels in LEVERS.items()}


def entry_of(levels: Mapping[str, Any]) -> dict[str, Any]:
    """
    :param levels: Level of each lever
    :return: An entry in RL Zoo's format
    """
    same = ("n_envs", "batch_size", "n_epochs", "gamma", "gae_lambda", "clip_range", "ent_coef", "normalize_value", "vtrace")
    entry = {"policy": "MlpPolicy", **{name: levels[name] for name in same}}
    entry["n_steps"] = levels["rollout"] // levels["n_envs"]
    if levels["normalize_obs"] or levels["normalize_reward"]:
        entry["normalize"] = f"dict(norm_obs={levels['normalize_obs']}, norm_reward={levels['normalize_reward']})"
    if levels["critic_rate"] is not None:
        entry["critic_learning_rate"] = levels["critic_rate"]
    return {**entry, **_rate(levels), "policy_kwargs": _policy_kwargs(levels)}


def _rate(levels: Mapping[str, Any]) -> dict[str, Any]:
    """The learning rate, and what changes it"""
    prefix = "" if levels["decay"] == "constant" else f"{levels['decay']}_"

    def decayed(value: float) -> Any:
        return f"{prefix}{value}" if prefix else value

    if levels["rule"] == "rate":
        return {"learning_rate": decayed(levels["rate"])}
    return {
        "learning_rate": levels["rate"],
        "adaptive_lr_kl": decayed(levels["kl"]),
        "adaptive_lr_rule": levels["rule"],
    }


def _policy_kwargs(levels: Mapping[str, Any]) -> str:
    keywords = {
        "activation_fn": levels["activation_fn"],
        "log_std_init": str(levels["log_std_init"]),
        "optimizer_kwargs": f"dict(betas={levels['betas']}, eps=1e-5)",
        "net_type": repr(levels["net_type"]),
    }
    return f"dict({', '.join(f'{name}={value}' for name, value in keywords.items())})"


@dataclass(frozen=True)
class SearchJob:
    """
    One run of the search.

    :param configuration: A name of ``REFERENCES``, or the number of a sampled configuration
    :param task: Name of the task
    :param seed: Seed
    :param limit: Largest number of steps
    """

    configuration: str
    task: str
    seed: int
    limit: int | None = None

    @property
    def timesteps(self) -> int:
        return min(DEVELOPMENT[self.task], self.limit or DEVELOPMENT[self.task])

    def entry(self) -> dict[str, Any]:
        """The entry of the configuration, fitted to the observations of the task."""
        known = REFERENCES.get(self.configuration)
        entry = dict(entry_of(sample(int(self.configuration))) if known is None else known)
        if "normalize" in entry and self.task.startswith("MinAtar/"):
            entry["normalize"] = _without_observations(entry["normalize"])
        return {**entry, "n_timesteps": self.timesteps}

    def digest(self) -> str:
        """A hash of the hyperparameters."""
        return hashlib.sha256(json.dumps(self.entry(), sort_keys=True).encode()).hexdigest()[:12]


def _without_observations(normalize: bool | str) -> str:
    """As the Zoo's `default` for these observations, which are only zeros and ones."""
    if normalize is True:
        return FITTED["MinAtar/"]["normalize"]
    return str(normalize).replace("norm_obs=True", "norm_obs=False")


def schedule(n_configurations: int, tasks: list[str], limit: int | None = None) -> list[SearchJob]:
    """
    All runs, in the order in which they are computed: a seed of each reference, and then four sampled configurations and
    another seed of the references in turns. A sampled configuration has one seed, which no other one has.

    :param n_configurations: Number of sampled configurations
    :param tasks: Names of the tasks
    :param limit: Largest number of steps
    :return: The runs
    """

    def references(number: int) -> list[SearchJob]:
        return [SearchJob(name, task, FIRST_SEED + number, limit) for task in tasks for name in REFERENCES]

    jobs = references(0)
    for number in range(n_configurations):
        jobs += [SearchJob(str(number), task, FIRST_SEED + number, limit) for task in tasks]
        if number % 4 == 3:
            jobs += references(1 + number // 4)
    return jobs
