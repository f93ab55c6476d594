"""Gymnasium's own wrappers of vectorised environments, in all modes, and environments that reset copies by their numbers."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from gymnasium import wrappers as single
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorObservationWrapper, VectorWrapper
from gymnasium.wrappers import vector
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize
from support.parity import assert_equal
from support.toys import DICT, VECTOR, ToyEnv
from support.vec_envs import Plain, as_floats, rollout, without_clock

from sb3_ppo_ext import PPOExt, VectorEnvAdapter

RESCALED = dict(min_obs=np.float32(-2), max_obs=np.float32(5))
OF_OBSERVATIONS = {
    "rescaled": (vector.RescaleObservation, single.RescaleObservation, RESCALED, VECTOR),
    "dtype": (vector.DtypeObservation, single.DtypeObservation, dict(dtype=np.float64), VECTOR),
    "reshaped": (vector.ReshapeObservation, single.ReshapeObservation, dict(shape=(3, 1)), VECTOR),
    "flat": (vector.FlattenObservation, single.FlattenObservation, {}, DICT),
    "filtered": (vector.FilterObservation, single.FilterObservation, dict(filter_keys=["joints"]), DICT),
}
OF_OTHERS = {
    "statistics": (vector.RecordEpisodeStatistics, single.RecordEpisodeStatistics, {}, VECTOR),
    "rewards": (vector.ClipReward, single.ClipReward, dict(min_reward=0.1, max_reward=0.6), VECTOR),
    "actions": (vector.RescaleAction, single.RescaleAction, dict(min_action=-2.0, max_action=4.0), VECTOR),
    "lists": (vector.DictInfoToList, lambda env: env, {}, VECTOR),
}
# Gymnasium refuses to transform observations in this mode.
NO_OBSERVATIONS = AutoresetMode.SAME_STEP
CASES = {
    f"{name}-{mode.name.lower()}": (*case, mode)
    for kinds in (OF_OBSERVATIONS, OF_OTHERS)
    for name, case in kinds.items()
    for mode in AutoresetMode
    if kinds is OF_OTHERS or mode != NO_OBSERVATIONS
}


IN_PROCESSES = [pytest.param(AsyncVectorEnv, case, marks=pytest.mark.integration) for case in list(CASES)[::4]]


def seen_of(env):
    seen = as_floats(without_clock(rollout(env)))
    env.close()
    return seen


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(("cls", "case"), [*((SyncVectorEnv, case) for case in CASES), *IN_PROCESSES])
def test_wrappers(cls, case):
    """
    A wrapper around all copies does what it does around each of them in DummyVecEnv: observations, the first and last ones of
    episodes included, rewards and infos, with the statistics of episodes.
    """
    of_all, of_one, kwargs, space, mode = CASES[case]
    fns = [partial(Plain, observation_space=space)] * 3
    adapter = VectorEnvAdapter(of_all(cls(fns, autoreset_mode=mode), **kwargs))
    expected = DummyVecEnv([lambda: of_one(Plain(observation_space=space), **kwargs)] * 3)
    assert adapter.observation_space == expected.observation_space
    assert_equal(seen_of(expected), seen_of(adapter))


@pytest.mark.parametrize("mode", AutoresetMode)
def test_wrappers_in_each_other(mode):
    """Statistics of episodes inside of other wrappers, with lists of infos outside, are those of SB3's VecMonitor."""
    venv = vector.RecordEpisodeStatistics(SyncVectorEnv([Plain] * 3, autoreset_mode=mode))
    venv = venv if mode == NO_OBSERVATIONS else vector.DtypeObservation(venv, np.float64)
    inside = VectorEnvAdapter(vector.DictInfoToList(vector.ClipReward(venv, 0.0, 1.0)))
    outside = VecMonitor(VectorEnvAdapter(SyncVectorEnv([Plain] * 3, autoreset_mode=mode)))

    def episodes(env):
        return [(i["episode"]["r"], i["episode"]["l"]) for infos in rollout(env)[5::5] for i in infos if "episode" in i]

    found = episodes(inside)
    assert len(found) > 10
    np.testing.assert_allclose(found, episodes(outside), rtol=1e-5)


def test_statistics_under_another_key():
    """Statistics under a key of the user's choice belong to the last step of the episode as well."""
    venv = SyncVectorEnv([Plain] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    env = VectorEnvAdapter(vector.RecordEpisodeStatistics(venv, stats_key="statistics"))
    seen = rollout(env)
    infos = [info for infos in seen[5::5] for info in infos if "terminal_observation" in info]
    assert all(1 <= info["statistics"]["l"] <= 7 for info in infos)
    assert len(infos) > 5
    assert not any("statistics" in info for infos in seen[1::5] for info in infos)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_training_logs_the_returns_of_gymnasiums_statistics(mode):
    """The returns of episodes that Gymnasium's wrapper records are in SB3's log."""
    env = VectorEnvAdapter(vector.RecordEpisodeStatistics(SyncVectorEnv([ToyEnv] * 2, autoreset_mode=mode)))
    model = PPOExt("MlpPolicy", env, n_steps=32, batch_size=16, n_epochs=1, device="cpu").learn(64)
    assert len(model.ep_info_buffer) >= 8
    assert all(1 <= info["l"] <= 7 for info in model.ep_info_buffer)


def in_mode(mode):
    return SyncVectorEnv([ToyEnv] * 2, autoreset_mode=mode)


@pytest.mark.parametrize(
    ("cls", "remedy", "mode"),
    [
        (vector.NormalizeReward, "norm_obs=False", AutoresetMode.NEXT_STEP),
        (vector.NormalizeReward, "norm_obs=False", AutoresetMode.DISABLED),
        (vector.NormalizeObservation, "norm_reward=False", AutoresetMode.NEXT_STEP),
    ],
)
def test_running_statistics_are_refused(cls, remedy, mode):
    """
    Gymnasium's normalisation forgets running returns, or refuses, if some copies are reset: the message names SB3's, which
    works.
    """
    with pytest.raises(ValueError, match=f"`venv=.*VecNormalize.*{remedy}"):
        VectorEnvAdapter(cls(in_mode(mode)))
    env = VecNormalize(VectorEnvAdapter(in_mode(mode)), **{remedy.removesuffix("=False"): False})
    PPOExt("MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=1, device="cpu").learn(32)


def test_rewards_normalised_by_an_older_gymnasium(recwarn):
    """`NormalizeReward` under SAME_STEP is warned of where Gymnasium has not mended it, and nowhere else."""
    wrapper = vector.NormalizeReward(in_mode(AutoresetMode.SAME_STEP))
    if hasattr(wrapper, "_autoreset_mode"):
        VectorEnvAdapter(wrapper)
        assert not [warning for warning in recwarn if "NormalizeReward" in str(warning.message)]
        del wrapper._autoreset_mode
    with pytest.warns(UserWarning, match=r"NormalizeReward.*first reward.*VecNormalize"):
        VectorEnvAdapter(wrapper)


class Doubled(VectorObservationWrapper):
    """Doubles the observations."""

    def observations(self, observations):
        return 2 * observations


class Counting(VectorWrapper):
    """Counts the steps of episodes, with a `reset` of its own that knows masks."""

    def reset(self, *, seed=None, options=None):
        mask = np.ones(self.num_envs, bool) if options is None else options["reset_mask"]
        self.count = np.where(mask, 0, getattr(self, "count", 0))
        return self.env.reset(seed=seed, options=options)

    def step(self, actions):
        self.count += 1
        *rest, infos = self.env.step(actions)
        return *rest, {**infos, "count": self.count.copy()}


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_wrappers_of_users(mode):
    """A user's wrapper of observations is applied to first ones as well."""
    venvs = (SyncVectorEnv([Plain] * 3, autoreset_mode=mode) for _ in range(2))
    doubled, plain = (VectorEnvAdapter(venv) for venv in (Doubled(next(venvs)), next(venvs)))
    seen, expected = rollout(doubled), rollout(plain)
    np.testing.assert_array_equal(seen[0], 2 * expected[0])
    np.testing.assert_array_equal(seen[2::5], 2 * np.array(expected[2::5]))


def test_users_wrappers_with_states():
    """A user's wrapper with a `reset` of its own gets the mask in the mode that has masks, and is refused in the other."""
    with pytest.raises(ValueError, match=r"`reset` of Counting.*autoreset_mode=\"Disabled\""):
        VectorEnvAdapter(Counting(in_mode(AutoresetMode.NEXT_STEP)))
    env = VectorEnvAdapter(vector.RecordEpisodeStatistics(Counting(in_mode(AutoresetMode.DISABLED))))
    ended = [info for infos in rollout(env)[5::5] for info in infos if "episode" in info]
    assert len(ended) > 5
    assert all(info["count"] == info["episode"]["l"] for info in ended)


def test_partial_reset_gets_the_wrappers():
    """A function of the user is given the environment with its wrappers, so that first observations are transformed."""
    env = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point", max_episode_steps=4)
    wrapped = Doubled(env)
    with pytest.raises(ValueError, match=r"through its wrappers.*VecMonitor.*partial_reset"):
        VectorEnvAdapter(wrapped)
    given = []

    def partial_reset(venv, mask):
        given.append(venv)
        first, infos = venv.unwrapped.reset()
        venv.unwrapped.steps[~mask] = 1
        return venv.observations(first), infos

    adapter = VectorEnvAdapter(wrapped, partial_reset)
    adapter.reset()
    for _ in range(4):
        adapter.step(np.array([0, 1]))
    assert given == [wrapped]


class LikeNumpyToTorch(VectorWrapper):
    """As Gymnasium's wrapper of this name, whose module needs a package that is not installed."""

    _target_xp = th


def test_tensors_are_refused():
    """A wrapper that turns arrays into tensors is refused by name, one that turns them into arrays is not."""
    wrapper = LikeNumpyToTorch(in_mode(AutoresetMode.SAME_STEP))
    with pytest.raises(ValueError, match="LikeNumpyToTorch are no NumPy arrays"):
        VectorEnvAdapter(wrapper)
    wrapper._target_xp = np
    VectorEnvAdapter(wrapper)


# EnvPool knows its classes by their modules.
class LikeEnvPool(gym.vector.VectorEnv):
    """
    As EnvPool's environments of Gymnasium's kind: some copies step by their numbers, and it then returns as many rows. A step
    after the end of an episode begins the next one.
    Copy ``i`` ends after ``3 + i`` steps. Observations are a dictionary if ``is_dict``, as those of dm_control.
    """

    __module__ = "envpool.python.gymnasium_envpool"

    def __init__(self, num_envs=3, is_dict=False, batch_size=None):
        self.num_envs, self.is_dict = num_envs, is_dict
        self.config = {"num_envs": num_envs, "batch_size": batch_size or num_envs}
        part = spaces.Box(0, np.inf, (1,), np.float64)
        self.single_observation_space = spaces.Dict({"time": part, "twice": part}) if is_dict else part
        self.single_action_space = spaces.Discrete(2)
        self.time = np.zeros(num_envs)

    def observe(self, indices):
        time = self.time[indices, None].copy()
        return {"time": time, "twice": 2 * time} if self.is_dict else time

    def reset(self, *, seed=None, options=None):
        self.time[:] = 0
        self.ended = np.zeros(self.num_envs, bool)
        indices = np.arange(self.num_envs)
        return self.observe(indices), {"env_id": indices}

    def step(self, actions, env_id=None):
        indices = np.arange(self.num_envs) if env_id is None else env_id
        assert len(actions) == len(indices)
        self.time[indices] = np.where(self.ended[indices], 0, self.time[indices] + 1)
        self.ended = self.time >= 3 + np.arange(self.num_envs)
        ended = self.ended[indices]
        return self.observe(indices), np.ones(len(indices)), ended, np.zeros_like(ended), {"env_id": indices}


@pytest.mark.parametrize("is_dict", [False, True])
def test_environments_that_are_reset_by_numbers(is_dict):
    """At the end of an episode, the first observation of the next one is returned, and the last one is in the infos."""
    env = VectorEnvAdapter(LikeEnvPool(is_dict=is_dict))
    env.reset()
    for n in range(1, 13):
        observations, _, dones, infos = env.step(np.zeros(3, int))
        for index in range(3):
            observation = {key: part[index] for key, part in observations.items()} if is_dict else observations[index]
            last = infos[index].get("terminal_observation")
            assert dones[index] == (n % (3 + index) == 0) == (last is not None)
            for value, time in ((observation, n % (3 + index)), (last, 3 + index)):
                if value is not None:
                    assert value == ({"time": [time], "twice": [2 * time]} if is_dict else [time])
    PPOExt("MultiInputPolicy" if is_dict else "MlpPolicy", env, n_steps=8, batch_size=8, n_epochs=1, device="cpu").learn(24)


def test_environments_that_step_some_copies():
    """EnvPool's mode in which a step returns the copies that are ready is refused by the name of its argument."""
    with pytest.raises(ValueError, match=r"`batch_size=2` is not valid: .*`batch_size=3`"):
        VectorEnvAdapter(LikeEnvPool(batch_size=2))


@pytest.mark.integration
def test_envpool_with_dictionaries():
    """The environments of dm_control in EnvPool, whose observations are dictionaries, train over ends of episodes."""
    envpool = pytest.importorskip("envpool")
    env = VectorEnvAdapter(envpool.make("CartpoleBalance-v1", env_type="gymnasium", num_envs=2, max_episode_steps=5))
    env.reset()
    for _ in range(5):
        observations, _, dones, infos = env.step(np.zeros((2, 1)))
    assert dones.all()
    assert infos[1]["terminal_observation"].keys() == observations.keys()
    PPOExt("MultiInputPolicy", env, n_steps=16, batch_size=16, n_epochs=1, device="cpu").learn(64)
