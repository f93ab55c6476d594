"""Actor and critic that read different keys of the observations: what is computed, what acts, and what is refused."""

from functools import partial

import numpy as np
import pytest
import sb3_contrib
import sb3_contrib.ppo_recurrent
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.policies import MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecNormalize
from support.cases import one_in
from support.masks import make_masked
from support.options import make as make_with
from support.parity import assert_equal, assert_equal_runs, train
from support.policies import SCHEDULE
from support.toys import BOX_ACTION, DICT, VECTOR, ToyEnv, make_toys
from support.training import changed
from support.zips import Zip
from torch import nn

from sb3_ppo_ext import (
    ActionMaskWrapper,
    MlpPolicy,
    MultiInputLstmPolicy,
    MultiInputPolicy,
    MultiInputTransformerPolicy,
    PPOExt,
    TrainingCheckpoint,
)
from sb3_ppo_ext.update.optimizers import critic_parameters

SPACE = spaces.Dict({"gear": spaces.Discrete(3), "goal": spaces.Box(-1.0, 1.0, (2,), np.float32), "joints": VECTOR})
SMALL = dict(n_steps=16, batch_size=8, n_epochs=2, seed=3, device="cpu")
TRANSFORMER = dict(context_length=5, d_model=8, n_heads=2, net_arch=[8])
LSTM = dict(lstm_hidden_size=8, net_arch=[8])
# Each policy with keywords that make it small
POLICIES = {
    "MultiInputPolicy": dict(net_arch=[8, 8]),
    "MultiInputTransformerPolicy": TRANSFORMER,
    "MultiInputTransformerPolicy, last action": dict(TRANSFORMER, use_last_action=True, context_length=1),
    "MultiInputLstmPolicy": LSTM,
    "MultiInputLstmPolicy, GRU": dict(LSTM, rnn="gru", enable_critic_lstm=False),
}
HIDDEN = dict(actor_keys=["joints", "gear"])


def make(policy="MultiInputPolicy", algorithm=PPOExt, space=SPACE, env=None, keywords=None, **options):
    name = policy.split(",")[0]
    policy_kwargs = {**POLICIES.get(policy, {}), **(HIDDEN if keywords is None else keywords)}
    return algorithm(name, env or make_toys(observation_space=space), policy_kwargs=policy_kwargs, **{**SMALL, **options})


# What is computed


class TwoNetworks(nn.Module):
    """The networks of actor and critic, written by hand."""

    def __init__(self, n_actor, n_critic):
        super().__init__()
        self.latent_dim_pi = self.latent_dim_vf = 8
        self.policy_net = nn.Sequential(nn.Linear(n_actor, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.value_net = nn.Sequential(nn.Linear(n_critic, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    def forward_actor(self, features):
        return self.policy_net(features)

    def forward_critic(self, features):
        return self.value_net(features)


class TwoExtractors:
    """A policy of SB3 or sb3-contrib with two extractors, each made for some keys."""

    def __init__(self, *args, parts, **kwargs):
        self.parts = list(parts)
        super().__init__(*args, share_features_extractor=False, **kwargs)

    def make_features_extractor(self):
        keys = self.parts.pop(0)
        space = spaces.Dict({key: self.observation_space[key] for key in keys})
        return self.features_extractor_class(space, **self.features_extractor_kwargs)


class ByHand(TwoExtractors, MultiInputActorCriticPolicy):
    """SB3's policy with two extractors and two networks."""

    def _build_mlp_extractor(self):
        sizes = (self.pi_features_extractor.features_dim, self.vf_features_extractor.features_dim)
        self.mlp_extractor = TwoNetworks(*sizes)


KEYS = {
    "the critic knows more": (SPACE, ["joints", "gear"], None),
    "the actor knows more": (SPACE, None, ["goal"]),
    "nothing in common": (SPACE, ["gear"], ["goal", "joints"]),
    "of one size": (SPACE, ["gear"], ["joints"]),
    "an image for the critic": (DICT, ["joints"], ["camera", "gear"]),
    "an image for the actor": (DICT, ["camera"], ["joints"]),
    "an image for both": (DICT, ["camera", "gear"], None),
}


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("case", KEYS)
@pytest.mark.parametrize("options", one_in(2, [dict(target_kl=0.01, ent_coef=0.01, clip_range_vf=0.1), {}]), ids=str)
def test_training_by_hand(case, options):
    """Training equals SB3's PPO with a policy of two networks that was written by hand, bit for bit."""
    space, *keys = KEYS[case]
    parts = [sorted(space.spaces if part is None else part) for part in keys]
    env = partial(make_toys, observation_space=space)
    reference = train(PPO(ByHand, env(), policy_kwargs=dict(parts=parts), **SMALL, **options), 64)
    keywords = dict(zip(("actor_keys", "critic_keys"), keys, strict=True)) | dict(net_arch=[8, 8])
    assert_equal_runs(reference, train(make(env=env(), keywords=keywords, backend="eager", **options), 64))


class RecurrentByHand(TwoExtractors, sb3_contrib.ppo_recurrent.MultiInputLstmPolicy):
    """RecurrentPPO's policy with two extractors of one size, which it supports."""


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("keywords", [{}, dict(enable_critic_lstm=False)], ids=str)
def test_recurrent_training_by_hand(keywords):
    """Training equals RecurrentPPO with a policy with two extractors that was written by hand, bit for bit."""
    env = partial(make_toys, observation_space=SPACE)
    given = dict(LSTM, parts=[["gear"], ["joints"]], **keywords)
    reference = train(sb3_contrib.RecurrentPPO(RecurrentByHand, env(), policy_kwargs=given, **SMALL), 64)
    keys = dict(actor_keys=["gear"], critic_keys=["joints"])
    actual = make("MultiInputLstmPolicy", env=env(), keywords=dict(keys, **keywords), backend="eager")
    assert_equal_runs(reference, train(actual, 64))


ALL = [*SPACE.spaces]


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "keys", one_in(2, [dict(critic_keys=ALL[::-1]), dict(actor_keys=ALL), dict(actor_keys=ALL, critic_keys=ALL)]), ids=str
)
@pytest.mark.parametrize(
    "shared", one_in(3, [dict(share_features_extractor=False), {}, dict(share_features_extractor=True)]), ids=str
)
def test_all_keys(policy, keys, shared):
    """With all keys for both, in whatever order, training is as without the keywords, also with two extractors."""
    expected, actual = (train(make(policy, keywords={**shared, **given}, backend="eager"), 32) for given in ({}, keys))
    assert_equal_runs(expected, actual)


@pytest.mark.parametrize("policy", POLICIES)
def test_same_keys(policy):
    """If both read the same keys, others are left out: training is that without them in the observation space."""
    few = {key: SPACE[key] for key in ("gear", "joints")}
    one = make(policy, space=SPACE, keywords=dict(actor_keys=["joints", "gear"], critic_keys=["gear", "joints"])).policy
    other = make(policy, space=spaces.Dict(few), keywords={}).policy
    assert_equal(one.state_dict(), other.state_dict(), "policy")
    assert one.share_features_extractor


def inputs_of(policy, n=6):
    """A batch of the policy's inputs, as `evaluate_actions` takes them, and the floats among the observations."""
    model = make(policy).learn(16)
    data = next(iter(model.rollout_buffer.get(None)))
    obs = data.observations
    observations = getattr(obs, "observations", obs)
    assert isinstance(observations, dict)
    return model, data, observations


@pytest.mark.parametrize("policy", POLICIES)
def test_actor_does_not_depend_on_what_the_critic_knows(policy):
    """What only the critic reads changes the values, but neither the log probabilities nor the entropy, to the bit."""
    model, data, observations = inputs_of(policy)
    net, actions = model.policy, data.actions
    before = net.evaluate_actions(data.observations, actions)
    distribution = net.get_distribution(data.observations).distribution.mean
    observations["goal"] = observations["goal"].clone() + 0.5
    after = net.evaluate_actions(data.observations, actions)
    assert (before[0] != after[0]).any()
    assert_equal(before[1:], after[1:], "log probabilities and entropy")
    assert th.equal(distribution, net.get_distribution(data.observations).distribution.mean)


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_with_respect_to_observations(policy):
    """The actor's loss has no gradient with respect to what only the critic reads, nor the critic's beyond its keys."""
    model = make(policy, keywords=dict(actor_keys=["joints"], critic_keys=["goal", "gear"])).learn(16)
    data = next(iter(model.rollout_buffer.get(None)))
    observations = getattr(data.observations, "observations", data.observations)
    for key in ("goal", "joints"):
        observations[key] = observations[key].float().requires_grad_()
    values, log_prob, entropy = model.policy.evaluate_actions(data.observations, data.actions)
    of_actor = th.autograd.grad((log_prob + entropy).sum(), [observations[k] for k in ("goal", "joints")], allow_unused=True)
    assert of_actor[0] is None
    assert of_actor[1].abs().max() > 0
    of_critic = th.autograd.grad(values.sum(), [observations[k] for k in ("goal", "joints")], allow_unused=True)
    assert of_critic[0].abs().max() > 0
    assert of_critic[1] is None


class Sum(BaseFeaturesExtractor):
    """Reads all keys that there are, and insists on those of its space."""

    def __init__(self, observation_space, scale=1.0):
        super().__init__(observation_space, features_dim=1)
        self.scale, self.seen = scale, set()

    def forward(self, observations):
        assert list(observations) == list(self._observation_space)
        return self.scale * sum(part.flatten(1).sum(dim=1, keepdim=True) for part in observations.values())


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("policy", POLICIES)
def test_own_features_extractor(policy):
    """A features extractor of one's own gets the space with the keys, and observations with these keys alone."""
    keywords = dict(HIDDEN, features_extractor_class=Sum, features_extractor_kwargs=dict(scale=2.0))
    model = make(policy, keywords=keywords).learn(32)
    assert [*model.policy.pi_features_extractor._observation_space] == ["gear", "joints"]
    assert [*model.policy.vf_features_extractor._observation_space] == ["gear", "goal", "joints"]
    observation = model.observation_space.sample()
    full = model.predict(observation, deterministic=True)[0]
    del observation["goal"]
    np.testing.assert_array_equal(model.predict(observation, deterministic=True)[0], full)


class Inherited(MultiInputPolicy):
    """A policy of a user."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, ortho_init=False)


def test_inherited_policy():
    """Policies that inherit ours take the keywords."""
    model = PPOExt(Inherited, make_toys(observation_space=SPACE), policy_kwargs=HIDDEN, **SMALL).learn(32)
    assert model.policy.is_asymmetric
    assert "goal" not in model.policy.pi_features_extractor.extractors


# Options


@pytest.mark.parametrize("backend", ["native", "device"])
def test_own_learning_rate_of_the_critic(backend):
    """With `critic_learning_rate`, the networks behind the critic's keys are the critic's, and the others the actor's."""
    space = SPACE if backend == "native" else DICT
    options = dict(space=space, keywords=dict(actor_keys=["joints"], net_arch=[8]), backend=backend, max_grad_norm=1e9)
    slow, fast, start = (
        make(**options, critic_learning_rate=rate, n_epochs=1, batch_size=32).learn(32) for rate in (1e-4, 1e-2, 1e-4)
    )
    assert changed(slow, fast) == "critic"
    assert changed(slow, start) == ""
    of_critic = critic_parameters(slow.policy)
    assert set(slow.policy.vf_features_extractor.parameters()) <= of_critic
    assert not set(slow.policy.pi_features_extractor.parameters()) & of_critic


def test_native_threads():
    """On two threads, the networks read their own columns as on one, to the bit."""
    one, two = (make(backend="native", native_threads=n).learn(32).policy.state_dict() for n in (1, 2))
    assert_equal(one, two, "policy")


def test_parts_of_actions():
    """Actions of several parts can be chosen by an actor that knows less than the critic, also alone."""
    action_space = spaces.Dict({"push": spaces.Box(-1.0, 1.0, (2,), np.float32), "mode": spaces.Discrete(3)})
    model = make(env=make_toys(observation_space=SPACE, action_space=action_space)).learn(32)
    observation = without(observations_of(SPACE))[0]
    expected = model.predict(observation, deterministic=True)[0]
    alone = model.policy.without_critic().predict(observation, deterministic=True)[0]
    assert_equal(expected, alone, "actions")


def test_frozen_actor():
    """`max_clip_fraction` freezes the actor with its extractor, and the critic learns on."""
    options = dict(space=DICT, learning_rate=1e-2, n_epochs=4, max_grad_norm=1e9)
    free, frozen = (make(**options, max_clip_fraction=limit).learn(32) for limit in (None, 1e-9))
    assert "actor" in changed(free, frozen)
    start = make(**options, max_clip_fraction=1e-9)
    assert changed(start, frozen) == "actor and critic"


@pytest.mark.parametrize("policy", ["MultiInputPolicy", "MultiInputTransformerPolicy"])
def test_checkpoints(policy, tmp_path):
    """A training is resumed from a checkpoint, with the keys that it had."""
    make(policy).learn(64, callback=TrainingCheckpoint(32, tmp_path))
    resumed = PPOExt.resume(tmp_path, make_toys(observation_space=SPACE))
    assert resumed.policy.is_asymmetric
    resumed.learn(96)


# Masks of invalid actions


def masked(policy="MultiInputPolicy", in_observation=False, keywords=None, **options):
    """A model with masks of the environment, or in the observation."""
    env = make_masked(observation_space=SPACE, wrapper=ActionMaskWrapper if in_observation else None)
    given = dict(action_mask_key="action_mask") if in_observation else {}
    return make(policy, env=env, keywords=keywords, action_masking=True, **given, **options)


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("in_observation", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_masks(policy, in_observation):
    """Neither network reads the mask, wherever it is; the actor acts on its keys and the mask, also alone."""
    model = masked(policy, in_observation).learn(32)
    assert [*model.policy.pi_features_extractor.extractors] == ["gear", "joints"]
    assert [*model.policy.vf_features_extractor.extractors] == ["gear", "goal", "joints"]
    actor = model.policy.without_critic()
    assert [*actor.observation_space] == ["gear", "joints", "action_mask"]
    full = {key: np.stack([part, part]) for key, part in SPACE.sample().items()}
    for valid in range(5):
        masks = np.tile(np.arange(5) == valid, (2, 1))
        for observation in (full, *without([full])):
            given = {**observation, "action_mask": masks}
            predicted = model.predict(given) if in_observation else model.predict(observation, action_masks=masks)
            assert predicted[0].tolist() == actor.predict(given)[0].tolist() == [valid, valid]
    with pytest.raises(ValueError, match="no 'gear', which the actor reads"):
        actor.predict({"joints": full["joints"], "action_mask": masks})


@pytest.mark.parametrize("in_observation", [False, True])
def test_all_keys_with_masks(in_observation):
    """With all keys for both, and two extractors, training with masks is as without the keywords."""
    shared = dict(share_features_extractor=False)
    expected, actual = (
        train(masked("MultiInputPolicy", in_observation, dict(shared, **keys)), 32) for keys in ({}, dict(actor_keys=ALL))
    )
    assert_equal_runs(expected, actual)


def test_actor_of_one_key_with_masks():
    """The actor alone reads a dictionary as it did before, also if nothing but the key "observation" and the mask is left."""
    space = spaces.Dict({"goal": VECTOR, "observation": VECTOR})
    env = make_masked(observation_space=space)
    model = make(env=env, keywords=dict(actor_keys=["observation"]), action_masking=True).learn(32)
    actor, given = model.policy.without_critic(), {"observation": VECTOR.sample(), "action_mask": np.ones(5)}
    expected = model.policy.predict({**given, "goal": VECTOR.sample()}, deterministic=True)[0]
    assert actor.predict(given, deterministic=True)[0] == expected


def test_bad_keys_with_masks():
    """The mask is no feature, and there is nothing to choose from where the observation is a vector."""
    with pytest.raises(ValueError, match=r"`actor_keys=.*there is no 'action_mask'; give a list.*'gear', 'goal', 'joints'$"):
        masked(in_observation=True, keywords=dict(actor_keys=["joints", "action_mask"]))
    for wrapper in (None, ActionMaskWrapper):
        env, given = make_masked(wrapper=wrapper), {} if wrapper is None else dict(action_mask_key="action_mask")
        with pytest.raises(ValueError, match=r"`actor_keys=.*the observation space is Box"):
            PPOExt("MlpPolicy", env, action_masking=True, policy_kwargs=dict(actor_keys=["observation"]), **given)


# Acting


def walk(act, observations):
    """Actions in successive steps of two environments, of which one begins anew in the third step."""
    state, actions = None, []
    for step, observation in enumerate(observations):
        starts = np.array([step == 0, step in (0, 2)])
        action, state = act(observation, state=state, episode_start=starts, deterministic=True)
        actions.append(action)
    return np.stack(actions)


def observations_of(space, n=5):
    space.seed(0)
    samples = [[space.sample() for _ in range(2)] for _ in range(n)]
    return [{key: np.stack([sample[key] for sample in pair]) for key in space} for pair in samples]


def without(observations, key="goal"):
    return [{name: part for name, part in observation.items() if name != key} for observation in observations]


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("policy", POLICIES)
def test_predict_without_what_the_critic_knows(policy):
    """`predict` takes observations with or without what only the critic reads, and acts in the same way."""
    model, observations = make(policy).learn(32), observations_of(SPACE)
    expected = walk(model.predict, observations)
    np.testing.assert_array_equal(walk(model.predict, without(observations)), expected)
    mixed = [*observations[:2], *without(observations[2:])]
    np.testing.assert_array_equal(walk(model.predict, mixed), expected)
    loaded = Zip(model).load(device="cpu")
    assert (loaded.policy.actor_keys, loaded.policy.critic_keys) == (["joints", "gear"], None)
    np.testing.assert_array_equal(walk(loaded.predict, without(observations)), expected)
    single = {key: part[0] for key, part in without(observations)[0].items()}
    np.testing.assert_allclose(model.predict(single, deterministic=True)[0], expected[0, 0], rtol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_predict_needs_what_the_actor_reads(policy):
    """What the actor reads is missing: the error names it."""
    model = make(policy)
    with pytest.raises(ValueError, match="no 'gear', which the actor reads: it has 'joints', 'goal'; give all keys"):
        model.predict({"joints": VECTOR.sample(), "goal": np.zeros(2)})
    with pytest.raises(ValueError, match="no 'gear', which the actor reads: it has no keys"):
        model.policy.predict({})


def test_tensors_without_what_the_critic_knows():
    """`get_distribution` needs what the actor reads, and `predict_values` what the critic reads."""
    policy = make(keywords=dict(actor_keys=["joints"], critic_keys=["goal"])).policy
    tensors = policy.obs_to_tensor(observations_of(SPACE)[0])[0]
    joints, goal = {"joints": tensors["joints"]}, {"goal": tensors["goal"]}
    assert_equal(policy.get_distribution(tensors).distribution.mean, policy.get_distribution(joints).distribution.mean, "")
    assert_equal(policy.predict_values(tensors), policy.predict_values(goal), "values")
    with pytest.raises(ValueError, match="no 'joints', which the actor reads"):
        policy.get_distribution(goal)
    with pytest.raises(ValueError, match="no 'goal', which the critic reads"):
        policy.predict_values(joints)


@pytest.mark.many(one_in=5)
@pytest.mark.parametrize("policy", POLICIES)
def test_evaluation_in_full_environments(policy, tmp_path):
    """`evaluate_policy` and `EvalCallback` work with environments that show everything, also with `VecNormalize`."""
    env, of_evaluation = (VecNormalize(make_toys(observation_space=SPACE), norm_obs_keys=["goal", "joints"]) for _ in range(2))
    model = make(policy, env=env)
    model.learn(32, callback=EvalCallback(of_evaluation, eval_freq=8, n_eval_episodes=2, best_model_save_path=str(tmp_path)))
    assert np.isfinite(evaluate_policy(model, of_evaluation, 2)[0])
    best = PPOExt.load(tmp_path / "best_model", device="cpu")
    # As the documentation says, the normalisation of what the actor reads
    env.training, env.norm_obs_keys = False, ["joints"]
    observation = env.normalize_obs(without(observations_of(SPACE))[0])
    assert best.predict(observation)[0].shape == (2, 2)


# The actor alone

ACTORS = {
    **{name: dict(policy=name) for name in POLICIES},
    "images": dict(space=DICT, keywords=dict(actor_keys=["camera"], net_arch=[8])),
    "beta": dict(action_dist="beta"),
    "squashed": dict(action_dist="squashed_gaussian", keywords=dict(HIDDEN, net_arch=dict(pi=[8], vf=[4]))),
    "gSDE": dict(use_sde=True),
    "std": dict(keywords=dict(HIDDEN, learn_std=False, mean_tanh=True, net_arch=dict(vf=[3]))),
    "all keys": dict(keywords=dict(learn_std=True)),
    "shared LSTM": dict(
        policy="MultiInputLstmPolicy", keywords=dict(actor_keys=ALL, shared_lstm=True, enable_critic_lstm=False, **LSTM)
    ),
}


@pytest.mark.many(one_in=5)
@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("case", one_in(2, ACTORS))
def test_actor_alone(case, trusted, tmp_path):
    """A saved actor acts as the model does, needs nothing that it does not read, and has no parameter of the critic."""
    model = make(**ACTORS[case]).learn(32)
    before, state = th.get_rng_state(), {name: p.clone() for name, p in model.policy.state_dict().items()}
    actor = model.policy.without_critic()
    assert th.equal(th.get_rng_state(), before)
    assert_equal(state, model.policy.state_dict(), "policy")
    actor.save(tmp_path / "actor.pth")
    loaded = type(model.policy).load(tmp_path / "actor.pth", device="cpu", trusted=trusted)
    observations = observations_of(model.observation_space)
    keys = model.policy.actor_keys or [*model.observation_space]
    alone = [{key: observation[key] for key in keys} for observation in observations]
    expected = walk(model.predict, observations)
    for policy in (actor, loaded, loaded.without_critic()):
        assert {*policy.observation_space} == {*keys}
        np.testing.assert_array_equal(walk(policy.predict, alone), expected)
        np.testing.assert_array_equal(walk(policy.predict, observations), expected)
        n_actor = sum(p.numel() for p in {*model.policy.parameters()} - critic_parameters(model.policy))
        assert sum(p.numel() for p in policy.parameters()) == n_actor
    # The copy is one.
    with th.no_grad():
        next(model.policy.parameters()).add_(1.0)
    np.testing.assert_array_equal(walk(actor.predict, alone), expected)


def test_actor_alone_has_no_values():
    """An actor alone says that it has no values, and a model is not made with one."""
    model = make()
    actor = model.policy.without_critic()
    tensors = actor.obs_to_tensor(without(observations_of(SPACE))[0])[0]
    assert actor.get_distribution(tensors).distribution.mean.shape == (2, 2)
    for method in (actor.predict_values, actor, partial(actor.evaluate_actions, actions=th.zeros(2, 2))):
        with pytest.raises(ValueError, match=r"an actor without its critic.*has no values"):
            method(tensors)
    with pytest.raises(ValueError, match=r"`with_critic=False`.*`model.policy.without_critic\(\)`"):
        make(keywords=dict(with_critic=False))
    with pytest.raises(ValueError, match="`with_critic='no'` is not valid: give True or False"):
        MlpPolicy(VECTOR, BOX_ACTION, SCHEDULE, with_critic="no")


def test_actor_of_a_vector():
    """The actor of a policy without dictionaries can be copied and saved as well."""
    model = make_with(dict(action_dist="beta")).learn(16)
    actor = model.policy.without_critic()
    observation = VECTOR.sample()
    expected = model.predict(observation, deterministic=True)[0]
    np.testing.assert_array_equal(actor.predict(observation, deterministic=True)[0], expected)


# Bad input

BAD = [
    (dict(actor_keys=[]), r"`actor_keys=\[\]` is not valid: give a list with some of the keys.*'gear', 'goal', 'joints'"),
    (dict(critic_keys=[]), r"`critic_keys=\[\]` is not valid"),
    (dict(actor_keys="joints"), "`actor_keys='joints'` is not valid: give a list"),
    (dict(critic_keys={"joints"}), "`critic_keys={'joints'}` is not valid: give a list"),
    (dict(actor_keys=3), "`actor_keys=3` is not valid: give a list"),
    (dict(actor_keys=True), "`actor_keys=True` is not valid: give a list"),
    (dict(actor_keys=["joint"]), r"`actor_keys=\['joint'\]` is not valid: there is no 'joint'; give a list.*'joints'"),
    (dict(critic_keys=["joints", "camera"]), "there is no 'camera'"),
    (dict(critic_keys=[["joints"]]), r"there is no \['joints'\]"),
    (dict(critic_keys=["joints", None]), "there is no None"),
    (dict(HIDDEN, share_features_extractor=True), "`share_features_extractor=True`.*read different keys.*leave it out"),
    (dict(actor_kyes=["joints"]), "`policy_kwargs` has no option `actor_kyes`: did you mean `actor_keys`"),
]


@pytest.mark.parametrize(("keywords", "message"), BAD, ids=str)
def test_bad_keys(keywords, message):
    """Bad keys are refused by the algorithm, with each policy, and by a policy alone."""
    for policy in POLICIES:
        with pytest.raises(ValueError, match=message):
            make(policy, keywords=keywords)
    for policy_class in (MultiInputPolicy, MultiInputTransformerPolicy, MultiInputLstmPolicy):
        with pytest.raises((ValueError, TypeError), match=None if "actor_kyes" in keywords else message):
            policy_class(SPACE, BOX_ACTION, SCHEDULE, **keywords)


def test_keys_of_a_vector():
    """Observations that are no dictionary have no keys, and the policy must know the keywords."""
    for keywords in (dict(actor_keys=["joints"]), dict(critic_keys=["joints"])):
        with pytest.raises(ValueError, match=r"_keys=\['joints'\]` is not valid: the observation space is Box.*leave it out"):
            PPOExt("MlpPolicy", ToyEnv(), policy_kwargs=keywords)

    class Theirs(MultiInputActorCriticPolicy):
        def __init__(self, observation_space, action_space, lr_schedule, use_sde=False):
            super().__init__(observation_space, action_space, lr_schedule)

    with pytest.raises(ValueError, match=r"`actor_keys=.*let it inherit `sb3_ppo_ext.MlpPolicy`"):
        PPOExt(Theirs, ToyEnv(SPACE), policy_kwargs=HIDDEN)


def test_shared_lstm():
    """Actor and critic cannot share an LSTM that reads different keys."""
    keywords = dict(HIDDEN, shared_lstm=True, enable_critic_lstm=False)
    with pytest.raises(ValueError, match=r"`shared_lstm=True`.*read different keys.*give `shared_lstm=False`"):
        make("MultiInputLstmPolicy", keywords=keywords)


def test_small_images_that_nobody_reads():
    """Parts of the observations that no network reads may be of any form; those that one reads may not."""
    space = spaces.Dict({"icon": spaces.Box(0, 255, (20, 20, 3), np.uint8), "joints": VECTOR, "a.b": VECTOR})
    both = dict(actor_keys=["joints"], critic_keys=["joints"])
    make(space=space, keywords=both).learn(32)
    for bad, message in (("icon", "20 x 20 pixels"), ("a.b", "no module with the name 'a.b'")):
        for name in both:
            with pytest.raises(ValueError, match=message):
                make(space=space, keywords={**both, name: ["joints", bad]})
