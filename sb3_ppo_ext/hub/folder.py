"""
The folder of a model, as it is on the Hub: the model, the statistics of its normalisation, the card, and the files of RL Zoo.

Its layout is that of RL Zoo's ``push_to_hub``, so that the Zoo's ``load_from_hub`` reads it as well. The statistics are also
there in a plain form, which is read without unpickling.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize, unwrap_vec_normalize

from sb3_ppo_ext.common.saved_models import refused
from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.common.validation import (
    BadArgumentError,
    check_dictionary,
    check_number,
    refuse,
    unknown_environments_as_value_errors,
)
from sb3_ppo_ext.envs.action_masks import check_masks, reader
from sb3_ppo_ext.hub.card import NO_REPOSITORY, Card, Evaluation, check_command, command_of, versions
from sb3_ppo_ext.hub.normalization import normalized, statistics_of
from sb3_ppo_ext.hub.settings import as_text, environment_code, omitted_by_code, options_of, policy_name
from sb3_ppo_ext.ppo_ext import PPOExt

ALGO = "ppo_ext"
CONFIG = "config.json"
# Statistics of the normalisation: those that are unpickled, under RL Zoo's name, and their plain form
PICKLED_STATISTICS, PLAIN_STATISTICS = "vec_normalize.pkl", "vec_normalize.json"
METRICS = "train_eval_metrics.zip"
PLOT = "learning_curve.png"
# Arguments of the Zoo's command that are saved; others, such as the address of a database, may be private.
ARGUMENTS = ("algo", "env", "n_timesteps", "seed")


def save_folder(
    model: PPOExt,
    folder: str | Path,
    *,
    env: GymEnv | str | None = None,
    env_id: str | None = None,
    env_kwargs: Kwargs | None = None,
    runs: str | Path | Iterable[str | Path] = (),
    command: str | None = None,
    n_eval_episodes: int = 20,
    deterministic: bool = True,
    seed: int | None = 0,
    video: str | Path | None = None,
    repo_id: str = NO_REPOSITORY,
) -> Path:
    """
    Evaluate a model and write the folder that :func:`push_to_hub` uploads: the model, the statistics of ``VecNormalize``, a
    model card, and the files that RL Zoo reads. Look at its ``README.md`` before it is public.

    :param model: Trained model
    :param folder: Folder to write, which must be empty or not exist
    :param env: Environment for the evaluation, not the one that the model trains in; by default one that is made from
        ``env_id``. With a ``VecNormalize`` around the training environments, its statistics are used
    :param env_id: Gymnasium's id of the environment; ``None`` for that of ``env``, or of the training
    :param env_kwargs: Keyword arguments of the environment, if it is made from ``env_id``; ``None`` for those of the run, if
        RL Zoo has trained it, or else those of the training, if neither ``env`` nor ``env_id`` is given
    :param runs: Folder of the training, with its logs, as for ``plot_runs``; with those of other seeds after it. The card has
        a plot of them, and the last returns of each. If it is a run of RL Zoo, its hyperparameters and logs are copied
    :param command: Shell command that repeats the training; ``None`` for that of the run, if RL Zoo has trained it
    :param n_eval_episodes: Number of episodes of the evaluation, at least 1
    :param deterministic: Whether actions are the mode of the distribution, or sampled
    :param seed: Seed of the evaluation; ``None`` for none
    :param video: A video in MP4, which the Hub shows
    :param repo_id: Repository on the Hub that the card names
    :return: The folder
    :raises ValueError: if an argument is not valid, or the environment does not fit the model
    """
    check_number("n_eval_episodes", n_eval_episodes, 1, integer=True)
    check_command(command)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        refuse("folder", str(folder), "it exists and is not an empty folder; give another one")
    if video is not None and not Path(video).is_file():
        refuse("video", str(video), "there is no such file")
    run_folders = _run_folders(runs)
    figure, last_returns = _plot(run_folders, model.seed) if run_folders else (None, [])
    arguments = _arguments_of(run_folders[0]) if run_folders else {}
    if env_kwargs is None:
        of_training = _kwargs_of(model.get_env()) if env is None and env_id is None else {}
        env_kwargs = arguments.get("env_kwargs") or of_training
    env_kwargs, seed = _checked_kwargs(env_kwargs), None if seed is None else int(seed)
    evaluated = _evaluated_environment(model, env, env_id, env_kwargs, seed)
    env_id = env_id or _id_of(evaluated.env)
    evaluation = _evaluate(model, evaluated.env, n_eval_episodes, deterministic, seed)
    if evaluated.is_ours:
        evaluated.env.close()

    folder.mkdir(parents=True, exist_ok=True)
    name = _file_name(env_id)
    model.save(folder / f"{ALGO}-{name}.zip")
    if (normalization := evaluated.normalization) is not None:
        normalization.save(str(folder / PICKLED_STATISTICS))
        _write_json(folder / PLAIN_STATISTICS, statistics_of(normalization))
    if video is not None:
        shutil.copy(video, folder / "replay.mp4")
    params = run_folders[0] / name if run_folders else None
    n_envs = _environments_of(params) or model.n_envs
    arguments = {key: arguments[key] for key in ARGUMENTS if key in arguments}
    _write_json(folder / "args.yml", {**arguments, "env_kwargs": env_kwargs})  # JSON is YAML, too.
    _write_json(folder / "env_kwargs.yml", env_kwargs)
    if params is not None and (params / "config.yml").is_file():
        shutil.copy(params / "config.yml", folder / "config.yml")
    else:
        _write_json(folder / "config.yml", {"n_envs": model.n_envs, "normalize": normalization is not None})
    _write_metrics(folder / METRICS, run_folders[:1])
    _write_results(folder, evaluation)
    if figure is not None:
        figure.savefig(folder / PLOT)
    card = Card(
        env_id=env_id,
        policy=policy_name(model),
        options=options_of(model),
        environment=environment_code(env_id, n_envs, model.seed, env_kwargs, normalization),
        num_timesteps=model.num_timesteps,
        total_timesteps=_total_timesteps(model, n_envs),
        evaluation=evaluation,
        runs=last_returns,
        command=command or (command_of(params, arguments.get("seed")) if params else None),
        has_plot=figure is not None,
        repo_id=repo_id,
        omitted=omitted_by_code(model),
    )
    _write_json(folder / CONFIG, _config(card, env_kwargs, normalization is not None))
    (folder / "README.md").write_text(card.text(), encoding="utf-8")
    return folder


def load_folder(
    folder: str | Path,
    env: GymEnv | str | None = None,
    *,
    trusted: bool = False,
    filename: str | None = None,
    **kwargs: Any,
) -> tuple[PPOExt, VecEnv | None]:
    """
    Load a model from a folder that :func:`save_folder`, or RL Zoo's or huggingface_sb3's upload, has written.

    :param folder: Folder with the files of a repository on the Hub
    :param env: Environment, without ``VecNormalize``, or its id; ``None`` for one that is made from the id in the folder
    :param trusted: Whether pickled objects may be loaded, which can execute any code; see ``PPOExt.load``. If not, keyword
        arguments of the environment are not taken from the folder either
    :param filename: Name of the model's zip in the folder; ``None`` if there is one only
    :param kwargs: Further arguments of ``PPOExt.load``, such as ``device`` and ``custom_objects``
    :return: The model and its environment, which normalises observations as in the training, with fixed statistics and the
        rewards unchanged; ``None`` in place of the environment if its id is not known
    :raises ValueError: if a file is damaged or missing, belongs to another algorithm, or cannot be loaded without trusting it
    """
    folder = Path(folder)
    path = _find_model(folder, filename)
    vec_env = _environment(folder, env, trusted)
    vec_env = _with_statistics(folder, vec_env, trusted)
    model = PPOExt.load(path, env=vec_env, trusted=trusted, **kwargs)
    return model, model.get_env()


class _Evaluated(NamedTuple):
    env: VecEnv
    normalization: VecNormalize | None
    is_ours: bool


def _evaluated_environment(model: PPOExt, env: object, env_id: str | None, env_kwargs: Any, seed: int | None) -> _Evaluated:
    training = model.get_env()
    if env is None:
        if env_id is None and training is None:
            refuse("env", env, "the model has no environment either; give one, or `env_id`")
        env = env_id or _id_of(training)
    made = _vectorised(env, env_kwargs, seed)
    own, of_training = unwrap_vec_normalize(made), model.get_vec_normalize_env()
    if own is None and of_training is not None:
        made = normalized(made, statistics_of(of_training))
    # The settings of the training are saved, not those of the evaluation. Images are transposed as in the training.
    return _Evaluated(model._wrap_env(made, verbose=0, monitor_wrapper=False), of_training or own, made is not env)


def _vectorised(env: object, env_kwargs: Kwargs | None = None, seed: int | None = None) -> VecEnv:
    if isinstance(env, str):
        with unknown_environments_as_value_errors(env):
            return make_vec_env(env, n_envs=1, seed=seed, env_kwargs=env_kwargs)
    if isinstance(env, VecEnv):
        return env
    if not isinstance(env, gym.Env):
        refuse("env", env, "give an environment or its id")
    return DummyVecEnv([lambda: env])


def _id_of(env: VecEnv | None) -> str:
    try:
        (spec,) = env.get_attr("spec", indices=[0])  # type: ignore[union-attr]
        return str(spec.id)
    except (AttributeError, NotImplementedError, TypeError):
        refuse("env_id", None, "the environment has no id of Gymnasium; name it")


def _kwargs_of(env: VecEnv | None) -> dict[str, object]:
    """Keyword arguments of an environment that differ from those of its id, without the mode of rendering."""
    try:
        (spec,) = env.get_attr("spec", indices=[0])  # type: ignore[union-attr]
        usual = {**gym.spec(spec.id).kwargs, "render_mode": spec.kwargs.get("render_mode")}
        return {
            name: value for name, value in spec.kwargs.items() if name not in usual or as_text(usual[name]) != as_text(value)
        }
    except (AttributeError, NotImplementedError, TypeError, gym.error.Error):
        return {}


def _environments_of(params: Path | None) -> int | None:
    """Number of environments of a run by RL Zoo: a model that was loaded since then has that of its new environment."""
    from sb3_ppo_ext.zoo.yaml_entries import read_saved

    if params is None or not (path := params / "config.yml").is_file():
        return None
    n_envs = read_saved(path).get("n_envs", 1)
    return n_envs if isinstance(n_envs, int) else None


def _total_timesteps(model: PPOExt, n_envs: int) -> int:
    """Argument of ``learn``, which schedules depend on, of a training that has reached it."""
    beyond = model.num_timesteps - model._total_timesteps
    return int(model._total_timesteps) if 0 <= beyond < model.n_steps * n_envs else model.num_timesteps


def _evaluate(model: PPOExt, env: VecEnv, n_episodes: int, deterministic: bool, seed: int | None) -> Evaluation:
    if env.observation_space != model.observation_space or env.action_space != model.action_space:
        remedy = "its spaces are not those of the model; give an environment with the wrappers of the training"
        pairs = [(env.observation_space, model.observation_space), (env.action_space, model.action_space)]
        given, needed = next(pair for pair in pairs if pair[0] != pair[1])
        refuse("env", env, f"{remedy}: {given}, not {needed}")
    normalization = unwrap_vec_normalize(env)
    with contextlib.nullcontext() if normalization is None else _as_it_is(normalization):
        env.seed(seed)
        actor: Any = _WithMasks(model, env) if model.action_masking and model.action_mask_key is None else model
        mean, std = evaluate_policy(actor, env, n_episodes, deterministic, warn=False)
    return Evaluation(float(np.mean(mean)), float(np.mean(std)), int(n_episodes), deterministic, seed)


class _WithMasks:
    """A model that gets the masks of the environments' method, which SB3's evaluation does not pass."""

    def __init__(self, model: PPOExt, env: VecEnv):
        check_masks(env)
        self.model, self.read = model, reader(env)

    def predict(self, observation: Any, **kwargs: Any) -> Any:
        return self.model.predict(observation, action_masks=np.array(self.read()), **kwargs)


@contextlib.contextmanager
def _as_it_is(normalization: VecNormalize) -> Iterator[None]:
    """Statistics stay as they are, and rewards are those of the environment."""
    before = normalization.training, normalization.norm_reward
    normalization.training = normalization.norm_reward = False
    try:
        yield
    finally:
        normalization.training, normalization.norm_reward = before


def _file_name(env_id: str) -> str:
    """As RL Zoo names files."""
    return env_id.rpartition(":")[2].replace("/", "-")


def _run_folders(runs: str | Path | Iterable[str | Path]) -> list[Path]:
    return [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_metrics(path: Path, runs: list[Path]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in (file for run in runs for file in sorted([*run.glob("*.csv"), *run.glob("evaluations.npz")])):
            archive.write(file, file.name)


def _write_results(folder: Path, evaluation: Evaluation) -> None:
    """As RL Zoo and huggingface_sb3 write it, with the seed."""
    results = {
        "mean_reward": evaluation.mean,
        "std_reward": evaluation.std,
        "is_deterministic": evaluation.deterministic,
        "n_eval_episodes": evaluation.n_episodes,
        "seed": evaluation.seed,
        "eval_datetime": datetime.datetime.now().isoformat(),
    }
    _write_json(folder / "results.json", results)


def _plot(runs: list[Path], seed: int | None) -> tuple[Any, list[tuple[int | None, float]]]:
    """Plot of the runs, and the seed and the last logged return of each; the first is that of the model, with its seed."""
    from sb3_ppo_ext.plot_run import find_runs, plot_runs, read_log

    found: list[tuple[int | None, float]] = []
    for run in find_runs(runs):
        log = read_log(run)
        if "rollout/ep_rew_mean" in log:
            _, returns = log["rollout/ep_rew_mean"]
            found.append((_seed_of(run) if found else seed, float(returns[-1])))
    return plot_runs(runs), found


def _arguments_of(run: Path) -> Kwargs:
    """Arguments of the Zoo's command that has made a run."""
    from sb3_ppo_ext.zoo.yaml_entries import read_saved

    path = next(run.glob("*/args.yml"), None)
    return {} if path is None else read_saved(path)


def _seed_of(run: Path) -> int | None:
    # Without `--seed`, the Zoo draws one, which it saves.
    seed = _arguments_of(run).get("seed")
    return seed if isinstance(seed, int) and seed >= 0 else None


def _checked_kwargs(env_kwargs: Any) -> Kwargs:
    check_dictionary("env_kwargs", env_kwargs)
    try:
        json.dumps(env_kwargs)
    except (TypeError, ValueError):
        refuse("env_kwargs", env_kwargs, "only numbers, strings, lists and dictionaries can be saved; give `env` instead")
    return dict(env_kwargs)


def _config(card: Card, env_kwargs: object, is_normalized: bool) -> dict[str, object]:
    return {
        "algo": ALGO,
        "env_id": card.env_id,
        "env_kwargs": env_kwargs,
        "normalized": is_normalized,
        "policy": card.policy,
        "options": {name: as_text(value) for name, value in card.options.items()},
        "num_timesteps": card.num_timesteps,
        "versions": versions(),
    }


def _find_model(folder: Path, filename: str | None) -> Path:
    if filename is not None:
        if Path(filename).name != filename or not (folder / filename).is_file():
            refuse("filename", filename, f"there is no such file in {folder}")
        return folder / filename
    zips = sorted(path.name for path in folder.glob("*.zip") if path.name != METRICS)
    if len(zips) != 1:
        found = f"there are {', '.join(zips)}" if zips else "there is no zip"
        refuse("filename", filename, f"give the name of the model's zip; in {folder} {found}")
    return folder / zips[0]


def _environment(folder: Path, env: GymEnv | str | None, trusted: bool) -> VecEnv | None:
    if env is not None:
        return _vectorised(env)
    with refused(f"{folder / CONFIG} is damaged", "give `env`."):
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8")) if (folder / CONFIG).is_file() else {}
        env_id, env_kwargs = config.get("env_id"), dict(config.get("env_kwargs", {}))
    if env_id is None:  # huggingface_sb3 writes another file of this name.
        return None
    if not trusted and (not isinstance(env_id, str) or ":" in env_id):
        # "module:id" imports the module.
        refuse("env", None, f"{folder} names the environment {env_id!r}, which is not made without `trusted=True`; give one")
    if not trusted and env_kwargs:
        remedy = "it has keyword arguments, which are not taken without `trusted=True`; give one that is made with those of"
        refuse("env", None, f"{remedy} {folder / CONFIG}")
    return _vectorised(env_id, env_kwargs)


def _with_statistics(folder: Path, env: VecEnv | None, trusted: bool) -> VecEnv | None:
    plain, pickled = folder / PLAIN_STATISTICS, folder / PICKLED_STATISTICS
    if not plain.is_file() and not pickled.is_file():
        return env
    if env is None:
        refuse("env", env, f"the policy reads normalised observations, and {folder} has no id of its environment; give one")
    if unwrap_vec_normalize(env) is not None:
        refuse("env", env, "it normalises already; give it without `VecNormalize`, which gets the statistics of the folder")
    if plain.is_file():
        with refused(f"{plain} does not fit, or is damaged", "give an environment with the spaces of the training."):
            return normalized(env, json.loads(plain.read_text(encoding="utf-8")))
    if not trusted:
        raise BadArgumentError(
            f"{pickled} has no plain form, and unpickling it could execute any code: give `trusted=True` if you trust it."
        )
    loaded = VecNormalize.load(str(pickled), env)
    loaded.training = loaded.norm_reward = False
    return loaded
