"""A training that was interrupted and resumed is equal to the bit to one that was not."""

import json
import pickle
import warnings
import zipfile
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize
from support import hybrid  # noqa: F401  # registers its task
from support.masks import make_masked
from support.parity import assert_equal
from support.resuming import OPTIONS, TOTAL, Interruption, different, everything, interrupted_script, script
from support.torch_envs import TorchPendulum
from support.toys import IMAGE, Silent, make_toys

from sb3_ppo_ext import FastDummyVecEnv, ParallelVecEnv, PPOExt, RNDReward, TorchVecEnv, TrainingCheckpoint
from sb3_ppo_ext.checkpoints.training_state import STATE, SUMMARY
from sb3_ppo_ext.rollout.user_code import runs_user_code

pytestmark = pytest.mark.integration

CONFIGURATIONS = {
    "eager": dict(backend="eager"),
    "fused": dict(backend="fused"),
    "native": dict(backend="native"),
    "ema": dict(advantage_norm="ema"),
    "adaptive KL and rate": dict(kl_coef=0.1, kl_target=0.01, adaptive_lr_kl=0.01, backend="eager"),
    "critic rate": dict(critic_learning_rate=1e-3),
    "muon": dict(optimizer="muon"),
    "normalised values": dict(normalize_value=True),
    "beta": dict(action_dist="beta"),
    "gSDE": dict(use_sde=True, sde_sample_freq=5, backend="eager"),
    "transformer": dict(
        policy="MlpTransformerPolicy",
        policy_kwargs=dict(context_length=8, d_model=16, use_last_action=True),
    ),
    "LSTM": dict(policy="MlpLstmPolicy", policy_kwargs=dict(lstm_hidden_size=8)),
    "GRU, V-trace": dict(policy="MlpLstmPolicy", policy_kwargs=dict(lstm_hidden_size=8, rnn="gru"), vtrace=True),
    "MinGRU": dict(policy="MlpLstmPolicy", policy_kwargs=dict(lstm_hidden_size=8, rnn="mingru", n_lstm_layers=2)),
    "LRU": dict(policy="MlpLstmPolicy", policy_kwargs=dict(lstm_hidden_size=8, rnn="lru", n_lstm_layers=2)),
    "LSTM, eager": dict(policy="MlpLstmPolicy", policy_kwargs=dict(lstm_hidden_size=8), backend="eager"),
    "V-trace with segments": dict(vtrace=True, priority_alpha=0.6, priority_segment=8),
    "linear schedules": dict(learning_rate="lin_1e-3", clip_range="lin_0.2", ent_coef="lin_0.01", lr_warmup=0),
    "falling KL": dict(adaptive_lr_kl="lin_0.001", learning_rate=1e-3),
    "KL that falls later": dict(adaptive_lr_kl="hold_0.001", learning_rate=1e-3),
    "rate in proportion": dict(adaptive_lr_kl=0.01, adaptive_lr_rule="proportional"),
    "one environment, not normalized": dict(n_envs=1, normalize=False, env_id="CartPole-v1"),
    "auxiliary losses": dict(
        auxiliary_losses={
            "mirror": {"coef": 0.5, "obs": [0, [1, -1], [2, -1]], "action": [[0, -1]]},
            "caps_spatial": {"coef": 0.1, "std": 0.1},
        }
    ),
    "RND": dict(wrapper=partial(RNDReward, n_steps=16)),
    "RND, sums of episodes": dict(wrapper=partial(RNDReward, n_steps=16, episodic=True), backend="fused"),
    "many environments": dict(n_envs=4, n_steps=16),
    "hybrid actions": dict(env_id="Passing-v0"),
    "hybrid actions, transformer": dict(
        env_id="Passing-v0",
        policy="MlpTransformerPolicy",
        policy_kwargs=dict(context_length=4, d_model=16, use_last_action=True),
        action_dist="beta",
    ),
    "MuJoCo": dict(env_id="HalfCheetah-v5", backend="eager"),
}
# What keeps a state between two updates, together: the default suite runs these, and ``make test-slow`` each by itself.
TOGETHER = {
    "native, much at once": dict(
        **dict(advantage_norm="ema", kl_coef=0.1, kl_target=0.01, adaptive_lr_kl="hold_0.001", normalize_value=True),
        **dict(vtrace=True, priority_alpha=0.6, priority_segment=8, critic_learning_rate=1e-3, backend="native"),
    ),
    "fused, muon, gSDE, RND": dict(
        **dict(optimizer="muon", use_sde=True, sde_sample_freq=5, ent_coef="lin_0.01", backend="fused"),
        **dict(wrapper=partial(RNDReward, n_steps=16, episodic=True), n_envs=4, n_steps=16),
    ),
    "hybrid actions, transformer": CONFIGURATIONS["hybrid actions, transformer"],
    "eager, GRU, V-trace": dict(**CONFIGURATIONS["GRU, V-trace"], backend="eager"),
}
# MuJoCo starts a process when it is imported.
ALONE = {"MuJoCo": [pytest.mark.slow, pytest.mark.integration]}
SLOW = [pytest.param(name, marks=ALONE.get(name, pytest.mark.slow)) for name in CONFIGURATIONS if name not in TOGETHER]
CONFIGURATIONS |= TOGETHER


@pytest.mark.parametrize("name", [*TOGETHER, *SLOW])
def test_equal_to_the_bit(name, tmp_path):
    """Parameters, optimiser, generators, statistics, evaluations and all logs are equal, after two interruptions."""
    configuration = CONFIGURATIONS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # the environments go on, too
        warnings.filterwarnings("ignore", "You have specified a mini-batch size")
        warnings.filterwarnings("ignore", "In the rollout after .* longer than context_length")
        resumed = everything(tmp_path / "b", *interrupted_script(tmp_path / "b", **configuration))
        plain = everything(tmp_path / "a", *script(tmp_path / "a", **configuration))
    assert different(plain, resumed) == []
    size = configuration.get("n_envs", 2) * configuration.get("n_steps", 32)
    assert plain["iterations"].tolist() == list(range(1, TOTAL // size + 1))


@pytest.mark.slow
def test_compiled_engine(tmp_path):
    """The same on the engine that compiles."""
    resumed = everything(tmp_path / "b", *interrupted_script(tmp_path / "b", times=(200,), backend="compile"))
    assert different(everything(tmp_path / "a", *script(tmp_path / "a", backend="compile")), resumed) == []


def toy_model(n_envs=2, **options):
    return PPOExt("MlpPolicy", make_toys(n_envs), **{**OPTIONS, **options})


def checkpoints_of(model, folder, timesteps=256, **kwargs):
    """Paths of the checkpoints of a training, the newest last."""
    model.learn(timesteps, callback=TrainingCheckpoint(**{"save_freq": 32, "save_path": folder, "keep": None, **kwargs}))
    return sorted(folder.glob("*.zip"), key=lambda path: int(path.stem.split("_")[1]))


class Layouts(Silent):
    """Keeps the memory layout of the observations that rollouts begin with."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _on_rollout_start(self):
        self.seen.append(self.model._last_obs.strides)


def test_layout_of_images(tmp_path):
    """Observations go on in their memory layout, since convolutions round differently in another one."""
    options = dict(policy_kwargs=dict(features_extractor_kwargs=dict(features_dim=8)), n_steps=8, batch_size=16, device="cpu")
    model, layouts = PPOExt("CnnPolicy", make_toys(observation_space=IMAGE), **options), Layouts()
    model.learn(32, callback=[TrainingCheckpoint(8, tmp_path), layouts])
    resumed = PPOExt.resume(tmp_path / "training_16_steps.zip", make_toys(observation_space=IMAGE), device="cpu")
    layouts_of_resumed = Layouts()
    resumed.learn(32, callback=layouts_of_resumed)
    assert layouts_of_resumed.seen == layouts.seen  # The first is restored.


def test_from_any_checkpoint(tmp_path):
    """Each checkpoint of a training leads to the same model."""
    model = toy_model()
    for path in checkpoints_of(model, tmp_path / "checkpoints"):
        resumed = PPOExt.resume(path, make_toys()).learn(256)
        assert resumed.num_timesteps == model.num_timesteps
        assert all((a == b).all() for a, b in zip(model.policy.parameters(), resumed.policy.parameters(), strict=True))


def test_masked_actions(tmp_path):
    """Environments that refuse invalid actions go on in the middle of their episodes as well."""
    model = PPOExt("MlpPolicy", make_masked(), action_masking=True, **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # their copies fail
        path = checkpoints_of(model, tmp_path / "checkpoints")[1]
    resumed = PPOExt.resume(path, make_masked()).learn(256)
    assert all((a == b).all() for a, b in zip(model.policy.parameters(), resumed.policy.parameters(), strict=True))


def test_second_call_of_learn(tmp_path):
    """A call that counts on from an earlier one goes on to its own end, and its schedules with it."""

    def train(model, **kwargs):
        return model.learn(192, reset_num_timesteps=False, **kwargs)

    plain = toy_model(learning_rate="lin_1e-3").learn(128)
    train(plain, callback=TrainingCheckpoint(32, tmp_path, keep=None))
    resumed = train(PPOExt.resume(tmp_path / "training_192_steps", make_toys()))
    assert resumed.num_timesteps == plain.num_timesteps == 320
    assert all((a == b).all() for a, b in zip(plain.policy.parameters(), resumed.policy.parameters(), strict=True))


def test_longer_training(tmp_path):
    """A larger total than before goes on to that total; one that has been reached trains no further."""
    path = checkpoints_of(toy_model(), tmp_path)[-1]
    assert PPOExt.resume(path, make_toys()).learn(320).num_timesteps == 320
    assert PPOExt.resume(path, make_toys()).learn(256).num_timesteps == 256


def test_iterations_and_log_interval(tmp_path):
    """The log goes on at the same iterations, although the interval does not divide those before the checkpoint."""

    class Rows(Silent):
        def _on_rollout_start(self):
            self.rows = [*getattr(self, "rows", []), self.logger.name_to_value.get("time/iterations")]

    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        toy_model(tensorboard_log=None).learn(192, callback=[TrainingCheckpoint(32, folder, keep=None)], log_interval=2)
    calls = Rows()
    model = PPOExt.resume(folders[0] / "training_192_steps.zip", make_toys())
    model.learn(320, callback=calls, log_interval=2)
    # The fourth iteration is logged, the fifth waits for the sixth.
    assert model.logger.name_to_value["train/n_updates"] == 5 * OPTIONS["n_epochs"]
    assert len(calls.rows) == 2


class Curriculum(BaseCallback):
    """Has an argument, a counter, and something that cannot be pickled."""

    def __init__(self, limit):
        super().__init__()
        self.limit, self.count, self.function = limit, 0, lambda: None

    def _on_step(self):
        self.count += 1
        return True


def test_callbacks_keep_their_state_but_not_their_arguments(tmp_path):
    """Counters go on, while an argument that the script has changed acts; callbacks may be added, left out and reordered."""
    toy_model().learn(128, callback=[Curriculum(limit=1), TrainingCheckpoint(32, tmp_path)])
    first, second = Curriculum(limit=2), Curriculum(limit=3)
    PPOExt.resume(tmp_path, make_toys()).learn(192, callback=[TrainingCheckpoint(32, tmp_path), first, second])
    assert (first.limit, first.count) == (2, 96)
    assert (second.limit, second.count) == (3, 32)
    assert first.function() is None


class Change(BaseCallback):
    """Changes a model once, before the second rollout."""

    def __init__(self, change):
        super().__init__()
        self.change, self.is_done = change, False

    def _on_rollout_start(self):
        if not self.is_done and self.num_timesteps >= 64:
            self.change(self.model)
            self.is_done = True

    def _on_step(self):
        return True


def freeze(model):
    for parameter in model.policy.mlp_extractor.policy_net.parameters():
        parameter.requires_grad_(False)


@pytest.mark.parametrize("backend", ["eager", "auto"])
@pytest.mark.parametrize(
    "change",
    [
        freeze,
        lambda model: setattr(model, "lr_schedule", lambda progress: 0.02),
        lambda model: setattr(model, "learning_rate", 0.02),
        lambda model: setattr(model, "gamma", 0.5),
        lambda model: setattr(model, "gae_lambda", 0.5),
        lambda model: setattr(model.rollout_buffer, "gamma", 0.5),
    ],
    ids=["frozen layers", "schedule", "learning rate", "gamma", "lambda", "gamma of the buffer"],
)
def test_what_a_callback_changes(change, backend, tmp_path):
    """It goes on as in a training without an interruption, also in a second call of `learn`."""
    finals = []
    for at in (None, 128):
        model = toy_model(backend=backend)
        model.learn(256, callback=[TrainingCheckpoint(32, tmp_path, keep=None), Change(change)])
        if at is not None:
            model = PPOExt.resume(tmp_path / f"training_{at}_steps.zip", make_toys())
            model.learn(256, callback=[TrainingCheckpoint(32, tmp_path / "other"), Change(change)])
        model.learn(64, reset_num_timesteps=False)
        finals.append(th.cat([parameter.detach().flatten() for parameter in model.policy.parameters()]))
    assert finals[0].equal(finals[1])


def test_checkpoint_of_the_first_format(tmp_path):
    """It lacks what callbacks have changed, and goes on all the same."""
    path, earlier = checkpoints_of(toy_model(), tmp_path)[1], tmp_path / "earlier.zip"
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(earlier, "w") as copy:
        for name in archive.namelist():
            content = archive.read(name)
            if name == SUMMARY:
                content = json.dumps({**json.loads(content), "format": 1})
            elif name == STATE:
                content = pickle.dumps(pickle.loads(content)[:-1])
            copy.writestr(name, content)
    models = [PPOExt.resume(each, make_toys()).learn(256) for each in (path, earlier)]
    assert_equal(*(model.policy.state_dict() for model in models), "policy")


def test_options_given_to_resume(tmp_path):
    """They have precedence over what a callback has changed before."""
    model = toy_model(learning_rate="lin_0.01")
    change = Change(lambda model: (setattr(model, "gamma", 0.5), setattr(model, "lr_schedule", lambda progress: 0.02)))
    model.learn(192, callback=[TrainingCheckpoint(32, tmp_path, keep=None), change])
    for given, gamma, rate in (({}, 0.99, 0.02), (dict(gamma=0.9), 0.9, 0.02), (dict(learning_rate=0.03), 0.99, 0.03)):
        model = PPOExt.resume(tmp_path / "training_128_steps.zip", make_toys(), **given)
        model.learn(256)
        assert (model.rollout_buffer.gamma, model.lr_schedule(1.0)) == (gamma, rate)


class Numbered(RolloutBuffer):
    """Counts its rollouts, and scales the rewards of each by their number."""

    count = 0

    def compute_returns_and_advantage(self, *args, **kwargs):
        self.count += 1
        self.rewards *= self.count
        super().compute_returns_and_advantage(*args, **kwargs)


def test_own_buffers_and_environments_that_change_actions(tmp_path):
    """A rollout buffer of the user's class goes on, and so does an environment that writes into its actions."""

    class InPlace(gym.ActionWrapper):
        def action(self, action):
            action *= 0.5
            return action

    def make():
        return make_vec_env("Pendulum-v1", 2, seed=1, wrapper_class=InPlace)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = PPOExt("MlpPolicy", make(), rollout_buffer_class=Numbered, **OPTIONS)
        path = checkpoints_of(model, tmp_path)[1]
        resumed = PPOExt.resume(path, make()).learn(256)
    assert resumed.rollout_buffer.count == model.rollout_buffer.count == 4
    assert all((a == b).all() for a, b in zip(model.policy.parameters(), resumed.policy.parameters(), strict=True))


def test_another_folder(tmp_path):
    """A training that goes on in another folder deletes nothing in the former one."""
    path = checkpoints_of(toy_model(), tmp_path / "one")[-1]
    before = sorted(path.parent.iterdir())
    PPOExt.resume(path, make_toys()).learn(512, callback=TrainingCheckpoint(32, tmp_path / "other", keep=1))
    assert sorted(path.parent.iterdir()) == before
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["training_512_steps.zip"]


def test_only_some_are_kept(tmp_path):
    """The newest checkpoints are kept, also after the training is resumed; other files in the folder stay."""
    (tmp_path / "training_1_steps.zip").touch()
    names = [path.name for path in checkpoints_of(toy_model(), tmp_path, keep=2)]
    assert names == ["training_1_steps.zip", "training_192_steps.zip", "training_256_steps.zip"]
    model = PPOExt.resume(tmp_path, make_toys())
    names = [path.name for path in checkpoints_of(model, tmp_path, timesteps=320, keep=2)]
    assert names == ["training_1_steps.zip", "training_256_steps.zip", "training_320_steps.zip"]


def test_newest_whole_checkpoint(tmp_path):
    """In a folder, a damaged checkpoint is passed over with a warning, and models and other files in silence."""
    *_, earlier, newest = checkpoints_of(toy_model(), tmp_path)
    toy_model().save(tmp_path / "model.zip")
    (tmp_path / "notes.zip").write_text("no zip")
    content = bytearray(newest.read_bytes())
    content[len(content) // 3] ^= 255
    newest.write_bytes(content)
    with pytest.warns(UserWarning, match="not a whole checkpoint"):
        assert PPOExt.resume(tmp_path, make_toys()).num_timesteps == int(earlier.stem.split("_")[1])


def test_also_a_model(tmp_path):
    """PPOExt and SB3 load the model of a checkpoint."""
    model = toy_model()
    path = checkpoints_of(model, tmp_path)[-1]
    for algorithm in (PPOExt, PPO):
        loaded = algorithm.load(path, device="cpu")
        assert all((a == b).all() for a, b in zip(model.policy.parameters(), loaded.policy.parameters(), strict=True))


def test_refused(tmp_path):
    """What cannot be resumed is refused with a reason."""
    path = checkpoints_of(toy_model(), tmp_path / "checkpoints")[-1]
    toy_model().save(tmp_path / "model.zip")
    with pytest.raises(ValueError, match="`env` has 3 environments, and the checkpoint was written with 2"):
        PPOExt.resume(path, make_toys(3))
    with pytest.raises(ValueError, match="is a model and no checkpoint"):
        PPOExt.resume(tmp_path / "model.zip", make_toys())
    with pytest.raises(FileNotFoundError, match="no checkpoint of `TrainingCheckpoint` in"):
        PPOExt.resume(tmp_path, make_toys())
    with pytest.raises(FileNotFoundError, match=r'missing\.zip": give a checkpoint of `TrainingCheckpoint`'):
        PPOExt.resume(tmp_path / "missing.zip", make_toys())
    with pytest.raises(IsADirectoryError, match=r"is a folder: give the zip of a model, such as .*model\.zip"):
        PPOExt.load(tmp_path)
    (tmp_path / "model").mkdir()  # as RL Zoo has the settings beside the zip
    with pytest.raises(IsADirectoryError, match=r"model is a folder: give the zip of a model, such as .*/model\.zip"):
        PPOExt.load(tmp_path / "model")
    with pytest.raises(FileNotFoundError, match=r"There is no model \".*missing\" or \".*missing\.zip\": give the path"):
        PPOExt.load(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"`trusted=False` is not valid: .*load\(\.\.\., trusted=False\)"):
        PPOExt.resume(path, make_toys(), trusted=False)
    with pytest.raises(ValueError, match="`force_reset=True` is not valid"):
        PPOExt.resume(path, make_toys(), force_reset=True)
    with pytest.raises(ValueError, match="`path=None` is not valid"):
        PPOExt.resume(None, make_toys())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        PPOExt.resume(path, make_toys())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("save_freq", 0),
        ("save_freq", 1.5),
        ("save_path", None),
        ("name_prefix", 1),
        ("name_prefix", "a/b"),
        ("keep", 0),
        ("keep", "all"),
    ],
)
def test_arguments_are_checked(name, value):
    """An argument that is not valid is named."""
    with pytest.raises(ValueError, match=f"`{name}="):
        TrainingCheckpoint(**{"save_freq": 1, "save_path": "folder", name: value})


def test_needs_ppo_ext(tmp_path):
    """SB3's PPO is refused before it trains."""
    model = PPO("MlpPolicy", make_toys(), n_steps=16)
    with pytest.raises(ValueError, match="PPO cannot resume"):
        model.learn(64, callback=TrainingCheckpoint(16, tmp_path))


class Forgetful(gym.Wrapper, gym.utils.EzPickle):
    """An environment whose reward depends on something that it does not let anyone read."""

    def __init__(self, env):
        gym.Wrapper.__init__(self, env)
        gym.utils.EzPickle.__init__(self, env)
        hidden = [0]
        self.count = lambda: hidden.__setitem__(0, hidden[0] + 1) or hidden[0]

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, reward + self.count() % 3, *rest


def test_environments_that_cannot_go_on(tmp_path):
    """Where the state of an environment cannot be had, a warning says so once, and the training goes on from a reset."""
    make = dict(env_id="Pendulum-v1", n_envs=2, seed=1, wrapper_class=Forgetful)
    model = PPOExt("MlpPolicy", make_vec_env(**make), **OPTIONS)
    with pytest.warns(UserWarning, match="A resumed training will start with a reset") as caught:
        model.learn(192, callback=TrainingCheckpoint(32, tmp_path))
    assert len([each for each in caught if "A resumed training" in str(each.message)]) == 1
    resumed = PPOExt.resume(tmp_path, make_vec_env(**make))
    with pytest.warns(UserWarning, match="continues from a reset of the environments, since the rewards of copies"):
        resumed.learn(256)
    assert resumed.num_timesteps == 256


FORKED = dict(vec_env_cls=ParallelVecEnv, vec_env_kwargs=dict(n_workers=1, start_method="fork"))


@pytest.mark.parametrize("vec_env", [pytest.param(FORKED, marks=pytest.mark.integration, id="processes"), {}], ids=str)
def test_other_episodes_after_each_reset(vec_env, tmp_path, monkeypatch):
    """Where environments are reset, each resumed run begins other episodes, also if the environments have a seed."""
    seen = []
    collect = PPOExt.collect_rollouts
    monkeypatch.setattr(
        PPOExt, "collect_rollouts", lambda self, *a, **k: seen.append(self._last_obs) or collect(self, *a, **k)
    )
    first = []
    for _ in range(3):
        env = make_vec_env("Pendulum-v1", 2, seed=1, wrapper_class=Forgetful, **vec_env)
        model = PPOExt.resume(tmp_path, env) if first else PPOExt("MlpPolicy", env, **OPTIONS)
        seen.clear()
        with pytest.warns(UserWarning, match="continues from a reset" if first else "will start with a reset"):
            model.learn(model.num_timesteps + 192, callback=TrainingCheckpoint(32, tmp_path))
        first.append(seen[0])
        env.close()
    assert not np.isclose(first[0], first[1]).any()
    assert not np.isclose(first[1], first[2]).any()


def test_other_environments(tmp_path):
    """Wrappers that were not there before: a warning names them, and the training goes on from a reset."""
    model = PPOExt("MlpPolicy", make_vec_env("Pendulum-v1", 2), **OPTIONS)
    model.learn(128, callback=TrainingCheckpoint(32, tmp_path))
    other = make_vec_env("Pendulum-v1", 2, wrapper_class=lambda env: gym.wrappers.RescaleAction(env, -2, 2))
    with pytest.warns(UserWarning, match="RescaleAction.* now, and were"):
        PPOExt.resume(tmp_path, other).learn(192)


pendulums = partial(make_vec_env, "Pendulum-v1", 2)


@pytest.mark.parametrize("outer", [VecNormalize, partial(RNDReward, n_steps=16)], ids=["VecNormalize", "RNDReward"])
@pytest.mark.parametrize(
    "other",
    [partial(pendulums, vec_env_cls=FastDummyVecEnv), lambda: VecMonitor(pendulums())],
    ids=["class of the environments", "wrapper inside"],
)
def test_other_environments_within_a_normalisation(other, outer, tmp_path):
    """Statistics are restored, and the training goes on with the new environments."""
    model = PPOExt("MlpPolicy", outer(pendulums()), **OPTIONS).learn(128, callback=TrainingCheckpoint(32, tmp_path))
    inner = other()
    env = outer(inner)
    with pytest.warns(UserWarning, match="continues from a reset of the environments"):
        PPOExt.resume(tmp_path, env).learn(192)
    assert env.venv is inner
    assert env.obs_rms.count > model.env.obs_rms.count
    env.close()


def test_folder_appears_with_its_first_checkpoint(tmp_path):
    """A script that was interrupted before its first checkpoint finds no folder, and starts anew."""

    class Early(BaseCallback):
        def _on_step(self):
            raise Interruption

    with pytest.raises(Interruption):
        toy_model().learn(128, callback=[TrainingCheckpoint(32, tmp_path / "checkpoints"), Early()])
    assert list(tmp_path.iterdir()) == []


def test_failure_of_the_first_checkpoint(tmp_path, monkeypatch):
    """A checkpoint that cannot be written leaves no folder, which a script would try to resume from."""

    def full(file):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        toy_model().learn(128, callback=TrainingCheckpoint(32, tmp_path / "checkpoints"))
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_hides_what_is_repeated(tmp_path, monkeypatch):
    """TensorBoard shows each time step once, in the folder of the run, although another run was started since."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # The number at the end of the names of event files: its tenth is the first of the resumed run.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(8))

    logs = tmp_path / "tensorboard"
    paths = checkpoints_of(toy_model(tensorboard_log=str(logs)), tmp_path)
    toy_model(tensorboard_log=str(logs)).learn(64)
    PPOExt.resume(paths[1], make_toys()).learn(320)
    events = EventAccumulator(str(logs / "PPOExt_1"))
    events.Reload()
    assert [event.step for event in events.Scalars("time/fps")] == [64, 128, 192, 256, 320]
    assert sorted(path.name for path in logs.iterdir()) == ["PPOExt_1", "PPOExt_2"]


def test_name_with_a_folder_in_tensorboard(tmp_path):
    """The folder of the run is found again if `tb_log_name` has a slash."""
    logs = tmp_path / "tensorboard"
    toy_model(tensorboard_log=str(logs)).learn(64, callback=TrainingCheckpoint(32, tmp_path), tb_log_name="group/run")
    PPOExt.resume(tmp_path, make_toys()).learn(128, tb_log_name="group/run")
    assert [str(path.relative_to(logs)) for path in logs.glob("*/*")] == ["group/run_1"]


@pytest.mark.parametrize(
    ("policy", "keywords"),
    [("MlpTransformerPolicy", dict(context_length=6, d_model=8, n_heads=2)), ("MlpLstmPolicy", dict(lstm_hidden_size=8))],
)
def test_memory_of_a_policy_goes_on(policy, keywords, tmp_path):
    """The first values of the resumed rollout depend on observations before the checkpoint."""
    options = dict(policy_kwargs=keywords)
    long = dict(length=100, p_end=0.0)
    model = PPOExt(policy, make_toys(**long), **{**OPTIONS, **options})
    path = checkpoints_of(model, tmp_path, timesteps=128)[-1]
    plain = PPOExt.resume(path, make_toys(**long)).learn(192)
    forgetful = PPOExt.resume(path, make_toys(**long))
    forgetful._interrupted = forgetful._interrupted._replace(memory=None)
    forgetful.learn(192)
    assert not np.array_equal(plain.rollout_buffer.values[0], forgetful.rollout_buffer.values[0])


class Dice(BaseCallback):
    """Uses the global generators between the steps."""

    def _on_step(self):
        np.random.rand(), th.rand(1)
        return True


@pytest.mark.parametrize("backend", ["eager", "device"])
def test_global_generator_of_torch(backend, tmp_path):
    """An environment that draws from it continues, though the policy draws from it, too, and callbacks."""

    def make():
        return TorchVecEnv(TorchPendulum(2, max_episode_steps=15, has_own_generator=False))

    def callbacks():
        return [TrainingCheckpoint(40, tmp_path / "seldom"), TrainingCheckpoint(32, tmp_path, keep=None), Dice()]

    model = PPOExt("MlpPolicy", make(), backend=backend, **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.learn(256, callback=callbacks())
    resumed = PPOExt.resume(tmp_path / "training_128_steps.zip", make()).learn(256, callback=callbacks())
    assert all((a == b).all() for a, b in zip(model.policy.parameters(), resumed.policy.parameters(), strict=True))
    np.testing.assert_array_equal(*(np.asarray(each.rollout_buffer.observations) for each in (model, resumed)))


def test_environment_by_its_id(tmp_path):
    """An environment that is given by its id goes on, too."""
    model = PPOExt("MlpPolicy", "CartPole-v1", **OPTIONS)
    path = checkpoints_of(model, tmp_path)[1]
    resumed = PPOExt.resume(str(path), "CartPole-v1").learn(256)
    assert all((a == b).all() for a, b in zip(model.policy.parameters(), resumed.policy.parameters(), strict=True))


def test_fast_engines_stay_fast(tmp_path):
    """The callback does not count as code of the user, for which fast engines would keep every value."""
    callback = TrainingCheckpoint(32, tmp_path)
    toy_model().learn(128, callback=callback)
    assert not runs_user_code(callback)
