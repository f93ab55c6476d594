"""Adapter for environments in PyTorch, with stand-ins that keep the contracts of simulators that need a GPU."""

import warnings
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecNormalize
from support.torch_envs import TorchCartPole, TorchPendulum
from support.torch_simulators import CLOCK, PUSH, LikeIsaacLab, LikeLists, LikeManiSkill, LikeMjlab, LikeRslRl

from sb3_ppo_ext import PPOExt, TensorVecNormalize, TorchVecEnv

ACTIONS = th.zeros(4, 1)
# Copies 0 and 1 terminate after 3 and 4 steps, 2 terminates at its limit of 5, and 3 is cut off after 5.
TERMINATED = {3: [0], 4: [1], 5: [2], 6: [0], 8: [1], 9: [0], 10: [2]}
TRUNCATED = {5: [3], 10: [3]}


def isaac(keys="policy", **kwargs):
    return TorchVecEnv(LikeIsaacLab(**kwargs), keys=keys, action_space=PUSH)


def rsl_rl():
    return TorchVecEnv(LikeRslRl(), observation_space=CLOCK, action_space=PUSH)


def mani_skill():
    return TorchVecEnv(LikeManiSkill())


def mjlab():
    return TorchVecEnv(LikeMjlab(), keys="actor", action_space=PUSH)


def lists_of_sb3():
    return TorchVecEnv(LikeLists())


def lists_of_gymnasium():
    return TorchVecEnv(LikeLists(n_results=5, is_short=True))


def ended(mask):
    return th.arange(4)[mask].tolist()


@pytest.mark.parametrize("make", [mani_skill, isaac, rsl_rl, mjlab, lists_of_sb3, lists_of_gymnasium])
def test_ends_of_episodes(make):
    """Terminated and truncated episodes, first observations of the next ones, rewards and lengths are those of the clocks."""
    env = make()
    assert env.reset_tensors().tolist() == [[0, 0]] * 4
    lengths = th.zeros(4)
    for n in range(1, 11):
        step = env.step_tensors(ACTIONS)
        lengths += 1
        assert ended(step.terminated) == TERMINATED.get(n, [])
        assert ended(step.truncated) == TRUNCATED.get(n, [])
        assert step.rewards.tolist() == [n] * 4
        assert step.episode_lengths.tolist() == lengths.tolist()
        lengths[step.terminated | step.truncated] = 0
        assert step.observations[:, 0].tolist() == lengths.tolist()


class Cells:
    """Random cells, and the last one of an episode among the infos."""

    num_envs, device = 4, "cpu"
    single_action_space = spaces.Discrete(2)

    def __init__(self, observation_space):
        self.single_observation_space = observation_space

    def observe(self):
        cells = th.randint(5, (4,))
        return (
            cells
            if isinstance(self.single_observation_space, spaces.Discrete)
            else {"cell": cells, "place": cells[:, None] / 5}
        )

    def reset(self):
        return self.observe(), {}

    def step(self, actions):
        truncated = th.rand(4) < 0.2
        return self.observe(), actions.float(), th.zeros_like(truncated), truncated, {"final_obs": self.observe()}


@pytest.mark.parametrize("backend", ["eager", "device"])
@pytest.mark.parametrize(
    "space",
    [spaces.Discrete(5), spaces.Dict({"cell": spaces.Discrete(5), "place": spaces.Box(0, 1, (1,))})],
    ids=["Discrete", "Dict"],
)
def test_last_observations_of_integers(space, backend):
    """Values of last observations are added to rewards, also if a single number says where the agent is."""
    policy = "MlpPolicy" if isinstance(space, spaces.Discrete) else "MultiInputPolicy"
    env = TorchVecEnv(Cells(space))
    model = PPOExt(policy, env, n_steps=16, batch_size=32, learning_rate=0.0, gamma=0.9, backend=backend, device="cpu", seed=0)
    with th.no_grad():
        model.policy.value_net.weight.zero_()
        model.policy.value_net.bias.fill_(10.0)
    model.learn(64)
    bonus = model.rollout_buffer.rewards >= 9
    assert 0 < bonus.sum() < 40
    starts = np.asarray(model.rollout_buffer.episode_starts, bool)
    np.testing.assert_array_equal(bonus[:-1], starts[1:])


class WithoutRewards(TorchVecEnv):
    """Changes a step as subclasses of other vectorised environments do."""

    def step_wait(self):
        observations, rewards, dones, infos = super().step_wait()
        return observations, 0 * rewards, dones, infos


def cells(cls=TorchVecEnv):
    return cls(Cells(spaces.Discrete(5)))


@pytest.mark.parametrize("backend", ["eager", "auto", "device"])
@pytest.mark.parametrize("is_script", [False, True])
def test_step_of_a_subclass(backend, is_script):
    """A step in NumPy that a subclass or a script has replaced is called by all engines."""
    env = cells(TorchVecEnv if is_script else WithoutRewards)
    if is_script:
        step_wait = env.step_wait
        env.step_wait = lambda: (lambda step: (step[0], 0 * step[1], *step[2:]))(step_wait())
    model = PPOExt("MlpPolicy", env, n_steps=16, batch_size=32, gamma=0.0, backend=backend, device="cpu", seed=0)
    model.learn(64)
    assert not np.asarray(model.rollout_buffer.rewards).any()


class WithoutBootstrap(BaseCallback):
    """Sets the discount factor of terminal observations in the middle of a rollout."""

    def _on_step(self):
        self.model.gamma = 0.0
        return True


@pytest.mark.parametrize("backend", ["eager", "auto", "device"])
def test_a_callback_sets_the_discount(backend):
    """As in SB3, the values of terminal observations are discounted with the model's, so that clocks alone remain here."""
    model = PPOExt("MlpPolicy", mani_skill(), n_steps=10, batch_size=40, backend=backend, device="cpu", seed=0)
    model.learn(40, callback=WithoutBootstrap())
    assert np.asarray(model.rollout_buffer.rewards)[:, 3].tolist() == list(range(1, 11))


def test_step_that_a_normalisation_would_not_call():
    """Another step in NumPy would be passed by."""
    with pytest.raises(ValueError, match="its `step_wait` is not that of `TensorVecEnv`"):
        TensorVecNormalize(cells(WithoutRewards), norm_obs=False)
    assert (VecNormalize(cells(WithoutRewards), norm_obs=False, clip_reward=1.0).reset() < 5).all()


@pytest.mark.parametrize("make", [mani_skill, isaac, lists_of_sb3, lists_of_gymnasium])
def test_last_observations(make):
    """Where an episode has ended, its last observation is given; infos have the same."""
    env, same = make(), make()
    env.reset_tensors(), same.reset()
    for _ in range(10):
        step = env.step_tensors(ACTIONS)
        infos = same.step(ACTIONS.numpy())[3]
        for index in ended(step.terminated | step.truncated):
            assert step.final_observations[index].tolist() == [step.episode_lengths[index].item()] * 2
            assert infos[index]["terminal_observation"].tolist() == step.final_observations[index].tolist()
        assert step.final_observations is None or step.final_observations.dtype == th.float32


def test_spaces_of_own_classes():
    """Spaces of mjlab are read by their names; a critic may read its own group; other kinds are refused by name."""
    env = TorchVecEnv(LikeMjlab(), keys=["actor", "critic"], action_space=PUSH)
    endless = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    assert env.observation_space == spaces.Dict({"actor": endless, "critic": endless})
    assert env.reset()["critic"].shape == (4, 2)
    unknown = LikeMjlab()
    unknown.single_observation_space = object()
    with pytest.raises(ValueError, match=r"observation_space=.*gymnasium.spaces"):
        TorchVecEnv(unknown, action_space=PUSH)


def test_infos_that_are_no_dictionaries():
    """A list of another length, or of something else, is refused by name; successes in lists are logged."""
    env = lists_of_sb3()
    env.reset()
    for infos in ([{}] * 3, [None] * 4):
        with pytest.raises(ValueError, match=r"infos=.*list of 4 dictionaries"):
            env._joined(infos)
    assert env._log(env._joined([{"is_success": True}] * 4))["is_success"].tolist() == [True] * 4


def test_last_observations_that_are_not_given():
    """Without them, there are none in any step, and with SB3's methods the observation of the step before stands in."""
    env = isaac(compute_final_obs=False)
    env.reset()
    env.step(ACTIONS.numpy())
    assert env.step_tensors(ACTIONS).final_observations is None
    env = rsl_rl()
    env.reset()
    env.step(ACTIONS.numpy()), env.step(ACTIONS.numpy())
    with pytest.warns(UserWarning, match="last observations"):
        infos = env.step(ACTIONS.numpy())[3]
    assert infos[0]["terminal_observation"].tolist() == [2, 2]


def test_last_observations_are_found_out():
    """An argument, or `compute_final_obs`, says from the first step on that they are given; otherwise the first ones do."""
    env = mani_skill()
    env.reset_tensors()
    given = [env.step_tensors(ACTIONS).final_observations is not None for _ in range(4)]
    assert given == [False, False, True, True]
    for env in (isaac(), TorchVecEnv(LikeManiSkill(), final_observations=True)):
        env.reset_tensors()
        assert env.step_tensors(ACTIONS).final_observations is not None
    env = TorchVecEnv(LikeManiSkill(), final_observations=False)
    env.reset_tensors()
    assert [env.step_tensors(ACTIONS).final_observations for _ in range(4)] == [None] * 4


def test_time_outs_without_any():
    """Where the extras do not say which episodes were cut off, all are terminated."""
    env = rsl_rl()
    env.env.extras = {}
    env.reset_tensors()
    step = env.step_tensors(ACTIONS)
    assert not step.truncated.any()
    env.env.time[3] = 4
    env.env.extras = type("Extras", (dict,), {"__setitem__": lambda *args: None})()
    assert ended(env.step_tensors(ACTIONS).terminated) == [3]


def test_old_time_outs_do_not_count():
    """Episodes that ended by time earlier, and whose flags have stayed in the extras, are not cut off again."""
    env = rsl_rl()
    env.reset_tensors()
    for _ in range(6):
        step = env.step_tensors(ACTIONS)
    assert env.env.extras["time_outs"].sum() == 0
    env.env.extras["time_outs"] = th.ones(4)
    assert not env.step_tensors(ACTIONS).truncated.any()
    assert ended(step.terminated) == [0]


def test_finite_horizons():
    """With `is_finite_horizon` of Isaac Lab, running out of time is an end of the task."""
    env = isaac(is_finite_horizon=True)
    env.reset_tensors()
    for _ in range(5):
        step = env.step_tensors(ACTIONS)
    assert ended(step.terminated) == [2, 3]
    assert not step.truncated.any()


@pytest.mark.parametrize("policy", ["MultiInputPolicy", "MultiInputTransformerPolicy"])
@pytest.mark.parametrize("normalizes", [False, True])
def test_groups_of_actor_and_critic(policy, normalizes):
    """With the groups of Isaac Lab as keys, the actor reads its own, and the critic both; the actor alone needs one."""
    env = isaac(None)
    env = TensorVecNormalize(env) if normalizes else env
    keywords = dict(context_length=4, d_model=8, n_heads=2) if "Transformer" in policy else {}
    options = dict(n_steps=8, batch_size=16, n_epochs=2, seed=0, device="cpu")
    model = PPOExt(policy, env, policy_kwargs=dict(actor_keys=["policy"], **keywords), **options).learn(64)
    assert [*model.policy.pi_features_extractor.extractors] == ["policy"]
    assert [*model.policy.vf_features_extractor.extractors] == ["critic", "policy"]
    full = {"policy": np.ones((4, 2), np.float32), "critic": np.ones((4, 2), np.float32)}
    expected = model.predict(full, deterministic=True)[0]
    actor = model.policy.without_critic()
    np.testing.assert_array_equal(actor.predict({"policy": full["policy"]}, deterministic=True)[0], expected)


def test_keys():
    """Without `keys` all groups of observations are used, with a list some, with a string one, without a dictionary."""
    for keys, expected in ((None, {"policy", "critic"}), (["critic"], {"critic"})):
        env = isaac(keys)
        assert set(env.observation_space.spaces) == expected
        assert set(env.reset_tensors()) == expected
        assert set(env.step_tensors(ACTIONS).final_observations) == expected
    assert isaac("critic").observation_space == CLOCK


def test_log():
    """Isaac Lab's log, ManiSkill's metrics and its success come into the log, and into the infos of ended episodes."""
    env = isaac()
    env.reset()
    for _ in range(5):
        infos = env.step(ACTIONS.numpy())[3]
    assert infos[3].items() >= {"Episode_Reward/clock": 5.0, "Curriculum/level": 0.5}.items()
    env = mani_skill()
    env.reset()
    assert env.step_tensors(ACTIONS).log["is_success"].tolist() == [False] * 4
    for _ in range(4):
        infos = env.step(ACTIONS.numpy())[3]
    assert infos[2].items() >= {"is_success": True, "success_once": True}.items()
    assert infos[3].items() >= {"is_success": False, "success_once": False}.items()


def test_seeds_and_options():
    """The reset gets the seed and the options if it takes them."""
    env = mani_skill()
    env.seed(7)
    env.env.time += 2
    env.set_options({"env_idx": th.tensor([0, 1])})
    assert env.reset_tensors()[:, 0].tolist() == [0, 0, 2, 2]
    assert env.env.seed == 7
    rsl_rl().seed(1)


def test_observations_are_cast():
    """Observations in float64 come in float32."""
    env = TorchVecEnv(TorchPendulum(2), observation_space=spaces.Box(-8, 8, (3,), np.float64))
    env.env.observe = lambda state: TorchPendulum.observe(env.env, state).double()
    assert env.reset_tensors().dtype == th.float32
    assert env.step_tensors(th.zeros(2, 1)).final_observations.dtype == th.float32


@pytest.mark.parametrize("is_dict", [False, True])
def test_decimals_are_not_cut_off(is_dict):
    """Observations of floats under a space of integers are refused by name, at a reset and in a step."""
    image = spaces.Box(0, 255, (2,), np.uint8)
    space = spaces.Dict({"camera": image}) if is_dict else image
    clocks = LikeRslRl()
    clocks.observe = lambda: {"camera": th.full((4, 2), 0.5)} if is_dict else th.full((4, 2), 0.5)
    env = TorchVecEnv(clocks, observation_space=space, action_space=PUSH)
    with pytest.raises(ValueError, match=r"observations.*dtype=torch.float32.*decimals"):
        env.reset()
    with pytest.raises(ValueError, match=r"observations.*dtype=torch.float32.*decimals"):
        env.step(np.zeros((4, 1), np.float32))


def test_observations_of_the_real_rsl_rl():
    """A `VecEnv` of rsl_rl with a TensorDict of observations fits."""
    tensordict = pytest.importorskip("tensordict")
    rsl_env = pytest.importorskip("rsl_rl.env")

    class Env(LikeRslRl, rsl_env.VecEnv):
        def get_observations(self):
            return tensordict.TensorDict({"policy": self.observe(), "critic": self.observe()}, batch_size=[4])

        def step(self, actions):
            return self.get_observations(), *super().step(actions)[1:]

    space = spaces.Dict({"policy": CLOCK, "critic": CLOCK})
    for keys in (None, "policy"):
        env = TorchVecEnv(Env(), observation_space=space, action_space=PUSH, keys=keys)
        env.reset_tensors()
        assert set(env.step_tensors(ACTIONS).log) == set()


class Drawing(TorchCartPole):
    render_mode = "rgb_array"

    def render(self):
        return th.zeros(self.num_envs, 4, 5, 3, dtype=th.uint8)

    def close(self):
        self.is_closed = True


def test_images_and_attributes():
    """Images, attributes and `close` are those of the environment inside."""
    env = TorchVecEnv(Drawing(3))
    assert env.render_mode == "rgb_array"
    assert [image.shape for image in env.get_images()] == [(4, 5, 3)] * 3
    assert env.render().shape[2] == 3
    assert env.get_attr("max_episode_steps", [0]) == [500]
    env.set_attr("max_episode_steps", 7)
    assert env.env.max_episode_steps == 7
    assert env.has_attr("keys")
    env.close()
    assert env.env.is_closed
    assert isaac().get_attr("reward_buf", 0)[0].shape == (4,)


class NextStep(TorchCartPole):
    metadata: ClassVar = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}


class NotByItself(LikeManiSkill):
    auto_reset = False


BAD = {
    "env=": [lambda: TorchVecEnv(TorchCartPole), lambda: TorchVecEnv(4), lambda: TorchVecEnv(NextStep())],
    "begin new episodes": [lambda: TorchVecEnv(NotByItself()), lambda: TorchVecEnv(LikeMjlab(auto_reset=False))],
    "observation_space": [lambda: TorchVecEnv(LikeRslRl())],
    "action_space": [lambda: TorchVecEnv(LikeRslRl(), observation_space=CLOCK)],
    "keys": [
        lambda: TorchVecEnv(TorchCartPole(), keys="policy"),
        lambda: TorchVecEnv(LikeIsaacLab(), keys="polizy"),
        lambda: TorchVecEnv(LikeIsaacLab(), keys=[]),
        lambda: TorchVecEnv(LikeIsaacLab(), keys=4),
    ],
    "num_envs": [lambda: TorchVecEnv(TorchCartPole(), num_envs=0)],
    "observations.shape": [lambda: TorchVecEnv(TorchCartPole(), num_envs=3).reset()],
}


@pytest.mark.parametrize(("name", "make"), [(name, make) for name, makers in BAD.items() for make in makers])
def test_bad_arguments(name, make):
    """Each bad argument, and each that the environment does not say, is a ValueError that names it."""
    with pytest.raises(ValueError, match=name):
        make()


def test_numpy_is_refused():
    """An environment in NumPy is refused by its first observations."""
    env = TorchVecEnv(TorchCartPole(2))
    env.env.observe = lambda state: state.T.numpy()
    with pytest.raises(ValueError, match=r"(?s)observations=array.*torch\.Tensor"):
        env.reset()


@pytest.mark.parametrize("make", [mani_skill, isaac, rsl_rl, mjlab, lists_of_sb3, lists_of_gymnasium])
def test_training(make):
    """PPOExt learns on each of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*last observations")
        PPOExt("MlpPolicy", make(), n_steps=16, batch_size=32, n_epochs=1, device="cpu").learn(128)


class Interrupt(BaseCallback):
    """The user presses Ctrl-C in the middle of a rollout."""

    def _on_step(self):
        if self.n_calls == 10:
            raise KeyboardInterrupt
        return True


def test_interrupted_rollout():
    """After it, a training goes on from a reset, not from an observation of many steps before."""
    env = isaac()
    model = PPOExt("MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=1, device="cpu", backend="device").learn(64)
    with pytest.raises(KeyboardInterrupt):
        model.learn(128, callback=Interrupt(), reset_num_timesteps=False)
    model.learn(64, reset_num_timesteps=False)
    ages = model.rollout_buffer.tensors["observations"][:, :, 0]
    starts = model.rollout_buffer.tensors["episode_starts"]
    assert (ages[0] == 0).all()
    assert (starts[0] == 1).all()
    assert th.equal(ages[1:] == ages[:-1] + 1, starts[1:] == 0)
