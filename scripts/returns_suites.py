"""
What `benchmark_returns.py` compares: tasks, arms and the hyperparameters of each run. Not a script.
"""

import ast
import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from default_split import DEVELOPMENT, HELD_OUT, MORE_DEVELOPMENT, MORE_PACKAGES, MORE_POLICIES, NOT_NORMALIZED, is_discrete

# Numbers of steps: the Zoo's, or less than its million
CLASSIC = {"Pendulum-v1": 100_000, "MountainCarContinuous-v0": 20_000, "LunarLanderContinuous-v3": 300_000}
CONTROL = CLASSIC | dict.fromkeys(("Hopper-v5", "HalfCheetah-v5", "Walker2d-v5", "Swimmer-v5"), 300_000)
# Tasks that played no part in choosing the default; mostly fewer steps than in the Zoo. The last ones are in the packages
# MinAtar (https://arxiv.org/abs/1903.03176) and gymnasium-robotics.
UNSEEN = {
    "CartPole-v1": 50_000,
    "Acrobot-v1": 100_000,
    "MountainCar-v0": 100_000,
    "LunarLander-v3": 100_000,
    "BipedalWalker-v3": 300_000,
    "InvertedDoublePendulum-v5": 100_000,
    "Reacher-v5": 100_000,
    "Pusher-v5": 100_000,
    "MinAtar/Freeway-v1": 300_000,
    "MinAtar/Seaquest-v1": 300_000,
    "MinAtar/SpaceInvaders-v1": 300_000,
    "PointMaze_UMazeDense-v3": 100_000,
}
# Discrete actions, with the Zoo's number of steps or the million that is usual for MinAtar
DISCRETE = {
    "Acrobot-v1": 1_000_000,
    "MountainCar-v0": 1_000_000,
    "LunarLander-v3": 1_000_000,
    "MinAtar/Asterix-v1": 1_000_000,
    "MinAtar/Breakout-v1": 1_000_000,
    "MinAtar/Freeway-v1": 1_000_000,
    "MinAtar/SpaceInvaders-v1": 1_000_000,
}
# The Zoo's numbers of steps
MEMORY = {"CartPoleNoVel-v1": 100_000, "PendulumNoVel-v1": 100_000, "MountainCarContinuousNoVel-v0": 300_000}
# The usual benchmark of PPO, at the usual length
ROBOTS = dict.fromkeys(("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5", "Swimmer-v5"), 1_000_000)
# Continuous control, in which single changes of the presets are compared
CONTINUOUS = dict.fromkeys(
    ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Pendulum-v1", "LunarLanderContinuous-v3"), 300_000
)
# Policies for other observations than numbers, with SB3's defaults
POLICIES = {"PointMaze_UMazeDense-v3": "MultiInputPolicy", **MORE_POLICIES}
# The presets, and `default`, before results changed them
ABLATED = Path(__file__).parents[1] / "benchmark" / "ablation.yml"
# Packages that register tasks, by the beginning of their names. That of MinAtar is beside this script.
PACKAGES = {"MinAtar/": "minatar_ids", "PointMaze_": "gymnasium_robotics", **MORE_PACKAGES}
# Entries of `ppo_ext.yml` for all tasks of a package
SHARED_ENTRIES = {"MinAtar/": "minatar"}
# What the Zoo adds to `default` to fit it to the observations of these tasks
FITTED = {
    "MinAtar/": {"normalize": "{'norm_obs': False}"},
    **{task: {"policy": policy} for task, policy in POLICIES.items()},
    **{
        task: {"policy": POLICIES.get(task, "MlpPolicy"), "normalize": "{'norm_obs': False}"}
        for task in sorted(NOT_NORMALIZED)
    },
}


@dataclass(frozen=True)
class Arm:
    """
    :param algo: Name of the algorithm in the Zoo
    :param source: ``"ppo"``, ``"ppo_lstm"``, ``"trpo"`` or ``"ppo_ext"``, whose file has the entries, ``"ablation"`` for the
        entries in benchmark/ablation.yml, or ``"sb3"`` for SB3's defaults, as for tasks of which the Zoo has no entry
    :param key: Key of the entry, if it is the same for each task
    :param words: Further words of the command
    :param changes: Hyperparameters that differ from the entry
    :param policy_kwargs: Keyword arguments of the policy in addition to those of the entry
    :param task_policy_kwargs: The same for single tasks
    """

    algo: str
    source: str
    key: str | None = None
    words: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    policy_kwargs: Mapping[str, Any] = field(default_factory=dict)
    task_policy_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def changed(self, entry: Mapping[str, Any], task: str) -> dict[str, Any]:
        """:return: The entry of a task with the changes of the arm"""
        changed = {**entry, **self.changes}
        policy_kwargs = {**self.policy_kwargs, **self.task_policy_kwargs.get(task, {})}
        if policy_kwargs:
            changed["policy_kwargs"] = {**_keywords(entry.get("policy_kwargs")), **policy_kwargs}
        return changed


def _keywords(policy_kwargs: str | None) -> dict[str, Any]:
    """Keyword arguments in an entry, such as ``"dict(log_std_init=-1)"``"""
    if policy_kwargs is None:
        return {}
    call = ast.parse(policy_kwargs, mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}


def _changed(policy_kwargs: Mapping[str, Any] | None = None, **changes: Any) -> Arm:
    """An entry of the ablation with changes"""
    return Arm("ppo_ext", "ablation", changes=changes, policy_kwargs=policy_kwargs or {})


def _decayed(keywords: str = "", **changes: Any) -> Arm:
    """`searched` with a rate that decreases to 0, further keyword arguments of the policy, and changes"""
    policy_kwargs = f"dict(activation_fn=nn.ReLU, {keywords})"
    changes = {"learning_rate": "lin_0.0003", "policy_kwargs": policy_kwargs, **changes}
    return Arm("ppo_ext", "ablation", "searched", changes=changes)


# The entry before the search, whose runs are published, and today's
DEFAULTS = {"former default": Arm("ppo_ext", "ablation", "default"), "default": Arm("ppo_ext", "ppo_ext", "default")}
# The native engine computes what SB3's PPO computes, up to rounding, and makes so many runs affordable.
PRESETS_AND_PPO = {
    "ppo": Arm("ppo_ext", "ppo"),
    "ppo_ext": Arm("ppo_ext", "ppo_ext"),
    "ppo, computed by SB3": Arm("ppo", "ppo"),
}
# What a task is compared with besides the Zoo's entry for PPO: untouched hyperparameters of SB3, the same with normalised
# observations and rewards, and the Zoo's entries for sb3-contrib's TRPO. What PPOExt computes here has no option of its own.
BASELINES = {
    "SB3's defaults": Arm("ppo_ext", "sb3"),
    "SB3's defaults + VecNormalize": Arm("ppo_ext", "sb3", changes={"normalize": True}),
    "TRPO": Arm("trpo", "trpo"),
}
WITH_VEC_NORMALIZE = {name: BASELINES[name] for name in ("SB3's defaults + VecNormalize",)}
# The same computed by SB3 itself
BASELINES_BY_SB3 = {
    "SB3's defaults, computed by SB3": Arm("ppo", "sb3"),
    "SB3's defaults + VecNormalize, computed by SB3": Arm("ppo", "sb3", changes={"normalize": True}),
}
# 0 where the entry has -1, and the reverse. LunarLanderContinuous has a Beta distribution, without a standard deviation.
OTHER_LOG_STD_INIT = {
    **{task: {"log_std_init": 0} for task in ("HalfCheetah-v5", "Walker2d-v5", "Ant-v5")},
    **{task: {"log_std_init": -1} for task in ("Hopper-v5", "Pendulum-v1")},
}
# Numbers of steps of the tasks, and arms. The baseline is the first arm, and ours the second. A third one
# is the baseline as SB3 computes it, of which the tables have the scores alone.
SUITES: dict[str, tuple[dict[str, int], dict[str, Arm]]] = {
    "presets": (CLASSIC, {"ppo": Arm("ppo", "ppo"), "ppo_ext": Arm("ppo_ext", "ppo_ext"), **BASELINES, **BASELINES_BY_SB3}),
    "default": (CONTROL, {"SB3's defaults": Arm("ppo", "sb3"), **DEFAULTS, **WITH_VEC_NORMALIZE}),
    "unseen": (
        UNSEEN,
        {
            "SB3's defaults": Arm("ppo_ext", "sb3"),
            **DEFAULTS,
            **WITH_VEC_NORMALIZE,
            "SB3's defaults, computed by SB3": Arm("ppo", "sb3"),
        },
    ),
    # Candidates for `default` on all tasks of the development. The second arm is what the search had chosen on the first part.
    "candidates": (
        DEVELOPMENT | MORE_DEVELOPMENT,
        {"SB3's defaults": Arm("ppo_ext", "sb3"), "searched": Arm("ppo_ext", "ablation", "searched"), **WITH_VEC_NORMALIZE},
    ),
    "held_out": (
        HELD_OUT,
        {
            "SB3's defaults": Arm("ppo_ext", "sb3"),
            "default": Arm("ppo_ext", "ppo_ext", "default"),
            **WITH_VEC_NORMALIZE,
            **BASELINES_BY_SB3,
        },
    ),
    "discrete": (DISCRETE, PRESETS_AND_PPO | BASELINES | BASELINES_BY_SB3),
    "memory": (MEMORY, {"ppo_lstm": Arm("ppo_lstm", "ppo_lstm"), "ppo_ext": Arm("ppo_ext", "ppo_ext")}),
    "robots": (ROBOTS, PRESETS_AND_PPO | BASELINES | BASELINES_BY_SB3),
    "ablation": (
        CONTINUOUS,
        {
            "entry": _changed(),
            "16 environments, batches of 128": _changed(n_envs=16, batch_size=128),
            "SimBa": _changed({"net_type": "simba"}),
            "LayerNorm": _changed({"net_type": "layer_norm"}),
            "value normalisation": _changed(normalize_value=True),
            "SimBa, value normalisation": _changed({"net_type": "simba"}, normalize_value=True),
            "larger critic": _changed({"net_arch": {"pi": [64, 64], "vf": [256, 256]}}),
            "other log_std_init": Arm("ppo_ext", "ablation", task_policy_kwargs=OTHER_LOG_STD_INIT),
            "10 more epochs of the critic": _changed(critic_epochs=10),
            "upper clip range 0.28": _changed(clip_range_high=0.28),
            "KL of a step": _changed(adaptive_lr_kl=1e-4, adaptive_lr_signal="step", lr_decay="constant"),
            "first output with gain 0.5": _changed({"actor_gain": 0.5}),
            "41 ordinal bins": _changed(action_dist="ordinal", use_sde=False, sde_sample_freq=-1),
            "41 categorical bins": _changed(action_dist="discretized", use_sde=False, sde_sample_freq=-1),
            "state-dependent standard deviation": _changed(action_dist="state_dependent", use_sde=False, sde_sample_freq=-1),
        },
    ),
}
# Development of the robots' entries on seeds that are in no table: python scripts/benchmark_returns.py --suites
# robots_development --first-seed 2000. All arms but the first ones are `searched`, the entry `default` of then, with changes.
SUITES["robots_development"] = (
    ROBOTS,
    {
        "SB3's defaults + VecNormalize": BASELINES["SB3's defaults + VecNormalize"],
        "ppo_ext": Arm("ppo_ext", "ppo_ext"),
        "TRPO": BASELINES["TRPO"],
        "searched": Arm("ppo_ext", "ablation", "searched"),
        "decay": _decayed(),
        "decay, 2 environments": _decayed(n_envs=2, n_steps=1024),
        "decay, 256 steps": _decayed(n_steps=256),
        "decay, LayerNorm": _decayed("net_type='layer_norm'"),
        "decay, SimBa": _decayed("net_type='simba'"),
        "decay, wide critic": _decayed("net_arch=dict(pi=[64, 64], vf=[256, 256])"),
        "decay, less noise": _decayed("log_std_init=-1"),
        "decay, critic 0.001": _decayed(critic_learning_rate=1e-3),
        "decayed KL": Arm("ppo_ext", "ablation", "searched", changes={"adaptive_lr_kl": "lin_0.01"}),
    },
)
# End of the name of an arm that SB3's PPO computes, for comparison with the same hyperparameters computed by `PPOExt`
BY_SB3 = ", computed by SB3"
# Suites that are run only if they are named: to choose, or once, after everything has been chosen
RUN_ONCE = {"candidates", "held_out", "robots_development"}
# Suites in which each arm is compared with the first one
ABLATIONS = {"ablation", "robots_development"}
# Options that were tried and removed, because they did not pay. Their runs are still reported.
REMOVED = {
    *("10 more epochs of the critic", "upper clip range 0.28", "KL of a step", "first output with gain 0.5"),
    *("41 ordinal bins", "41 categorical bins", "state-dependent standard deviation"),
}


def pair(suite: str) -> list[str]:
    """:return: Names of the baseline and of our arm"""
    return list(SUITES[suite][1])[:2]


def timed_baselines(suite: str) -> dict[str, str]:
    """:return: Names of the baselines, and the algorithm that is timed for each: SB3's PPO for ours without its options"""
    arms = {name: arm for name, arm in SUITES[suite][1].items() if name != pair(suite)[1] and not name.endswith(BY_SB3)}
    return {name: "ppo" if arm.algo == "ppo_ext" else arm.algo for name, arm in arms.items()}


def of_package(task: str, listed: Mapping[str, Any]) -> Any:
    """
    :param task: Name of a task
    :param listed: Values by the beginning of the names of the tasks of a package
    :return: Value for the task, ``None`` if it is in no package
    """
    return next((value for prefix, value in listed.items() if task.startswith(prefix)), None)


@dataclass(frozen=True)
class Job:
    """One run."""

    suite: str
    task: str
    arm: str
    seed: int
    limit: int | None = None

    @property
    def timesteps(self) -> int:
        full = SUITES[self.suite][0][self.task]
        return min(full, self.limit or full)

    def entry(self) -> dict[str, Any]:
        arm = SUITES[self.suite][1][self.arm]
        if arm.source == "sb3" or (arm.source in {"ppo", "trpo"} and of_package(self.task, PACKAGES)):
            listed = {"policy": POLICIES.get(self.task, "MlpPolicy")}
        else:
            listed = entries(arm.source)[self._key(arm)]
        return arm.changed({**listed, "n_timesteps": self.timesteps}, self.task)

    def fitted_entry(self) -> dict[str, Any]:
        """The entry as the Zoo fits it to the observations of the task."""
        entry = self.entry()
        fitted = of_package(self.task, FITTED) or {}
        is_fitted = SUITES[self.suite][1][self.arm].key == "default" or entry.get("normalize") is True
        return {**entry, **{name: value for name, value in fitted.items() if is_fitted and name in entry}}

    def _key(self, arm: Arm) -> str:
        if arm.key is not None:
            discrete = f"{arm.key}-discrete"
            return discrete if is_discrete(self.task) and discrete in entries(arm.source) else arm.key
        listed = entries(arm.source)
        for key in (self.task, re.sub("-v5$", "-v4", self.task), of_package(self.task, SHARED_ENTRIES)):
            if key in listed:
                return key
        raise ValueError(f"{arm.source}.yml has no entry for {self.task}: add one, or leave the task out with --tasks")

    def digest(self) -> str:
        """A hash of the hyperparameters."""
        words = SUITES[self.suite][1][self.arm].words
        return hashlib.sha256("".join([json.dumps(self.entry(), sort_keys=True), *words]).encode()).hexdigest()[:12]


@cache
def entries(source: str) -> dict[str, dict[str, Any]]:
    """The entries of a file. For environments that `ppo_ext.yml` does not list, ``ppo_ext`` uses the Zoo's ``ppo.yml``."""
    if source == "ablation":
        return yaml.safe_load(ABLATED.read_text())
    ours = source == "ppo_ext"
    spec = importlib.util.find_spec("sb3_ppo_ext" if ours else "rl_zoo3")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / ("zoo/hyperparams" if ours else "hyperparams")
    listed = yaml.safe_load((folder / f"{source}.yml").read_text())
    return {**(entries("ppo") if ours else {}), **listed}
