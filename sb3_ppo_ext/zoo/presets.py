"""Tuned hyperparameters from Python: a model and the environments that it is trained in."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from pprint import pprint
from typing import Any, Literal

import gymnasium as gym
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

from sb3_ppo_ext.common.cores import available_cores
from sb3_ppo_ext.common.guards import find_normalizers
from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.common.validation import check_number, check_observation_space, check_type, refuse
from sb3_ppo_ext.envs.choice_of_vec_env import VecEnvChoice, choose_vec_env
from sb3_ppo_ext.envs.envpool_vec_env import ENVPOOL, EnvPoolVecEnv, config_for_wrappers, is_atari_game
from sb3_ppo_ext.ppo_ext import PPOExt
from sb3_ppo_ext.zoo.entry_normalization import options_of
from sb3_ppo_ext.zoo.environment_counts import check_n_envs, number_of, rollouts_for
from sb3_ppo_ext.zoo.made_environments import Source, staggered, wrapper_of
from sb3_ppo_ext.zoo.yaml_entries import (
    DEFAULT,
    DEFAULTS,
    DEFAULTS_OF_RECURRENT_PPO,
    HYPERPARAMS,
    OF_RECURRENT_PPO,
    TEMPLATES,
    can_be_normalized,
    default_for,
    find_hyperparams,
    is_scaled,
    policy_for,
    read_entries,
    takes_networks,
    wrappers_for,
)

# Number of parameters from which on threads make updates faster (docs/scaling.md; two networks of 256-256 have more), and
# the largest number of threads that the option takes
LARGE, MOST_THREADS = 100_000, 256
# What an entry says besides the arguments of the model
OF_ENVIRONMENTS = ("n_envs", "env_kwargs", "env_wrapper", "vec_env_wrapper", "frame_stack", "staggered_start")
OF_ENTRY = (*OF_ENVIRONMENTS, "n_timesteps", "normalize", "callback", "policy")


def make(
    env: Any,
    n_envs: int | str | None = None,
    seed: int | None = None,
    vec_env_cls: type[VecEnv] | Literal["envpool"] | None = None,
    env_kwargs: Kwargs | None = None,
    device: str = "auto",
    verbose: int = 0,
    tensorboard_log: str | None = None,
    **hyperparams: object,
) -> tuple[PPOExt, VecEnv]:
    """
    Make a model with tuned hyperparameters, and the environments to train it in. The hyperparameters are the entry of the
    environment in ``ppo_ext.yml`` or, where RL Zoo is installed, in its ``ppo.yml``, or else ``default``, or
    ``default-discrete`` where no part of the action space is a ``Box``. Their policy is chosen by the observation space.

    Where the entry normalises, the model does so (``normalize_obs``, ``normalize_reward``): ``evaluate_policy(model, env)``
    and ``PPOExt.load(path).predict(observation)`` take environments and observations as they are. The number of time steps
    for which the entry was tuned is ``presets()[env_id]["n_timesteps"]``.

    An entry says how many samples an update has. With another number of environments, ``n_steps`` is divided accordingly,
    unless it is given. Where fewer than 64 steps of each are left, the environments begin at different steps of their episodes
    (:class:`~sb3_ppo_ext.StaggeredStart`), unless ``staggered_start=False`` is given.

    :param env: Gymnasium's id, also with the module that registers it, such as ``"package.module:Task-v0"``; a class of
        environments, or a function that makes a new one at each call; an environment; or vectorised environments, such as a
        ``TensorVecEnv``
    :param n_envs: Number of environments, at least 1; ``None`` for that of the entry, ``"auto"`` for at least one on each
        core, in a :class:`~sb3_ppo_ext.ParallelVecEnv` if several processes are faster than one, which is measured with random
        actions in one more environment, and with ``native_threads`` on all cores if the networks are large
    :param seed: Seed of the model and of the environments; ``None`` for none
    :param vec_env_cls: Class of the vectorised environments, such as ``ParallelVecEnv``; ``None`` for ``FastDummyVecEnv``;
        ``"envpool"`` for the environments with this id in EnvPool, :class:`~sb3_ppo_ext.EnvPoolVecEnv`
    :param env_kwargs: Keyword arguments of the environment
    :param device: Device of the policy, as in SB3
    :param verbose: 1 to print hyperparameters and training logs, 0 for neither
    :param tensorboard_log: Folder for TensorBoard; ``None`` for no log
    :param hyperparams: Hyperparameters that replace those of the entry, as ``-params`` does: those of ``PPOExt``, and those of
        RL Zoo, such as ``normalize``, ``frame_stack`` and ``env_wrapper``
    :return: The model, which has not been trained, and its environments
    :raises ValueError: if there is no such environment, or an argument is not valid
    """
    _register()
    source = Source.of_envpool(env) if vec_env_cls == ENVPOOL else Source.of(env)
    _check_arguments(source, n_envs, seed, vec_env_cls, env_kwargs, verbose)
    key, entry = _entry_of(source, env_kwargs or {}, hyperparams)
    found = {**entry, **hyperparams}
    if found.get("callback"):
        refuse("callback", found["callback"], "the model does not keep callbacks; give them to `learn`")
    kwargs = {**(found.get("env_kwargs") or {}), **(env_kwargs or {})}
    seed = None if seed is None else int(seed)  # Gymnasium takes none of NumPy's.
    if vec_env_cls == ENVPOOL:
        n_in_pool = number_of(entry.get("n_envs", 1) if n_envs is None else n_envs, entry.get("n_envs", 1))
        config = {**config_for_wrappers(env, found.pop("env_wrapper", None)), **kwargs}
        source, vec_env_cls, kwargs = Source(env, None, EnvPoolVecEnv(env, n_in_pool, seed, **config)), None, {}
    wrap = _fit_observations(found, key, source, kwargs, hyperparams)
    found["n_envs"], choice = _number_of_environments(source, n_envs, entry, vec_env_cls, wrap, kwargs)
    if verbose and choice is not None:
        print(choice.reason)
    vec_env_cls = vec_env_cls if choice is None else choice.cls
    if "n_steps" not in hyperparams:
        of_entry = {**found, "n_envs": entry.get("n_envs", 1)}
        found |= {**rollouts_for(of_entry, found["n_envs"]), **hyperparams}
    if _is_staggered(found, source, wrap, hyperparams):
        wrap = staggered(wrap)
    venv = source.environments(found["n_envs"], seed, vec_env_cls, kwargs, wrap, device)
    # In the order of RL Zoo
    if (wrap_all := wrapper_of("vec_env_wrapper", found.get("vec_env_wrapper"))) is not None:
        venv = wrap_all(venv)
    if found.get("frame_stack") is not None:
        venv = VecFrameStack(venv, found["frame_stack"])
    model_options = {**_normalization(found, key in DEFAULTS and "normalize" not in hyperparams, venv), **_of_model(found)}
    if verbose:
        pprint({"preset": key, "n_envs": venv.num_envs, "policy": found["policy"], **model_options})
    same: Kwargs = dict(seed=seed, device=device, verbose=verbose, tensorboard_log=tensorboard_log)
    model = PPOExt(found["policy"], venv, **same, **model_options)
    if n_envs == "auto" and "native_threads" not in found:
        _use_threads(model)
    return model, venv


def _register() -> None:
    """Register the environments of other packages, those of gymnax, and, where RL Zoo is installed, those that it knows."""
    importlib.import_module("sb3_ppo_ext.envs.tensors.gymnax_ids")
    if importlib.util.find_spec("rl_zoo3") is not None:
        importlib.import_module("rl_zoo3.import_envs")


def _check_arguments(
    source: Source, n_envs: object, seed: object, vec_env_cls: object, env_kwargs: object, verbose: object
) -> None:
    if n_envs is not None:
        check_n_envs(n_envs)
    if vec_env_cls not in (None, ENVPOOL) and not (isinstance(vec_env_cls, type) and issubclass(vec_env_cls, VecEnv)):
        refuse("vec_env_cls", vec_env_cls, 'give a class of vectorised environments, such as `ParallelVecEnv`, or "envpool"')
    if env_kwargs is not None:
        check_type("env_kwargs", env_kwargs, dict, "give a dictionary")
    if source.made is not None:
        of_made = getattr(source.made, "num_envs", 1)
        for name, value in dict(vec_env_cls=vec_env_cls, env_kwargs=env_kwargs).items():
            if value is not None:
                refuse(name, value, "the environment is made already; give its id, its class or a function instead")
        if n_envs not in (None, "auto", of_made):
            refuse("n_envs", n_envs, f"there are {of_made}; give an id, a class or a function of the environment for others")
    if seed is not None:
        check_number("seed", seed, 0, integer=True)
    check_number("verbose", verbose, 0, integer=True)


def _entry_of(source: Source, env_kwargs: Kwargs, given: Kwargs) -> tuple[str, Kwargs]:
    """Key and values of the entry for an environment."""
    env_id, zoo_file = source.env_id, _file_of_the_zoo()
    entry_point = "" if env_id is None else _entry_point(env_id)
    path, key = find_hyperparams(env_id or "", entry_point, zoo_file, given.get("policy"))
    if key == DEFAULT:
        env_kwargs = {**(given.get("env_kwargs") or {}), **env_kwargs}
        key = default_for(source.spaces(env_kwargs, wrapper_of("env_wrapper", given.get("env_wrapper"))).action)
    entry = read_entries(path)[key]
    return key, {**DEFAULTS_OF_RECURRENT_PPO, **entry} if path.name == OF_RECURRENT_PPO else entry


def _entry_point(env_id: str) -> str:
    if env_id not in gym.registry and importlib.util.find_spec("envpool") is not None:
        return "AtariEnv" if is_atari_game(env_id) else ENVPOOL
    return str(gym.spec(env_id).entry_point)


def _fit_observations(
    found: dict[str, object], key: str, source: Source, env_kwargs: dict[str, object], given: dict[str, object]
) -> Any:
    """
    Choose the policy and the wrappers of an entry that is not for an environment of its own, except for what the user gives.
    Return the function that wraps an environment.
    """
    wrap = wrapper_of("env_wrapper", found.get("env_wrapper"))
    if wrap is not None and isinstance(source.made, VecEnv):
        refuse(
            "env_wrapper", found["env_wrapper"], "it is for single environments, and these are made already; wrap them before"
        )
    if key not in (*DEFAULTS, "memory", "recurrent"):
        return wrap
    space = source.spaces(env_kwargs, wrap).observation
    if key in DEFAULTS and "env_wrapper" not in given and (names := wrappers_for(space)):
        if isinstance(source.made, VecEnv):
            refuse("env", source.made, f"its observations in {space} need the wrappers {names}; give one environment's class")
        wrap = wrapper_of("env_wrapper", names)
        space = source.spaces(env_kwargs, wrap).observation
    check_observation_space(space)
    if key in DEFAULTS and "policy" not in given:
        found["policy"] = policy_for(space, found.get("action_mask_key"))
    if key in DEFAULTS and "policy_kwargs" not in given and not takes_networks(found["policy"]):
        del found["policy_kwargs"]
    return wrap


def _number_of_environments(
    source: Source, n_envs: Any, entry: Kwargs, vec_env_cls: object, wrap: Any, env_kwargs: Kwargs
) -> tuple[int, VecEnvChoice | None]:
    """Number of environments, and their class if it is chosen here."""
    if source.made is not None:
        return getattr(source.made, "num_envs", 1), None
    own = entry.get("n_envs", 1)
    number = number_of(own if n_envs is None else n_envs, own)
    if n_envs != "auto" or vec_env_cls is not None or source.steps_in_tensors(wrap):
        return number, None
    return number, choose_vec_env(lambda: source.one(env_kwargs, wrap), number)


def _is_staggered(found: Kwargs, source: Source, wrap: Any, given: Kwargs) -> bool:
    """Whether environments begin at different steps of their first episodes, which those that are made already cannot."""
    is_wanted = found.get("staggered_start", False)
    check_type("staggered_start", is_wanted, bool, "give True or False")
    can_be = source.make is not None and not source.steps_in_tensors(wrap)
    if is_wanted and not can_be and given.get("staggered_start"):
        remedy = "it is for environments that are made one by one; wrap them in `StaggeredStart` before they are vectorised"
        refuse("staggered_start", True, remedy)
    return is_wanted and can_be


def _use_threads(model: PPOExt) -> None:
    """Let all cores compute the updates of large networks, with the same results."""
    if sum(parameter.numel() for parameter in model.policy.parameters()) >= LARGE:
        model.native_threads = min(available_cores(), MOST_THREADS)
        if model.verbose:
            print(f"native_threads={model.native_threads}: the networks are large")


def _normalization(found: Kwargs, leaves_scaled: bool, venv: VecEnv) -> Kwargs:
    """Options of the model for ``normalize``, which can leave alone what lies between 0 and 1 already."""
    if find_normalizers(venv):
        return {}

    def is_normalized(space: spaces.Space) -> bool:
        return can_be_normalized(space) and not (leaves_scaled and is_scaled(space))

    return options_of(found.get("normalize"), found.get("gamma", 0.99), venv.observation_space, is_normalized)


def _of_model(found: Kwargs) -> Kwargs:
    options = {name: value for name, value in found.items() if name not in OF_ENTRY}
    if isinstance(options.get("policy_kwargs"), str):
        names = {"nn": importlib.import_module("torch.nn"), "th": importlib.import_module("torch")}
        options["policy_kwargs"] = eval(options["policy_kwargs"], names)  # as RL Zoo reads its entries
    if options.get("distributed") is False:  # which YAML reads for `off`
        options["distributed"] = "off"
    return options


def _file_of_the_zoo() -> Path | None:
    """The Zoo's entries for PPO, ``None`` if it is not installed."""
    if importlib.util.find_spec("rl_zoo3") is None:
        return None
    zoo = Path(str(importlib.import_module("rl_zoo3").__file__)).parent
    folder = zoo if (zoo / "hyperparams").is_dir() else zoo.parent  # in a source checkout, they lie beside the package
    return folder / "hyperparams" / "ppo.yml"


def presets() -> dict[str, dict[str, object]]:
    """
    :return: Hyperparameters by environment: all entries of ``ppo_ext.yml``, with ``default`` and ``default-discrete`` for
        environments without an entry of their own, ``memory`` for transformer policies and ``recurrent`` for LSTM policies;
        and, where RL Zoo is installed, its tuned entries for PPO of the other environments
    """
    theirs = {} if (path := _file_of_the_zoo()) is None else read_entries(path)
    return {name: entry for name, entry in {**theirs, **read_entries(HYPERPARAMS)}.items() if name not in TEMPLATES}
