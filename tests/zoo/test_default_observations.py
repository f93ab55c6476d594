"""The entry `default` reads any observations: it chooses wrappers and a policy."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecNormalize
from support.toys import Samples, Words
from support.zoo import config, manager, saved

from sb3_ppo_ext import make
from sb3_ppo_ext.zoo.yaml_entries import normalization_for, policy_for, wrappers_for

ENCODE, FLATTEN = "sb3_ppo_ext.EncodeText", "gymnasium.wrappers.FlattenObservation"
VECTOR = spaces.Box(-1, 1, (2,), np.float32)


def image(*shape):
    return spaces.Box(0, 255, shape, np.uint8)


# Space, wrappers, policy, and shape of what the policy reads
SPACES = {
    "minigrid": (
        spaces.Dict(direction=spaces.Discrete(4), image=image(7, 7, 3), mission=Words()),
        [ENCODE, FLATTEN],
        "MlpPolicy",
        (4 + 147 + 32 * 64,),
    ),
    "large-image": (spaces.Dict(image=image(40, 40, 3), mission=Words()), [ENCODE], "MultiInputPolicy", None),
    "text": (spaces.Text(5), [ENCODE], "MlpPolicy", (32 * 64,)),
    "small-image-in-dict": (spaces.Dict(image=image(7, 7, 3), speed=VECTOR), [FLATTEN], "MlpPolicy", (149,)),
    "tuple": (spaces.Tuple([spaces.Discrete(3), VECTOR]), [FLATTEN], "MlpPolicy", (5,)),
    "nested": (spaces.Dict(part=spaces.Dict(speed=VECTOR), word=spaces.Discrete(3)), [FLATTEN], "MlpPolicy", (5,)),
    "flat": (spaces.Dict(speed=VECTOR, image=image(36, 36, 1)), [], "MultiInputPolicy", None),
    "vector": (VECTOR, [], "MlpPolicy", (2,)),
    "flags": (spaces.Box(0, 1, (3, 3, 4), bool), [], "MlpPolicy", (3, 3, 4)),
    "image": (image(64, 48, 3), [], "CnnPolicy", (64, 48, 3)),
    "channels-first": (image(1, 36, 36), [], "CnnPolicy", (1, 36, 36)),
    "small-image": (image(7, 7, 3), [], "MlpPolicy", (7, 7, 3)),
    "discrete": (spaces.Discrete(5), [], "MlpPolicy", ()),
    "vector-and-flags": (spaces.Dict(flags=spaces.Box(0, 1, (4,)), speed=VECTOR), [], "MultiInputPolicy", None),
}
for name, (space, *_) in SPACES.items():
    gym.register(f"Sampling-{name}-v0", Samples, max_episode_steps=10, kwargs=dict(observation_space=space))


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "MountainCarContinuous-v0"])
def test_no_option_is_said_to_have_no_effect(env_id, tmp_path):
    """The options of `default` act, and nothing says that they do not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        manager(env_id=env_id, folder=tmp_path, hyperparams=dict(n_steps=32), eval_freq=-1).setup_experiment()


@pytest.mark.integration
def test_policy_of_an_agent_with_a_memory(tmp_path):
    """An agent that is trained further has the entry of its policy."""
    first, stored = manager(env_id="CartPole-v1", folder=tmp_path, hyperparams=dict(policy="MlpLstmPolicy")).setup_experiment()
    first.save(tmp_path / "agent.zip")
    again = manager(env_id="CartPole-v1", folder=tmp_path, trained_agent=str(tmp_path / "agent.zip"), eval_freq=-1)
    model, stored_again = again.setup_experiment()
    assert (stored_again["policy"], model.n_steps) == ("MlpLstmPolicy", first.n_steps)
    assert stored_again["n_epochs"] == stored["n_epochs"]


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("name", SPACES)
def test_wrappers_and_policy(name):
    """What the policy cannot read is encoded or flattened, and it is trained with."""
    space, wrappers, policy, shape = SPACES[name]
    assert wrappers_for(space) == wrappers
    assert wrappers or policy_for(space) == policy
    model, env = make(f"Sampling-{name}-v0", n_steps=8, batch_size=8, n_epochs=1, n_envs=2, device="cpu", seed=0)
    assert isinstance(model.policy, model.policy_aliases[policy])
    assert env.observation_space.shape == shape
    model.learn(32)


@pytest.mark.parametrize("env_id", ["MiniGrid-GoToObject-6x6-N2-v0", "BabyAI-GoToObj-v0", "BabyAI-BossLevel-v0"])
def test_minigrid_and_babyai(env_id):
    """Missions are read, also the long ones of BabyAI."""
    model, _ = make(env_id, n_steps=8, batch_size=8, n_envs=1, device="cpu", seed=0)
    assert model.observation_space.shape == ((2835,) if env_id.startswith("MiniGrid") else (4 + 147 + 32 * 64,))
    model.learn(8)


@pytest.mark.parametrize(
    ("space", "kwargs"),
    [
        (VECTOR, {}),
        (image(40, 40, 3), {}),
        (spaces.Discrete(3), {}),
        (spaces.Box(0, np.array([1, 2], np.float32)), {}),
        (spaces.Box(0, 1, (2,)), {"norm_obs": False}),
        (spaces.Box(0, 1, (3, 3, 4), bool), {"norm_obs": False}),
        (spaces.Dict(a=VECTOR, b=spaces.Discrete(3)), {}),
        (spaces.Dict(a=VECTOR, b=spaces.Box(0, 1, (2,)), c=image(40, 40, 3)), {"norm_obs_keys": ["a"]}),
        (spaces.Dict(b=spaces.Box(0, 1, (2,)), c=image(40, 40, 3)), {"norm_obs": False}),
    ],
)
def test_what_is_normalized(space, kwargs):
    """What lies between 0 and 1 is not normalised; what cannot be normalised is left to `VecNormalize`'s other arguments."""
    assert normalization_for(space) == kwargs


def test_flags_stay_as_they_are():
    """With `default`, rewards are normalised and flags are not, unless the user asks for it."""
    model, _ = make("Sampling-flags-v0", n_envs=1)
    assert (model.normalize_obs, model.normalize_reward) == (False, True)
    model, _ = make("Sampling-vector-and-flags-v0", n_envs=1)
    assert model.normalize_obs == ["speed"]
    model, _ = make("Sampling-flags-v0", n_envs=1, normalize=True)
    assert model.normalize_obs is True


def test_what_nothing_can_read():
    """Spaces without a fixed size are refused, with the name of the space."""
    gym.register("Sampling-sequence-v0", Samples, kwargs=dict(observation_space=spaces.Sequence(VECTOR)))
    assert wrappers_for(spaces.Sequence(VECTOR)) == []
    with pytest.raises(ValueError, match="has a Sequence, which no policy can read"):
        make("Sampling-sequence-v0")


@pytest.mark.integration
def test_train_and_enjoy(tmp_path, train_here, enjoy_here):
    """The Zoo trains on such observations, saves the wrappers with the other hyperparameters, and watches the agent."""
    train_here("--env", "Sampling-minigrid-v0", "-n", 64, "-params", "n_steps:16", "batch_size:16", "n_epochs:1")
    assert saved(tmp_path, "Sampling-minigrid-v0").exists()
    stored = config(tmp_path, "Sampling-minigrid-v0")
    assert (stored["env_wrapper"], stored["policy"], stored["gamma"]) == ([ENCODE, FLATTEN], "MlpPolicy", "auto")
    assert "Mean reward" in enjoy_here("Sampling-minigrid-v0", 30)


class OwnPolicy(ActorCriticPolicy):
    """A user's policy with SB3's networks"""


class WithKeywords(ActorCriticPolicy):
    """One that passes on whatever it gets, as in SB3's documentation"""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize("policy", [OwnPolicy, WithKeywords])
@pytest.mark.parametrize(
    ("policy_kwargs", "expected"), [({}, "Tanh"), ({"policy_kwargs": "dict(activation_fn=nn.ReLU)"}, "ReLU")]
)
def test_policies_of_users(policy, policy_kwargs, expected, tmp_path):
    """
    A class without the networks of `default` keeps its own, from Python and from the Zoo, and takes what the user gives. It
    cannot normalise what `predict` gets: in the Zoo, a `VecNormalize` does.
    """
    with pytest.raises(ValueError, match=rf"`{policy.__name__}` would not normalise what `predict` gets; let it inherit"):
        make("Acrobot-v1", policy=policy, device="cpu", **policy_kwargs)
    models = [make("Acrobot-v1", policy=policy, device="cpu", normalize=False, **policy_kwargs)[0]]
    given = {"policy": f"{__name__}.{policy.__name__}", **policy_kwargs}
    gym.register("OtherAcrobot-v0", "gymnasium.envs.classic_control:AcrobotEnv", max_episode_steps=500)
    experiment = manager(env_id="OtherAcrobot-v0", folder=tmp_path, hyperparams=given, eval_freq=-1)
    models.append(experiment.setup_experiment()[0])
    del gym.registry["OtherAcrobot-v0"]
    assert isinstance(models[1].env, VecNormalize)
    for model in models:
        assert type(model.policy) is policy
        assert [type(layer).__name__ for layer in model.policy.mlp_extractor.policy_net][1::2] == [expected] * 2


def test_users_decide(tmp_path):
    """A wrapper or policy of the user's is kept, and the other one fits it; keyword arguments reach the environment."""
    arguments = dict(env_id="Sampling-minigrid-v0", folder=tmp_path, eval_freq=-1)
    given = dict(n_steps=8, env_wrapper=[{ENCODE: dict(n_words=8)}, FLATTEN])
    model, hyperparams = manager(
        **arguments, hyperparams=given, env_kwargs=dict(action_space=spaces.Discrete(3))
    ).setup_experiment()
    assert (hyperparams["env_wrapper"], hyperparams["policy"]) == (given["env_wrapper"], "MlpPolicy")
    assert model.observation_space.shape == (4 + 147 + 8 * 64,)
    assert model.action_space == spaces.Discrete(3)
    given = dict(n_steps=8, policy="sb3_ppo_ext.MlpPolicy")
    _, hyperparams = manager(**arguments, hyperparams=given).setup_experiment()
    assert (hyperparams["env_wrapper"], hyperparams["policy"]) == ([ENCODE, FLATTEN], "sb3_ppo_ext.MlpPolicy")
