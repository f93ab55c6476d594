"""PPOExt without options is stable_baselines3.PPO, to the bit."""

import inspect
import pydoc
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack, VecNormalize
from support.parity import assert_equal, assert_equal_runs, train
from support.toys import DICT, IMAGE, ToyEnv, make_toys

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.rollout.bootstrap import terminal_values

SMALL = dict(n_steps=16, batch_size=16, n_epochs=2, seed=3, device="cpu")


def reference(algorithm):
    """The arguments with which the algorithm computes what SB3's PPO does, to the bit."""
    return dict(backend="eager") if algorithm is PPOExt else {}


class Case:
    def __init__(self, make_env=make_toys, policy="MlpPolicy", timesteps=64, stop_at=None, **kwargs):
        self.make_env, self.policy, self.timesteps, self.stop_at = make_env, policy, timesteps, stop_at
        self.kwargs = {**SMALL, **kwargs}

    def run(self, algorithm):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You have specified a mini-batch size")
            model = algorithm(self.policy, self.make_env(), **self.kwargs, **reference(algorithm))
        run = train(model, self.timesteps, self.stop_at)
        model.env.close()
        return run


def toys(**kwargs):
    return lambda: make_toys(**kwargs)


class CountingBuffer(RolloutBuffer):
    def __init__(self, *args, scale=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = scale

    def compute_returns_and_advantage(self, last_values, dones):
        super().compute_returns_and_advantage(last_values, dones)
        self.advantages *= self.scale


class NoisyExtractor(FlattenExtractor):
    """Acts otherwise in training than while collecting."""

    def forward(self, observations):
        return th.nn.functional.dropout(super().forward(observations), 0.5, self.training)


def squashed_sde():
    return dict(use_sde=True, policy_kwargs=dict(squash_output=True, full_std=False, use_expln=True))


CASES = {
    # Action spaces
    "box": Case(),
    "box of shape (2, 2)": Case(toys(action_space=spaces.Box(-1, 1, (2, 2), np.float32))),
    "box in float64": Case(toys(action_space=spaces.Box(-2.0, 2.0, (2,), np.float64))),
    "discrete": Case(toys(action_space=spaces.Discrete(4))),
    "multi-discrete": Case(toys(action_space=spaces.MultiDiscrete([3, 2]))),
    "multi-binary": Case(toys(action_space=spaces.MultiBinary(3))),
    # Observation spaces
    "discrete observations": Case(toys(observation_space=spaces.Discrete(5))),
    "multi-discrete observations": Case(toys(observation_space=spaces.MultiDiscrete([4, 3]))),
    "multi-binary observations": Case(toys(observation_space=spaces.MultiBinary(4))),
    "float64 observations": Case(toys(observation_space=spaces.Box(-1.0, 1.0, (3,), np.float64))),
    "images": Case(toys(observation_space=IMAGE), "CnnPolicy"),
    "images, discrete actions": Case(toys(observation_space=IMAGE, action_space=spaces.Discrete(3)), "CnnPolicy"),
    "dict": Case(toys(observation_space=DICT), "MultiInputPolicy"),
    "dict, discrete actions": Case(toys(observation_space=DICT, action_space=spaces.Discrete(3)), "MultiInputPolicy"),
    # Number of environments, lengths of episodes
    "one environment": Case(toys(n_envs=1)),
    "five environments, truncated together": Case(toys(n_envs=5, p_end=0.0), timesteps=96),
    "images, truncated together": Case(toys(n_envs=3, observation_space=IMAGE, p_end=0.0), "CnnPolicy", timesteps=96),
    "dict, truncated together": Case(toys(n_envs=3, observation_space=DICT, p_end=0.0), "MultiInputPolicy", timesteps=96),
    "never truncated": Case(toys(length=10**6, p_end=0.2)),
    # Options
    "gsde": Case(use_sde=True),
    "gsde, resampled": Case(use_sde=True, sde_sample_freq=4),
    "gsde, squashed": Case(**squashed_sde()),
    "clip_range_vf": Case(clip_range_vf=0.1),
    "target_kl": Case(target_kl=1e-4, learning_rate=1e-2, verbose=1),
    "ent_coef": Case(ent_coef=0.02),
    "vf_coef, max_grad_norm": Case(vf_coef=0.9, max_grad_norm=0.1),
    "normalize_advantage=False": Case(normalize_advantage=False),
    "batch size 1": Case(normalize_advantage=False, batch_size=1, n_epochs=1),
    "batch size that leaves a remainder": Case(batch_size=7),
    "batch size that leaves one": Case(batch_size=31),
    "batch larger than the rollout": Case(batch_size=128),
    "schedules": Case(
        learning_rate=LinearSchedule(1e-2, 1e-3, 0.5), clip_range=lambda p: 0.1 + p / 10, clip_range_vf=lambda p: p
    ),
    "gamma, gae_lambda": Case(gamma=0.5, gae_lambda=0.0),
    "rollout buffer class": Case(rollout_buffer_class=CountingBuffer, rollout_buffer_kwargs=dict(scale=0.5)),
    "stats_window_size": Case(stats_window_size=2),
    # Policies
    "separate extractors": Case(policy_kwargs=dict(share_features_extractor=False)),
    "separate extractors, images": Case(
        toys(observation_space=IMAGE), "CnnPolicy", policy_kwargs=dict(share_features_extractor=False)
    ),
    "shared extractor class": Case(policy_kwargs=dict(features_extractor_class=FlattenExtractor)),
    "dropout": Case(policy_kwargs=dict(features_extractor_class=NoisyExtractor)),
    "networks": Case(policy_kwargs=dict(net_arch=dict(pi=[8], vf=[16, 16]), activation_fn=th.nn.ReLU, ortho_init=False)),
    "log_std_init": Case(policy_kwargs=dict(log_std_init=-1.5)),
    "optimizer": Case(policy_kwargs=dict(optimizer_class=th.optim.RMSprop, optimizer_kwargs=dict(alpha=0.9))),
    # Callbacks that stop
    "stopped in the first rollout": Case(stop_at=5),
    "stopped in the second rollout": Case(stop_at=20),
    "stopped at the end of a rollout": Case(stop_at=16),
    # Vectorised environments
    "VecNormalize": Case(lambda: VecNormalize(make_toys(p_end=0.0), gamma=0.9)),
    "VecNormalize, rewards alone": Case(lambda: VecNormalize(make_toys(p_end=0.0), norm_obs=False)),
    "VecNormalize, observations alone": Case(lambda: VecNormalize(make_toys(p_end=0.0), norm_reward=False)),
    "VecNormalize, dict": Case(
        lambda: VecNormalize(make_toys(observation_space=DICT), norm_obs_keys=["joints"]), "MultiInputPolicy"
    ),
    "VecFrameStack": Case(lambda: VecFrameStack(make_toys(), 3)),
    "VecFrameStack, images": Case(lambda: VecFrameStack(make_toys(observation_space=IMAGE), 2), "CnnPolicy"),
    "SubprocVecEnv": Case(toys(vec_env_class=SubprocVecEnv)),
    "an environment, not vectorised": Case(ToyEnv),
    # Gymnasium's own
    "CartPole-v1": Case(lambda: make_vec_env("CartPole-v1", 4), n_steps=64, batch_size=32, timesteps=512),
    "Pendulum-v1": Case(lambda: make_vec_env("Pendulum-v1", 2), n_steps=128, batch_size=64, timesteps=512),
    "an id": Case(lambda: "CartPole-v1"),
}


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.integration if name == "SubprocVecEnv" else ()) for name in CASES]
)
def test_equals_sb3(name, capsys):
    """Parameters, optimiser, logs, rollouts, what callbacks see and printed lines are the same bits."""
    case = CASES[name]
    expected = case.run(PPO)
    printed = capsys.readouterr().out
    actual = case.run(PPOExt)
    assert_equal_runs(expected, actual)
    assert printed == capsys.readouterr().out
    assert ("target_kl" in name) == ("Early stopping" in printed)


@pytest.mark.parametrize("factor", [1.45, 1.55])
def test_target_kl_at_its_limit(factor, capsys):
    """The update stops above 1.5 times the target, and not below."""
    whole = dict(batch_size=32, n_epochs=2, timesteps=32, learning_rate=1e-2)
    kl = Case(**whole).run(PPO).logs[-1]["train/approx_kl"]
    stopped = Case(target_kl=float(kl) / factor, verbose=1, **whole)
    runs = [stopped.run(algorithm) for algorithm in (PPO, PPOExt)]
    assert_equal_runs(*runs)
    assert capsys.readouterr().out.count("Early stopping") == (2 if factor > 1.5 else 0)


def test_the_oracle_can_tell_a_difference():
    """The comparison fails when one number of the algorithm is another."""
    expected = CASES["box"].run(PPO)
    with pytest.raises(AssertionError):
        assert_equal_runs(expected, Case(gamma=0.9899).run(PPOExt))


def test_several_truncations_in_one_step():
    """The cases with several environments bootstrap more than one of them in the same step."""
    run = CASES["five environments, truncated together"].run(PPOExt)
    assert any(step["dones"].sum() == 5 for step in run.recorder.steps)
    stored = run.recorder.rollouts[0]["rewards"]
    seen = np.stack([step["rewards"] for step in run.recorder.steps[:16]])
    dones = np.stack([step["dones"] for step in run.recorder.steps[:16]])
    assert (stored[dones] != seen[dones]).all()
    assert (stored[~dones] == seen[~dones]).all()


@pytest.mark.parametrize(("space", "policy"), [(None, "MlpPolicy"), (IMAGE, "CnnPolicy"), (DICT, "MultiInputPolicy")])
def test_batched_bootstrap(space, policy):
    """One call for all terminal observations gives what one call for each gives, to float rounding."""
    env = make_toys(n_envs=2, **({} if space is None else {"observation_space": space}))
    model = PPOExt(policy, env, **SMALL)
    model.env.observation_space.seed(0)
    observations = [model.env.observation_space.sample() for _ in range(5)]
    one_by_one, batched = (
        terminal_values(model.policy, model.rollout_buffer, range(5), observations, batched).values
        for batched in (False, True)
    )
    assert batched.shape == one_by_one.shape == (5,)
    assert one_by_one.std() > 0
    th.testing.assert_close(batched, one_by_one, rtol=1e-5, atol=1e-6)


def test_signature():
    """SB3's 26 parameters come first, with the same names, order, kinds and defaults."""
    expected = list(inspect.signature(PPO.__init__).parameters.values())
    actual = list(inspect.signature(PPOExt.__init__).parameters.values())
    assert len(expected) == 26 + 1
    for ours, theirs in zip(actual, expected, strict=False):
        assert (ours.name, ours.kind, ours.default) == (theirs.name, theirs.kind, theirs.default)
    # What comes behind them is keyword-only
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in actual[27:])


class TwoOptions(PPOExt):
    """A user's class with a constructor of its own."""

    def __init__(self, policy, env, mine=1, **kwargs):
        super().__init__(policy, env, **kwargs)


def test_help():
    """The arguments are printed once, with the class; subclasses have their own."""
    printed = pydoc.plain(pydoc.render_doc(PPOExt))
    assert "__init__(self, ...)" in printed
    assert len([line for line in printed.splitlines() if "n_epochs: int" in line]) == 1
    assert list(inspect.signature(PPOExt).parameters) == list(inspect.signature(PPOExt.__init__).parameters)[1:]
    assert str(inspect.signature(TwoOptions)) == "(policy, env, mine=1, **kwargs)"


@pytest.mark.parametrize("method", ["learn", "load", "set_parameters", "collect_rollouts", "train"])
def test_signatures_of_methods(method):
    """The methods take SB3's arguments, with the same defaults but for the name of the TensorBoard run, and our `trusted`."""
    expected, actual = (dict(inspect.signature(getattr(cls, method)).parameters) for cls in (PPO, PPOExt))
    if method in ("load", "set_parameters"):
        assert actual.pop("trusted").kind is inspect.Parameter.KEYWORD_ONLY
    assert list(expected) == list(actual)
    defaults = {name: p.default for name, p in actual.items()}
    assert defaults == {name: p.default for name, p in expected.items()} | (
        {"tb_log_name": "PPOExt"} if method == "learn" else {}
    )


def test_truncated_minibatch_warning():
    """SB3's warning about a batch size that does not divide the rollout, word for word, at the user's line."""
    messages = []
    for algorithm in (PPO, PPOExt):
        with pytest.warns(UserWarning, match="mini-batch size of 7") as caught:
            algorithm("MlpPolicy", ToyEnv(), n_steps=16, batch_size=7)
        messages.append(str(caught[0].message))
    assert messages[0] == messages[1]
    assert caught[0].filename == __file__


def test_cpu_hint_on_cuda():
    """On CUDA an MlpPolicy still gets SB3's hint to prefer the CPU, a CnnPolicy does not."""
    model = PPOExt("MlpPolicy", ToyEnv(), device="cpu")
    model.device = th.device("cuda")
    with pytest.warns(UserWarning, match="trying to run PPOExt on the GPU"):
        model._maybe_recommend_cpu()
    model = PPOExt("CnnPolicy", ToyEnv(observation_space=IMAGE), n_steps=8, batch_size=8, device="cpu")
    model.device = th.device("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model._maybe_recommend_cpu()


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(
    ("source", "name"),
    [
        *((PPO, name) for name in ("box", "gsde", "clip_range_vf", "dict")),
        *((PPOExt, name) for name in ("box", "discrete", "separate extractors")),
    ],
)
def test_load_and_continue(source, name, tmp_path):
    """A zip of PPO, or of PPOExt, continues in PPOExt as it continues in PPO."""
    case = CASES[name]
    case.run(source).model.save(tmp_path / "model")
    runs = [
        train(algorithm.load(tmp_path / "model", env=case.make_env(), **reference(algorithm)), 64)
        for algorithm in (PPO, PPOExt)
    ]
    assert_equal_runs(*runs)
    assert runs[1].model._n_updates == case.kwargs["n_epochs"] * 4


def test_saved_and_continued_is_trained_straight_through(tmp_path):
    """With nothing random left, train, save, load, train equals train straight through."""

    def continued(interrupt):
        model = PPOExt("MlpPolicy", make_toys(), **{**SMALL, "seed": None})
        th.manual_seed(0)
        np.random.seed(0)
        model.policy.load_state_dict(PPOExt("MlpPolicy", make_toys(), **SMALL).policy.state_dict())
        model.env.seed(1)
        model.learn(32)
        if interrupt:
            state = th.get_rng_state(), np.random.get_state()
            model.save(tmp_path / "half")
            model = PPOExt.load(tmp_path / "half", env=model.env, force_reset=False)
            th.set_rng_state(state[0])
            np.random.set_state(state[1])
        model.learn(32, reset_num_timesteps=False)
        return model

    straight, resumed = continued(False), continued(True)
    assert_equal(straight.policy.state_dict(), resumed.policy.state_dict(), "policy")
    assert_equal(straight.policy.optimizer.state_dict(), resumed.policy.optimizer.state_dict(), "optimizer")
    assert straight.num_timesteps == resumed.num_timesteps == 64


def test_set_parameters_of_ppo(tmp_path):
    """`set_parameters` takes those of a PPO, as a dictionary and as a zip."""
    ppo = CASES["box"].run(PPO).model
    ppo.save(tmp_path / "ppo.zip")
    for source in (ppo.get_parameters(), str(tmp_path / "ppo.zip"), str(tmp_path / "ppo")):
        model = PPOExt("MlpPolicy", make_toys(), **SMALL)
        model.set_parameters(source)
        assert_equal(ppo.policy.state_dict(), model.policy.state_dict(), "policy")
        assert_equal(ppo.policy.optimizer.state_dict(), model.policy.optimizer.state_dict(), "optimizer")


def test_ppo_loads_our_zip(tmp_path):
    """PPO loads a zip of PPOExt, also one with schedules from strings."""
    model = Case(learning_rate="lin_0.01", clip_range="lin_0.2").run(PPOExt).model
    model.save(tmp_path / "ours")
    loaded = PPO.load(tmp_path / "ours")
    assert_equal(model.policy.state_dict(), loaded.policy.state_dict(), "policy")
    assert loaded.lr_schedule(0.5) == pytest.approx(0.005)


def test_registered_env_by_name():
    """A string as environment is its id, as for PPO."""
    assert PPOExt("MlpPolicy", "CartPole-v1", device="cpu").env.num_envs == 1
    with pytest.raises(gym.error.NameNotFound):
        PPOExt("MlpPolicy", "NoSuchEnv-v0")
