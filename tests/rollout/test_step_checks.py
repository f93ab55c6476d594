"""What a misbehaving environment returns is refused by every engine in the same words, and what is legal stays legal."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv
from support.engines import SMALL, VECTORS
from support.misbehaving import LEGAL, REFUSED, Bent, observations, rewards, terminal
from support.parity import assert_equal
from support.toys import ToyEnv

from sb3_ppo_ext import FastDummyVecEnv, PPOExt
from sb3_ppo_ext.common.guards import EnvironmentDataError, NonFinitePolicyError
from sb3_ppo_ext.engines.native import extension

BACKENDS = ["eager", "fused", "native"] if extension.module is not None else ["eager"]


@pytest.fixture(scope="module")
def models():
    """A model of each engine, for all tests: it stays usable after each of them."""
    return {backend: PPOExt("MlpPolicy", Bent(), backend=backend, **SMALL) for backend in BACKENDS}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, backend, models):
    """The message says what is wrong, and nothing is learned or counted."""
    bend, message = REFUSED[name]
    model = models[backend]
    model.set_env(Bent(bend))
    before = {key: value.clone() for key, value in model.policy.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        model.learn(32)
    assert_equal(before, model.policy.state_dict(), "policy")
    assert model.num_timesteps == model.rollout_buffer.pos == 0
    assert model._last_obs is None


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("name", LEGAL)
def test_legal(name, models):
    """Every engine trains on it as on the ordinary environment."""
    for model in models.values():
        rollouts = []
        for bend in (None, LEGAL[name]):
            model.set_env(Bent(bend))
            model.learn(32)
            buffer = model.rollout_buffer
            assert buffer.full
            rollouts.append([buffer.observations.ravel(), buffer.rewards.ravel(), buffer.episode_starts.ravel()])
        (seen, _, starts), (seen_bent, _, starts_bent) = rollouts
        np.testing.assert_allclose(seen, seen_bent, atol=1e-3)
        np.testing.assert_array_equal(starts, starts_bent)


@pytest.mark.parametrize("dtype", [int, bool, np.uint8])
def test_rewards_of_integers(dtype, models):
    """The value of a truncated episode is added to a reward that is an integer, too, with its decimals."""
    for model in models.values():
        model.set_env(Bent(rewards(lambda r: np.ones(2, dtype))))
        model.gamma = 0.9
        with th.no_grad():
            model.policy.value_net.weight.zero_()
            model.policy.value_net.bias.fill_(0.5)
        _, callback = model._setup_learn(32)
        model.collect_rollouts(model.env, callback, model.rollout_buffer, 16)
        received = model.rollout_buffer.rewards[3::4]
        np.testing.assert_allclose(received, np.tile([1.0, 1.45], (4, 1)), rtol=1e-6)


def test_as_sb3_with_strange_types():
    """What SB3 trains on, the reference trains on, to the bit."""
    names = ("observations in float64", "rewards in float64", "dones of 0 and 1", "tuple of infos")
    for name in (*names, "no infos between ends of episodes"):
        options = {**SMALL, "n_epochs": 1}
        ours = PPOExt("MlpPolicy", Bent(LEGAL[name]), backend="eager", **options).learn(64)
        assert_equal(
            PPO("MlpPolicy", Bent(LEGAL[name]), **options).learn(64).policy.state_dict(), ours.policy.state_dict(), name
        )


FIRST = {
    "observations and infos, as in Gymnasium": (lambda o: (o, {}), r"\(tuple\)"),
    "None": (lambda o: None, "not None"),
    "one of two": (lambda o: o[:1], r"\(1, 3\)"),
    "a single one": (lambda o: o[0], r"not .*\(3,\)"),
    "a list": (list, r"\(list\)"),
}


@pytest.mark.parametrize("name", FIRST)
def test_first_observations(name, models):
    """The observations of a reset are checked as well."""
    bend, message = FIRST[name]
    model = models[BACKENDS[-1]]
    model.set_env(Bent(bend_reset=bend))
    with pytest.raises(EnvironmentDataError, match=f"observations .*{message}"):
        model.learn(32)


@pytest.mark.parametrize(
    ("bend", "message"),
    [
        (observations(lambda o: {**o, "joints": o["joints"][:1]}), r"observations 'joints' .* \(2, 3\), not .* \(1, 3\)"),
        (observations(lambda o: {"joints": o["joints"]}), r"the keys \['gear', 'joints'\], not .*\['joints'\]"),
        (observations(lambda o: o["joints"]), r"the keys .* not an array"),
        (observations(lambda o: {**o, "gear": o["gear"][:, None]}), None),
        (terminal(lambda o: {**o, "joints": 0.0}), r"terminal observation 'joints' .* \(3,\), not 0.0"),
        (terminal(lambda o: {"joints": o["joints"]}), r"terminal observation .* the keys"),
    ],
)
def test_dictionaries(bend, message):
    """Parts of a dictionary are named; discrete ones may be a column."""
    model = PPOExt("MultiInputPolicy", Bent(bend, observation_space=VECTORS), **SMALL)
    if message is None:
        model.learn(32)
    else:
        with pytest.raises(EnvironmentDataError, match=message):
            model.learn(32)


class OfTensors(ToyEnv):
    """Its observations are tensors, which NumPy reads as it reads arrays."""

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return th.as_tensor(observation), info

    def step(self, action):
        observation, *rest = super().step(action)
        return th.as_tensor(observation), *rest


def test_fast_dummy_vec_env_takes_tensors():
    """An environment that returns tensors trains as with SB3's DummyVecEnv."""
    models = [
        PPOExt("MlpPolicy", make_env(), n_steps=16, batch_size=16, seed=0, device="cpu").learn(16)
        for make_env in (lambda: DummyVecEnv([OfTensors]), OfTensors)
    ]
    assert type(models[1].env) is FastDummyVecEnv
    assert_equal(*(model.policy.state_dict() for model in models), "policy")


class Short(ToyEnv):
    """Its observations are of another shape than its space says, in the same or in another number of numbers."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return self.change(observation), info


def test_fast_dummy_vec_env_repeats_no_numbers():
    """An observation with too few numbers is refused; one that only lacks or has dimensions is taken as NumPy does."""
    for change in (lambda o: o[:1], lambda o: 0.0, lambda o: None):
        with pytest.raises(EnvironmentDataError, match=r"Environment 1: the observation .* must have \(3,\)"):
            FastDummyVecEnv([ToyEnv, lambda change=change: Short(change)]).reset()
    for change in (np.ndarray.tolist, lambda o: o[None], lambda o: o):
        assert FastDummyVecEnv([lambda change=change: Short(change)] * 2).reset().shape == (2, 3)


ACTIONS = {
    "box": {},
    "discrete": dict(action_space=spaces.Discrete(3)),
    "multi-discrete": dict(action_space=spaces.MultiDiscrete([3, 2])),
    "multi-binary": dict(action_space=spaces.MultiBinary(2)),
    "beta": dict(action_dist="beta"),
    "squashed": dict(action_dist="squashed_gaussian"),
    "gSDE": dict(use_sde=True),
}
BROKEN = [(kind, "bias", np.nan) for kind in ACTIONS]
BROKEN += [(kind, "log_std", value) for kind in ("box", "gSDE") for value in (np.nan, -np.inf, -200.0)]
BROKEN += [("box", "log_std", np.inf), ("box", "bias", np.inf), ("squashed", "log_std", np.nan)]


# The last engine with each, the others with a third of them
ON_ENGINES = [(*case, name) for n, case in enumerate(BROKEN) for name in BACKENDS if name == BACKENDS[-1] or n % 3 == 0]


@pytest.mark.parametrize(("kind", "name", "value", "backend"), ON_ENGINES)
def test_no_action_of_a_broken_policy(kind, name, value, backend):
    """Where PyTorch refuses the distribution, no engine steps the environment, and all say the same of the policy."""
    options = dict(ACTIONS[kind])
    space = options.pop("action_space", None)
    env = Bent(**({} if space is None else dict(action_space=space)))
    model = PPOExt("MlpPolicy", env, backend=backend, **options, **SMALL).learn(32)
    with th.no_grad():
        broken = model.policy.log_std if name == "log_std" else model.policy.action_net.bias
        broken.view(-1)[0] = value
    n_steps = env.t
    with pytest.raises(NonFinitePolicyError, match="not finite at step 0 of the rollout, after 32 timesteps"):
        model.learn(32, reset_num_timesteps=False)
    assert env.t == n_steps
    assert model.num_timesteps == 32


def test_other_errors_pass():
    """An error of a callback is not taken for one of the policy."""

    def callback(local, _):
        raise ValueError("Something else")

    with pytest.raises(ValueError, match=r"^Something else$"):
        PPOExt("MlpPolicy", Bent(), **SMALL).learn(32, callback=callback)
