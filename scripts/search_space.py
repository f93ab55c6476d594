"""
What `search_default.py` samples: levers, each with a few levels, and the configurations that are always run. Not a script.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from default_split import DEVELOPMENT, DISCRETE
from returns_suites import FITTED, entries

# Seeds of the search; no published run has one of them.
FIRST_SEED = 1000
# Levels of each lever. The first one is near SB3's defaults or today's `default`; the others are compared with it.
# `scale` says what is normalised besides the observations: the rewards, or the targets of the critic.
# `rule` says what sets the learning rate: `rate` itself, or the KL divergence, with `rate` as its first value and `kl` as its
# target; `decay` acts on the rate or on the target.
LEVERS: dict[str, tuple[Any, ...]] = {
    "scale": ("reward", "value"),
    "normalize_freq": ("step", "rollout"),
    "rule": ("rate", "threshold", "proportional"),
    "decay": ("constant", "hold", "lin"),
    "rate": (3e-4, 1e-3),
    "kl": (0.01, 0.02),
    "betas": ((0.9, 0.999), (0.9, 0.9), (0.99, 0.99)),
    "critic_rate": (None, 1e-3),
    "n_envs": (2, 8, 16, 64),
    "rollout": (2048, 1024, 4096),
    "batch_size": (64, 256),
    "n_epochs": (10, 4),
    "gamma": (0.99, 0.98, 0.995),
    "gae_lambda": (0.95, 0.9, 0.98),
    "clip_range": (0.2, 0.1, 0.3),
    "advantage_norm": ("minibatch", "rollout"),
    "vtrace": (False, True),
    "ent_coef": (0.0, 0.01),
    "log_std_init": (0.0, -0.5, -1.0),
    "net_type": ("mlp", "layer_norm"),
    "activation_fn": ("nn.Tanh", "nn.ReLU"),
    "width": (64, 128, 256),
}
FIRST_LEVELS = {name: levels[0] for name, levels in LEVERS.items()}
# Levers that change nothing for some levels of another one
ACTIVE = {"kl": ("rule", {"threshold", "proportional"})}
# Levers that are sampled for one kind of actions only; the other one has their first level.
CONTINUOUS_ONLY = {"log_std_init"}
DISCRETE_ONLY = {"ent_coef"}
# Configurations at fixed points, with more seeds than the sampled ones have
REFERENCES: dict[str, dict[str, Any]] = {
    "SB3's defaults": {"policy": "MlpPolicy"},
    "SB3's defaults + VecNormalize": {"policy": "MlpPolicy", "normalize": True},
    "default": {**entries("ppo_ext")["default"]},
}
# What the screening favours
_SCREENED = {"n_envs": 16, "normalize_freq": "rollout", "advantage_norm": "rollout", "betas": (0.9, 0.9)}
_MINIBATCH = {"advantage_norm": "minibatch"}
# What is left after the first race: each lever that helped where actions are continuous, nearer to SB3's defaults
_RELU = {"n_envs": 8, "advantage_norm": "rollout", "activation_fn": "nn.ReLU"}
_NARROW = {**_RELU, "log_std_init": -0.5, "rollout": 1024}
_DISCRETE = {"advantage_norm": "minibatch", "normalize_freq": "rollout", "betas": (0.9, 0.9), "rollout": 2048}
_DISCRETE["activation_fn"] = "nn.Tanh"  # With ReLU, Acrobot is often not learned.
# Candidates for the race: levels that differ from the first ones, and those that differ again where actions are discrete.
# Those of the third race differ from `ReLU`: the first word of a name where actions are continuous, the second one elsewhere.
CANDIDATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "screened": (_SCREENED, _MINIBATCH),
    "screened, LayerNorm": ({**_SCREENED, "net_type": "layer_norm", "activation_fn": "nn.ReLU"}, _MINIBATCH),
    "screened, KL": ({**_SCREENED, "rule": "threshold", "kl": 0.01}, _MINIBATCH),
    "ReLU, narrow": (_NARROW, {**_DISCRETE, "n_envs": 16}),
    "ReLU, narrow, KL": ({**_NARROW, "rule": "threshold", "kl": 0.01}, {**_DISCRETE, "gamma": 0.995}),
    "LayerNorm, narrow, KL": (
        {**_NARROW, "rule": "threshold", "kl": 0.01, "net_type": "layer_norm"},
        {**_DISCRETE, "decay": "lin", "rule": "rate", "n_epochs": 4, "rate": 1e-3},
    ),
    "ReLU": (_RELU, _DISCRETE),
    "1024 / LayerNorm": ({**_RELU, "rollout": 1024}, {**_DISCRETE, "net_type": "layer_norm"}),
    "quiet / KL": (
        {**_RELU, "log_std_init": -0.5},
        {**_DISCRETE, "log_std_init": 0.0, "rule": "threshold", "kl": 0.01, "gamma": 0.995},
    ),
    "256 / 128": ({**_RELU, "width": 256}, {**_DISCRETE, "width": 128}),
    "fast / fast": (
        {**_RELU, "rollout": 1024, "n_epochs": 4, "rate": 1e-3, "rule": "threshold", "kl": 0.01},
        {**_DISCRETE, "rollout": 1024, "n_epochs": 4, "rate": 1e-3, "rule": "rate"},
    ),
    "betas / 2": ({**_RELU, "betas": (0.9, 0.9)}, {**_DISCRETE, "n_envs": 2}),
    "LayerNorm / entropy": (
        {**_RELU, "net_type": "layer_norm"},
        {**_DISCRETE, "net_type": "mlp", "ent_coef": 0.01},
    ),
}
# The second race won against the first one, and its winner is in the third one.
ENDED = set(list(CANDIDATES)[:6])
# After so many seeds, the better half of the candidates goes on, for each kind of actions by itself.
HALVED_AFTER = (1, 3)


def sample(number: int, task: str) -> dict[str, Any]:
    """
    :param number: Number of a run
    :param task: Name of its task
    :return: Its level of each lever: each one is drawn on its own, and all are equally likely
    """
    rng = np.random.default_rng([FIRST_SEED, number])
    drawn = {name: levels[rng.integers(len(levels))] for name, levels in LEVERS.items()}
    fixed = CONTINUOUS_ONLY if task in DISCRETE else DISCRETE_ONLY
    return {**drawn, **{name: FIRST_LEVELS[name] for name in fixed}}


def entry_of(levels: Mapping[str, Any], task: str) -> dict[str, Any]:
    """
    :param levels: Level of each lever
    :param task: Name of the task. The observations of MinAtar, which are only zeros and ones, are not normalised.
    :return: An entry in RL Zoo's format
    """
    same = ("n_envs", "batch_size", "n_epochs", "gamma", "gae_lambda", "clip_range", "ent_coef", "vtrace", "advantage_norm")
    entry = {"policy": "MlpPolicy", **{name: levels[name] for name in same}}
    entry["n_steps"] = levels["rollout"] // levels["n_envs"]
    entry["normalize_obs"] = not task.startswith("MinAtar/")
    entry["normalize_reward" if levels["scale"] == "reward" else "normalize_value"] = True
    if entry["normalize_obs"] or levels["scale"] == "reward":
        entry["normalize_freq"] = levels["normalize_freq"]
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
    if levels["width"] != LEVERS["width"][0]:
        keywords["net_arch"] = str([levels["width"]] * 2)
    return f"dict({', '.join(f'{name}={value}' for name, value in keywords.items())})"


@dataclass(frozen=True)
class SearchJob:
    """
    One run of the search.

    :param configuration: A name of ``REFERENCES`` or ``CANDIDATES``, or the number of a sampled run
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

    def levels(self) -> dict[str, Any] | None:
        """:return: Level of each lever, ``None`` for a reference"""
        if self.configuration in REFERENCES:
            return None
        if self.configuration.isdecimal():
            return sample(int(self.configuration), self.task)
        everywhere, discrete = CANDIDATES[self.configuration]
        return {**FIRST_LEVELS, **everywhere, **(discrete if self.task in DISCRETE else {})}

    def entry(self) -> dict[str, Any]:
        """The entry of the configuration, fitted to the observations of the task."""
        levels = self.levels()
        entry = dict(REFERENCES[self.configuration]) if levels is None else entry_of(levels, self.task)
        if entry.get("normalize") is True and self.task.startswith("MinAtar/"):
            entry["normalize"] = FITTED["MinAtar/"]["normalize"]
        return {**entry, "n_timesteps": self.timesteps}

    def digest(self) -> str:
        """A hash of the hyperparameters."""
        return hashlib.sha256(json.dumps(self.entry(), sort_keys=True).encode()).hexdigest()[:12]


def sampled_jobs(n_runs: int, tasks: list[str], limit: int | None = None) -> list[SearchJob]:
    """
    :param n_runs: Number of runs
    :param tasks: Names of the tasks
    :param limit: Largest number of steps
    :return: Sampled runs, on the tasks in turns. Each one has levels and a seed of its own.
    """
    return [SearchJob(str(number), tasks[number % len(tasks)], FIRST_SEED + number, limit) for number in range(n_runs)]


def race_jobs(number: int, racers: Mapping[str, list[str]], limit: int | None = None) -> list[SearchJob]:
    """
    :param number: Number of a round
    :param racers: Names of the candidates that are left, for each task
    :param limit: Largest number of steps
    :return: A run of each candidate and of each reference on each task, with a seed that the round before did not have
    """
    return [SearchJob(name, task, FIRST_SEED + number, limit) for task in racers for name in (*racers[task], *REFERENCES)]
