"""Environments of EnvPool are those of its own API, with SB3's ends of episodes, and log episodes."""

import sys

import numpy as np
import pytest
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecFrameStack

from sb3_ppo_ext import EnvPoolVecEnv, PPOExt, make
from sb3_ppo_ext.envs.time_limits import time_limit_of_all

envpool = pytest.importorskip("envpool")
pytestmark = pytest.mark.integration
# One id of each suite, with an episode length that comes about in the test
SUITES = {
    "classic control": ("Pendulum-v1", dict(max_episode_steps=7)),
    "ends by itself": ("CartPole-v1", {}),
    "box2d": ("LunarLander-v3", dict(max_episode_steps=30)),
    "toy text": ("FrozenLake-v1", dict(max_episode_steps=6)),
    "mujoco": ("HalfCheetah-v5", dict(max_episode_steps=6)),
    "mujoco, ends": ("Hopper-v5", {}),
    "atari": ("Pong-v5", dict(max_episode_steps=6)),
    "minigrid": ("MiniGrid-Empty-5x5-v0", dict(max_episode_steps=6)),
    "dm_control": ("CartpoleBalance-v1", dict(max_episode_steps=6)),
}


def of_one(observations, index):
    return {key: part[index] for key, part in observations.items()} if isinstance(observations, dict) else observations[index]


@pytest.mark.parametrize("suite", SUITES)
def test_equal_to_its_own_api(suite):
    """Observations, rewards and ends are those of EnvPool's own, and last observations are where SB3 reads them."""
    env_id, config = SUITES[suite]
    env = EnvPoolVecEnv(env_id, 2, seed=5, **config)
    own = [envpool.make_gymnasium(env_id, num_envs=1, seed=5 + index, **config) for index in range(2)]
    observations = env.reset()
    expected = [each.reset()[0] for each in own]
    env.action_space.seed(0)
    n_ends, returns = 0, np.zeros(2)
    for _ in range(150 if suite == "mujoco, ends" else 40):
        for index in range(2):
            np.testing.assert_equal(of_one(observations, index), of_one(expected[index], 0))
        actions = np.stack([env.action_space.sample() for _ in range(2)])
        observations, rewards, dones, infos = env.step(actions)
        for index, each in enumerate(own):
            last, reward, terminated, truncated, _ = each.step(actions[index : index + 1])
            assert rewards[index] == np.float32(reward[0])
            assert dones[index] == (terminated[0] or truncated[0])
            assert infos[index]["TimeLimit.truncated"] == bool(truncated[0] and not terminated[0])
            returns[index] += reward[0]
            expected[index] = last
            if dones[index]:
                n_ends += 1
                np.testing.assert_equal(infos[index]["terminal_observation"], of_one(last, 0))
                assert infos[index]["episode"]["r"] == pytest.approx(returns[index], rel=1e-5, abs=1e-5)
                returns[index] = 0
                # It begins the next episode in an additional step, whatever the action.
                expected[index] = each.step(actions[index : index + 1])[0]
    assert n_ends > 0
    env.close()


def test_seeds():
    """With a seed, also one that is set later, environments repeat themselves; without one, they are new each time."""

    def first(env, seed=None):
        if seed is not None:
            env.seed(seed)
        return env.reset()

    env = EnvPoolVecEnv("Pendulum-v1", 3, seed=1)
    observations = first(env)
    np.testing.assert_array_equal(first(EnvPoolVecEnv("Pendulum-v1", 3), seed=1), observations)
    assert not np.array_equal(first(env), observations)
    np.testing.assert_array_equal(first(env, seed=1), observations)
    assert len({first(EnvPoolVecEnv("Pendulum-v1"))[0, 0] for _ in range(3)}) == 3


def test_make():
    """`make` takes the preset of the id, keeps its samples per update, trains, logs episodes and is evaluated."""
    model, env = make("Pendulum-v1", n_envs=8, vec_env_cls="envpool", env_kwargs=dict(max_episode_steps=50), device="cpu")
    assert isinstance(env, EnvPoolVecEnv)
    assert (model.n_envs, model.n_steps) == (8, 512)
    model.set_parameters(model.get_parameters())
    model.learn(1024)
    assert len(model.ep_info_buffer) > 0
    assert model.ep_info_buffer[-1]["l"] == 50
    mean, _ = evaluate_policy(model, EnvPoolVecEnv("Pendulum-v1", 2, seed=0), 2)
    assert mean < 0
    env.close()


def test_make_of_its_own_ids():
    """Ids that Gymnasium does not know are trained with `default`, whose policy fits their observations."""
    model, env = make("CheetahRun-v1", vec_env_cls="envpool", n_steps=16, batch_size=16, device="cpu", seed=3)
    assert type(model.policy).__name__ == "MultiInputPolicy"
    model.learn(32)
    env.close()


def test_atari():
    """The preset of Atari sees lives, clipped rewards and four frames; the log has games and their scores."""
    pytest.importorskip("rl_zoo3")
    for env_id, sticky in (("PongNoFrameskip-v4", 0.0), ("ALE/Pong-v5", 0.25)):
        model, env = make(env_id, n_envs=2, vec_env_cls="envpool", n_steps=16, batch_size=16, device="cpu", seed=0)
        assert isinstance(env, VecFrameStack)
        assert model.observation_space.shape == (4, 84, 84)
        config = env.unwrapped.venv.config
        assert config["episodic_life"]
        assert config["reward_clip"]
        assert config["repeat_action_probability"] == sticky
        env.close()
    env = EnvPoolVecEnv("Breakout-v5", 2, seed=0, episodic_life=True, reward_clip=True)
    env.reset()
    np.random.seed(0)
    lives, games = 0, []
    for _ in range(600):
        _, _, dones, infos = env.step(np.random.randint(0, 4, 2))
        lives += dones.sum()
        games += [info["episode"] for info in infos if "episode" in info]
    assert lives >= 5 * len(games) > 0
    env.close()


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("env='HalfCheeta-v5'.*it has HalfCheetah-v5", dict(env="HalfCheeta-v5")),
        ("env=.*give the id of one", dict(env=lambda: None)),
        ("env_kwargs=.*'nope'", dict(env="Pendulum-v1", env_kwargs=dict(nope=1))),
        ("env_wrapper=.*not wrapped one by one", dict(env="Pendulum-v1", env_wrapper="gymnasium.wrappers.ClipAction")),
        ("n_envs=0", dict(env="Pendulum-v1", n_envs=0)),
    ],
)
def test_bad_input(message, arguments):
    """Mistakes are refused by name."""
    with pytest.raises(ValueError, match=message):
        make(**arguments, vec_env_cls="envpool")


def test_without_the_package(monkeypatch):
    """Without EnvPool, the message says how to install it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"vec_env_cls='envpool'.*pip install envpool"):
        EnvPoolVecEnv("Pendulum-v1")


def test_the_zoo(tmp_path, monkeypatch):
    """`--vec-env envpool` trains, evaluates, saves, and is remembered by the run."""
    pytest.importorskip("rl_zoo3")
    import contextvars

    import yaml
    from support.zoo import saved

    from sb3_ppo_ext.zoo.__main__ import main

    def zoo_here(*words):
        monkeypatch.setattr(sys, "argv", ["zoo", *map(str, words)])
        contextvars.copy_context().run(main)

    made = []
    init = EnvPoolVecEnv.__init__
    monkeypatch.setattr(EnvPoolVecEnv, "__init__", lambda self, *args, **kw: made.append(args) or init(self, *args, **kw))
    monkeypatch.chdir(tmp_path)
    zoo_here(
        *("train", "--algo", "ppo_ext", "--env", "Pendulum-v1", "--vec-env", "envpool", "-n", "256", "--eval-freq", "128"),
        *("--eval-episodes", "1", "--save-freq", "64", "--device", "cpu", "-params", "n_envs:4", "n_steps:32"),
    )
    assert made == [("Pendulum-v1", 1), ("Pendulum-v1", 4)]
    run = saved(tmp_path, "Pendulum-v1").parent
    assert yaml.unsafe_load((run / "Pendulum-v1" / "args.yml").read_text())["vec_env"] == "envpool"
    assert PPOExt.load(run / "Pendulum-v1.zip").num_timesteps == 256
    (run / "Pendulum-v1.zip").unlink()
    zoo_here("resume", run)
    assert len(made) == 4


def test_time_limit():
    """It is the pool's, unless the pool has none."""
    assert time_limit_of_all(EnvPoolVecEnv("Pendulum-v1", 2, max_episode_steps=7)) == 7
    assert time_limit_of_all(EnvPoolVecEnv("CartPole-v1", 2)) == 500
    assert time_limit_of_all(EnvPoolVecEnv("Catch-v0", 2)) is None
