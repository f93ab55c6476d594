"""Processes that do not wait for each other collect what they would have collected step by step, or step aside."""

import gc
import importlib
import os
import signal
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CheckpointCallback,
    EvalCallback,
    EveryNTimesteps,
    ProgressBarCallback,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnNoModelImprovement,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize
from support.cases import one_in
from support.parity import assert_equal
from support.toys import BOX_ACTION, IMAGE, VECTOR, Brittle, Silent, ToyEnv
from support.vec_envs import FORK, Slow, Talkative, interrupted, nothing_is_left, without_clock

from sb3_ppo_ext import ActionMaskWrapper, ParallelVecEnv, PPOExt, TrainingCheckpoint, WorkerError
from sb3_ppo_ext.engines.native import extension
from sb3_ppo_ext.envs import choice_of_vec_env
from sb3_ppo_ext.rollout import overlap

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform == "win32", reason="workers are forked, which is faster"),
    pytest.mark.skipif(extension.module is None, reason="the native engine alone acts in several processes"),
]
SMALL = dict(n_steps=16, batch_size=20, n_epochs=2, seed=3, device="cpu")
VECTORS = spaces.Dict({"joints": VECTOR, "gear": spaces.Discrete(3), "flags": spaces.MultiBinary(2)})
HYBRID = spaces.Dict({"push": BOX_ACTION, "button": spaces.Discrete(3), "lights": spaces.MultiBinary(2)})
_nothing_is_left = pytest.fixture(autouse=True)(nothing_is_left)


@pytest.fixture
def collected(monkeypatch):
    """Numbers of steps of the rollouts that were collected without waiting."""
    found = []
    original = ParallelVecEnv.collect

    def collect(self, make_actor, observations, n_steps, source):
        found.append(n_steps)
        return original(self, make_actor, observations, n_steps, source)

    monkeypatch.setattr(ParallelVecEnv, "collect", collect)
    return found


# Normalisation inside the model, with statistics that stay as they are in a rollout
NORMALIZED = dict(normalize_obs=True, normalize_reward=True, normalize_freq="rollout")


def make(fns, n_workers=1, wrap=lambda env: env, policy="MlpPolicy", is_overlapped=True, timeout=None, **options):
    env = ParallelVecEnv(fns, n_workers=n_workers, timeout=timeout, overlap=is_overlapped, **FORK)
    return PPOExt(policy, wrap(env), **{**SMALL, **options})


def toys(n_envs=5, cls=Talkative, **kwargs):
    return [lambda: Monitor(cls(**kwargs))] * n_envs


def seen_of(model, env):
    """All that can be seen of a model and its environments after a training."""
    buffer, distribution = model.rollout_buffer, model.policy.action_dist
    arrays = ("observations", "actions", "rewards", "episode_starts", "values", "log_probs", "advantages", "returns")
    return {
        "policy": model.policy.state_dict(),
        "optimizer": model.policy.optimizer.state_dict(),
        "buffer": [getattr(buffer, name) for name in arrays],
        "position": (buffer.pos, buffer.full),
        "last": (model._last_obs, model._last_episode_starts, model.num_timesteps, env.actions),
        "infos": without_clock([list(model.ep_info_buffer), list(model.ep_success_buffer), env.reset_infos]),
        "generator": th.get_rng_state(),
        "coefficients": [getattr(distribution, name, None) for name in ("exploration_mat", "exploration_matrices")],
        "statistics": None if model.normalizer is None else model.normalizer.state_dict(),
        "environments": env.get_attr("t") if env.has_attr("t") else None,
    }


def same_without_overlap(fns, n_rollouts=3, policy=None, n_workers=1, **options):
    is_dict = isinstance(fns[0]().observation_space, spaces.Dict)
    policy, seen = policy or ("MultiInputPolicy" if is_dict else "MlpPolicy"), []
    for is_overlapped in (True, False):
        model = make(fns, n_workers, policy=policy, is_overlapped=is_overlapped, **options)
        model.learn(n_rollouts * model.n_steps * len(fns))
        seen.append(seen_of(model, model.env.unwrapped))
        model.env.close()
    assert_equal(without_clock(seen[1]["infos"]), seen[0].pop("infos"))
    del seen[1]["infos"]
    assert_equal(seen[1], seen[0], "training")


SPACES = {
    "box": (VECTOR, BOX_ACTION),
    "float64": (spaces.Box(-1.0, 1.0, (2, 2), np.float64), spaces.Box(-1.0, 1.0, (2, 2), np.float64)),
    "discrete": (VECTOR, spaces.Discrete(3)),
    "integers": (spaces.Box(-9, 9, (4,), np.int32), BOX_ACTION),
    "dict": (VECTORS, BOX_ACTION),
    "discrete-observations": (spaces.Discrete(4), BOX_ACTION),
    "multi-discrete": (spaces.MultiDiscrete([3, 2]), spaces.MultiDiscrete([2, 3])),
    "multi-binary": (VECTOR, spaces.MultiBinary(2)),
    "hybrid": (VECTORS, HYBRID),
}
WORKERS = {"box": (0, 2), "discrete": (2,)}
CASES = [(name, n) for name in SPACES for n in WORKERS.get(name, (1,))]


@pytest.mark.parametrize("case", one_in(2, CASES), ids=str)
def test_the_same_results(case, collected):
    """Parameters, the buffer, last observations, infos, generators and environments are those of stepping together."""
    name, n_workers = case
    observation_space, action_space = SPACES[name]
    fns = toys(observation_space=observation_space, action_space=action_space)
    same_without_overlap(fns, n_workers=n_workers)
    assert collected == [16] * 3


def test_the_same_results_where_it_steps_aside(collected):
    """With convolutions, the environments step together."""
    same_without_overlap(toys(observation_space=IMAGE, action_space=spaces.Discrete(2)), 1, "CnnPolicy")
    assert collected == []


class Masked(ToyEnv):
    """Some of its actions are invalid, and it writes its masks into one array; it refuses them."""

    def __init__(self, choices=(3,), **kwargs):
        super().__init__(
            action_space=spaces.MultiDiscrete(choices) if len(choices) > 1 else spaces.Discrete(*choices), **kwargs
        )
        self.mask = np.ones(sum(choices), bool)

    def action_masks(self):
        self.mask[:] = True
        self.mask[[self.t % 2, -1 - self.t % 2]] = False
        return self.mask

    def step(self, action):
        firsts = np.cumsum([0, *np.atleast_1d(self.action_space.nvec)[:-1]]) if np.ndim(action) else 0
        assert self.mask[firsts + action].all()
        return super().step(action)


MASKS = {
    "method": (lambda: Masked(), {}),
    "several actions": (lambda: Masked((4, 3)), {}),
    "observations": (
        lambda: ActionMaskWrapper(Masked()),
        dict(action_mask_key="action_mask", policy="MlpPolicy", **NORMALIZED),
    ),
    "normalised": (lambda: Masked(), NORMALIZED),
    "dictionaries": (lambda: Masked(observation_space=VECTORS), NORMALIZED),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name, collected):
    """Masks of a method of the environments, or in their observations, are those of their step."""
    make_env, options = MASKS[name]
    same_without_overlap([lambda: Monitor(make_env())] * 3, action_masking=True, **options)
    assert collected == ([16] * 2 if "normalize_obs" in options else [16] * 3)


class BadMask(Masked):
    def __init__(self, mask):
        super().__init__()
        self.bad, self.age = mask, 0

    def action_masks(self):
        self.age += 1
        return self.bad if self.age == 20 else super().action_masks()


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("mask", [np.zeros(3, bool), np.ones(2, bool)])
def test_bad_masks(mask, index, collected):
    """A mask that leaves no choice, or has another shape, is refused with its environment and step."""
    fns = [Masked] * 4
    fns[index] = lambda: BadMask(mask)
    messages = [message_of(fns, is_overlapped, ValueError, action_masking=True) for is_overlapped in (True, False)]
    assert f"Environment {index}: " in messages[0][0]
    assert_equal(messages[1], messages[0], "error")
    assert collected


OPTIONS = {
    "relu": dict(policy_kwargs=dict(net_arch=dict(pi=[300, 7], vf=[5]), activation_fn=th.nn.ReLU)),
    "no hidden layer": dict(policy_kwargs=dict(net_arch=[])),
    "layer_norm": dict(policy_kwargs=dict(net_type="layer_norm")),
    "simba": dict(policy_kwargs=dict(net_type="simba", net_arch=dict(pi=[9, 9], vf=[5]))),
    "truncations": dict(gamma=0.5, gae_lambda=0.7),
    "squashed Gaussian": dict(action_dist="squashed_gaussian"),
    "threads": dict(native_threads=2),
    "normalised advantages": dict(advantage_norm="rollout"),
    "normalised": NORMALIZED,
    "beta": dict(action_dist="beta"),
    "gSDE": dict(use_sde=True),
    "gSDE, drawn again": dict(use_sde=True, sde_sample_freq=5, **NORMALIZED),
    "squashed gSDE": dict(use_sde=True, policy_kwargs=dict(squash_output=True)),
}


@pytest.mark.parametrize("name", one_in(3, OPTIONS, "threads", "beta", "gSDE", "gSDE, drawn again"))
def test_options(name, collected):
    """Options of the update and other networks change nothing in this."""
    same_without_overlap(toys(cls=ToyEnv, p_end=0.2), n_rollouts=2, **OPTIONS[name])
    assert collected


@pytest.mark.parametrize("name", ["truncations", "squashed Gaussian", "beta", "gSDE"])
def test_outputs_do_not_depend_on_the_number_of_environments(name):
    """The actor of one environment computes what the actor of all of them does, to the bit."""
    model = make(toys(n_envs=37, cls=ToyEnv), **OPTIONS[name])
    _, callback = model._setup_learn(1)
    if model.use_sde:
        model.policy.reset_noise(37)
    actor = model._make_actor(model.rollout_buffer, model._rollout_config(callback, 16))
    make_actor = actor.for_share(10**9)
    observations = np.random.default_rng(0).normal(size=(16, 37, 3)).astype(np.float32)
    for step in range(16):
        expected = actor.act(model.policy, observations[step], None, step).samples
        for envs in (slice(0, 37), slice(0, 1), slice(5, 7), slice(11, 30)):
            samples, env_actions = make_actor(envs).act(observations[step, envs], step)
            np.testing.assert_array_equal(samples, expected[envs])
            assert BOX_ACTION.contains(env_actions[0])
    model.env.close()


class Own(PPOExt):
    """A subclass, which may do anything in a rollout."""


class OwnEnv(ParallelVecEnv):
    def step_wait(self):
        return super().step_wait()


def replaced_step(env):
    env.step = lambda actions: type(env).step(env, actions)
    return env


def switched_off(env):
    env.overlap = False
    return env


MADE = {
    "callback": dict(callback=lambda model: Silent()),
    "function": dict(callback=lambda model: lambda *_: True),
    "stop": dict(callback=lambda model: StopTrainingOnMaxEpisodes(1000)),
    "nested stop": dict(callback=lambda model: EveryNTimesteps(20, StopTrainingOnMaxEpisodes(1000))),
    "stop after evaluation": dict(
        callback=lambda model: EvalCallback(
            Monitor(ToyEnv()), callback_after_eval=StopTrainingOnNoModelImprovement(5), eval_freq=1000
        )
    ),
    "stop at a new best": dict(
        callback=lambda model: EvalCallback(
            Monitor(ToyEnv()), callback_on_new_best=StopTrainingOnRewardThreshold(1e9), eval_freq=1000
        )
    ),
    "evaluates the environments": dict(callback=lambda model: EvalCallback(model.env, eval_freq=1000, warn=False)),
    "VecNormalize": dict(wrap=VecNormalize),
    "VecMonitor": dict(wrap=VecMonitor),
    "replaced method": dict(wrap=replaced_step),
    "switched off": dict(wrap=switched_off),
    "eager": dict(backend="eager"),
    "mean_tanh": dict(policy_kwargs=dict(mean_tanh=True)),
    "gSDE between random evaluations": dict(
        use_sde=True,
        sde_sample_freq=4,
        callback=lambda model: EveryNTimesteps(9, EvalCallback(Monitor(ToyEnv()), deterministic=False)),
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_it_steps_aside(name, collected):
    """Whoever may see or change something in a rollout does so: the environments step together."""
    kwargs = dict(MADE[name])
    make_callback, fns = kwargs.pop("callback", lambda model: None), kwargs.pop("fns", toys(n_envs=2, cls=ToyEnv))
    model = make(fns, **kwargs)
    model.learn(64, callback=make_callback(model))
    assert model.num_timesteps == 64
    assert collected == []
    model.env.close()


def test_large_rollouts_step_aside(collected, monkeypatch):
    """Rollouts with so many numbers that copies of them matter are collected step by step."""
    for limit, expected in ((16 * 2 * 12, [16]), (16 * 2 * 12 - 1, [16])):
        monkeypatch.setattr(overlap, "LARGEST", limit)
        model = make(toys(n_envs=2, cls=ToyEnv))
        model.learn(32)
        model.env.close()
        assert collected == expected


def test_subclasses_step_aside(collected):
    """So do subclasses of the model and of the environments that may see or change something."""
    fns = toys(n_envs=2, cls=ToyEnv)
    for algorithm, cls in ((Own, ParallelVecEnv), (PPOExt, OwnEnv)):
        env = cls(fns, n_workers=1, **FORK)
        algorithm("MlpPolicy", env, **SMALL).learn(64)
        env.close()
    assert collected == []


def test_callbacks_see_each_step(collected, tmp_path):
    """Evaluations and checkpoints in the middle of a rollout are those of environments that step together."""
    found = {}
    for is_overlapped in (True, False):
        folder = tmp_path / str(is_overlapped)
        model = make(toys(n_envs=4), is_overlapped=is_overlapped)
        env = Monitor(ToyEnv())
        env.reset(seed=1)
        evaluation = EvalCallback(env, eval_freq=5, n_eval_episodes=2, log_path=str(folder), deterministic=False, verbose=0)
        checkpoints = CheckpointCallback(7, str(folder))
        model.learn(192, callback=[evaluation, EveryNTimesteps(30, CheckpointCallback(1, str(folder), "n")), checkpoints])
        model.env.close()
        results = np.load(folder / "evaluations.npz")
        zips = [path.name for path in sorted(folder.glob("*.zip"))]
        models = [PPOExt.load(folder / name, device="cpu") for name in zips]
        saved = [(m._last_obs, m._last_episode_starts, m.num_timesteps, m.policy.state_dict()) for m in models]
        episodes = [[(info["r"], info["l"]) for info in m.ep_info_buffer] for m in models]
        found[is_overlapped] = [zips, results["timesteps"], results["results"], saved, episodes, evaluation.n_calls]
    assert len(found[True][0]) > 8
    assert_equal(found[False], found[True], "callbacks")
    assert collected == [16] * 3


def test_names_of_callbacks():
    """All callbacks that are known by name exist under this name."""
    for path in overlap.PATIENT:
        module, _, name = path.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), name), BaseCallback)


def test_checkpoints_and_progress_bar(collected, tmp_path):
    """A training with a bar of its progress and checkpoints is resumed from them."""
    pytest.importorskip("tqdm")
    pytest.importorskip("rich")
    model = make(toys(n_envs=2, cls=ToyEnv))
    with pytest.warns(UserWarning, match="will start with a reset"):
        model.learn(96, callback=[TrainingCheckpoint(16, tmp_path), ProgressBarCallback()])
    model.env.close()
    env = ParallelVecEnv(toys(n_envs=2, cls=ToyEnv), n_workers=1, **FORK)
    with pytest.warns(UserWarning, match="from a reset of the environments"):
        assert PPOExt.resume(tmp_path, env, device="cpu").learn(128).num_timesteps == 128
    env.close()
    assert len(collected) > 3


def test_training_goes_on(collected):
    """A second call of `learn` goes on where the first one ended, with or without overlap."""
    seen = []
    for overlaps in ((True, True, True), (False, False, False), (True, False, True)):
        model = make(toys())
        for is_overlapped in overlaps:
            model.env.overlap = is_overlapped
            model.learn(160, reset_num_timesteps=False)
        seen.append(seen_of(model, model.env))
        model.env.close()
    for each in seen:
        each.pop("infos")
    assert_equal(seen[0], seen[1], "never")
    assert_equal(seen[0], seen[2], "sometimes")
    assert len(collected) == 10


def message_of(fns, is_overlapped, error, change=lambda model: None, **options):
    """The error of a training in its second rollout, and what is left of the model."""
    model = make(fns, is_overlapped=is_overlapped, **options)
    model.learn(64)
    change(model)
    with pytest.raises(error) as caught:
        model.learn(64, reset_num_timesteps=False)
    assert model._last_obs is None
    left = str(caught.value), model.num_timesteps, [info["r"] for info in model.ep_info_buffer], model.policy.state_dict()
    model.env.close()
    return left


BAD = {
    "observation": (dict(observation=np.float32([0, np.nan, 0]), at=20), ValueError),
    "large observation": (dict(observation=np.full(3, 1e30, np.float32) * np.float32(1e30), at=20), ValueError),
    "reward": (dict(reward=float("inf"), at=25), ValueError),
    "shape": (dict(observation=np.zeros(2, np.float32), at=20), ValueError),
}


@pytest.mark.parametrize("index", one_in(2, [0, 3]))
@pytest.mark.parametrize("name", BAD)
def test_bad_data(name, index, collected):
    """Bad data are refused with their environment and step, and the model is as it was before the rollout."""
    given, error = BAD[name]
    fns = toys(n_envs=4, cls=ToyEnv)
    fns[index] = lambda: Monitor(Brittle(**given))
    overlapped = message_of(fns, True, error)
    assert f"Environment {index}: the {'reward' if name == 'reward' else 'observation'}" in overlapped[0]
    assert_equal(message_of(fns, False, error), overlapped, "error")
    assert collected


class Collapsing(ToyEnv):
    """Says something that is not finite in its 20th step, and then raises errors."""

    def __init__(self, what):
        super().__init__(observation_space=spaces.Box(-np.inf, np.inf, (3,), np.float64), p_end=0)
        self.what, self.age = what, 0

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        self.age += 1
        if self.age > 20:
            raise RuntimeError("collapsed")
        if self.age == 20 and self.what == "observation":
            observation = np.full(3, 1e300)  # finite, but not in float32
        return observation, float("nan") if self.age == 20 and self.what == "reward" else reward, terminated, truncated, info


@pytest.mark.parametrize("index", one_in(2, [0, 3]))
@pytest.mark.parametrize("what", ["observation", "reward"])
def test_nothing_is_asked_of_broken_environments(what, index, collected):
    """An environment is not stepped any more after it has said something that is not finite."""
    fns = [lambda: ToyEnv(observation_space=Collapsing(what).observation_space)] * 4
    fns[index] = lambda: Collapsing(what)
    with pytest.raises(ValueError, match=f"Environment {index}: the {what} is not finite .* at step 3 "):
        make(fns, n_steps=8).learn(1000)
    assert collected == [8] * 3


def test_policies_that_cannot_act(collected):
    """A policy whose outputs are not finite is refused as without overlap."""

    def spoil(model):
        with th.no_grad():
            model.policy.action_net.bias[0] = float("nan")

    def message(is_overlapped):
        text, number, *_ = message_of(toys(n_envs=4, cls=ToyEnv), is_overlapped, ValueError, spoil)
        return text, number

    assert message(True) == message(False)
    assert "action_net.bias" in message(True)[0]


class Failing(ToyEnv):
    """Does something else in its 20th step."""

    def __init__(self, what):
        super().__init__()
        self.what, self.age = what, 0

    def step(self, action):
        self.age += 1
        if self.age == 20:
            self.what()
        return super().step(action)


def broken():
    raise KeyError("broken")


@pytest.mark.parametrize("index", [0, 3])
def test_an_error_names_its_environment(index, collected):
    """An error of an environment is a WorkerError that names it, and a training goes on with new environments."""
    fns = toys(n_envs=4, cls=ToyEnv)
    fns[index] = lambda: Failing(broken)
    model = make(fns)
    model.learn(64)
    where = f"Environment {index}, in the main process," if index < 2 else f"Worker 1 .* in environment {index}:"
    with pytest.raises(WorkerError, match=rf"{where}(.|\n)*in step\n(.|\n)*KeyError: 'broken'"):
        model.learn(64, reset_num_timesteps=False)
    model.set_env(ParallelVecEnv(toys(n_envs=4, cls=ToyEnv), n_workers=1, **FORK))
    assert model.learn(64, reset_num_timesteps=False).num_timesteps == 128
    model.env.close()
    assert len(collected) == 3


def test_a_worker_that_dies(collected):
    """A worker that is killed in a rollout is named with its environments."""
    fns = [*toys(n_envs=2, cls=ToyEnv), lambda: Failing(lambda: os.kill(os.getpid(), signal.SIGKILL)), ToyEnv]
    model = make(fns)
    with pytest.raises(WorkerError, match=r"Worker 1 .*environments 2 to 3\) was killed by SIGKILL"):
        model.learn(128)
    assert model.num_timesteps == 64


def test_a_worker_that_hangs(collected):
    """The time limit is one for a step, not for a rollout."""
    fns = [*toys(n_envs=2, cls=ToyEnv), lambda: Slow(), lambda: Failing(lambda: time.sleep(1000))]
    model = make(fns, n_workers=2, timeout=0.5, n_steps=60)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"No answer in 0\.5 seconds: Worker 2 .*environments 2 to 3\)"):
        model.learn(240)
    assert time.monotonic() - start < 20
    fns[3] = ToyEnv
    model = make(fns, n_workers=2, timeout=0.4, n_steps=60)
    assert model.learn(480).num_timesteps == 480  # more than 0.4 seconds for each rollout
    model.env.close()


@pytest.mark.parametrize("in_main", [True, False])
def test_interrupt(in_main, collected):
    """After Ctrl-C in a rollout, a training goes on from a reset, and nothing waits for the end of the rollout."""
    slow, fast = lambda: Monitor(Slow(0.02)), lambda: Monitor(ToyEnv())
    model = make([slow if in_main else fast, fast, fast, slow], n_steps=500)
    start = time.monotonic()
    with interrupted(model.env, 0.5):
        model.learn(10**6)
    assert model._last_obs is None
    assert model.num_timesteps == 0
    model.env.get_attr("t")
    assert time.monotonic() - start < 5
    assert len(collected) == 1
    with interrupted(model.env, 0.3):
        model.learn(10**6, reset_num_timesteps=False)
    model.env.close()
    assert time.monotonic() - start < 8
    assert [process.exitcode for process in model.env.processes] == [0]


SCRIPT = """
from support.vec_envs import Slow
from sb3_ppo_ext import ParallelVecEnv, PPOExt

env = ParallelVecEnv([Slow] * 4, n_workers=2, start_method="fork")
print(*[process.pid for process in env.processes], flush=True)
PPOExt("MlpPolicy", env, n_steps=100_000, batch_size=100, device="cpu").learn(10**6)
"""


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="processes are looked for in /proc")
def test_the_main_process_is_killed(tmp_path):
    """The workers end with the main process, in the middle of a rollout."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, str(path)], env=environment, stdout=subprocess.PIPE, text=True) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        time.sleep(1.0)
        process.kill()
    deadline = time.monotonic() + 20
    while any(os.path.isdir(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(os.path.isdir(f"/proc/{pid}") for pid in pids)


def test_without_flags(collected, monkeypatch):
    """Without the extension module of the flags, the results are the same."""
    from sb3_ppo_ext.envs.parallel import flags

    monkeypatch.setattr(flags, "module", None)
    same_without_overlap(toys())
    assert collected


def test_bad_argument():
    """`overlap` is True or False."""
    with pytest.raises(ValueError, match="`overlap=1"):
        ParallelVecEnv([ToyEnv] * 2, overlap=1)


def test_the_zoo(train_here, collected, monkeypatch):
    """In RL Zoo, with its callbacks for evaluations and checkpoints, rollouts overlap."""
    monkeypatch.setattr(choice_of_vec_env, "COST", 0.0)
    train_here(
        *("--env", "CartPole-v1", "-n", "256", "--vec-env", "subproc", "--eval-freq", "16", "--eval-episodes", "1"),
        *("--save-freq", "32", "-params", "n_envs:4", "n_steps:32"),
    )
    assert collected == [32, 32]
    gc.collect()


class Reporting(ToyEnv):
    """Reports an episode at every third step, in the same dictionary, which it changes at each step, and sometimes success."""

    def reset(self, **kwargs):
        self.report = getattr(self, "report", {"r": 0.0, "l": 0})
        return super().reset(**kwargs)

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        self.report["r"] += reward
        self.report["l"] += 1
        if self.t % 3 == 0:
            info["episode"] = self.report
        if terminated:
            info["is_success"] = reward > 0.5
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize("index", [0, 2])
def test_statistics_of_episodes(index, collected):
    """Statistics of episodes are those of their step, wherever in an episode, and whatever the environment does with them."""
    fns = [ToyEnv] * 3
    fns[index] = lambda: Reporting(p_end=0.2)
    same_without_overlap(fns)
    assert collected


def test_gymnasium(collected):
    """CartPole, with episodes that end by themselves, trains as without overlap."""
    same_without_overlap([lambda: Monitor(gym.make("CartPole-v1"))] * 3, n_workers=2, ent_coef=0.01)
    assert collected
