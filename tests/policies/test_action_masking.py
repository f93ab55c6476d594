"""Invalid actions masked: PPOExt is MaskablePPO of sb3-contrib, to the bit; other engines compute the same."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.callbacks import MaskableEvalCallback
from sb3_contrib.common.maskable.evaluation import evaluate_policy as evaluate_masked
from sb3_contrib.common.wrappers import ActionMasker
from sb3_contrib.ppo_mask import MlpPolicy as MaskableMlpPolicy
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
from support import toys
from support.cases import one_in
from support.engines import KEYS, VECTORS, assert_same_update
from support.engines import make as make_engine
from support.masks import ACTIONS, MaskedToy, choices_of, make_masked
from support.parity import assert_equal, assert_equal_runs, train
from support.toys import DICT, IMAGE, ToyEnv, make_toys

from sb3_ppo_ext import ActionMaskWrapper, MlpPolicy, ParallelVecEnv, PPOExt
from sb3_ppo_ext.distributions.masked import MaskedCategoricalDistribution, make_masked_distribution

pytestmark = pytest.mark.integration

SMALL = dict(n_steps=16, batch_size=8, n_epochs=3, seed=3, device="cpu", policy_kwargs=dict(net_arch=[8]))
IN_OBSERVATION = dict(action_masking=True, action_mask_key="action_mask")


def make(algorithm=PPOExt, env=None, policy="MlpPolicy", **options):
    if algorithm is PPOExt:
        options = dict(action_masking=True, backend="eager") | options
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You have specified a mini-batch size")
        return algorithm(policy, make_masked(**(env or {})), **{**SMALL, **options})


CASES = {
    **{name: dict(env=dict(action_space=space)) for name, space in ACTIONS.items()},
    "entropy": dict(env=dict(action_space=ACTIONS["multi-discrete"]), ent_coef=0.1),
    "entropy, discrete": dict(ent_coef=0.1, vf_coef=0.9),
    "images": dict(env=dict(observation_space=IMAGE), policy="CnnPolicy"),
    "dict": dict(env=dict(observation_space=DICT), policy="MultiInputPolicy"),
    "discrete observations": dict(env=dict(observation_space=spaces.Discrete(4))),
    "multi-binary observations": dict(env=dict(observation_space=spaces.MultiBinary(4))),
    "float64 observations": dict(env=dict(observation_space=spaces.Box(-1.0, 1.0, (3,), np.float64))),
    "one environment": dict(env=dict(n_envs=1)),
    "five environments, truncated together": dict(env=dict(n_envs=5, p_end=0.0)),
    "separate extractors": dict(policy_kwargs=dict(net_arch=[8], share_features_extractor=False)),
    "values are clipped": dict(clip_range_vf=0.1),
    "target_kl": dict(target_kl=1e-4, learning_rate=1e-2),
    "normalize_advantage=False": dict(normalize_advantage=False),
    "a remainder": dict(batch_size=7),
}


def without_masks(run):
    """The rollouts with observations as MaskablePPO has them, and the masks of the rollouts."""
    masks = []
    for rollout in run.recorder.rollouts:
        parts = rollout["observations"]
        masks.append(parts.pop("action_mask"))
        rollout["observations"] = parts["observation"] if parts.keys() == {"observation"} else parts
    return masks


class Masks(BaseCallback):
    """Keeps the masks of each step."""

    def _on_training_start(self):
        self.masks = []

    def _on_step(self):
        self.masks.append(self.locals["action_masks"].reshape(self.training_env.num_envs, -1).copy())
        return True


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_equal_to_maskable_ppo(name):
    """Parameters, optimiser, rollouts and logs are those of MaskablePPO, to the bit."""
    theirs, ours = (train(make(algorithm, **CASES[name]), 64) for algorithm in (MaskablePPO, PPOExt))
    without_masks(ours)
    for run in (theirs, ours):
        for step in run.recorder.steps:
            step.pop("clipped_actions", None)
    assert_equal_runs(theirs, ours)


@pytest.fixture(autouse=True)
def _locals_of_both(monkeypatch):
    """MaskablePPO has no `clipped_actions`."""
    names = tuple(name for name in toys.RolloutRecorder.LOCALS if name != "clipped_actions")
    monkeypatch.setattr(toys.RolloutRecorder, "LOCALS", names)


def test_callbacks_see_the_masks():
    """Callbacks find the masks under the name of MaskablePPO, and the observations without them."""
    models = [make(MaskablePPO), make()]
    callbacks = [Masks(), Masks()]
    for model, callback in zip(models, callbacks, strict=True):
        model.learn(64, callback=callback)
    assert_equal(*[np.array(callback.masks).astype(bool) for callback in callbacks], "masks")


# Engines

MASKED = dict(make_env=make_masked, action_masking=True)
UPDATES = {
    **{name: dict(env=dict(action_space=space)) for name, space in ACTIONS.items()},
    "entropy": dict(env=dict(action_space=ACTIONS["multi-discrete"]), ent_coef=0.1),
    "discrete, entropy": dict(ent_coef=0.1),
    "KL": dict(kl_coef=0.5, ent_coef=0.01),
    "multi-discrete, KL": dict(env=dict(action_space=ACTIONS["multi-discrete"]), kl_coef=0.5),
    "discrete observations": dict(env=dict(observation_space=spaces.Discrete(4))),
    "dict of vectors": dict(env=dict(observation_space=VECTORS), policy="MultiInputPolicy"),
    "different keys": dict(env=dict(observation_space=VECTORS), policy="MultiInputPolicy", policy_kwargs=KEYS),
    "different keys, in the observation": dict(
        **dict(env=dict(observation_space=VECTORS, wrapper=ActionMaskWrapper), action_mask_key="action_mask"),
        **dict(policy="MultiInputPolicy", policy_kwargs=KEYS),
    ),
    "accumulated": dict(accumulate_grad=2, batch_size=4),
    "segments, EMA, V-trace": dict(priority_alpha=0.6, priority_segment=4, advantage_norm="ema", vtrace=True),
    "in the observation": dict(env=dict(wrapper=ActionMaskWrapper), action_mask_key="action_mask"),
}


@pytest.mark.parametrize("name", one_in(2, UPDATES))
def test_updates(name):
    """An update from the same rollout gives the same parameters on the native engine, up to rounding."""
    assert_same_update(other="native", **MASKED, **UPDATES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(3, ["multi-discrete, KL", "discrete, entropy", "KL"]))
def test_compiled(name, quick_compiler):
    """The update can be compiled."""
    assert_same_update(other="compile", **MASKED, **UPDATES[name], learning_rate=1e-3)


@pytest.mark.parametrize("name", UPDATES)
def test_native_rollouts(name):
    """The native engine chooses valid actions, and its values and log probabilities are those of the policy."""
    model = make_small(backend="native", **MASKED, **UPDATES[name])
    assert model._find_engine().__class__.__name__ == "NativeEngine"
    model.learn(SMALL["n_steps"] * model.n_envs)
    buffer = model.rollout_buffer
    model.policy.load_state_dict(model.before)
    observations = {key: th.as_tensor(part) for key, part in buffer.observations.items()}
    actions = th.as_tensor(buffer.actions)
    actions = actions.flatten() if isinstance(model.action_space, spaces.Discrete) else actions
    with th.no_grad():
        values, log_probs, _ = model.policy.evaluate_actions(observations, actions)
    np.testing.assert_allclose(buffer.values, values.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(buffer.log_probs.ravel(), log_probs.numpy(), rtol=1e-4, atol=1e-6)


def make_small(**kwargs):
    kwargs.setdefault("policy_kwargs", dict(net_arch=[8]))
    model = make_engine(**kwargs)
    model.before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    return model


def test_native_samples_are_distributed_as_the_policy_says():
    """Over many states with one mask, the native engine draws the valid actions as often as the policy says."""

    class Still(MaskedToy):
        def _draw(self):
            self.mask = np.array([True, False, True, True, False])
            self.observation = np.zeros(3, np.float32)

    env = DummyVecEnv([Still] * 8)
    model = PPOExt("MlpPolicy", env, n_steps=512, batch_size=4096, n_epochs=1, seed=0, action_masking=True, backend="native")
    with th.no_grad():
        model.policy.action_net.bias += th.tensor([0.5, 3.0, 0.0, -1.0, 3.0])
        observation = {"observation": th.zeros(1, 3), "action_mask": th.tensor([[1, 0, 1, 1, 0]])}
        expected = model.policy.get_distribution(observation).distribution.probs[0].numpy()
    model.learn(4096)
    counts = np.bincount(model.rollout_buffer.actions.astype(int).ravel(), minlength=5) / 4096
    assert counts[[1, 4]].tolist() == [0, 0]
    np.testing.assert_allclose(counts, expected, atol=4 * 0.5 / 64)


@pytest.mark.parametrize("name", ACTIONS)
def test_distributions(name):
    """Log probabilities, entropies and modes are those of the valid choices alone."""
    space, rng = ACTIONS[name], np.random.default_rng(0)
    n = sum(choices_of(space))
    logits = th.tensor(rng.normal(size=(50, n)), dtype=th.float64)
    env = MaskedToy(action_space=space)
    env.reset(seed=0)
    masks = []
    for _ in range(50):
        env._draw()
        masks.append(env.mask)
    distribution = make_masked_distribution(space)
    distribution.masks = th.tensor(np.array(masks))
    distribution.proba_distribution(logits)
    expected_entropy, expected_mode = np.zeros(50), []
    splits = np.cumsum(choices_of(space))[:-1]
    for part, mask in zip(np.split(logits.numpy(), splits, axis=1), np.split(np.array(masks), splits, axis=1), strict=True):
        weights = np.exp(part) * mask
        p = weights / weights.sum(axis=1, keepdims=True)
        expected_entropy -= np.where(mask, p * np.log(np.where(mask, p, 1)), 0).sum(axis=1)
        expected_mode.append(p.argmax(axis=1))
    np.testing.assert_allclose(distribution.entropy().numpy(), expected_entropy, rtol=1e-9)
    mode = distribution.mode().reshape(50, -1)
    np.testing.assert_array_equal(mode.numpy(), np.stack(expected_mode, axis=1))


def test_masks_must_be_set():
    """A distribution is never made with the masks of another observation."""
    distribution = MaskedCategoricalDistribution(3)
    distribution.masks = th.ones(1, 3, dtype=th.bool)
    distribution.proba_distribution(th.zeros(1, 3))
    with pytest.raises(RuntimeError, match="before each call"):
        distribution.proba_distribution(th.zeros(1, 3))


# Where masks come from


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("MlpPolicy", dict(backend="eager")),
        ("MlpPolicy", {}),
        ("MlpLstmPolicy", dict(vtrace=True, priority_alpha=0.5, ent_coef=0.1)),
        ("MlpTransformerPolicy", {}),
    ],
    ids=str,
)
def test_masks_in_observations(policy, options):
    """Masks that are part of the observation give the same training as those that a method returns."""
    models = []
    for wrapper, key in ((None, None), (ActionMaskWrapper, "action_mask")):
        model = make(env=dict(wrapper=wrapper), policy=policy, action_mask_key=key, **{"backend": "auto", **options})
        models.append(model.learn(64))
    assert_equal(*[model.policy.state_dict() for model in models], policy)


def test_masks_are_no_features():
    """Actor and critic do not read the mask."""
    model = make(env=dict(wrapper=ActionMaskWrapper), **IN_OBSERVATION)
    assert model.policy.mlp_extractor.policy_net[0].in_features == 3
    observation = {"observation": th.zeros(1, 3), "action_mask": th.ones(1, 5)}
    other = {**observation, "action_mask": th.tensor([[1.0, 0, 0, 0, 0]])}
    assert th.equal(model.policy.predict_values(observation), model.policy.predict_values(other))
    assert model.policy.get_distribution(other).distribution.probs[0].tolist() == [1, 0, 0, 0, 0]


def test_environments_in_other_processes():
    """Masks come from environments in other processes as well."""
    models = []
    for vec_env_class in (DummyVecEnv, SubprocVecEnv, partial(ParallelVecEnv, n_workers=1)):
        env = make_masked(3, vec_env_class=vec_env_class)
        models.append(PPOExt("MlpPolicy", env, action_masking=True, **SMALL).learn(96))
        env.close()
    for model in models[1:]:
        assert_equal(models[0].policy.state_dict(), model.policy.state_dict(), "policy")


def test_action_masker():
    """The wrapper of sb3-contrib gives environments a method."""
    env = ActionMasker(ToyEnv(action_space=spaces.Discrete(3)), lambda env: [True, False, True])
    model = PPOExt("MlpPolicy", env, action_masking=True, **SMALL).learn(64)
    assert set(model.rollout_buffer.actions.ravel().tolist()) <= {0.0, 2.0}


# Memory


@pytest.mark.parametrize(("policy", "name"), [("MlpLstmPolicy", "discrete"), ("MlpTransformerPolicy", "multi-discrete")])
def test_memory(name, policy):
    """With a memory, the environments refuse no action, and the first ratio of an update is 1."""
    model = make(env=dict(action_space=ACTIONS[name]), policy=policy, backend="auto", n_epochs=1, batch_size=32)
    model.learn(96)
    assert abs(model.logger.name_to_value["train/approx_kl"]) < 1e-6


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy", "MlpTransformerPolicy"])
@pytest.mark.parametrize("name", ACTIONS)
def test_predict(name, policy):
    """``predict`` chooses valid actions, for one environment and for several, with the states of policies with a memory."""
    model = make(env=dict(action_space=ACTIONS[name]), policy=policy)
    env = make_masked(3, action_space=ACTIONS[name])
    observations, state, starts = env.reset(), None, np.ones(3, bool)
    for deterministic in (True, False) * 5:
        masks = np.stack(env.env_method("action_masks"))
        actions, state = model.predict(observations, state, starts, deterministic, action_masks=masks)
        observations, _, starts, _ = env.step(actions)
    single = MaskedToy(action_space=ACTIONS[name])
    observation, _ = single.reset(seed=0)
    for _ in range(5):
        action, _ = model.predict(observation, action_masks=single.action_masks())
        assert np.shape(action) == single.action_space.shape
        observation, *_ = single.step(action)


def test_predict_without_masks_warns():
    """Without masks, ``predict`` says that it may choose invalid actions."""
    model = make()
    with pytest.warns(UserWarning, match="ActionMaskWrapper"):
        model.predict(np.zeros(3, np.float32))


def test_predict_is_that_of_maskable_ppo():
    """The same parameters and masks give the actions of MaskablePPO."""
    theirs, ours = make(MaskablePPO), make()
    observations = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    masks = np.random.default_rng(1).random((20, 5)) < 0.4
    masks[:, 2] = True
    for deterministic in (True, False):
        th.manual_seed(0)
        expected, _ = theirs.predict(observations, deterministic=deterministic, action_masks=masks)
        th.manual_seed(0)
        actual, _ = ours.predict(observations, deterministic=deterministic, action_masks=masks)
        np.testing.assert_array_equal(expected, actual)


@pytest.mark.filterwarnings("error")
def test_evaluation():
    """The evaluation of sb3-contrib passes masks; with masks in the observations, that of SB3 works, and so do callbacks."""
    model, env = make(), make_masked(1)
    evaluate_masked(model, env, n_eval_episodes=3)
    model.learn(64, callback=MaskableEvalCallback(make_masked(1), eval_freq=16, verbose=0))
    wrapped = dict(wrapper=ActionMaskWrapper)
    model = make(env=wrapped, **IN_OBSERVATION)
    evaluate_policy(model, make_masked(1, **wrapped), n_eval_episodes=3)
    model.learn(64, callback=EvalCallback(make_masked(1, **wrapped), eval_freq=16, verbose=0))


# Files


@pytest.mark.parametrize("name", one_in(2, ["dict", "discrete", "multi-binary", "images"]))
def test_zips_of_maskable_ppo(name, tmp_path):
    """Zips of MaskablePPO load, predict and train on as there."""
    theirs = make(MaskablePPO, **CASES[name])
    theirs.learn(64)
    theirs.save(tmp_path / "model.zip")
    env = CASES[name].get("env", {})
    ours = PPOExt.load(tmp_path / "model.zip", make_masked(**env), backend="eager", device="cpu")
    again = MaskablePPO.load(tmp_path / "model.zip", make_masked(**env), device="cpu")
    assert ours.action_masking
    runs = []
    for model in (again, ours):
        model.set_random_seed(0)
        runs.append(train(model, 64))
    without_masks(runs[1])
    assert_equal_runs(*runs)


@pytest.mark.parametrize(("key", "trusted"), [(None, True), ("action_mask", False)])
def test_zips(key, trusted, tmp_path):
    """A model is loaded with its masks, and trains on."""
    env = dict(wrapper=ActionMaskWrapper if key else None)
    model = make(env=env, action_mask_key=key, backend="auto").learn(64)
    model.save(tmp_path / "model.zip")
    loaded = PPOExt.load(tmp_path / "model.zip", make_masked(**env), device="cpu", trusted=trusted)
    assert (loaded.action_masking, loaded.action_mask_key) == (True, key)
    assert loaded.observation_space == model.observation_space
    assert_equal(model.policy.state_dict(), loaded.policy.state_dict(), "policy")
    loaded.learn(64)
    model.policy.save(tmp_path / "policy.pth")
    policy = MlpPolicy.load(tmp_path / "policy.pth", trusted=trusted)
    assert policy.action_mask_key == "action_mask"


# Bad input


def refused(match, *args, error=ValueError, **kwargs):
    with pytest.raises(error, match=match):
        PPOExt(*args, **{**SMALL, **kwargs})


def test_bad_arguments():
    """What cannot work is refused before the training, with a remedy."""
    masked = make_masked()
    refused("no method `action_masks`", "MlpPolicy", make_toys(action_space=spaces.Discrete(3)), action_masking=True)
    refused("whose actions can be masked", "MlpPolicy", make_toys(), action_masking=True)
    refused("without `action_masking=True`", "MlpPolicy", masked, action_mask_key="action_mask")
    refused("action_mask_key='action_mask'", "MlpPolicy", masked, **IN_OBSERVATION)
    refused("give a key", "MlpPolicy", masked, action_masking=True, action_mask_key=3)
    refused("not in `policy_kwargs`", "MlpPolicy", masked, policy_kwargs=dict(action_mask_key="a"))
    wrapped = make_masked(wrapper=ActionMaskWrapper)
    refused("is no mask for", "MlpPolicy", wrapped, action_masking=True, action_mask_key="observation")
    refused("have the key 'action_mask' already", "MultiInputPolicy", wrapped, action_masking=True)
    refused("'MlpPolicy' and `action_masking=True`", MaskableMlpPolicy, masked)

    class Own(MaskableMlpPolicy):
        pass

    refused("sb3_ppo_ext.MlpPolicy", Own, masked, action_masking=True)
    with pytest.raises(ValueError, match="action_masking=True"):
        PPOExt("MlpPolicy", make_toys(), **SMALL).predict(np.zeros(3), action_masks=np.ones(5))


def test_policy_of_maskable_ppo():
    """A policy class of MaskablePPO is replaced by ours."""
    assert type(PPOExt(MaskableMlpPolicy, make_masked(), action_masking=True, **SMALL).policy) is MlpPolicy


@pytest.mark.parametrize("masks", [np.ones(4), np.ones((2, 3)), np.zeros(5)], ids=str)
def test_bad_masks_of_predict(masks):
    """``predict`` refuses masks of another size, and those that leave no choice."""
    with pytest.raises(ValueError, match="action_masks"):
        make().predict(np.zeros(3, np.float32), action_masks=masks)


@pytest.mark.parametrize("method", ["forward", "get_distribution", "predict_values", "evaluate_actions", "predict"])
@pytest.mark.parametrize("obs", [np.zeros((1, 3), np.float32), {"observation": np.zeros((1, 3), np.float32)}], ids=type)
def test_observations_without_masks(method, obs):
    """The policy refuses observations without what it reads."""
    policy = make().policy
    if method == "predict_values" and isinstance(obs, dict):
        return  # values need no masks
    given = obs if method == "predict" else policy.obs_to_tensor(obs)[0] if isinstance(obs, dict) else th.as_tensor(obs)
    actions = [th.zeros(1)] if method == "evaluate_actions" else []
    with pytest.raises(ValueError, match=r"The observation (is|has no)"):
        getattr(policy, method)(given, *actions)


class Bad(MaskedToy):
    """Has another mask in the sixth step."""

    other = None

    def reset(self, **kwargs):
        self.age = getattr(self, "age", -1)
        return super().reset(**kwargs)

    def _draw(self):
        super()._draw()
        self.age += 1
        if self.age == 5:
            self.mask = self.other


@pytest.mark.parametrize(
    ("mask", "match"),
    [
        (np.zeros(5), "all actions are masked"),
        (np.ones(4), "5 numbers"),
        (None, "5 numbers"),
        ([[1], [2, 3]], "5 numbers"),
    ],
    ids=str,
)
def test_bad_masks_of_environments(mask, match):
    """A mask that cannot be used is refused with environment and step, and nothing is learned."""
    bad = type("Bad", (Bad,), {"other": mask})
    model = PPOExt("MlpPolicy", DummyVecEnv([lambda: MaskedToy(p_end=0), lambda: bad(p_end=0)]), action_masking=True, **SMALL)
    with pytest.raises(ValueError, match=rf"Environment 1: .*{match}.* at step 5 of the rollout"):
        model.learn(64)
    assert model.num_timesteps == 0


def test_all_choices_of_an_action():
    """With several actions, the error names the one that has no choice left."""
    space = ACTIONS["multi-discrete"]
    bad = type("Bad", (Bad,), {"other": np.array([1, 1, 1, 0, 0, 1, 0, 0, 0])})
    model = PPOExt("MlpPolicy", DummyVecEnv([lambda: bad(action_space=space)]), action_masking=True, **SMALL)
    with pytest.raises(ValueError, match="all choices of action 1 are masked at step 5"):
        model.learn(64)


def test_bad_wrapper():
    """The wrapper refuses environments without masks."""
    with pytest.raises(ValueError, match="action_masks"):
        ActionMaskWrapper(ToyEnv(action_space=spaces.Discrete(2)))
