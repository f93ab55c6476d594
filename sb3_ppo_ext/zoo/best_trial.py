"""The hyperparameters of the best trial of a study as an entry of a YAML file, which can be pasted and trained with."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sb3_ppo_ext.common.atomic_files import write_whole
from sb3_ppo_ext.options.values import NotCodeError, class_name
from sb3_ppo_ext.zoo.yaml_entries import TrialHyperparams, evaluate

if TYPE_CHECKING:
    import optuna
    from rl_zoo3.exp_manager import ExperimentManager

# In the folder of the run that the Zoo makes for a study
BEST = "best.yml"


def write_best_trial(experiment: ExperimentManager) -> None:
    """
    Print the hyperparameters of the best trial, and write them to ``best.yml`` in the folder of the run.

    :param experiment: Experiment whose study is over
    """
    study = _study_of(experiment)
    if study is None:
        return
    trial = study.best_trial
    try:
        entry = best_entry(experiment, trial.params, trial.user_attrs.get("n_timesteps", experiment.n_timesteps))
        text = _as_yaml(experiment, entry)
    except KeyError as error:
        print(f"{BEST} is not written, because the trial lacks {error}, which the converter of `{experiment.algo}` needs")
        return
    except NotCodeError as error:
        remedy = f"train with `--trial-id {trial.number}`" if experiment.storage else "tune with a `--storage`"
        print(f"{BEST} is not written, because {error} has no form in YAML: {remedy}")
        return
    path = Path(experiment.save_path, BEST)
    steps = f"after {entry['n_timesteps']} steps"
    text = f"# Trial {trial.number} of the study {study.study_name}: mean return {trial.value:.6g} {steps}\n{text}"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode())
    command = f"rl_zoo3 train --algo {experiment.algo} --env {experiment.env_name.gym_id} --conf-file {path}"
    print(f"\nHyperparameters of the best trial, to train with `{command}`:\n{text}")


def _study_of(experiment: ExperimentManager) -> optuna.Study | None:
    """Study of the trials of this process, or if it had none to do, that of the storage."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    study: optuna.Study | None = getattr(experiment, "study", None)
    if study is not None or not experiment.storage or not experiment.study_name:
        return study
    storage: Any = experiment.storage
    if storage.endswith(".log"):
        storage = JournalStorage(JournalFileBackend(storage))
    return optuna.load_study(study_name=experiment.study_name, storage=storage)


def best_entry(experiment: ExperimentManager, sampled_params: dict[str, object], n_timesteps: float) -> dict[str, object]:
    """
    :param experiment: Experiment whose study is over
    :param sampled_params: Parameters of a trial as Optuna keeps them
    :param n_timesteps: Number of steps of the trial, which may differ from trial to trial of a study
    :return: All hyperparameters of the trial as an entry of a YAML file: those of the entry that it started from, and those
        that it has sampled, which take precedence
    :raises NotCodeError: if ``policy_kwargs`` contain something that cannot be written
    :raises KeyError: if the trial was not sampled by our sampler, nor by one whose converter is registered in the Zoo
    """
    converted = sys.modules["rl_zoo3.hyperparams_opt"].HYPERPARAMS_CONVERTER[experiment.algo](dict(sampled_params))
    entry = experiment.entry  # type: ignore[attr-defined]
    merged = TrialHyperparams(entry, policy_kwargs=evaluate(entry.get("policy_kwargs")))
    merged.update(converted)
    merged["n_timesteps"] = n_timesteps
    if "n_envs" in sampled_params:  # not that of the last command
        merged["n_envs"] = sampled_params["n_envs"]
    if experiment.env_kwargs:
        merged["env_kwargs"] = experiment.env_kwargs
    return {**merged, "policy_kwargs": as_code(merged["policy_kwargs"])}


def _as_yaml(experiment: ExperimentManager, entry: Mapping[str, object]) -> str:
    import yaml

    try:
        return str(yaml.safe_dump({experiment.env_name.gym_id: dict(entry)}, width=120))
    except yaml.representer.RepresenterError as error:
        raise NotCodeError(repr(error.args[-1])) from error


def as_code(value: object) -> str:
    """
    :param value: Number, string, ``None``, class of ``torch.nn`` or ``torch.optim``, or a list, tuple or dictionary of these
    :return: Expression that evaluates to it where ``nn`` and ``th`` are known
    :raises NotCodeError: if it is or contains anything else
    """
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) and key.isidentifier() for key in value):
        return "dict(" + ", ".join(f"{key}={as_code(part)}" for key, part in value.items()) + ")"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{as_code(key)}: {as_code(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_code, value)) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(f"{as_code(part)}, " for part in value) + ")"
    return class_name(value)
