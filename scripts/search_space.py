"""
What `search_default.py` samples: levers, each with a few levels, and the configurations that are always run. Not a script.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from default_split import DEVELOPMENT, DISCRETE, is_discrete
from returns_suites import FITTED, entries

# Seeds of the search; no published run has one of them.
FIRST_SEED = 1000
# Levels of each lever. The first one is near SB3's defaults or the `default` before it; the others are compared with it.
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
    "rollout": (2048, 1024, 4096, 512),
    "batch_size": (64, 256),
    "n_epochs": (10, 4, 20),
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
    "use_sde": (False, True),
    "noise_color": (0.0, 0.25, 0.5, 1.0),
}
FIRST_LEVELS = {name: levels[0] for name, levels in LEVERS.items()}
# Levers that change nothing for some levels of another one
ACTIVE: dict[str, tuple[str, set[Any]]] = {"kl": ("rule", {"threshold", "proportional"}), "noise_color": ("use_sde", {False})}
# Levers that are sampled for one kind of actions only; the other one has their first level.
CONTINUOUS_ONLY = {"log_std_init", "use_sde", "noise_color"}
DISCRETE_ONLY = {"ent_coef"}
# Configurations at fixed points, with more seeds than the sampled ones have
REFERENCES: dict[str, dict[str, Any]] = {
    "SB3's defaults": {"policy": "MlpPolicy"},
    "SB3's defaults + VecNormalize": {"policy": "MlpPolicy", "normalize": True},
    "former default": entries("ablation")["default"],
}
# Candidates for the race: levels that differ from the first ones, for each kind of actions. First, what the screening favours.
_SCREENED = {"n_envs": 16, "normalize_freq": "rollout", "betas": (0.9, 0.9)}
_LAYER_NORM = {"net_type": "layer_norm", "activation_fn": "nn.ReLU"}
_KL = {"rule": "threshold", "kl": 0.01}
# Then, nearer to SB3's defaults. With ReLU, Acrobot is often not learned.
_RELU = {"n_envs": 8, "advantage_norm": "rollout", "activation_fn": "nn.ReLU"}
_SHORT = {**_RELU, "rollout": 1024}
_SHORT_TANH = {"n_envs": 8, "advantage_norm": "rollout", "rollout": 1024}
_TANH = {"n_envs": 8, "normalize_freq": "rollout", "betas": (0.9, 0.9)}
_FAST = {"rollout": 1024, "n_epochs": 4, "rate": 1e-3}
CANDIDATES: dict[str, dict[str, dict[str, Any]]] = {
    "continuous": {
        "screened": {**_SCREENED, "advantage_norm": "rollout"},
        "screened, LayerNorm": {**_SCREENED, "advantage_norm": "rollout", **_LAYER_NORM},
        "screened, KL": {**_SCREENED, "advantage_norm": "rollout", **_KL},
        "ReLU": _RELU,
        "ReLU, narrow": {**_SHORT, "log_std_init": -0.5},
        "ReLU, narrow, KL": {**_SHORT, "log_std_init": -0.5, **_KL},
        "LayerNorm, narrow, KL": {**_SHORT, "log_std_init": -0.5, **_KL, **_LAYER_NORM},
        "rollout 1024": _SHORT,
        "log_std_init": {**_RELU, "log_std_init": -0.5},
        "width": {**_RELU, "width": 256},
        "fast": {**_RELU, **_FAST, **_KL},
        "betas": {**_RELU, "betas": (0.9, 0.9)},
        "LayerNorm": {**_RELU, "net_type": "layer_norm"},
        "1024, gSDE": {**_SHORT, "use_sde": True},
        "1024, KL": {**_SHORT, **_KL},
        "1024, LayerNorm, KL": {**_SHORT, **_KL, **_LAYER_NORM},
        "1024, 2 environments": {**_SHORT, "n_envs": 2},
        "1024, 20 epochs": {**_SHORT, "n_epochs": 20},
        "rollout 512": {**_RELU, "rollout": 512},
        "1024, tanh": _SHORT_TANH,
        "1024, tanh, colored 0.5": {**_SHORT_TANH, "noise_color": 0.5},
        "1024, colored 1": {**_SHORT, "noise_color": 1.0},
        "1024, colored 0.5": {**_SHORT, "noise_color": 0.5},
        "1024, colored 0.25": {**_SHORT, "noise_color": 0.25},
    },
    "discrete": {
        "screened": _SCREENED,
        "screened, LayerNorm": {**_SCREENED, **_LAYER_NORM},
        "screened, KL": {**_SCREENED, **_KL},
        "ReLU": _TANH,
        "ReLU, narrow": {**_TANH, "n_envs": 16, "log_std_init": -0.5},
        "ReLU, narrow, KL": {**_TANH, **_KL, "gamma": 0.995, "log_std_init": -0.5},
        "LayerNorm, narrow, KL": {
            **{**_TANH, "log_std_init": -0.5, "kl": 0.01},
            **{"net_type": "layer_norm", "decay": "lin", "n_epochs": 4, "rate": 1e-3},
        },
        "LayerNorm": {**_TANH, "net_type": "layer_norm"},
        "KL": {**_TANH, **_KL, "gamma": 0.995},
        "width": {**_TANH, "width": 128},
        "fast": {**_TANH, **_FAST},
        "2 environments": {**_TANH, "n_envs": 2},
        "entropy": {**_TANH, "ent_coef": 0.01},
        "KL, LayerNorm": {**_TANH, **_KL, "gamma": 0.995, "net_type": "layer_norm"},
        "KL, entropy": {**_TANH, **_KL, "gamma": 0.995, "ent_coef": 0.01},
    },
}
# What the search has chosen, `searched` in the tables. On other tasks it did not pay, and is no longer the entry `default`.
CHOSEN = {"continuous": "rollout 1024", "discrete": "KL"}
# Those that are left. Earlier races have ended.
RACERS = {
    "continuous": ["1024, colored 0.25", "rollout 1024"],
    "discrete": ["KL", "KL, LayerNorm", "KL, entropy"],
}
# After so many seeds, the better half of the candidates goes on, for each kind of actions by itself.
HALVED_AFTER = (1, 3)


def kind_of(task: str) -> str:
    """:return: Kind of the actions of a task, a key of ``CANDIDATES``"""
    return "discrete" if is_discrete(task) else "continuous"


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
    if levels["use_sde"]:
        entry |= {"use_sde": True, "sde_sample_freq": 4}
    elif levels["noise_color"] != 0:
        entry["noise_color"] = levels["noise_color"]
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
        return {**FIRST_LEVELS, **CANDIDATES[kind_of(self.task)][self.configuration]}

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


def race_jobs(
    number: int, racers: Mapping[str, list[str]], limit: int | None = None, references: Iterable[str] = tuple(REFERENCES)
) -> list[SearchJob]:
    """
    :param number: Number of a round
    :param racers: Names of the candidates that are left, for each task
    :param limit: Largest number of steps
    :param references: Names of references
    :return: A run of each candidate and of each reference on each task, with a seed that the round before did not have
    """
    return [SearchJob(name, task, FIRST_SEED + number, limit) for task in racers for name in (*racers[task], *references)]
