"""Mistakes in YAML files and on the command line of RL Zoo: one line that names the key and the remedy."""

import contextlib
import contextvars
import re
import sys

import pytest
from rl_zoo3.wrappers import FrameSkip
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.vec_env import VecCheckNan, is_vecenv_wrapped
from support.processes import run_forked
from support.zoo import manager, saved

from sb3_ppo_ext.zoo.__main__ import main
from sb3_ppo_ext.zoo.entry_checks import CommandError
from sb3_ppo_ext.zoo.run_folder import removed_if_not_begun

ENTRY = "n_timesteps: 64\n  policy: MlpPolicy\n  n_steps: 16\n  batch_size: 16\n"


def of_file(folder, more, env_id="CartPole-v1", **arguments):
    """Manager with the entry of a YAML file, which has some more lines."""
    path = folder / "mine.yml"
    path.write_text(f"{env_id}:\n  {ENTRY}  {more}\n")
    return manager(env_id=env_id, folder=folder, config=str(path), eval_freq=-1, **arguments)


# Text of a file -> what the message says
FILES = {
    "CartPole-v1:\n  n_steps: [16\n": "it is not YAML (while parsing a flow sequence",
    "CartPole-v1:\nn_steps: 16\n": "each entry has to be a mapping of names to values",
    "CartPole-v1: 16\n": "each entry has to be a mapping",
    "- CartPole-v1\n": "each entry has to be a mapping",
    "Acrobot-v1:\n  n_steps: 16\n": "Hyperparameters not found for ppo_ext-CartPole-v1",
    "CartPole-v1:\n  policy: MlpPolicy\n": "The entry of CartPole-v1 has no `n_timesteps`: add it",
    "CartPole-v1:\n  n_timesteps: 64\n": "has no `policy`: add it, such as `policy: MlpPolicy`",
}
# Further lines of an entry -> what the message says
LINES = {
    "normalise: true": "PPOExt has no option `normalise`: did you mean `normalize`",
    "n_env: 2": "PPOExt has no option `n_env`: did you mean `n_envs`",
    "n_envs: two": "`n_envs='two'` is not valid: give a number of at least 1",
    "n_timesteps: 1e6": "`n_timesteps='1e6'` is not valid: give a number (in YAML, write",
    "frame_stack: 0": "`frame_stack=0` is not valid",
    "learning_rate: 3e-4": "`learning_rate='3e-4'` is not valid",
    "normalize: yess": "`normalize='yess'` is not valid: it is no Python code",
    "normalize: 3": "`normalize=3` is not valid: give true, false",
    "normalize: {norm_obz: true}": "`normalize` has no option `norm_obz`: did you mean `norm_obs`",
    "monitor_kwargs: {info: 1}": "`monitor_kwargs` has no option `info`",
    "policy_kwargs: dict(net_arch=[64]": "`policy_kwargs='dict(net_arch=[64]'` is not valid",
    "policy_kwargs: [64]": "`policy_kwargs=[64]` is not valid: give a dictionary",
    "policy_kwargs: {net_arc: [64]}": "`policy_kwargs` has no option `net_arc`: did you mean `net_arch`",
    "policy: my.Policy": "`policy='my.Policy'` is not valid: it cannot be imported",
    "env_wrapper: rl_zoo3.wrappers.FrameSkp": "`env_wrapper='rl_zoo3.wrappers.FrameSkp'` is not valid",
    "env_wrapper: TimeLimit": "give the full name of a class",
    "env_wrapper:\n    - rl_zoo3.wrappers.FrameSkip:\n      skip: 2": "give one class with its keyword",
    "env_wrapper:\n    - rl_zoo3.wrappers.FrameSkip:\n        skp: 2": "did you mean `skip`",
    "policy: 5": "`policy=5` is not valid: give the name of a policy",
    "learning_rate: null": "`learning_rate=None` is not valid",
    "learning_rate: true": "`learning_rate=True` is not valid",
    "clip_range: [0.1]": "`clip_range=[0.1]` is not valid",
    "normalize: 'True'": "`normalize=True` is not valid",
    "seed: 5": "`seed=5` is not valid: RL Zoo gives it to the model itself; give `--seed`",
    "env_wrapper: 5": "`env_wrapper=5` is not valid: give the full name of a class",
    "env_wrapper: gymnasium.wrappers": "`env_wrapper='gymnasium.wrappers'` is not valid",
    "env_wrapper: gymnasium.wrappers.TimeLimit": "it needs `max_episode_steps`",
    "env_wrapper:\n    - rl_zoo3.wrappers.FrameSkip:": "give one class with its keyword arguments",
    "callback:\n    5: {}": "`callback=5` is not valid: give the full name of a class",
    "callback: stable_baselines3.common.callbacks.EveryNTimesteps": "it needs `n_steps`",
    "action_dist: beta": "`action_dist='beta'` is not valid",
}


@pytest.mark.parametrize("text", [*FILES, *LINES])
def test_mistakes_in_a_file(text, tmp_path, train_here):
    """The message names the mistake, in one line, and is that with which the command ends."""
    message = FILES.get(text) or LINES[text]
    (tmp_path / "mine.yml").write_text(text if text in FILES else f"CartPole-v1:\n  {ENTRY}  {text}\n")
    with pytest.raises(CommandError, match=re.escape(message)) as caught:
        train_here("--env", "CartPole-v1", "-conf", "mine.yml")
    assert caught.value.code == f"Error: {caught.value}"
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert not list(tmp_path.rglob("CartPole-v1_1"))  # `enjoy` would take it for the newest run


@pytest.mark.parametrize(
    ("conf", "message"),
    [("missing.yml", "there is no such file"), ("no.module", "it cannot be read"), ("mine.py", "it cannot be read")],
)
def test_files_that_cannot_be_read(conf, message, tmp_path, train_here):
    """Nor is there a traceback if the file is missing, or is another one."""
    (tmp_path / "mine.py").write_text("hyperparameters = {}")
    with pytest.raises(CommandError, match=f"`--conf-file {conf}`: {message}"):
        train_here("--env", "CartPole-v1", "-conf", conf)


@pytest.mark.parametrize(
    "more",
    [
        "normalize: {norm_obs: false, clip_reward: 5.0}",
        "normalize: dict(norm_obs=False)",
        "normalize: null",
        "frame_stack: null",
        "env_wrapper: null",
        "env_wrapper: gymnasium.wrappers.FlattenObservation",
        "env_wrapper:\n    - rl_zoo3.wrappers.FrameSkip:\n        skip: 2\n    - gymnasium.wrappers.FlattenObservation",
        "policy_kwargs: dict(activation_fn=nn.ReLU)",
        "policy_kwargs: {net_arch: [8]}",
        "monitor_kwargs: dict(allow_early_resets=False)",
        "callback: rl_zoo3.callbacks.RawStatisticsCallback",
        "monitor_kwargs: null",
        "clip_range_vf: null",
        "callback: null",
        "policy: sb3_ppo_ext.MlpPolicy",
        "learning_rate: lin_0.001",
    ],
)
def test_what_the_zoo_takes(more, tmp_path):
    """Values in each form that the Zoo takes are accepted, and reach the model."""
    model, _ = of_file(tmp_path, more).setup_experiment()
    assert model.n_steps == 16


def test_schedules_that_the_zoo_does_not_know(tmp_path):
    """The Zoo takes each string for a linear decay; one that begins later stays what it is."""
    model, _ = of_file(tmp_path, "learning_rate: hold_0.001\n  clip_range: lin_0.2").setup_experiment()
    assert [model.lr_schedule(progress) for progress in (1.0, 0.5, 0.25)] == pytest.approx([1e-3, 1e-3, 5e-4])
    assert model.clip_range(0.5) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "more",
    [
        "env_wrapper=wrappers.FrameSkip",
        "env_wrapper=[{wrappers.FrameSkip: dict(skip=2)}, 'gymnasium.wrappers.FlattenObservation']",
        "vec_env_wrapper=[VecCheckNan]",
        "callback=CallbackList([])",
        "callback=[CallbackList([]), 'rl_zoo3.callbacks.RawStatisticsCallback']",
    ],
)
def test_objects_in_a_file_in_python(more, tmp_path):
    """Files in Python may have classes of wrappers, and callbacks, instead of their names."""
    imports = "from rl_zoo3 import wrappers\nfrom stable_baselines3.common.callbacks import CallbackList\n"
    imports += "from stable_baselines3.common.vec_env import VecCheckNan\n"
    entry = f"dict(n_timesteps=64, policy='MlpPolicy', n_steps=16, batch_size=16, {more})"
    path = tmp_path / "mine.py"
    path.write_text(f"{imports}hyperparams = {{'CartPole-v1': {entry}}}\n")
    experiment = manager(env_id="CartPole-v1", folder=tmp_path, config=str(path), eval_freq=-1)
    model, _ = experiment.setup_experiment()
    assert ("FrameSkip" in more) == model.env.env_is_wrapped(FrameSkip)[0]
    assert ("VecCheckNan" in more) == is_vecenv_wrapped(model.env, VecCheckNan)
    assert ("CallbackList" in more) == isinstance(experiment.callbacks[0], CallbackList)


@pytest.mark.parametrize(
    ("more", "message"),
    [("callback=nn.ReLU", "`callback=<class"), ("env_wrapper={nn.ReLU: dict(inplac=1)}", "did you mean `inplace`")],
)
def test_bad_objects_in_a_file_in_python(more, message, tmp_path):
    """Callbacks have to be made, and keyword arguments known."""
    path = tmp_path / "mine.py"
    path.write_text(
        f"from torch import nn\nhyperparams = {{'CartPole-v1': dict(n_timesteps=64, policy='MlpPolicy', {more})}}\n"
    )
    with pytest.raises(CommandError, match=message):
        manager(env_id="CartPole-v1", folder=tmp_path, config=str(path)).setup_experiment()


def test_traceback_on_demand(train_here):
    """From verbosity 2 on, the error ends the command as in Python, with the traceback."""
    with pytest.raises(ValueError, match="n_step") as caught:
        train_here("--env", "CartPole-v1", "-params", "n_step:5", "--verbose", 2)
    assert not isinstance(caught.value, SystemExit)


def test_a_folder_that_cannot_be_resumed(tmp_path, monkeypatch):
    """`resume` ends with a message as well."""
    monkeypatch.setattr(sys, "argv", ["zoo", "resume", str(tmp_path)])
    with pytest.raises(CommandError, match="give the folder of one run"):
        main()


def test_a_run_without_whole_checkpoints(tmp_path, train_here, monkeypatch):
    """So does `resume` of a run whose checkpoints are missing or damaged, or whose hyperparameters cannot be read."""
    params = ["-params", "n_envs:1", "n_steps:16", "batch_size:16"]
    train_here("--env", "CartPole-v1", "-n", "16", "--save-freq", "16", "--eval-freq", "-1", *params)
    run = saved(tmp_path, "CartPole-v1").parent
    config = run / "CartPole-v1" / "config.yml"
    before = config.read_text()
    config.write_text("!!python/name:None.%3Clambda%3E ''")
    monkeypatch.setattr(sys, "argv", ["zoo", "resume", str(run)])
    with pytest.raises(CommandError, match="such as functions"):
        contextvars.copy_context().run(main)
    config.write_text(before)
    for checkpoint in (run / "checkpoints").iterdir():
        checkpoint.write_bytes(b"")
    monkeypatch.setattr(sys, "argv", ["zoo", "resume", str(run)])
    with pytest.raises(CommandError, match="There is no checkpoint"):
        contextvars.copy_context().run(main)


@pytest.mark.parametrize("arguments", [{}, dict(eval_env_kwargs=dict(g=2.0))])
def test_evaluation_has_the_arguments_of_the_entry(arguments, tmp_path):
    """Arguments of the environment in an entry hold for evaluations, too, unless those are given."""
    experiment = of_file(tmp_path, "env_kwargs: {g: 1.0}", env_id="Pendulum-v1", **arguments)
    model, _ = experiment.setup_experiment()
    assert model.env.get_attr("g") == [1.0]
    expected = arguments.get("eval_env_kwargs", dict(g=1.0))["g"]
    assert experiment.create_envs(1, eval_env=True).get_attr("g") == [expected]


@pytest.mark.integration
def test_what_a_user_sees(train_here):
    """The last line is the message, there is no traceback, and the exit status is that of an error."""
    status, printed = run_forked(train_here, "--env", "CartPole-v1", "-params", "n_step:5")
    assert status == 1
    assert "Traceback" not in printed
    assert "\nError: PPOExt has no option `n_step`: did you mean `n_steps`" in printed


def test_functions_that_cannot_be_read_again(tmp_path, train_here):
    """What the folder of a run could not hold is refused before there is a folder."""
    with pytest.raises(SystemExit) as raised:
        train_here("--env", "CartPole-v1", "-n", 64, "-params", "learning_rate:lambda p: 1e-3 * p")
    assert "`learning_rate=<function" in str(raised.value.code)
    assert "'lin_0.001'" in str(raised.value.code)
    assert not list(tmp_path.rglob("CartPole-v1_1"))


def test_off_in_yaml(tmp_path):
    """YAML reads ``off`` as false: for ``distributed`` it is the choice of that name."""
    model, _ = of_file(tmp_path, "distributed: off").setup_experiment()
    assert model.distributed == "off"


def test_no_trial_completed(train_here):
    """A study without a complete trial ends with one line."""
    arguments = ["--n-trials", 1, "--n-startup-trials", 9, "--n-evaluations", 1, "--eval-episodes", 1, "--no-optim-plots"]
    with pytest.raises(SystemExit) as raised:
        train_here(
            "-optimize", "--env", "Pendulum-v1", "-n", 64, *arguments, "-params", "policy_kwargs:dict(squash_output=True)"
        )
    assert "`--n-trials 1`: no trial of the study was completed" in str(raised.value.code)
    with pytest.raises(CommandError, match="`--n-evaluations=0` is not valid"):
        train_here("-optimize", "--env", "Pendulum-v1", "-n", 64, "--n-trials", 1, "--n-evaluations", 0)


def test_mistakes_that_the_model_finds(tmp_path, train_here):
    """A run that ends before its model is made leaves no folder, of which `enjoy` would think that it is the newest run."""
    with pytest.raises(CommandError, match=r"`ent_coef=-1` is not valid"):
        train_here("--env", "Pendulum-v1", "-n", 64, "-params", "ent_coef:-1")
    with pytest.raises(CommandError, match=r"`device=.gpu.` is not valid"):
        train_here("--env", "Pendulum-v1", "-n", 64, "--device", "gpu")
    assert not list(tmp_path.rglob("Pendulum-v1_*"))


def test_folders_that_are_kept(tmp_path):
    """What is older than the run, or holds more than it begins with, stays."""
    for existed, name in ((True, "0.monitor.csv"), (False, "rl_model_64_steps.zip"), (False, "0.monitor.csv")):
        folder = tmp_path / name.partition(".")[0] / str(existed)
        if existed:
            folder.mkdir(parents=True)
        with contextlib.suppress(KeyError), removed_if_not_begun(folder):
            (folder / "Pendulum-v1").mkdir(parents=True)
            (folder / name).touch()
            raise KeyError
        assert folder.exists() == (existed or name.endswith("zip"))


def test_an_agent_of_another_environment(tmp_path, train_here):
    """A training cannot be continued in an environment with other observations: the message names the agent."""
    params = ["--eval-freq", "-1", "-params", "n_envs:1", "n_steps:16", "batch_size:16"]
    train_here("--env", "CartPole-v1", "-n", "16", *params)
    agent = saved(tmp_path, "CartPole-v1")
    with pytest.raises(CommandError, match=f"`trained_agent='{agent}'` is not valid: .* spaces do not match"):
        train_here("--env", "Acrobot-v1", "-n", "16", "-i", agent, *params)


def test_study_in_a_missing_database(tmp_path, train_here):
    """Training with a trial of a missing database does not create one."""
    study = ["--storage", f"sqlite:///{tmp_path}/missing.db", "--study-name", "s", "--trial-id", 0]
    with pytest.raises(SystemExit) as raised:
        train_here("--env", "CartPole-v1", "-n", 64, *study)
    assert "there is no such file; name the database" in str(raised.value.code)
    assert not (tmp_path / "missing.db").exists()
