"""Rollouts of JAX environments in one compiled function are those of stepping, up to rounding, or step aside."""

from functools import partial

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import CheckpointCallback, EvalCallback
from support.cases import one_in
from support.parity import CLOCK, assert_equal
from support.toys import Silent, record_log

from sb3_ppo_ext import JaxVecEnv, PPOExt, TensorVecNormalize, TrainingCheckpoint
from sb3_ppo_ext.engines.native import extension
from sb3_ppo_ext.rollout import collector, overlap

jax = pytest.importorskip("jax")
jnp = jax.numpy
pytestmark = [
    pytest.mark.integration,  # each environment is compiled
    pytest.mark.skipif(extension.module is None, reason="the native engine alone acts in them"),
]
N_ENVS, N_STEPS = 6, 10
OPTIONS = dict(n_steps=N_STEPS, batch_size=20, n_epochs=2, seed=3, device="cpu")
ARRAYS = ("observations", "actions", "rewards", "episode_starts", "values", "log_probs", "advantages", "returns")
VECTOR = spaces.Box(-9, 9, (3,), np.float32)
MIXED = spaces.Dict({"joints": VECTOR, "gear": spaces.Discrete(3), "legal": spaces.MultiBinary(4)})
PUSH = spaces.Box(np.float32([-1, -2]), np.float32([3, 0]))


def toy(observation_space=VECTOR, action_space=PUSH, spoil=None, num_envs=N_ENVS):
    """Its actions push what it observes, which forgets them; episodes end at random. ``spoil`` changes a step at a time."""

    def seen(key, position, time):
        if not isinstance(observation_space, spaces.Dict):
            return (9 * position).astype(observation_space.dtype)
        legal = jax.random.bernoulli(key, 0.5, (4,)).at[time % 2].set(True).at[2 + time % 2].set(True)
        return {"joints": position, "gear": time % 3, "legal": legal.astype(jnp.int8), "unused": time}

    def reset(key):
        position = jax.random.normal(key, (3,))
        return seen(key, position, 0), (position, 0)

    def step(key, state, action):
        position, time = state
        force = sum(jnp.sum(part * 1.0) for part in jax.tree.leaves(action))
        position = 0.5 * position + 0.1 * force + 0.1 * jax.random.normal(key, (3,))
        reward, terminated = position[0] - force, jax.random.uniform(key) < 0.1
        observation, log = seen(key, position, time + 1), {"force": force, "is_success": terminated}
        if spoil is not None:
            observation, reward = spoil(time, observation, reward)
        return observation, (position, time + 1), reward, terminated, False, log

    return JaxVecEnv((reset, step), None, num_envs, "cpu", observation_space, action_space, max_episode_steps=7)


@pytest.fixture
def scanned(monkeypatch):
    """Whether each rollout was collected in one function."""
    found = []

    def collection(*args):
        made = overlap.overlapped_collection(*args)
        found.append(made is not None)
        return made

    monkeypatch.setattr(collector, "overlapped_collection", collection)
    return found


def make(env, **options):
    policy = "MultiInputPolicy" if isinstance(env.observation_space, spaces.Dict) else "MlpPolicy"
    model = PPOExt(policy, env, **{**OPTIONS, **options})
    record_log(model)
    return model


def seen_of(model):
    """All that can be seen of a model and its environments after a training."""
    env, buffer = model.env.unwrapped, model.rollout_buffer
    logs = [*model.logger.output_formats[0].dumps, dict(model.logger.name_to_value)]
    assert any("env/force" in dump for dump in logs)
    return {
        "buffer": {name: getattr(buffer, name) for name in ARRAYS},
        "last": (
            model._last_obs,
            model._last_episode_starts,
            env.actions,
            *(part.numpy().copy() for part in (env._returns, env._lengths)),
        ),
        "state": [np.asarray(part) for part in jax.tree.leaves(env._state[1:])],
        "key": np.asarray(jax.random.key_data(env._state[0])),
        "infos": [(each["r"], each["l"]) for each in model.ep_info_buffer] + list(model.ep_success_buffer),
        "resets": env.reset_infos,
        "generator": th.get_rng_state().numpy(),
        "logs": [{k: v for k, v in dump.items() if k not in CLOCK} for dump in logs],
        "policy": {name: part.numpy() for name, part in model.policy.state_dict().items()},
        "statistics": None if model.normalizer is None else model.normalizer.state_dict(),
        "steps": model.num_timesteps,
    }


assert_close = partial(assert_equal, rtol=2e-3, atol=2e-4)


def scanned_and_stepped(env, monkeypatch):
    """Whether rollouts are scanned, first and then not; the environments are seeded alike."""
    for is_scanned in (True, False):
        if not is_scanned:
            monkeypatch.setattr(collector, "overlapped_collection", lambda *_: None)
        env.seed(5)
        yield is_scanned


def same_as_stepping(env, monkeypatch, n_rollouts=3, **options):
    seen = []
    for _ in scanned_and_stepped(env, monkeypatch):
        model = make(env, **options)
        model.learn(n_rollouts * N_STEPS * N_ENVS)
        seen.append(seen_of(model))
    assert_close(seen[1], seen[0], "training")


KEYS = dict(actor_keys=["joints"], critic_keys=["joints", "gear"])
CASES = {
    "gaussian": {},
    "squashed Gaussian": dict(action_dist="squashed_gaussian"),
    "beta": dict(action_dist="beta"),
    "float64": dict(action_space=spaces.Box(-1.0, 1.0, (2, 2), np.float64), action_dist="squashed_gaussian"),
    "discrete": dict(action_space=spaces.Discrete(3)),
    "multi-discrete": dict(action_space=spaces.MultiDiscrete([2, 3])),
    "multi-binary": dict(action_space=spaces.MultiBinary(2)),
    "gSDE, drawn again": dict(use_sde=True, sde_sample_freq=4),
    # The inverse of tanh, in its log probabilities, magnifies rounding.
    "squashed gSDE": dict(use_sde=True, policy_kwargs=dict(squash_output=True, log_std_init=-3.0)),
    "dictionaries": dict(observation_space=MIXED),
    "asymmetric": dict(observation_space=MIXED, policy_kwargs=KEYS),
    "masked": dict(
        observation_space=MIXED, action_space=spaces.MultiDiscrete([2, 2]), action_masking=True, action_mask_key="legal"
    ),
    "normalised": dict(normalize_obs=True, normalize_reward=True, normalize_freq="rollout"),
    "normalised dictionaries": dict(observation_space=MIXED, normalize_obs=["joints"], normalize_freq="rollout"),
    "integers": dict(observation_space=spaces.Box(-99, 99, (3,), np.int32), action_space=spaces.Discrete(2)),
    "simba, gelu": dict(policy_kwargs=dict(net_type="simba", net_arch=[9, 9], activation_fn=th.nn.GELU)),
    "elu": dict(policy_kwargs=dict(activation_fn=th.nn.ELU, net_arch=dict(pi=[7], vf=[5, 5]))),
    "value normalisation": dict(normalize_value=True),
}
OF_ENV = ("observation_space", "action_space")


@pytest.mark.parametrize("name", one_in(4, CASES, "beta", "squashed gSDE", "masked", "normalised dictionaries"))
def test_the_same_results(name, scanned, monkeypatch):
    """Buffer, parameters, log, episodes, environments and generators are those of stepping."""
    options = dict(CASES[name])
    of_env = {key: options.pop(key) for key in OF_ENV if key in options}
    same_as_stepping(toy(**of_env), monkeypatch, **options)
    assert scanned == [not options.get("normalize_freq"), True, True]


@pytest.fixture(scope="module")
def toys():
    """Environments of many tests, so that they are compiled once."""
    return toy()


@pytest.fixture
def env(toys):
    toys.seed(5)
    return toys


class Own(JaxVecEnv):
    def _step(self, actions):
        return super()._step(actions)


class OwnModel(PPOExt):
    """A subclass, which may do anything in a rollout."""


ASIDE = {
    "callback": dict(callback=Silent),
    "eager": dict(backend="eager"),
    "device": dict(backend="device"),
    "statistics per step": dict(normalize_obs=True, normalize_freq="step"),
    "large": {},
    "subclass of the model": dict(algorithm=OwnModel),
    "subclass of the environment": {},
    "replaced method": {},
    "wrapper": dict(wrap=TensorVecNormalize),
}


@pytest.mark.parametrize("name", ASIDE)
def test_it_steps_aside(name, env, scanned, monkeypatch):
    """Whoever may see or change something in a rollout does so: the environments are stepped."""
    options = dict(ASIDE[name])
    algorithm, wrap, make_callback = (options.pop(key, None) for key in ("algorithm", "wrap", "callback"))
    if name == "large":
        monkeypatch.setattr(overlap, "LARGEST", N_STEPS * N_ENVS * 12 - 1)
    if name == "subclass of the environment":
        monkeypatch.setattr(env, "__class__", Own)
    if name == "replaced method":
        monkeypatch.setitem(vars(env), "_step", env._step)
    model = (algorithm or PPOExt)("MlpPolicy", wrap(env) if wrap else env, **OPTIONS, **options)
    model.learn(2 * N_STEPS * N_ENVS, make_callback and make_callback())
    assert not any(scanned)


def test_other_environments_step_aside(scanned):
    """So do environments with hybrid actions, or with a state that no scan can carry."""
    hybrid = toy(action_space=spaces.Dict({"push": PUSH, "button": spaces.Discrete(2)}))
    for env in (hybrid, JaxVecEnv((_begins, _grows), None, 4, "cpu", VECTOR, PUSH)):
        make(env).learn(2 * N_STEPS * env.num_envs)
    assert not any(scanned)


def _begins(key):
    return jnp.zeros(3), jnp.zeros(1, jnp.int32)


def _grows(key, state, action):
    """A step that makes floats of the integers of its state, which a scan refuses."""
    return jnp.zeros(3), state + action[0], action[0], False, False


def test_callbacks_of_libraries_see_each_step(env, scanned, tmp_path, monkeypatch):
    """Evaluations and checkpoints in the middle of a rollout are those of stepping, and a resumed training goes on alike."""
    results = []
    for is_scanned in scanned_and_stepped(env, monkeypatch):
        folder, evaluated = tmp_path / str(is_scanned), toy(num_envs=1)
        evaluation = EvalCallback(evaluated, eval_freq=7, n_eval_episodes=2, log_path=str(folder), verbose=0, warn=False)
        saved = CheckpointCallback(6, str(folder))
        evaluated.seed(1)
        make(env).learn(180, [evaluation, saved, TrainingCheckpoint(10, folder / "training")])
        resumed = PPOExt.resume(folder / "training", env, device="cpu")
        record_log(resumed)
        resumed.learn(360)
        found = np.load(folder / "evaluations.npz")
        names = sorted(path.name for path in folder.iterdir())
        results.append((names, found["timesteps"], found["results"], seen_of(resumed)))
    assert all(scanned)
    assert scanned
    assert_close(results[1], results[0], "results")


def late(what):
    """A change of the fifth step of an episode."""

    def spoil(time, observation, reward):
        bad = jnp.where(time == 4, jnp.nan, 0.0)
        if what == "reward":
            return observation, reward + bad
        if what == "mask":
            return {**observation, "legal": jnp.where(time == 4, 0, observation["legal"]).astype(jnp.int8)}, reward
        return observation + bad, reward

    return spoil


@pytest.mark.parametrize("what", ["observation", "reward", "mask", "policy"])
def test_bad_data(what, scanned, monkeypatch):
    """What is not finite, and a mask that leaves no choice, are refused with the same words, and training can go on."""
    masked = dict(observation_space=MIXED, action_space=spaces.MultiDiscrete([2, 2])) if what == "mask" else {}
    env = toy(spoil=None if what == "policy" else late(what), **masked)
    options = dict(action_masking=True, action_mask_key="legal") if what == "mask" else {}
    messages = []
    for _ in scanned_and_stepped(env, monkeypatch):
        model = make(env, **options)
        if what == "policy":
            with th.no_grad():
                model.policy.action_net.bias.fill_(th.inf)
        with pytest.raises(ValueError, match="step") as error:
            model.learn(600)
        messages.append((str(error.value), model.num_timesteps, model._last_obs is None))
    assert messages[0] == messages[1]
    assert scanned
    assert all(scanned)
