"""``ppo_ext`` as an algorithm of RL Zoo: what its modules are extended by, and its scripts with that done."""

import argparse
import functools
import importlib
import importlib.util
import runpy
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from pprint import pprint
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from sb3_ppo_ext.common.schedules import make_schedule
from sb3_ppo_ext.common.validation import BadArgumentError
from sb3_ppo_ext.ppo_ext import PPOExt
from sb3_ppo_ext.rollout.fast_dummy_vec_env import FastDummyVecEnv
from sb3_ppo_ext.zoo.progress_file import ProgressFile
from sb3_ppo_ext.zoo.tuning import convert_ppo_ext_params, has_memory, sample_ppo_ext_params

if TYPE_CHECKING:
    import optuna
    from rl_zoo3.exp_manager import ExperimentManager

# As they are used and as they are saved
Hyperparams: TypeAlias = tuple[dict[str, Any], dict[str, Any]]
# The second is what the Hub look-up makes of the class's name.
NAMES = ("ppo_ext", "ppoext")
HYPERPARAMS = Path(__file__).parent / "hyperparams" / "ppo_ext.yml"
# The trial that runs in this thread (`--n-jobs`)
_TRIAL: ContextVar[Any] = ContextVar("trial", default=None)
SCRIPTS = {
    "train": "rl_zoo3.train",
    "enjoy": "rl_zoo3.enjoy",
    "record_video": "rl_zoo3.record_video",
    "record_training": "rl_zoo3.record_training",
    "load_from_hub": "rl_zoo3.load_from_hub",
    "push_to_hub": "rl_zoo3.push_to_hub",
    "benchmark": "rl_zoo3.benchmark",
    "plot_train": "rl_zoo3.plots.plot_train",
    "plot_from_file": "rl_zoo3.plots.plot_from_file",
    "all_plots": "rl_zoo3.plots.all_plots",
}


def register() -> None:
    """
    Make ``ppo_ext`` an algorithm of RL Zoo in this process. Calling it again changes nothing.

    :raises ImportError: if RL Zoo is not installed
    """
    if importlib.util.find_spec("rl_zoo3") is None:
        raise ImportError("RL Zoo is not installed: `pip install 'sb3-ppo-ext[zoo]'`")
    for name in EXTENSIONS:
        extend(importlib.import_module(name))


def extend(module: ModuleType) -> None:
    """
    :param module: One of the Zoo's modules named in ``EXTENSIONS``, to which ``ppo_ext`` is added
    """
    EXTENSIONS[module.__name__](module)


def _add_algorithm(utils: Any) -> None:
    for name in NAMES:
        utils.ALGOS.setdefault(name, PPOExt)


def _add_tuning(hyperparams_opt: Any) -> None:
    for name in NAMES:
        hyperparams_opt.HYPERPARAMS_SAMPLER.setdefault(name, sample_ppo_ext_params)
        # `--trial-id` needs the converter
        hyperparams_opt.HYPERPARAMS_CONVERTER.setdefault(name, convert_ppo_ext_params)


def _add_experiment(exp_manager: Any) -> None:
    for name, ours in _METHODS.items():
        theirs = getattr(exp_manager.ExperimentManager, name)
        if not hasattr(theirs, "for_ppo_ext"):
            setattr(exp_manager.ExperimentManager, name, _for_ppo_ext(ours, theirs))


EXTENSIONS = {
    "rl_zoo3.utils": _add_algorithm,
    "rl_zoo3.hyperparams_opt": _add_tuning,
    "rl_zoo3.exp_manager": _add_experiment,
}


# What the Zoo's ExperimentManager does otherwise for `ppo_ext`. Its class stays the same object, for the Zoo's scripts and
# users' subclasses refer to it, and is pickled.


def _for_ppo_ext(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """The Zoo's method, and for ``ppo_ext`` ours, which gets the Zoo's as its first argument."""

    @functools.wraps(theirs)
    def method(self: "ExperimentManager", *args: Any, **kwargs: Any) -> Any:
        if self.algo in NAMES:
            return ours(functools.partial(theirs, self), self, *args, **kwargs)
        return theirs(self, *args, **kwargs)

    method.for_ppo_ext = True  # type: ignore[attr-defined]  # once is enough
    return method


def _read_hyperparameters(theirs: Callable[[], Hyperparams], experiment: "ExperimentManager") -> Hyperparams:
    """
    Take the entry that :func:`find_hyperparams` finds, unless the user named a file (``-conf``), and merge the
    ``policy_kwargs`` of a trial (``--trial-id``) into those of the entry, where the Zoo replaces them.
    """
    env_name, trial_id = experiment.env_name, experiment.trial_id
    if _is_default(experiment.config, experiment.algo):
        zoo_file = Path(experiment.config).with_name("ppo.yml")
        policy = (experiment.custom_hyperparams or {}).get("policy")
        path, key = find_hyperparams(env_name.gym_id, experiment.entry_point(env_name.gym_id), zoo_file, has_memory(policy))
        experiment.config = str(path)
        if key != env_name.gym_id:
            print(f"No hyperparameters for {env_name.gym_id}, using those of {key}")
            experiment.env_name = type(env_name)(key)
    experiment.trial_id = None
    try:
        hyperparams, saved_hyperparams = theirs()
    finally:
        experiment.env_name, experiment.trial_id = env_name, trial_id

    if trial_id is not None:
        _check_trial(experiment.storage, experiment.study_name, trial_id)
        hyperparams = _with_trial(experiment, hyperparams, trial_id)
        saved_hyperparams = OrderedDict(sorted(hyperparams.items()))
        print(f"With those of trial {trial_id}:")
        pprint(saved_hyperparams)
    return hyperparams, saved_hyperparams


def _is_default(config: str, algo: str) -> bool:
    """Whether it is the file that the Zoo looks for in its package, or in its checkout."""
    package = Path(sys.modules["rl_zoo3"].__file__ or "").parent
    return Path(config) in [folder / "hyperparams" / f"{algo}.yml" for folder in (package, package.parent)]


def _check_trial(storage: str | None, study_name: str | None, trial_id: int) -> None:
    """:raises ValueError: if there is no such study; the Zoo would train without it, or make an empty journal"""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if not storage or not study_name:
        raise ValueError(f"`--trial-id {trial_id}`: of which study? Give its `--storage` and `--study-name` as well")
    if trial_id < 0:
        raise ValueError(f"`--trial-id {trial_id}`: trials are numbered from 0")
    journal = storage.endswith(".log")
    if journal and not Path(storage).is_file():
        raise ValueError(f"`--storage {storage}`: there is no such file; name the journal of the study")
    opened = JournalStorage(JournalFileBackend(storage)) if journal else storage
    names = optuna.get_all_study_names(opened)
    if study_name not in names:
        raise ValueError(f"`--study-name {study_name}`: no such study in that storage, which has {', '.join(names) or 'none'}")


def _with_trial(experiment: "ExperimentManager", hyperparams: dict[str, Any], trial_id: int) -> dict[str, Any]:
    try:
        sampled = experiment.load_trial(experiment.storage or "", experiment.study_name or "", trial_id)
    except IndexError as error:
        raise ValueError(f"`--trial-id {trial_id}`: the study {experiment.study_name} has no such trial") from error
    except KeyError as error:
        remedy = f"it did not sample {error}; name one of a study of `ppo_ext` that has come to its end"
        raise ValueError(f"`--trial-id {trial_id}`: {remedy}") from error
    merged = TrialHyperparams(hyperparams, policy_kwargs=_evaluate(hyperparams.get("policy_kwargs")))
    merged.update(sampled)
    # What the command line says (`-params`) goes before both.
    given = dict(experiment.custom_hyperparams or {})
    given["policy_kwargs"] = {**merged["policy_kwargs"], **_evaluate(given.get("policy_kwargs"))}
    merged |= {name: value for name, value in given.items() if name in sampled}
    return dict(merged)


def _preprocess_hyperparams(theirs: Callable[..., Any], experiment: "ExperimentManager", hyperparams: dict[str, Any]) -> Any:
    """Refuse bad options here, before the Zoo writes its log folder."""
    for name in ("learning_rate", "clip_range", "clip_range_vf"):
        # The Zoo takes any prefix for "lin".
        if isinstance(hyperparams.get(name), str):
            make_schedule(name, hyperparams[name])
    results = theirs(hyperparams)
    algorithm = sys.modules["rl_zoo3.utils"].ALGOS[experiment.algo]
    if issubclass(algorithm, PPOExt):
        algorithm(env=None, _init_setup_model=False, **results[0])  # as `load` does
    return results


def _maybe_normalize(theirs: Callable[..., VecEnv], experiment: "ExperimentManager", env: VecEnv, eval_env: bool) -> VecEnv:
    """
    ``normalize: true`` is for what ``VecNormalize`` can normalize, unless the user says more. In a trial it has the discount
    that was sampled, as a training with its ``--trial-id`` has.
    """
    if experiment.normalize and not {"norm_obs", "norm_obs_keys"} & experiment.normalize_kwargs.keys():
        experiment.normalize_kwargs = {**experiment.normalize_kwargs, **_normalizable(env.observation_space)}
    env, trial = theirs(env, eval_env), _TRIAL.get()
    if isinstance(env, VecNormalize) and trial is not None:
        env.gamma = trial.user_attrs.get("gamma", env.gamma)  # a sampler of the user's own may leave it out
    return env


def _normalizable(space: spaces.Space) -> dict[str, Any]:
    """:return: Arguments for ``VecNormalize``"""
    if isinstance(space, spaces.Dict):
        keys = [key for key, part in space.spaces.items() if not _normalizable(part)]
        return {"norm_obs_keys": keys} if keys else {"norm_obs": False}
    return {} if isinstance(space, spaces.Box) and not is_image_space(space) else {"norm_obs": False}


def _setup_experiment(theirs: Callable[[], Any], experiment: "ExperimentManager") -> Any:
    """
    Let the hyperparameters that each trial starts from keep their ``policy_kwargs``, take the vectorised environment that
    copies less, and keep what a training logs, for ``plot_run``.
    """
    if experiment.vec_env_class is DummyVecEnv:
        experiment.vec_env_class = FastDummyVecEnv
    results = theirs()
    experiment.callbacks.append(ProgressFile(experiment.save_path))
    experiment._hyperparams = TrialHyperparams(experiment._hyperparams)
    return results


def _objective(theirs: Callable[[Any], float], experiment: "ExperimentManager", trial: "optuna.Trial") -> float:
    """
    Tell the sampler what is tuned. What it samples goes together; if it does not go together with what else the YAML says, the
    trial is pruned, and the study goes on.
    """
    import optuna

    policy = experiment._hyperparams.get("policy")
    trial.set_user_attr("policy", getattr(policy, "__name__", str(policy)))
    trial.set_user_attr("n_timesteps", experiment.n_timesteps)
    token = _TRIAL.set(trial)
    try:
        return theirs(trial)
    except BadArgumentError as error:
        print(f"Trial {trial.number} is pruned: {error}")
        raise optuna.TrialPruned from error
    finally:
        _TRIAL.reset(token)


def _hyperparameters_optimization(theirs: Callable[[], None], experiment: "ExperimentManager") -> None:
    """Let a study in a database survive its workers. A journal has no such means."""
    storage = experiment.storage
    if not isinstance(storage, str) or "://" not in storage or storage.endswith(".log"):
        return theirs()
    from sb3_ppo_ext.zoo.storage import fail_stale_trials, open_storage

    database: Any = open_storage(storage)
    fail_stale_trials(database, experiment.study_name)
    experiment.storage = database
    try:
        theirs()
    finally:
        experiment.storage = storage


_METHODS: dict[str, Callable[..., Any]] = {
    "read_hyperparameters": _read_hyperparameters,
    "_preprocess_hyperparams": _preprocess_hyperparams,
    "setup_experiment": _setup_experiment,
    "_maybe_normalize": _maybe_normalize,
    "objective": _objective,
    "hyperparameters_optimization": _hyperparameters_optimization,
}


class TrialHyperparams(dict[str, Any]):
    """Hyperparameters whose ``policy_kwargs`` are not replaced by the sampled ones, but merged with them."""

    def copy(self) -> "TrialHyperparams":
        return type(self)(self)

    def update(self, sampled: Mapping[str, Any]) -> None:  # type: ignore[override]
        policy_kwargs = {**(self.get("policy_kwargs") or {}), **sampled.get("policy_kwargs", {})}
        super().update({**sampled, "policy_kwargs": policy_kwargs})


def find_hyperparams(env_id: str, entry_point: str, zoo_file: Path, memory: bool = False) -> tuple[Path, str]:
    """
    Our entry for the environment goes before the Zoo's for PPO, which knows MuJoCo's up to version 4.

    :param env_id: Gymnasium's id
    :param entry_point: Gymnasium's entry point, which tells Atari's environments
    :param zoo_file: The Zoo's ``ppo.yml``
    :param memory: Whether the user asks for a policy with a memory, for which our entry ``memory`` is, unless that of the
        environment has one too
    :return: The file to read and the key of the entry in it; without an entry, it is our ``default``, or the Zoo's ``atari``
    """
    import yaml  # it comes with the Zoo, without which `register` must still be able to say so

    entries = {path: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (HYPERPARAMS, zoo_file)}
    if memory and not has_memory(entries[HYPERPARAMS].get(env_id, {}).get("policy")):
        return HYPERPARAMS, "memory"
    for path, listed in entries.items():
        if env_id in listed:
            return path, env_id
    return (zoo_file, "atari") if "AtariEnv" in entry_point else (HYPERPARAMS, "default")


def _evaluate(policy_kwargs: Any) -> dict[str, Any]:
    """As the Zoo does: a string is Python, with ``nn`` and ``th`` at hand."""
    if isinstance(policy_kwargs, str):
        policy_kwargs = eval(policy_kwargs, vars(sys.modules["rl_zoo3.exp_manager"]))
    return dict(policy_kwargs or {})


def main() -> None:
    """
    Run a script of RL Zoo with ``ppo_ext`` registered: ``python -m sb3_ppo_ext.zoo train --env CartPole-v1 ...``
    """
    parser = argparse.ArgumentParser(prog="python -m sb3_ppo_ext.zoo", description=main.__doc__, add_help=False)
    parser.add_argument("script", choices=SCRIPTS)
    if sys.argv[1:2] in (["-h"], ["--help"]):
        parser.print_help()
        return
    script = parser.parse_args(sys.argv[1:2]).script
    register()
    sys.argv = [f"{sys.argv[0]} {script}", *sys.argv[2:]]
    runpy.run_module(SCRIPTS[script], run_name="__main__", alter_sys=True)
