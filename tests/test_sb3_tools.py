"""What SB3's users have around their PPO works around PPOExt."""

import warnings

import numpy as np
import pytest
from stable_baselines3.common.callbacks import (
    CallbackList,
    CheckpointCallback,
    EvalCallback,
    EveryNTimesteps,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import SubprocVecEnv, VecCheckNan, VecFrameStack, VecMonitor, VecNormalize
from support.toys import DICT, IMAGE, ToyEnv, make_toys

from sb3_ppo_ext import MlpPolicy, PPOExt

SMALL = dict(n_steps=16, batch_size=16, n_epochs=2, device="cpu")


def test_eval_and_checkpoints(tmp_path):
    """EvalCallback stops at its threshold and keeps the best model, CheckpointCallback keeps some on the way."""
    stop = StopTrainingOnRewardThreshold(-1e6)
    evaluate = EvalCallback(
        make_vec_env("CartPole-v1"),
        callback_on_new_best=stop,
        eval_freq=20,
        best_model_save_path=str(tmp_path),
        log_path=str(tmp_path),
        verbose=0,
    )
    checkpoints = EveryNTimesteps(16, CheckpointCallback(1, str(tmp_path)))
    model = PPOExt("MlpPolicy", "CartPole-v1", **SMALL).learn(1000, callback=CallbackList([checkpoints, evaluate]))
    assert model.num_timesteps == 20
    assert (tmp_path / "evaluations.npz").exists()
    for name in ("best_model", "rl_model_16_steps"):
        mean, _ = evaluate_policy(PPOExt.load(tmp_path / name), make_vec_env("CartPole-v1"), n_eval_episodes=2)
        assert mean >= 1


def test_stop_on_max_episodes():
    """StopTrainingOnMaxEpisodes ends the training after as many episodes."""
    model = PPOExt("MlpPolicy", ToyEnv(p_end=0.0), **SMALL)
    assert model.learn(1000, callback=StopTrainingOnMaxEpisodes(3)).num_timesteps == 3 * 7


def test_loggers(tmp_path):
    """CSV, JSON and TensorBoard files get SB3's keys."""
    model = PPOExt("MlpPolicy", "CartPole-v1", **SMALL)
    model.set_logger(configure(str(tmp_path), ["csv", "json", "tensorboard"]))
    model.learn(64)
    header = (tmp_path / "progress.csv").read_text().splitlines()[0].split(",")
    assert {"rollout/ep_rew_mean", "train/approx_kl", "train/clip_range", "time/fps"} <= set(header)
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_tensorboard_log(tmp_path):
    """The runs are named after the class, and continue in the same folder."""
    model = PPOExt("MlpPolicy", "CartPole-v1", tensorboard_log=str(tmp_path), **SMALL).learn(32)
    model.learn(32, reset_num_timesteps=False)
    model.learn(32, tb_log_name="mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["PPOExt_1", "mine_1"]


def test_progress_bar_and_stdout(capfd):
    """The progress bar comes to its end, and the table of statistics is printed."""
    PPOExt("MlpPolicy", "CartPole-v1", verbose=1, **SMALL).learn(48, progress_bar=True)
    printed = "".join(capfd.readouterr())
    assert "48/48" in printed
    assert "ep_len_mean" in printed


def test_predict():
    """`predict` takes single and batched observations, deterministic or not."""
    model = PPOExt("MlpPolicy", ToyEnv(), **SMALL)
    observation = ToyEnv().observation_space.sample()
    action, state = model.predict(observation, deterministic=True)
    assert action.shape == (2,)
    assert state is None
    batch, _ = model.predict(np.stack([observation] * 3), deterministic=True)
    np.testing.assert_allclose(batch, np.stack([action] * 3), rtol=1e-5, atol=1e-7)
    assert (model.predict(observation)[0] != action).any()


@pytest.mark.parametrize("wrap", [VecNormalize, VecMonitor, VecCheckNan, lambda env: VecFrameStack(env, 2)])
def test_wrappers(wrap):
    """PPOExt trains in each of SB3's wrappers of vectorised environments."""
    PPOExt("MlpPolicy", wrap(make_toys()), **SMALL).learn(64)


@pytest.mark.filterwarnings("ignore:The given environment is not wrapped")
def test_vec_normalize_saved_and_loaded(tmp_path):
    """Evaluation works with loaded statistics, as the Zoo does it."""
    model = PPOExt("MlpPolicy", VecNormalize(make_toys()), **SMALL).learn(64)
    model.save(tmp_path / "model")
    model.get_vec_normalize_env().save(tmp_path / "statistics.pkl")
    env = VecNormalize.load(tmp_path / "statistics.pkl", make_toys())
    env.training = env.norm_reward = False
    evaluate_policy(PPOExt.load(tmp_path / "model"), env, n_eval_episodes=2)


@pytest.mark.integration
def test_subprocesses():
    """PPOExt trains on environments in other processes."""
    env = make_vec_env("CartPole-v1", 2, vec_env_cls=SubprocVecEnv)
    PPOExt("MlpPolicy", env, **SMALL).learn(64)
    env.close()


@pytest.mark.parametrize(
    ("policy", "kwargs"),
    [
        ("MlpPolicy", {}),
        (MlpPolicy, {}),
        ("CnnPolicy", dict(observation_space=IMAGE)),
        ("MultiInputPolicy", dict(observation_space=DICT)),
    ],
    ids=str,
)
def test_save_and_load(policy, kwargs, tmp_path):
    """A loaded model acts alike, also its policy alone and with another number of environments."""
    model = PPOExt(policy, make_toys(**kwargs), **SMALL).learn(32)
    model.save(tmp_path / "model")
    observation = model.env.reset()
    expected, _ = model.predict(observation, deterministic=True)
    loaded = PPOExt.load(tmp_path / "model", env=make_toys(n_envs=3, **kwargs))
    np.testing.assert_array_equal(loaded.predict(observation, deterministic=True)[0], expected)
    loaded.learn(48)
    model.policy.save(tmp_path / "policy")
    policy = type(model.policy).load(tmp_path / "policy")
    np.testing.assert_array_equal(policy.predict(observation, deterministic=True)[0], expected)


def test_set_env():
    """The training goes on in an environment that was set afterwards."""
    model = PPOExt("MlpPolicy", make_toys(), **SMALL).learn(32)
    model.set_env(make_toys())
    model.learn(32, reset_num_timesteps=False)
    assert model.num_timesteps == 64


def test_quiet():
    """A usual run raises no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PPOExt("MlpPolicy", "CartPole-v1", **SMALL).learn(64)


@pytest.mark.slow
def test_learns():
    """CartPole-v1 is solved with the Zoo's hyperparameters."""
    model = PPOExt(
        "MlpPolicy",
        make_vec_env("CartPole-v1", 8, seed=0),
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        learning_rate="lin_0.001",
        clip_range="lin_0.2",
        seed=0,
    ).learn(100_000)
    assert evaluate_policy(model, make_vec_env("CartPole-v1", seed=1))[0] > 475
