"""Environments that step in tensors: the tensors, SB3's methods on top of them, and what they refuse."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize
from support.host_waits import no_host_waits
from support.torch_envs import TorchCartPole, TorchPendulum

from sb3_ppo_ext import PPOExt, TensorStep, TensorVecEnv, TorchVecEnv

SPACES = spaces.Dict({"image": spaces.Box(0, 255, (3,), np.uint8), "clock": spaces.Discrete(9)})


class Counter(TensorVecEnv):
    """Three clocks, of which number `i` is cut off after `2 + i` steps. Its tensors are overwritten by the next step."""

    def __init__(self, gives_final=True, **changes):
        super().__init__(3, SPACES, spaces.Discrete(2))
        self.time = th.zeros(3, dtype=th.int64)
        self.buffers = {"image": th.zeros(3, 3, dtype=th.uint8), "clock": th.zeros(3, dtype=th.int64)}
        self.rewards = th.zeros(3)
        self.gives_final, self.changes, self.given_seed = gives_final, changes, None

    def observe(self):
        return {"image": self.time.to(th.uint8).reshape(3, 1).repeat(1, 3), "clock": self.time.clone()}

    def write(self):
        for key, values in self.observe().items():
            self.buffers[key].copy_(values)
        return self.buffers

    def _reset(self, seed):
        self.given_seed = seed
        self.time.zero_()
        return self.write()

    def _step(self, actions):
        self.time += 1
        self.rewards.copy_(actions * self.time)
        truncated = self.time >= 2 + th.arange(3)
        final = self.observe() if self.gives_final else None
        log = {"success": truncated.clone(), "level": th.tensor(0.5), "episode": th.zeros(3)}
        self.time.masked_fill_(truncated, 0)
        step = TensorStep(self.write(), self.rewards, th.zeros(3, dtype=th.bool), truncated, final, log)
        return step._replace(**self.changes)


def ones(n=3):
    return np.ones(n, np.int64)


class StartAt(gym.Wrapper):
    """A task of Gymnasium that begins its episodes in given states."""

    def __init__(self, env_id, starts):
        super().__init__(gym.make(env_id, disable_env_checker=True))
        self.starts = starts

    def reset(self, **kwargs):
        self.env.reset(**kwargs)
        self.unwrapped.state = np.array(self.starts[0])
        return (self.starts.pop(0) if self.observes_state else self.unwrapped._get_obs()), {}

    @property
    def observes_state(self):
        return hasattr(self.unwrapped, "x_threshold")


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(("env_id", "env_class"), [("CartPole-v1", TorchCartPole), ("Pendulum-v1", TorchPendulum)])
def test_everything_is_that_of_gymnasium_in_a_dummy_vec_env(env_id, env_class):
    """Observations, rewards, ends of episodes and infos are those of Gymnasium's environment, `Monitor` and `DummyVecEnv`."""
    n_envs, n_steps = 3, 620
    tolerance = 2e-5 if env_id == "CartPole-v1" else 1e-3  # where Gymnasium multiplies torques in float32
    torch_env = env_class(n_envs, dtype=th.float64, max_episode_steps=None)
    env = TorchVecEnv(torch_env)
    env.seed(1)
    env.action_space.seed(1)
    starts = [[] for _ in range(n_envs)]
    reference = DummyVecEnv([lambda s=s: Monitor(StartAt(env_id, s)) for s in starts])
    observations = env.reset()
    for index, queue in enumerate(starts):
        queue.append(torch_env.state[:, index].numpy().copy())
    np.testing.assert_allclose(observations, reference.reset(), atol=1e-6)
    ends = []
    for step in range(n_steps):
        # The last pole is kept upright, so that the time limit ends its episode.
        actions = np.array([env.action_space.sample() for _ in range(n_envs)])
        if env_id == "CartPole-v1":
            actions[2] = observations[2, 2] + observations[2, 3] + 0.02 * observations[2, 0] + 0.1 * observations[2, 1] > 0
        observations, rewards, dones, infos = env.step(actions)
        for index in np.flatnonzero(dones):
            starts[index][:] = [torch_env.state[:, index].numpy().copy()]
        expected = reference.step(actions)
        np.testing.assert_allclose(observations, expected[0], atol=tolerance, err_msg=str(step))
        np.testing.assert_allclose(rewards, expected[1], atol=tolerance)
        np.testing.assert_array_equal(dones, expected[2])
        assert (observations.dtype, rewards.dtype, dones.dtype) == (np.float32, np.float32, bool)
        for index in np.flatnonzero(dones):
            theirs = expected[3][index]
            ends.append(theirs["TimeLimit.truncated"])
            assert infos[index]["TimeLimit.truncated"] == theirs["TimeLimit.truncated"]
            np.testing.assert_allclose(infos[index]["terminal_observation"], theirs["terminal_observation"], atol=tolerance)
            assert infos[index]["episode"]["l"] == theirs["episode"]["l"]
            assert infos[index]["episode"]["r"] == pytest.approx(theirs["episode"]["r"], rel=1e-4)
        assert [info for index, info in enumerate(infos) if not dones[index]] == [{}] * int(np.sum(~dones))
    assert len(ends) >= 9
    assert set(ends) == ({True, False} if env_id == "CartPole-v1" else {True})


def test_tensors_of_a_step():
    """Returns and lengths include the step, and begin at zero after the end of an episode; the observations are new ones."""
    env = Counter()
    assert env.reset_tensors()["clock"].tolist() == [0, 0, 0]
    for expected in ([1, 1, 1], [3, 3, 3], [1, 6, 6], [3, 1, 10]):
        step = env.step_tensors(th.ones(3, dtype=th.int64))
        assert step.episode_returns.tolist() == expected
    assert step.episode_lengths.tolist() == [2, 1, 4]
    assert step.truncated.tolist() == [True, False, True]
    assert step.observations["clock"].tolist() == [0, 1, 0]
    assert step.final_observations["clock"].tolist() == [2, 1, 4]
    assert step.episode_returns.dtype == th.float32
    assert step.episode_lengths.dtype == th.int64
    env.reset_tensors()
    assert env.step_tensors(th.ones(3, dtype=th.int64)).episode_lengths.tolist() == [1, 1, 1]


@pytest.mark.parametrize("make", [Counter, lambda: TorchVecEnv(TorchCartPole(3))])
def test_the_host_does_not_wait(make):
    """A step in tensors asks for no value of a tensor, in the first step and later."""
    env = make()
    actions = th.ones(3, dtype=th.int64)
    with no_host_waits():
        env.reset_tensors()
        for _ in range(12):
            env.step_tensors(actions)


@pytest.mark.parametrize(
    "wait", [lambda x: bool(x.any()), lambda x: x[x], lambda x: x.nonzero(), lambda x: x.cpu(), lambda x: x.sum().item()]
)
def test_waits_are_found(wait):
    """The check of the test above finds each way to wait."""
    with pytest.raises(AssertionError), no_host_waits():
        wait(th.tensor([True, False]))


def test_infos_in_numpy():
    """Infos are empty where no episode has ended, and have the entries of Monitor, DummyVecEnv and the log where one has."""
    env = Counter()
    env.reset()
    assert env.step(ones())[3] == [{}, {}, {}]
    _, _, dones, infos = env.step(ones())
    assert dones.tolist() == [True, False, False]
    assert infos[1:] == [{}, {}]
    assert infos[0].pop("terminal_observation")["clock"] == 2
    assert infos[0].pop("episode").items() >= {"r": 3.0, "l": 2}.items()
    assert infos[0] == {"TimeLimit.truncated": True, "success": True, "level": 0.5}


def test_numpy_results_are_copies():
    """What a step has returned stays as it was, although the environment writes into the same tensors again."""
    env = Counter()
    first = env.reset()
    second, rewards, _, infos = env.step(ones())
    infos[1]["mine"] = True
    env.step(ones())
    assert first["clock"].tolist() == [0, 0, 0]
    assert second["clock"].tolist() == [1, 1, 1]
    assert second["image"].dtype == np.uint8
    assert rewards.tolist() == [1, 1, 1]
    assert "mine" not in env.step(ones())[3][1]


def test_terminated_episodes_are_not_truncated():
    """An episode that terminates at its last step counts as terminated, as in DummyVecEnv."""
    env = Counter(terminated=th.ones(3, dtype=th.bool), truncated=th.ones(3, dtype=th.bool))
    env.reset()
    assert [info["TimeLimit.truncated"] for info in env.step(ones())[3]] == [False] * 3


def test_without_final_observations():
    """The observation of the step before stands in for the last one, with one warning."""
    env = Counter(gives_final=False)
    env.reset()
    env.step(ones())
    with pytest.warns(UserWarning, match="does not give the last observations"):
        infos = env.step(ones())[3]
    assert infos[0]["terminal_observation"]["clock"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infos = env.step(ones())[3]
    assert infos[1]["terminal_observation"]["clock"] == 2


BAD = {
    "rewards.shape": {"rewards": th.zeros(3, 1)},
    "rewards.dtype": {"rewards": th.zeros(3, dtype=th.float64)},
    "terminated.dtype": {"terminated": th.zeros(3)},
    "truncated.shape": {"truncated": th.zeros(2, dtype=th.bool)},
    "rewards.device": {"rewards": th.zeros(3, device="meta")},
    "observations=": {"observations": th.zeros(3, 3)},
    "observations.keys": {"observations": {"image": th.zeros(3, 3)}},
    r"observations\['image'\].dtype": {"observations": {"image": th.zeros(3, 3), "clock": th.zeros(3, dtype=th.int64)}},
    "final_observations.keys": {"final_observations": {}},
    r"log\['level'\]": {"log": {"level": th.zeros(2)}},
    "rewards=": {"rewards": np.zeros(3, np.float32)},
}


@pytest.mark.parametrize("name", BAD)
def test_first_step_is_checked(name):
    """Each mismatch of the first step is a ValueError that names the tensor."""
    env = Counter(**BAD[name])
    env.reset_tensors()
    with pytest.raises(ValueError, match=name):
        env.step_tensors(th.ones(3, dtype=th.int64))


def test_actions_are_checked():
    """Actions of another dtype or shape are refused in the first step."""
    env = Counter()
    env.reset_tensors()
    with pytest.raises(ValueError, match=r"actions\.dtype"):
        env.step_tensors(th.ones(3))
    with pytest.raises(ValueError, match=r"actions\.shape"):
        env.step_tensors(th.ones(3, 1, dtype=th.int64))


@pytest.mark.parametrize("bad", [{"num_envs": 0}, {"observation_space": 4}, {"action_space": gym.spaces.Box}])
def test_bad_arguments(bad):
    """Arguments of the constructor are refused by name."""

    class Env(TensorVecEnv):
        def _reset(self, seed):
            raise NotImplementedError

        def _step(self, actions):
            raise NotImplementedError

    good = {"num_envs": 2, "observation_space": SPACES, "action_space": spaces.Discrete(2)}
    with pytest.raises(ValueError, match=next(iter(bad))):
        Env(**{**good, **bad})


def test_attributes_and_methods():
    """Attributes are those of all environments together, and cannot be set for some of them."""
    env = Counter()
    assert env.get_attr("gives_final") == [True] * 3
    assert env.get_attr("gives_final", [0, 2]) == [True] * 2
    env.set_attr("gives_final", False)
    assert env.get_attr("gives_final", 1) == [False]
    with pytest.raises(ValueError, match="indices"):
        env.set_attr("gives_final", True, indices=[0])
    env.reset()
    assert [values["clock"].tolist() for values in env.env_method("observe", indices=[0, 1])] == [[0, 0, 0]] * 2
    assert not env.has_attr("no_such_attribute")
    assert env.env_is_wrapped(Monitor) == [True] * 3
    assert env.env_is_wrapped(gym.wrappers.TimeLimit, [0]) == [False]
    assert env.get_images() == [None] * 3
    env.close()


def test_seeds():
    """The seed is given to the next reset alone, and the same seed gives the same episodes."""
    env = Counter()
    env.seed(5)
    env.reset()
    assert env.given_seed == 5
    env.reset()
    assert env.given_seed is None
    first, second = (TorchVecEnv(TorchCartPole(3)) for _ in range(2))
    first.seed(3), second.seed(3)
    np.testing.assert_array_equal(first.reset(), second.reset())
    assert not np.array_equal(first.reset(), TorchVecEnv(TorchCartPole(3)).reset())


@pytest.mark.parametrize("wrap", [lambda env: env, VecNormalize, lambda env: VecFrameStack(env, 2)])
def test_training_and_evaluation(wrap):
    """PPOExt learns and is evaluated on it, under SB3's wrappers, without a warning about a missing Monitor."""
    env = wrap(TorchVecEnv(TorchCartPole(4)))
    model = PPOExt("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=1, device="cpu")
    model.learn(256)
    assert len(model.ep_info_buffer) > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, lengths = evaluate_policy(model, env, 4, return_episode_rewards=True)
    assert all(length > 5 for length in lengths)
