"""
Methods of the Zoo's ``ExperimentManager`` that are different for ``ppo_ext``.

Each function in ``METHODS`` replaces one of its methods, and gets the Zoo's own method as its first argument.
"""

import functools
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from pathlib import Path
from pprint import pprint
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium as gym
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from sb3_ppo_ext.common.action_masks import ACTION_MASK
from sb3_ppo_ext.common.saved_models import read_attribute, read_model
from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.common.validation import BadArgumentError, check_number, check_observation_space, check_type, refuse
from sb3_ppo_ext.envs.choice_of_vec_env import choose_vec_env
from sb3_ppo_ext.envs.envpool_vec_env import ENVPOOL, EnvPoolVecEnv, config_for_wrappers
from sb3_ppo_ext.envs.fast_dummy_vec_env import FastDummyVecEnv
from sb3_ppo_ext.envs.parallel.vec_env import ParallelVecEnv
from sb3_ppo_ext.envs.rnd_reward import without_rewards_of_rnd
from sb3_ppo_ext.envs.tensors.jax_functions import GYMNAX_PREFIX
from sb3_ppo_ext.envs.tensors.jax_vec_env import JaxVecEnv
from sb3_ppo_ext.ppo_ext import PPOExt
from sb3_ppo_ext.zoo.best_trial import write_best_trial
from sb3_ppo_ext.zoo.distributed_runs import (
    create_log_folder,
    find_interrupted_run,
    launch_of,
    save_config,
    save_trained_model,
    share_run,
)
from sb3_ppo_ext.zoo.entry_checks import (
    OF_ZOO_SCHEDULES,
    check_entry,
    class_of,
    one_line_errors,
    unreadable_files_as_value_errors,
)
from sb3_ppo_ext.zoo.environment_counts import with_environments
from sb3_ppo_ext.zoo.envpool_option import IS_CHOSEN as ENVPOOL_IS_CHOSEN
from sb3_ppo_ext.zoo.made_environments import staggered
from sb3_ppo_ext.zoo.progress_file import ProgressFile
from sb3_ppo_ext.zoo.resuming import (
    create_callbacks,
    find_run,
    keep_monitor_files,
    load_pretrained_agent,
)
from sb3_ppo_ext.zoo.run_folder import RESUMED, removed_if_not_begun
from sb3_ppo_ext.zoo.run_normalization import TRIAL, maybe_normalize, preprocess_action_noise
from sb3_ppo_ext.zoo.tuning import is_recurrent, is_transformer
from sb3_ppo_ext.zoo.yaml_entries import (
    DEFAULT,
    DEFAULTS,
    DEFAULTS_OF_RECURRENT_PPO,
    OF_RECURRENT_PPO,
    TrialHyperparams,
    default_for,
    environments_of_trial,
    find_hyperparams,
    is_default_file,
    merge_trial,
    normalization_for,
    policy_for,
    read_saved,
    staggered_start_of_trial,
    takes_networks,
    wrappers_for,
)

if TYPE_CHECKING:
    import optuna
    from rl_zoo3.exp_manager import ExperimentManager

# Hyperparameters as they are used, and as they are saved
Hyperparams: TypeAlias = tuple[Kwargs, Kwargs]
VEC_ENVS: dict[object, type[VecEnv]] = {DummyVecEnv: FastDummyVecEnv, SubprocVecEnv: ParallelVecEnv}
# Whether the environments that are being created are for evaluation
_IS_EVAL: ContextVar[bool] = ContextVar("is_eval", default=False)
# Trials in threads (`--n-jobs`) share the experiment, whose wrapper is another one while environments are created.
_CREATION = RLock()


def read_hyperparameters(theirs: Callable[[], Hyperparams], experiment: "ExperimentManager") -> Hyperparams:
    """
    Read the entry that :func:`find_hyperparams` finds, unless the user has named a file (``-conf``), and merge the
    ``policy_kwargs`` of a trial (``--trial-id``) into those of the entry, where the Zoo would replace them. A run that is
    resumed reads what it has saved.
    """
    if (folder := RESUMED.get()) is not None:
        saved = experiment.entry = read_saved(folder / experiment.env_name / "config.yml")  # type: ignore[attr-defined]
        return dict(saved), saved
    env_name, trial_id = experiment.env_name, experiment.trial_id
    _check_trial_is_named(experiment)
    key = _choose_entry(experiment)
    experiment.trial_id = None
    try:
        with unreadable_files_as_value_errors(experiment.config), _number_of_environments_left_out(experiment):
            hyperparams, saved_hyperparams = theirs()
    finally:
        experiment.env_name, experiment.trial_id = env_name, trial_id
    if key in DEFAULTS:
        fitting = _fitting_observations(experiment, hyperparams)
        print(f"For the observations of {env_name}: {fitting}")
        hyperparams, saved_hyperparams = {**hyperparams, **fitting}, OrderedDict({**saved_hyperparams, **fitting})
        takes_them = takes_networks(class_of("policy", hyperparams["policy"]))
        if "policy_kwargs" not in (experiment.custom_hyperparams or {}) and not takes_them:
            del hyperparams["policy_kwargs"], saved_hyperparams["policy_kwargs"]
    _say_what_repeats(experiment, hyperparams)
    if key in ("memory", "recurrent"):
        check_observation_space(_one(experiment, hyperparams).observation_space)
    if Path(experiment.config).name == OF_RECURRENT_PPO:
        # Its entries leave out what is the default of RecurrentPPO.
        hyperparams = {**DEFAULTS_OF_RECURRENT_PPO, **hyperparams}
        saved_hyperparams = OrderedDict(sorted({**DEFAULTS_OF_RECURRENT_PPO, **saved_hyperparams}.items()))

    given, of_trial = experiment.custom_hyperparams or {}, None
    if trial_id is not None:
        hyperparams = merge_trial(experiment, hyperparams, trial_id)
        of_trial = environments_of_trial(experiment, trial_id)
    found = with_environments(hyperparams, given, of_trial)
    if trial_id is not None and found.get("n_envs", of_trial) == of_trial and "staggered_start" not in given:
        found |= staggered_start_of_trial(experiment, trial_id)
    if found:
        print(f"With {found.get('n_envs', of_trial)} environments: {found}")
    hyperparams = {**hyperparams, **found}
    saved_hyperparams = OrderedDict(sorted({**saved_hyperparams, **found}.items()))
    if trial_id is not None:
        saved_hyperparams = OrderedDict(sorted(hyperparams.items()))
        print(f"Hyperparameters with those of trial {trial_id}:")
        pprint(saved_hyperparams)
    experiment.entry = deepcopy(dict(saved_hyperparams))  # type: ignore[attr-defined]  # for the entry of the best trial
    return hyperparams, saved_hyperparams


@contextmanager
def _number_of_environments_left_out(experiment: "ExperimentManager") -> Iterator[None]:
    """Let the Zoo read how many environments the entry has, where the user gives another number."""
    given = experiment.custom_hyperparams
    if given is not None:
        experiment.custom_hyperparams = {name: value for name, value in given.items() if name != "n_envs"}
    try:
        yield
    finally:
        experiment.custom_hyperparams = given


def _check_trial_is_named(experiment: "ExperimentManager") -> None:
    """:raises ValueError: if a study is named outside of tuning, but none of its trials: the Zoo would train without it"""
    if experiment.optimize_hyperparameters or experiment.trial_id is not None:
        return
    for name in ("study_name", "storage"):
        if (value := getattr(experiment, name)) is not None:
            option = f"--{name.replace('_', '-')}"
            raise BadArgumentError(
                f"`{option} {value}`: of which trial? Give `--trial-id`, or `-optimize` to tune; without them, leave it out"
            )


def _say_what_repeats(experiment: "ExperimentManager", hyperparams: Kwargs) -> None:
    """Say that both ALE and SB3's wrapper repeat actions, which RL Zoo's entry does to ids such as ALE/Pong-v5 in silence."""
    spec = gym.spec(experiment.env_name.gym_id)
    if "AtariEnv" not in str(spec.entry_point) or "AtariWrapper" not in str(hyperparams.get("env_wrapper")):
        return
    given = {**spec.kwargs, **experiment.env_kwargs, **hyperparams.get("env_kwargs", {})}
    frames, sticky = given.get("frameskip", 4), given.get("repeat_action_probability", 0.25)
    if frames != 1 or sticky:
        print(
            f"{spec.id} repeats each action for {frames} frames, with a probability of {sticky} that it repeats the one "
            "before, and AtariWrapper again for 4. For the tasks of the literature: `--env-kwargs frameskip:1 "
            "repeat_action_probability:0.0`, or an id such as PongNoFrameskip-v4"
        )


def _choose_entry(experiment: "ExperimentManager") -> str | None:
    """
    Set the file, ``experiment.config``, and the key in it, ``experiment.env_name``, that the Zoo reads. Return this key, or
    ``None`` if the user has named the file.
    """
    if not is_default_file(experiment.config, experiment.algo):
        return None
    env_id = experiment.env_name.gym_id
    zoo_file = Path(experiment.config).with_name("ppo.yml")
    _take_policy_of_agent(experiment)
    policy = (experiment.custom_hyperparams or {}).get("policy")
    path, key = find_hyperparams(env_id, experiment.entry_point(env_id), zoo_file, policy)
    if key == DEFAULT:
        key = default_for(_one(experiment, experiment.custom_hyperparams or {}).action_space)
    experiment.config = str(path)
    if key != env_id:
        print(f"No hyperparameters for {env_id}, using those of {key}")
        experiment.env_name = type(experiment.env_name)(key)
    return key


def _take_policy_of_agent(experiment: "ExperimentManager") -> None:
    """Let an agent with a memory, whose training is continued, have the entry of its policy, unless the user names another."""
    given = experiment.custom_hyperparams or {}
    if not experiment.continue_training or "policy" in given:
        return
    policy = read_attribute(read_model(experiment.trained_agent).data, "policy_class")
    name = next((name for name, known in PPOExt.policy_aliases.items() if known is policy), None)
    if name is not None and (is_recurrent(name) or is_transformer(name)):
        print(f"The policy of {experiment.trained_agent}: {name}")
        experiment.custom_hyperparams = {**given, "policy": name}


def _fitting_observations(experiment: "ExperimentManager", hyperparams: dict[str, object]) -> dict[str, object]:
    """Policy, wrappers and normalisation for the observations of an environment, except for what the user gives."""
    given = experiment.custom_hyperparams or {}
    fitting: dict[str, object] = {}
    space = _one(experiment, hyperparams).observation_space
    if "env_wrapper" not in given and (wrappers := wrappers_for(space)):
        fitting["env_wrapper"] = wrappers
        space = _one(experiment, {**hyperparams, **fitting}).observation_space
    check_observation_space(space)
    if "normalize" not in given and (normalization := normalization_for(space)):
        fitting["normalize"] = str(normalization)
    policy = policy_for(space, hyperparams.get("action_mask_key"))
    return fitting if "policy" in given else {**fitting, "policy": policy}


def _one(experiment: "ExperimentManager", hyperparams: Kwargs) -> gym.Env:
    """An environment with its wrappers, which is closed and has only spaces."""
    env_kwargs = {**experiment.env_kwargs, **hyperparams.get("env_kwargs", {})}
    env = gym.spec(experiment.env_name.gym_id).make(**env_kwargs)
    wrap = sys.modules["rl_zoo3.exp_manager"].get_wrapper_class(hyperparams)
    env = env if wrap is None else wrap(env)
    env.close()
    return env


def preprocess_hyperparams(theirs: Callable[..., Any], experiment: "ExperimentManager", hyperparams: Kwargs) -> Any:
    """Refuse invalid options before the Zoo writes its log folder, which the processes of torchrun share."""
    if hyperparams.get("distributed") is False:  # which YAML reads for `off`
        hyperparams = {**hyperparams, "distributed": "off"}
    if isinstance(hyperparams.get("normalize"), dict):  # The Zoo adds the discount factor.
        hyperparams = {**hyperparams, "normalize": {**hyperparams["normalize"]}}
    share_run(experiment, hyperparams.get("distributed", "auto"))
    check_entry(experiment, hyperparams)
    if hyperparams.get("action_masking") and hyperparams.get("action_mask_key") is None:
        remedy = "the Zoo passes no masks to `predict`; give `env_wrapper: sb3_ppo_ext.ActionMaskWrapper` and this as well, "
        refuse("action_masking", True, remedy + f"`action_mask_key: {ACTION_MASK}`")
    staggered_start = hyperparams.get("staggered_start", False)
    check_type("staggered_start", staggered_start, bool, "give true or false")
    experiment.staggered_start = staggered_start  # type: ignore[attr-defined]  # for `create_envs`
    hyperparams = {name: value for name, value in hyperparams.items() if name != "staggered_start"}
    # The Zoo takes only strings and numbers.
    others = {name: hyperparams[name] for name in OF_ZOO_SCHEDULES if not _is_read_by_the_zoo(hyperparams.get(name, 0))}
    if not isinstance(hyperparams["policy"], str):
        others["policy"] = hyperparams["policy"]
    kwargs, *rest = theirs({name: value for name, value in hyperparams.items() if name not in others})
    results = ({**kwargs, **others}, *rest)
    if experiment._eval_env_kwargs_args is None:
        # The Zoo would evaluate in other environments than it trains in.
        experiment.eval_env_kwargs = experiment.env_kwargs
    keep_monitor_files(experiment)
    algorithm = sys.modules["rl_zoo3.utils"].ALGOS[experiment.algo]
    if issubclass(algorithm, PPOExt):
        with warnings.catch_warnings():
            # What the model normalises is not among the options yet; it warns when it is made.
            warnings.simplefilter("ignore")
            algorithm(env=None, _init_setup_model=False, **results[0])  # as `load` does
    return results


def _is_read_by_the_zoo(value: object) -> bool:
    if isinstance(value, str):
        return value.startswith("lin_")  # It takes each string for a linear schedule.
    return isinstance(value, int | float) and not isinstance(value, bool)


def create_envs(
    theirs: Callable[..., VecEnv], experiment: "ExperimentManager", n_envs: int, eval_env: bool = False, no_log: bool = False
) -> VecEnv:
    """
    Step all copies of an environment of gymnax in one call, in a ``JaxVecEnv``. Evaluation is without intrinsic rewards, and
    without a staggered start.
    """
    if experiment.vec_env_class is ParallelVecEnv and experiment.default_vec_env_cls is None:
        _choose_class(experiment)
    no_log = no_log or launch_of(experiment).rank > 0  # Ranks have no folders of their own.
    with _CREATION:
        token, wrap = _IS_EVAL.set(eval_env), experiment.env_wrapper
        if experiment.staggered_start and not eval_env and isinstance(experiment.vec_env_class, type):  # type: ignore[attr-defined]
            experiment.env_wrapper = staggered(wrap)
        try:
            env = theirs(n_envs, eval_env=eval_env, no_log=no_log)
        finally:
            experiment.env_wrapper = wrap
            _IS_EVAL.reset(token)
    return without_rewards_of_rnd(env) if eval_env else env


def _choose_class(experiment: "ExperimentManager") -> None:
    """``--vec-env subproc`` is in one process where several are not faster."""

    def make() -> gym.Env:
        env = gym.spec(experiment.env_name.gym_id).make(**experiment.env_kwargs)
        return env if experiment.env_wrapper is None else experiment.env_wrapper(env)

    choice = choose_vec_env(make, experiment.n_envs)
    if experiment.verbose > 0:
        print(choice.reason)
    # Chosen for good: results do not depend on it, but what a checkpoint restores does.
    experiment.default_vec_env_cls = experiment.vec_env_class = choice.cls


def _pooled_copies(experiment: Any, env_fns: list[Any], **kwargs: Any) -> VecEnv:
    """What stands in for the class of vectorized environments with ``--vec-env envpool``."""
    env_kwargs = experiment.eval_env_kwargs if _IS_EVAL.get() else experiment.env_kwargs
    env_id = experiment.env_name.gym_id
    config = {**config_for_wrappers(env_id, experiment.entry.get("env_wrapper")), **env_kwargs}
    return EnvPoolVecEnv(env_id, len(env_fns), **config)


def _gymnax_copies(experiment: "ExperimentManager", vec_env_class: Any, env_fns: list[Any], **kwargs: Any) -> VecEnv:
    """What stands in for the class of vectorized environments, unless each copy is wrapped (``env_wrapper``)."""
    if experiment.env_wrapper is not None:
        return vec_env_class(env_fns, **kwargs)
    env_kwargs = experiment.eval_env_kwargs if _IS_EVAL.get() else experiment.env_kwargs
    name = experiment.env_name.gym_id.removeprefix(GYMNAX_PREFIX)
    # Another device than the CPU is that of JAX, which may have been installed without CUDA.
    device = "cpu" if str(experiment.device) == "cpu" else "auto"
    return JaxVecEnv(name, num_envs=len(env_fns), device=device, **env_kwargs)


def setup_experiment(theirs: Callable[[], object], experiment: "ExperimentManager") -> object:
    """
    Use the vectorized environments that copy less and that use all cores, write the log to ``progress.csv`` for
    ``plot_run``, and let each trial keep the ``policy_kwargs`` of the hyperparameters that it starts from.
    """
    _use_fast_environments(experiment)
    with one_line_errors(experiment.verbose):
        find_interrupted_run(experiment)
        find_run(experiment)
        with removed_if_not_begun(Path(experiment.save_path)):
            results = theirs()
    experiment.callbacks.append(ProgressFile(experiment.save_path))
    experiment._hyperparams = TrialHyperparams(experiment._hyperparams)
    return results


def _use_fast_environments(experiment: "ExperimentManager") -> None:
    if experiment.default_vec_env_cls is None:  # no class that the user has chosen
        experiment.vec_env_class = VEC_ENVS.get(experiment.vec_env_class, experiment.vec_env_class)
    if ENVPOOL_IS_CHOSEN.get():
        experiment.vec_env_class = functools.partial(_pooled_copies, experiment)  # type: ignore[assignment]
        experiment.args.vec_env = ENVPOOL  # which a run that is resumed reads
    elif experiment.env_name.gym_id.startswith(GYMNAX_PREFIX):
        copies: Any = functools.partial(_gymnax_copies, experiment, experiment.vec_env_class)
        experiment.vec_env_class = copies


def objective(theirs: Callable[[object], float], experiment: "ExperimentManager", trial: "optuna.Trial") -> float:
    """
    Tell the sampler what is tuned. The options that it samples can be combined; if they contradict other options in the YAML
    file, the trial is pruned, and the study continues.
    """
    import optuna

    policy = experiment._hyperparams.get("policy")
    trial.set_user_attr("policy", getattr(policy, "__name__", str(policy)))
    trial.set_user_attr("n_timesteps", experiment.n_timesteps)
    trial.set_user_attr("env", experiment.env_name.gym_id)
    trial.set_user_attr("staggered_start", experiment.staggered_start)  # type: ignore[attr-defined]
    experiment.study = trial.study  # type: ignore[attr-defined]  # the Zoo does not keep it
    token = TRIAL.set(trial)
    try:
        return theirs(trial)
    except BadArgumentError as error:
        print(f"Trial {trial.number} is pruned: {error}")
        raise optuna.TrialPruned from error
    finally:
        TRIAL.reset(token)


def hyperparameters_optimization(theirs: Callable[[], None], experiment: "ExperimentManager") -> None:
    """
    Print and save the hyperparameters of the best trial as an entry of a YAML file. Let a study in a database survive workers
    that die; studies in a journal file do not.
    """
    storage = experiment.storage
    theirs = functools.partial(_optimize, theirs, experiment)
    if not isinstance(storage, str) or "://" not in storage or storage.endswith(".log"):
        theirs()
        return write_best_trial(experiment)
    from sb3_ppo_ext.zoo.study_storage import fail_stale_trials, open_storage

    database: Any = open_storage(storage)
    fail_stale_trials(database, experiment.study_name)
    experiment.storage = database
    try:
        theirs()
        write_best_trial(experiment)
    finally:
        experiment.storage = storage


def _optimize(theirs: Callable[[], None], experiment: "ExperimentManager") -> None:
    """Let a study without a complete trial end with one line."""
    with one_line_errors(experiment.verbose):
        if experiment.n_evaluations is not None:
            check_number("--n-evaluations", experiment.n_evaluations, 1, integer=True)
        try:
            theirs()
        except ValueError as error:
            if "No trials are completed yet" not in str(error):
                raise
            remedy = "the lines above say why trials were pruned or have failed"
            raise BadArgumentError(
                f"`--n-trials {experiment.n_trials}`: no trial of the study was completed; {remedy}"
            ) from error


METHODS: dict[str, Callable[..., object]] = {
    "read_hyperparameters": read_hyperparameters,
    "_preprocess_hyperparams": preprocess_hyperparams,
    "setup_experiment": setup_experiment,
    "create_callbacks": create_callbacks,
    "create_envs": create_envs,
    "_load_pretrained_agent": load_pretrained_agent,
    "_save_config": save_config,
    "create_log_folder": create_log_folder,
    "save_trained_model": save_trained_model,
    "_maybe_normalize": maybe_normalize,
    "_preprocess_action_noise": preprocess_action_noise,
    "objective": objective,
    "hyperparameters_optimization": hyperparameters_optimization,
}
