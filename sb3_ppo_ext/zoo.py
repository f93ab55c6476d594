"""
``ppo_ext`` in RL Zoo: registration, hyperparameters, tuning and the command line.

The installation registers it as soon as ``rl_zoo3`` is imported. Where that is switched off
(``SB3_PPO_EXT_AUTOREGISTER=0``) or not possible, there are :func:`register` and ``python -m sb3_ppo_ext.zoo``, which
takes the name of a Zoo script (``train``, ``enjoy``, ...) and its arguments.
"""

import importlib
import importlib.util
import re
import runpy
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from pprint import pprint
from types import ModuleType
from typing import TYPE_CHECKING, Any

import yaml

from sb3_ppo_ext.ppo_ext import PPOExt
from sb3_ppo_ext.schedules import make_schedule

if TYPE_CHECKING:
    from rl_zoo3.exp_manager import ExperimentManager
    from stable_baselines3.common.base_class import BaseAlgorithm
else:
    ExperimentManager = object  # PPOExtExperiment is mixed into the Zoo's class once that is loaded

# The second is what the Hub look-up makes of the class's name.
NAMES = ("ppo_ext", "ppoext")
HYPERPARAMS = Path(__file__).parent / "hyperparams" / "ppo_ext.yml"
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
        hyperparams_opt.HYPERPARAMS_SAMPLER.setdefault(name, hyperparams_opt.sample_ppo_params)
        # `--trial-id` needs the converter
        hyperparams_opt.HYPERPARAMS_CONVERTER.setdefault(name, hyperparams_opt.convert_onpolicy_params)


def _add_experiment(exp_manager: Any) -> None:
    # The scripts hold references to the class, so that it stays and its instances for `ppo_ext` get another class.
    exp_manager.ExperimentManager.__new__ = staticmethod(_new_experiment)


EXTENSIONS = {
    "rl_zoo3.utils": _add_algorithm,
    "rl_zoo3.hyperparams_opt": _add_tuning,
    "rl_zoo3.exp_manager": _add_experiment,
}


def _new_experiment(cls: type, args: Any, algo: str, *_: Any, **__: Any) -> Any:
    """``__new__`` of the Zoo's ``ExperimentManager``: other algorithms get the class as it is."""
    if algo in NAMES and not issubclass(cls, PPOExtExperiment):
        cls = type(cls.__name__, (PPOExtExperiment, cls), {})
    return object.__new__(cls)


class PPOExtExperiment(ExperimentManager):
    """What the Zoo's ``ExperimentManager`` does otherwise for ``ppo_ext``."""

    def read_hyperparameters(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """
        Take the entry that :func:`find_hyperparams` finds, unless the user named a file (``-conf``), and merge the
        ``policy_kwargs`` of a trial (``--trial-id``) into those of the entry, where the Zoo replaces them.
        """
        env_name, trial_id = self.env_name, self.trial_id
        zoo_folder = Path(sys.modules["rl_zoo3"].__file__ or "").parent / "hyperparams"
        if Path(self.config) == zoo_folder / f"{self.algo}.yml":
            path, key = find_hyperparams(env_name.gym_id, self.entry_point(env_name.gym_id), zoo_folder / "ppo.yml")
            self.config = str(path)
            if key != env_name.gym_id:
                print(f"No hyperparameters for {env_name.gym_id}, using those of {key}")
                self.env_name = type(env_name)(key)
        self.trial_id = None
        try:
            hyperparams, saved_hyperparams = super().read_hyperparameters()
        finally:
            self.env_name, self.trial_id = env_name, trial_id

        if self.storage and self.study_name and trial_id is not None:
            hyperparams = self._with_trial(hyperparams, self.load_trial(self.storage, self.study_name, trial_id))
            saved_hyperparams = OrderedDict(sorted(hyperparams.items()))
            print(f"With those of trial {trial_id}:")
            pprint(saved_hyperparams)
        return hyperparams, saved_hyperparams

    def _with_trial(self, hyperparams: dict[str, Any], sampled: dict[str, Any]) -> dict[str, Any]:
        merged = TrialHyperparams(hyperparams, policy_kwargs=_evaluate(hyperparams.get("policy_kwargs")))
        merged.update(sampled)
        # What the command line says goes before both.
        return {**merged, **(self.custom_hyperparams or {})}

    def _preprocess_hyperparams(self, hyperparams: dict[str, Any]) -> Any:
        """Refuse bad options here, before the Zoo writes its log folder."""
        for name in ("learning_rate", "clip_range", "clip_range_vf"):
            # The Zoo takes any prefix for "lin".
            if isinstance(hyperparams.get(name), str):
                make_schedule(name, hyperparams[name])
        results = super()._preprocess_hyperparams(hyperparams)
        PPOExt(env=None, _init_setup_model=False, **results[0])  # type: ignore[arg-type]  # as `load` does
        return results

    def setup_experiment(self) -> "tuple[BaseAlgorithm, dict[str, Any]] | None":
        """Let the hyperparameters that each trial starts from keep their ``policy_kwargs``."""
        results = super().setup_experiment()
        self._hyperparams = TrialHyperparams(self._hyperparams)
        return results


class TrialHyperparams(dict[str, Any]):
    """Hyperparameters whose ``policy_kwargs`` are not replaced by the sampled ones, but merged with them."""

    def copy(self) -> "TrialHyperparams":
        return type(self)(self)

    def update(self, sampled: Mapping[str, Any]) -> None:  # type: ignore[override]
        policy_kwargs = {**(self.get("policy_kwargs") or {}), **sampled.get("policy_kwargs", {})}
        super().update({**sampled, "policy_kwargs": policy_kwargs})


def find_hyperparams(env_id: str, entry_point: str, zoo_file: Path) -> tuple[Path, str]:
    """
    Our entry for the environment goes before the Zoo's for PPO. A MuJoCo environment in version 5 that has neither
    takes that of version 4: the tasks are alike, and the Zoo's ``default`` is much worse.

    :param env_id: Gymnasium's id
    :param entry_point: Gymnasium's entry point, which tells MuJoCo's environments
    :param zoo_file: The Zoo's ``ppo.yml``
    :return: The file to read and the key of the entry in it; the file is the Zoo's and the key ``env_id`` if there is
        no entry, and the Zoo then chooses ``atari`` or ``default``
    """
    keys = [env_id]
    if "mujoco" in entry_point and env_id.endswith("-v5"):
        keys.append(re.sub("-v5$", "-v4", env_id))
    entries = {path: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (HYPERPARAMS, zoo_file)}
    for key in keys:
        for path, listed in entries.items():
            if key in listed:
                return path, key
    return zoo_file, env_id


def _evaluate(policy_kwargs: Any) -> dict[str, Any]:
    """As the Zoo does: a string is Python, with ``nn`` and ``th`` at hand."""
    if isinstance(policy_kwargs, str):
        policy_kwargs = eval(policy_kwargs, vars(sys.modules["rl_zoo3.exp_manager"]))
    return dict(policy_kwargs or {})


def main() -> None:
    """
    Run a script of RL Zoo with ``ppo_ext`` registered: ``python -m sb3_ppo_ext.zoo train --env CartPole-v1 ...``
    """
    script = sys.argv[1] if len(sys.argv) > 1 else ""
    if script not in SCRIPTS:
        sys.exit(f"usage: python -m sb3_ppo_ext.zoo {{{','.join(SCRIPTS)}}} ...\nunknown script {script!r}")
    register()
    sys.argv = [f"{sys.argv[0]} {script}", *sys.argv[2:]]
    runpy.run_module(SCRIPTS[script], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
