"""Finds hyperparameters in the YAML files, and merges them with those of a trial and of the command line."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space

from sb3_ppo_ext.common.action_masks import OBSERVATION
from sb3_ppo_ext.common.hybrid_actions import boxes_of
from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.common.validation import SUPPORTED_SPACES, BadArgumentError, keywords_of, refuse
from sb3_ppo_ext.envs.encode_text import text_keys
from sb3_ppo_ext.envs.tensors.jax_functions import GYMNAX_PREFIX
from sb3_ppo_ext.policies.actor_critic import with_action_distributions
from sb3_ppo_ext.policies.networks import NetTypeMixin
from sb3_ppo_ext.zoo.tuning import is_recurrent, is_transformer

if TYPE_CHECKING:
    from rl_zoo3.exp_manager import ExperimentManager

# Height and width in pixels that SB3's ``NatureCNN`` needs
SMALLEST_IMAGE = 36
# The Zoo's file for its RecurrentPPO, and the defaults of that algorithm that are others than PPO's
OF_RECURRENT_PPO, DEFAULTS_OF_RECURRENT_PPO = "ppo_lstm.yml", {"n_steps": 128, "batch_size": 128}
HYPERPARAMS = Path(__file__).parent / "hyperparams" / "ppo_ext.yml"
# Entries for tasks without one of their own: the second one is for actions without a `Box`
DEFAULTS = DEFAULT, DEFAULT_DISCRETE = "default", "default-discrete"
# Keys of values that several entries share, which are no entries themselves
TEMPLATES = {"shared"}


def find_hyperparams(env_id: str, entry_point: str, zoo_file: Path | None, policy: object = None) -> tuple[Path, str]:
    """
    Find the entry for an environment. Our file takes precedence over the Zoo's for PPO, which has MuJoCo's environments up to
    version 4 only.

    :param env_id: Gymnasium's id of the environment
    :param entry_point: Gymnasium's entry point of the environment, by which Atari, MinAtar and MiniGrid are recognised
    :param zoo_file: Path of the Zoo's ``ppo.yml``, ``None`` if it is not installed
    :param policy: Name or class of the policy that the user asks for, ``None`` for that of the entry. Unless our own entry of
        the environment has such a policy, a transformer takes our entry ``memory``, and a recurrent policy the Zoo's entry
        for its RecurrentPPO, or else our entry ``recurrent``
    :return: File to read and key of the entry in it; for an environment without an entry, our ``default``, ``minatar`` or
        ``minigrid``, or the Zoo's ``atari``
    """
    files = [HYPERPARAMS] if zoo_file is None else [HYPERPARAMS, zoo_file]
    entries = {path: read_entries(path) for path in files}
    own = entries[HYPERPARAMS].get(env_id, {}).get("policy")
    if is_transformer(policy) and not is_transformer(own):
        return HYPERPARAMS, "memory"
    if is_recurrent(policy) and not is_recurrent(own):
        if zoo_file is None:
            return HYPERPARAMS, "recurrent"
        recurrent_file = zoo_file.with_name(OF_RECURRENT_PPO)
        key = "atari" if "AtariEnv" in entry_point else env_id
        listed = read_entries(recurrent_file)
        return (recurrent_file, key) if is_recurrent(listed.get(key, {}).get("policy")) else (HYPERPARAMS, "recurrent")
    for path, listed in entries.items():
        if env_id in listed:
            return path, env_id
    if "AtariEnv" in entry_point:
        if zoo_file is None:
            refuse("env", env_id, "the hyperparameters of Atari come with RL Zoo: `pip install 'sb3-ppo-ext[zoo]'`")
        return zoo_file, "atari"
    if entry_point.startswith("minatar.") or (env_id.startswith(GYMNAX_PREFIX) and env_id.endswith("-MinAtar")):
        return HYPERPARAMS, "minatar"
    # The wrapper of this entry has no place for the long instructions of BabyAI.
    is_minigrid = entry_point.startswith("minigrid.") and "babyai" not in entry_point
    return HYPERPARAMS, "minigrid" if is_minigrid else DEFAULT


def read_entries(path: Path) -> dict[str, Kwargs]:
    """
    :param path: YAML file of this package or of the Zoo
    :return: Its entries by key
    """
    import yaml

    # In C, where PyYAML has it, it takes two milliseconds instead of fifteen.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    listed = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    return {key: dict(entry) for key, entry in listed.items()}


def default_for(space: spaces.Space) -> str:
    """
    :param space: Action space
    :return: Key of the entry for tasks without one of their own; that for continuous actions if any part is a ``Box``
    """
    return DEFAULT if boxes_of(space) else DEFAULT_DISCRETE


def policy_for(space: spaces.Space, mask_key: object = None) -> str:
    """
    :param space: Observation space
    :param mask_key: Key of action masks in it, which the policy does not read; ``None`` if there are none
    :return: Name of the policy that reads such observations, for an entry that is not for an environment of its own
    """
    if isinstance(space, spaces.Dict) and {*space} == {OBSERVATION, mask_key}:
        space = space[OBSERVATION]
    if isinstance(space, spaces.Dict):
        return "MultiInputPolicy"
    # As vectors, small images are divided by 255 as well.
    return "CnnPolicy" if is_image_space(space) and not _is_small(space) else "MlpPolicy"


def is_small_image(space: spaces.Space) -> bool:
    """
    :param space: Observation space that is not a ``Dict``
    :return: Whether it is one of images that SB3's network for images cannot read
    """
    return is_image_space(space) and _is_small(space)


def _is_small(image: spaces.Space) -> bool:
    """Whether SB3's network for images cannot read an image."""
    return min(sorted(image.shape or ())[-2:]) < SMALLEST_IMAGE


def wrappers_for(space: spaces.Space) -> list[str]:
    """
    :param space: Observation space
    :return: Names of wrappers after which a policy can read such observations: strings become numbers, and where there are
        tuples, nested dictionaries, or dictionaries with images that are too small for SB3's network, all is flattened
    """
    strings = text_keys(space)
    parts = space.spaces if isinstance(space, spaces.Dict) else {None: space}
    others = [part for key, part in parts.items() if key not in strings]
    is_readable = all(isinstance(part, SUPPORTED_SPACES) for part in others)
    has_small_images = isinstance(space, spaces.Dict) and any(map(is_small_image, others))
    must_be_flat = (not is_readable or has_small_images) and all(part.is_np_flattenable for part in others)
    flatten = ["gymnasium.wrappers.FlattenObservation"] if must_be_flat else []
    return [*(["sb3_ppo_ext.EncodeText"] if strings else []), *flatten]


def takes_networks(policy: object) -> bool:
    """
    :param policy: Name or class of a policy
    :return: Whether ``policy_kwargs`` of ``default`` and ``default-discrete`` are for it; a class of yours may have others
    """
    if not isinstance(policy, type):
        return True
    keywords = keywords_of(policy_class := with_action_distributions(policy))
    return issubclass(policy_class, NetTypeMixin) if keywords is None else "net_type" in keywords


def normalization_for(space: spaces.Space) -> dict[str, object]:
    """
    Normalised, a pixel or a flag that is rarely 1 would become larger than everything else when it is.

    :param space: Observation space
    :return: Keyword arguments for ``VecNormalize`` that leave alone what lies between 0 and 1 already; none where it would
        not normalise that, or where there is nothing of the kind
    """
    if not isinstance(space, spaces.Dict):
        return {"norm_obs": False} if is_scaled(space) else {}
    if not any(map(is_scaled, space.spaces.values())):
        return {}
    keys = [key for key, part in space.spaces.items() if can_be_normalized(part) and not is_scaled(part)]
    return {"norm_obs_keys": keys} if keys else {"norm_obs": False}


def can_be_normalized(space: spaces.Space) -> bool:
    """
    :param space: Observation space that is not a ``Dict``
    :return: Whether ``VecNormalize`` can normalise such observations
    """
    return isinstance(space, spaces.Box) and not is_image_space(space)


def is_scaled(space: spaces.Space) -> bool:
    """
    :param space: Observation space that is not a ``Dict``
    :return: Whether each number is a flag, or lies between 0 and 1
    """
    return isinstance(space, spaces.Box) and bool(np.all(space.low == 0) and np.all(space.high == 1))


def is_default_file(config: str, algo: str) -> bool:
    """
    :param config: Path of the YAML file that an experiment reads
    :param algo: Name of the algorithm
    :return: Whether it is the file that the Zoo looks for in its package, or in its checkout
    """
    package = Path(sys.modules["rl_zoo3"].__file__ or "").parent
    return Path(config) in [folder / "hyperparams" / f"{algo}.yml" for folder in (package, package.parent)]


class TrialHyperparams(dict[str, Any]):
    """Hyperparameters that merge the sampled ``policy_kwargs`` into their own, instead of replacing them."""

    def copy(self) -> "TrialHyperparams":
        return type(self)(self)

    def update(self, sampled: Mapping[str, Any]) -> None:  # type: ignore[override]
        own, chosen = self.get("policy_kwargs") or {}, dict(sampled.get("policy_kwargs", {}))
        if own.keys() & {"actor_keys", "critic_keys"}:
            # These decide on it.
            chosen.pop("share_features_extractor", None)
        policy_kwargs = {**own, **chosen}
        super().update({**sampled, "policy_kwargs": policy_kwargs})


def merge_trial(experiment: "ExperimentManager", hyperparams: dict[str, object], trial_id: int) -> dict[str, object]:
    """
    :param experiment: Experiment with the study, and with the hyperparameters from the command line (``-params``), which take
        precedence over the trial
    :param hyperparams: Hyperparameters of the YAML entry, over which the trial takes precedence
    :param trial_id: Number of the trial
    :return: Merged hyperparameters, with the ``policy_kwargs`` merged keyword by keyword
    :raises ValueError: if there is no such trial, or it lacks hyperparameters
    """
    opened = _check_study(experiment.storage, experiment.study_name, trial_id)
    sampled = _load_trial(experiment, trial_id)
    _check_task(experiment, opened, trial_id)
    merged = TrialHyperparams(hyperparams, policy_kwargs=evaluate(hyperparams.get("policy_kwargs")))
    merged.update(sampled)
    given = dict(experiment.custom_hyperparams or {})
    given["policy_kwargs"] = {**merged["policy_kwargs"], **evaluate(given.get("policy_kwargs"))}
    merged |= {name: value for name, value in given.items() if name in sampled}
    return dict(merged)


def environments_of_trial(experiment: "ExperimentManager", trial_id: int) -> int | None:
    """
    :param experiment: Experiment with the study
    :param trial_id: Number of the trial
    :return: Number of environments with which the trial was sampled; ``None`` if a user's own sampler does not say it
    """
    params = experiment.load_trial(experiment.storage or "", experiment.study_name or "", trial_id, convert=False)
    return params.get("n_envs")


def staggered_start_of_trial(experiment: "ExperimentManager", trial_id: int) -> dict[str, bool]:
    """
    :param experiment: Experiment with the study
    :param trial_id: Number of the trial
    :return: ``staggered_start``, if the environments of the trial had one
    """
    trial = _stored_trial(experiment, _check_study(experiment.storage, experiment.study_name, trial_id), trial_id)
    return {"staggered_start": True} if trial.user_attrs.get("staggered_start", False) else {}


def _stored_trial(experiment: "ExperimentManager", storage: Any, trial_id: int) -> Any:
    import optuna

    return optuna.load_study(study_name=experiment.study_name, storage=storage).trials[trial_id]


def _check_task(experiment: "ExperimentManager", storage: Any, trial_id: int) -> None:
    """Say that a trial was of another task; it may be meant."""
    trial = _stored_trial(experiment, storage, trial_id)
    tuned, env_id = trial.user_attrs.get("env"), experiment.env_name.gym_id
    if tuned not in (None, env_id):
        print(f"Trial {trial_id} of the study {experiment.study_name} was tuned on {tuned}, not on {env_id}")


def _check_study(storage: str | None, study_name: str | None, trial_id: int) -> object:
    """
    :return: The storage, for Optuna
    :raises ValueError: if there is no such study; the Zoo would train without it, or create an empty journal
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if not storage or not study_name:
        raise BadArgumentError(f"`--trial-id {trial_id}`: of which study? Give its `--storage` and `--study-name` as well")
    if trial_id < 0:
        raise BadArgumentError(f"`--trial-id {trial_id}`: trials are numbered from 0")
    journal = storage.endswith(".log")
    if journal and not Path(storage).is_file():
        raise BadArgumentError(f"`--storage {storage}`: there is no such file; name the journal of the study")
    scheme, _, path = storage.partition(":///")
    file = path.partition("?")[0]  # without options such as `?timeout=60`
    if scheme == "sqlite" and file and not Path(file).is_file():
        raise BadArgumentError(f"`--storage {storage}`: there is no such file; name the database of the study")
    opened = JournalStorage(JournalFileBackend(storage)) if journal else storage
    names = optuna.get_all_study_names(opened)
    if study_name not in names:
        raise BadArgumentError(
            f"`--study-name {study_name}`: no such study in that storage, which has {', '.join(names) or 'none'}"
        )
    return opened


def _load_trial(experiment: "ExperimentManager", trial_id: int) -> dict[str, object]:
    try:
        return experiment.load_trial(experiment.storage or "", experiment.study_name or "", trial_id)
    except IndexError as error:
        raise BadArgumentError(f"`--trial-id {trial_id}`: the study {experiment.study_name} has no such trial") from error
    except KeyError as error:
        remedy = f"it did not sample {error}; name a finished trial of a study of `ppo_ext`"
        raise BadArgumentError(f"`--trial-id {trial_id}`: {remedy}") from error


def evaluate(policy_kwargs: Any) -> Kwargs:
    """
    :param policy_kwargs: Dictionary, Python code of one that may use ``nn`` and ``th``, or ``None``
    :return: Dictionary, evaluated as the Zoo does
    """
    if isinstance(policy_kwargs, str):
        policy_kwargs = eval(policy_kwargs, vars(sys.modules["rl_zoo3.exp_manager"]))
    return dict(policy_kwargs or {})


def read_saved(path: Path) -> dict[str, object]:
    """
    :param path: File in the folder of a run, with its hyperparameters or command line arguments
    :return: Its contents. The Zoo writes Python objects to these files, so that they can execute code
    :raises ValueError: if it has Python objects that cannot be read, such as functions
    """
    import yaml

    try:
        return dict(yaml.load(path.read_text(), Loader=yaml.UnsafeLoader))
    except yaml.YAMLError as error:
        remedy = "it is damaged, or has Python objects that cannot be read again, such as functions"
        raise BadArgumentError(f"{path} cannot be read: {remedy} ({' '.join(str(error).split())})") from error
