"""Objects that environments, callbacks and the model share go on to be shared, and what they refer to is the model's own."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback, EveryNTimesteps
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv
from support.resuming import OPTIONS
from support.toys import Silent, make_toys

from sb3_ppo_ext import PPOExt, TrainingCheckpoint


class Task:
    """What a curriculum changes."""

    level = 0


class Walk(gym.Env):
    """A random walk, whose rewards depend on everything that users let environments depend on."""

    observation_space = spaces.Box(-10, 10, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)
    episodes = 0

    def __init__(self, task=None, hidden=False):
        self.task, self.own = task, np.random.default_rng(3)
        self.hidden = (number for number in range(100_000)) if hidden else None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        Walk.episodes += 1
        self.position, self.time = self.np_random.normal(size=1).astype(np.float32), 0
        return self.position, {}

    def step(self, action):
        self.time += 1
        self.position = np.clip(self.position + action / 10, -5, 5).astype(np.float32)
        reward = np.random.random() + self.own.random() + self.episodes % 3
        reward += 0 if self.task is None else self.task.level
        reward += 0 if self.hidden is None else next(self.hidden) % 3
        return self.position, float(reward), False, self.time >= 9, {"note": lambda: None}


class Curriculum(BaseCallback):
    """Changes the task that the environments have, too."""

    def __init__(self, task):
        super().__init__()
        self.task = task

    def _on_step(self):
        self.task.level = max(self.num_timesteps - 100, 0) // 8
        return True


def train(folder, path=None, total=256, hidden=False, wrapper=None, more=(), **kwargs):
    """A script that starts anew, or resumes from a checkpoint."""
    np.random.seed(0)
    Walk.episodes, task = 0, Task()
    monitor = dict(info_keywords=("note",), allow_early_resets=False)
    env = make_vec_env(lambda: Walk(task, hidden), 2, seed=1, monitor_kwargs=monitor, wrapper_class=wrapper)
    model = PPOExt("MlpPolicy", env, **OPTIONS) if path is None else PPOExt.resume(path, env)
    checkpoint = TrainingCheckpoint(**{"save_freq": 32, "save_path": folder, "keep": None, **kwargs})
    return model.learn(total, callback=[checkpoint, Curriculum(task), *more])


def assert_equal(one, other):
    assert all((a == b).all() for a, b in zip(one.policy.parameters(), other.policy.parameters(), strict=True))


def test_shared_objects_and_global_state(tmp_path):
    """
    Environments go on exactly if they share an object with a callback, count in an attribute of their class, and draw from
    the generator of NumPy. What only cloudpickle can pickle is no obstacle among the last episodes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain = train(tmp_path)
        # Where the callback changes the environments before the first checkpoint, they cannot be checked.
        warnings.filterwarnings("ignore", "A resumed training will start with a reset")
        for number in (64, 192):
            assert_equal(plain, train(tmp_path / "other", tmp_path / f"training_{number}_steps.zip"))


class Referring(Silent):
    """Refers to parts of the model, and to the environments."""

    def _on_training_start(self):
        self.optimizer, self.episodes = self.model.policy.optimizer, self.model.ep_info_buffer
        self.layers, self.env = self.model.policy.mlp_extractor, self.training_env

    def _on_rollout_end(self):
        self.optimizer.param_groups[0]["weight_decay"] = self.num_timesteps / 1e4
        with th.no_grad():
            self.layers.policy_net[0].weight.mul_(0.99)


def test_references_to_the_model(tmp_path):
    """Callbacks that refer to parts of the model go on to refer to those of the model that is resumed."""
    plain = train(tmp_path, more=[Referring()])
    callback = Referring()
    resumed = train(tmp_path / "other", tmp_path / "training_128_steps.zip", more=[callback])
    assert callback.optimizer is resumed.policy.optimizer
    assert callback.layers is resumed.policy.mlp_extractor
    assert callback.episodes is resumed.ep_info_buffer
    assert_equal(plain, resumed)


def test_reset(tmp_path):
    """
    Where environments have to be reset, generators and running statistics stay, a callback that refers to the environments
    does not undo the reset, and environments that refuse to be reset in the middle of an episode are reset only once.
    """
    kwargs = dict(hidden=True, wrapper=lambda env: gym.wrappers.NormalizeObservation(env), more=[Referring()])
    with pytest.warns(UserWarning, match="will start with a reset"):
        model = train(tmp_path, total=64, **kwargs)
    with pytest.warns(UserWarning, match="continues from a reset"):
        resumed = train(tmp_path, tmp_path / "training_64_steps.zip", total=64, **kwargs)
    for before, after in zip(model.env.envs, resumed.env.envs, strict=True):
        assert after.unwrapped.own.bit_generator.state == before.unwrapped.own.bit_generator.state
        assert after.unwrapped.time == 0
        assert after.get_wrapper_attr("obs_rms").count == before.get_wrapper_attr("obs_rms").count + 1


def test_not_called_at_each_step(tmp_path):
    """A callback that is not called at each step cannot check the environments, and says so."""
    with pytest.warns(UserWarning, match="`TrainingCheckpoint` that is not called at each step"):
        PPOExt("MlpPolicy", make_toys(), **OPTIONS).learn(192, callback=EveryNTimesteps(50, TrainingCheckpoint(1, tmp_path)))
    assert list(tmp_path.glob("*.zip"))


@pytest.mark.integration
def test_evaluation_in_other_processes(tmp_path):
    """Environments of a callback in other processes cannot be restored: a warning says so."""
    evaluation = EvalCallback(make_vec_env("CartPole-v1", vec_env_cls=SubprocVecEnv), eval_freq=1000)
    model = PPOExt("MlpPolicy", make_vec_env("CartPole-v1"), **OPTIONS)
    with pytest.warns(UserWarning, match="callback's SubprocVecEnv are in other processes"):
        model.learn(64, callback=[TrainingCheckpoint(32, tmp_path), evaluation])
    evaluation.eval_env.close()


class Best(BaseCallback):
    """Remembers something from its first steps."""

    best = None

    def _on_step(self):
        self.best = self.best or self.num_timesteps
        return True


def test_several_calls_of_learn(tmp_path):
    """Short calls add up to a checkpoint, and what callbacks remember from an earlier call is part of it."""
    model, callbacks = PPOExt("MlpPolicy", make_toys(), **OPTIONS), [TrainingCheckpoint(50, tmp_path), Best()]
    for _ in range(2):
        model.learn(64, callback=callbacks, reset_num_timesteps=False)
    again = [TrainingCheckpoint(50, tmp_path), Best()]
    PPOExt.resume(tmp_path, make_toys()).learn(64, callback=again, reset_num_timesteps=False)
    assert again[1].best == callbacks[1].best == 2
