"""Recurrent policies: PPOExt without options is RecurrentPPO of sb3-contrib, to the bit; other engines compute the same."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import RecurrentPPO
from sb3_contrib.ppo_recurrent import CnnLstmPolicy, MlpLstmPolicy, MultiInputLstmPolicy
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from support.cases import one_in
from support.engines import assert_same_update
from support.parity import assert_equal, assert_equal_runs, train
from support.processes import run_fresh
from support.toys import DICT, IMAGE, ToyEnv, make_toys

import sb3_ppo_ext
from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.common.observations import stack
from sb3_ppo_ext.memory import gru
from sb3_ppo_ext.memory.recurrence import Plan
from sb3_ppo_ext.update.optimizers import critic_parameters

pytestmark = pytest.mark.integration

SIZES = dict(lstm_hidden_size=8, net_arch=[8])
SMALL = dict(n_steps=16, batch_size=8, n_epochs=2, seed=3, device="cpu")


class Case:
    def __init__(self, env=None, policy="MlpLstmPolicy", timesteps=64, stop_at=None, keywords=None, **options):
        self.env, self.policy, self.timesteps, self.stop_at = env or {}, policy, timesteps, stop_at
        self.options = {**SMALL, "policy_kwargs": {**SIZES, **(keywords or {})}, **options}

    def make(self, algorithm, **options):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You have specified a mini-batch size")
            reference = dict(backend="eager") if algorithm is PPOExt else {}
            return algorithm(self.policy, make_toys(**self.env), **{**self.options, **reference, **options})

    def run(self, algorithm):
        return train(self.make(algorithm), self.timesteps, self.stop_at)


CASES = {
    "box": Case(),
    "box of shape (2, 2)": Case(dict(action_space=spaces.Box(-1, 1, (2, 2), np.float32))),
    "box in float64": Case(dict(action_space=spaces.Box(-2.0, 2.0, (2,), np.float64))),
    "discrete": Case(dict(action_space=spaces.Discrete(4))),
    "multi-discrete": Case(dict(action_space=spaces.MultiDiscrete([3, 2]))),
    "discrete observations": Case(dict(observation_space=spaces.Discrete(5))),
    "multi-binary observations": Case(dict(observation_space=spaces.MultiBinary(4))),
    "float64 observations": Case(dict(observation_space=spaces.Box(-1.0, 1.0, (3,), np.float64))),
    "images": Case(dict(observation_space=IMAGE), "CnnLstmPolicy", timesteps=64),
    "dict": Case(dict(observation_space=DICT), "MultiInputLstmPolicy", timesteps=64),
    "one environment": Case(dict(n_envs=1)),
    "five environments, truncated together": Case(dict(n_envs=5, p_end=0.0)),
    "never truncated": Case(dict(length=10**6, p_end=0.2)),
    "never ended": Case(dict(length=10**6, p_end=0.0)),
    "two layers": Case(keywords=dict(n_lstm_layers=2)),
    "shared": Case(keywords=dict(shared_lstm=True, enable_critic_lstm=False)),
    "critic without memory": Case(keywords=dict(enable_critic_lstm=False)),
    "shared, two layers": Case(keywords=dict(shared_lstm=True, enable_critic_lstm=False, n_lstm_layers=2)),
    "separate extractors": Case(keywords=dict(share_features_extractor=False)),
    "separate extractors, images": Case(
        dict(observation_space=IMAGE), "CnnLstmPolicy", timesteps=64, keywords=dict(share_features_extractor=False)
    ),
    "without biases": Case(keywords=dict(lstm_kwargs=dict(bias=False))),
    "dropout": Case(keywords=dict(n_lstm_layers=2, lstm_kwargs=dict(dropout=0.3))),
    "no hidden layers": Case(keywords=dict(net_arch=[])),
    "larger": Case(dict(n_envs=3), n_steps=32, batch_size=24, timesteps=192, policy_kwargs=dict(lstm_hidden_size=64)),
    "a remainder": Case(batch_size=7),
    "larger than the rollout": Case(batch_size=128),
    "gSDE": Case(use_sde=True, sde_sample_freq=4),
    "entropy": Case(ent_coef=0.02, vf_coef=0.9, max_grad_norm=0.1),
    "multi-discrete, entropy": Case(dict(action_space=spaces.MultiDiscrete([3, 2])), ent_coef=0.1),
    "values are clipped": Case(clip_range_vf=0.1, vf_coef=0.7),
    "target_kl": Case(target_kl=1e-4, learning_rate=1e-2),
    "normalize_advantage=False": Case(normalize_advantage=False, batch_size=1, n_epochs=1),
    "stopped by a callback": Case(stop_at=20),
    "SGD": Case(keywords=dict(optimizer_class=th.optim.SGD)),
}


@pytest.mark.parametrize("name", one_in(3, CASES, "shared, two layers", "gSDE"))
def test_equal_to_recurrent_ppo(name):
    """Parameters, optimiser, rollouts, logs and states are those of RecurrentPPO, to the bit."""
    case = CASES[name]
    expected, actual = case.run(RecurrentPPO), case.run(PPOExt)
    assert_equal_runs(expected, actual)
    assert_equal([*expected.model._last_lstm_states], [*actual.model._last_lstm_states], "states")


class ForgetsAtTheStart(BaseCallback):
    """Sets the states to zero at the start of each rollout, in place or by assigning others, and changes them in it."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place

    def change(self, factor):
        states = self.model._last_lstm_states
        if self.in_place:
            for part in (*states.pi, *states.vf):
                part.mul_(factor)
        else:
            self.model._last_lstm_states = type(states)(*(tuple(part * factor for part in state) for state in states))

    def _on_rollout_start(self):
        self.change(0.0)

    def _on_step(self):
        if self.n_calls % 8 == 3:
            self.change(0.5)
        return True


@pytest.mark.parametrize("in_place", [True, False])
def test_states_that_a_callback_changes(in_place):
    """They act on the next step, or are stored, as those of RecurrentPPO do."""
    expected, actual = (
        CASES["never ended"].make(algorithm).learn(64, callback=ForgetsAtTheStart(in_place))
        for algorithm in (RecurrentPPO, PPOExt)
    )
    assert_equal(expected.policy.state_dict(), actual.policy.state_dict(), "policy")
    plain = CASES["never ended"].make(PPOExt).learn(64)
    assert not th.equal(plain.policy.action_net.weight, actual.policy.action_net.weight)


def test_states_that_a_callback_keeps():
    """What a callback has read stays as it was, and what it assigns has to fit."""
    kept = []

    def keep(local_variables, _):
        kept.append(local_variables["self"]._last_lstm_states.pi[0])
        return True

    model = CASES["never ended"].make(PPOExt).learn(64, callback=keep)
    assert len({tuple(states.flatten().tolist()) for states in kept}) == len(kept) == 32
    states = model._last_lstm_states
    before = states.pi[0].clone()
    model.learn(32, reset_num_timesteps=False)
    assert th.equal(states.pi[0], before)
    with pytest.raises(ValueError, match="_last_lstm_states"):
        model._last_lstm_states = type(states)(*(tuple(part[:, :1] for part in state) for state in states))


def test_toys_are_truncated():
    """The environments of these tests have episodes that are truncated, which both algorithms bootstrap."""
    env = ToyEnv()
    env.reset(seed=0)
    assert any(env.step(env.action_space.sample())[3] for _ in range(7))


# Engines

GRU = dict(rnn="gru")
LSTM = dict(policy="MlpLstmPolicy", policy_kwargs=SIZES, rtol=1e-4)


def of(env=None, keywords=None, **options):
    return {**LSTM, "env": env, "policy_kwargs": {**SIZES, **(keywords or {})}, **options}


UPDATES = {
    "box": of(),
    "discrete": of(dict(action_space=spaces.Discrete(4)), ent_coef=0.1),
    "multi-binary": of(dict(action_space=spaces.MultiBinary(3))),
    "multi-discrete observations": of(dict(observation_space=spaces.MultiDiscrete([4, 3]))),
    "box in float64": of(dict(action_space=spaces.Box(-2.0, 2.0, (2,), np.float64))),
    "images": of(dict(observation_space=IMAGE), policy="CnnLstmPolicy"),
    "dict": of(dict(observation_space=DICT), policy="MultiInputLstmPolicy"),
    "dict, different keys": of(
        dict(observation_space=DICT), policy="MultiInputLstmPolicy", keywords=dict(actor_keys=["gear", "joints"])
    ),
    "one environment": of(dict(n_envs=1)),
    "never ended": of(dict(length=10**6, p_end=0.0)),
    "a remainder": of(batch_size=7),
    "two layers": of(keywords=dict(n_lstm_layers=2)),
    "shared": of(keywords=dict(shared_lstm=True, enable_critic_lstm=False)),
    "critic without memory": of(keywords=dict(enable_critic_lstm=False)),
    "GRU": of(keywords=GRU),
    "GRU, two layers, shared": of(keywords=dict(GRU, n_lstm_layers=2, shared_lstm=True, enable_critic_lstm=False)),
    "MinGRU, two layers": of(keywords=dict(rnn="mingru", n_lstm_layers=2)),
    "LRU, two layers": of(keywords=dict(rnn="lru", n_lstm_layers=2)),
    "gSDE": of(use_sde=True, ent_coef=0.1),
    "accumulated": of(accumulate_grad=2, batch_size=5),
}


@pytest.mark.parametrize("name", one_in(3, UPDATES, "MinGRU, two layers", "LRU, two layers"))
def test_fused_updates(name):
    """From the same rollout, the fused engine, which packs sequences, makes the update of the eager one, which pads them."""
    assert_same_update(other="fused", **UPDATES[name])


# Prediction


def walk(model, observations, starts):
    """Actions and states of `predict`, step by step."""
    state, results = None, []
    for observation, start in zip(observations, starts, strict=True):
        action, state = model.predict(observation, state, start, deterministic=True)
        results.append((action, state))
    return results


PREDICTED = ("box", "dict", "shared, two layers", "gSDE")


@pytest.mark.parametrize("name", PREDICTED)
def test_predict(name, tmp_path):
    """Actions and states are those of RecurrentPPO with the same parameters, to the bit, also for a single environment."""
    case = CASES[name]
    contrib = case.make(RecurrentPPO)
    contrib.save(tmp_path / "model")
    model = PPOExt.load(tmp_path / "model")
    contrib.observation_space.seed(0)
    rng = np.random.default_rng(0)
    for n_envs in (1, 3):
        observations = [stack([contrib.observation_space.sample() for _ in range(n_envs)]) for _ in range(6)]
        starts = rng.random((6, n_envs)) < 0.3
        assert_equal(walk(contrib, observations, starts), walk(model, observations, starts), name)
    single = contrib.observation_space.sample()
    assert_equal(contrib.predict(single, deterministic=True), model.predict(single, deterministic=True), name)


def test_predict_acts_as_while_collecting():
    """Deterministic actions depend on the states as those of a rollout do; an LSTM has two states, others one."""
    for rnn, n_states in (("lstm", 2), ("gru", 1), ("mingru", 1), ("lru", 1)):
        model = of_kind(rnn)
        model.learn(16)
        buffer, state = model.rollout_buffer, None
        for step in range(16):
            starts = buffer.episode_starts[step]
            _, state = model.predict(buffer.observations.reshape(2, 16, -1)[:, step], state, starts)
            assert len(state) == n_states
            np.testing.assert_allclose(state, buffer.memory.states[step + 1, 0], rtol=1e-5, atol=1e-6)


def of_kind(rnn, **options):
    """A small model before its first update: `n_epochs` with a learning rate of 0."""
    kwargs = {**SMALL, "policy_kwargs": dict(SIZES, rnn=rnn), "learning_rate": 0.0, **options}
    return PPOExt("MlpLstmPolicy", make_toys(), **kwargs)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("a string", r"`state='str'`.*2 of shape \(1, 2, 8\)"),
        ((np.zeros((1, 2, 8)),), r"`state=\[\(1, 2, 8\)\]`.*2 of shape"),
        ((np.zeros((1, 3, 8)),) * 2, r"`state=\[\(1, 3, 8\), .*or None to start anew"),
    ],
)
def test_bad_states(state, message):
    """A state of another policy or number of environments is refused."""
    with pytest.raises(ValueError, match=message):
        of_kind("lstm").predict(np.zeros((2, 3), np.float32), state)


def test_evaluation():
    """`evaluate_policy` and `EvalCallback` pass the states."""
    model = of_kind("gru")
    model.learn(32, callback=EvalCallback(make_toys(), eval_freq=8, n_eval_episodes=2, verbose=0))
    assert np.isfinite(evaluate_policy(model, make_toys(), n_eval_episodes=2)[0])


# Rollouts


@pytest.mark.parametrize("rnn", ["lstm", "gru", "mingru", "lru"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_minibatches_agree_with_rollouts(rnn, is_padded):
    """Before the first update, any minibatch has the values and log probabilities of the rollout."""
    model = of_kind(rnn, backend="eager")
    model.learn(32)
    buffer, n = model.rollout_buffer, 32
    drawn = np.random.default_rng(0).permutation(n)
    for indices in (np.arange(n), np.roll(np.arange(n), 7)[:20], np.array([5, 6, 7, 3, 20, 21, 22, 21]), drawn):
        data = buffer._get_samples(indices)
        sequences = data.observations._replace(is_padded=is_padded)
        values, log_prob, _ = model.policy.evaluate_actions(sequences, data.actions)
        th.testing.assert_close(values.flatten(), data.old_values, rtol=1e-4, atol=1e-5)
        th.testing.assert_close(log_prob, data.old_log_prob, rtol=1e-4, atol=1e-5)
        assert sequences.lengths.sum() == len(indices)
        samples = model.policy.predict_values(data.observations), model.policy.get_distribution(data.observations)
        th.testing.assert_close(samples[0].flatten(), data.old_values, rtol=1e-4, atol=1e-5)
        th.testing.assert_close(samples[1].log_prob(data.actions), data.old_log_prob, rtol=1e-4, atol=1e-5)


def test_estimates_go_through_whole_rollouts():
    """V-trace evaluates each environment from the first step of the rollout, not from states in its midst."""
    model = PPOExt("MlpLstmPolicy", make_toys(3), **{**SMALL, "n_steps": 700, "policy_kwargs": SIZES})
    model.batch_size, model.n_epochs, seen = 2100, 1, []
    model.learn(1)
    evaluate = model.policy.evaluate_samples
    model.policy.evaluate_samples = lambda obs, samples: seen.append(obs.lengths) or evaluate(obs, samples)
    model.rollout_buffer.episode_starts[1:] = 0
    model._rollout().evaluate(lambda data: model.policy.evaluate_samples(data.observations, data.actions)[0])
    assert np.concatenate(seen).tolist() == [700, 700, 700]


@pytest.mark.parametrize("n", [1, 2, 5, 40])
def test_plans(n):
    """Whatever the lengths, each sample has its own output, and little is computed in vain."""
    rng = np.random.default_rng(n)
    for rows_of_call in (0.5, 10.0, 1e9):
        lengths = rng.integers(1, 30, n)
        plan = Plan.of(lengths, rows_of_call, th.device("cpu"))
        rows = th.cat([window.rows for window in plan.windows])
        assert rows[plan.outputs].tolist() == list(range(lengths.sum()))
        assert len(plan.outputs.unique()) == lengths.sum()
        if rows_of_call == 0.5:
            assert len(rows) == lengths.sum()
        if rows_of_call == 1e9:
            assert len(plan.windows) == 1


def test_callbacks_read_the_names_of_recurrent_ppo():
    """The local variables of a rollout have the names and values of RecurrentPPO's."""

    class Reader(BaseCallback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def _on_step(self):
            states, starts = self.locals["lstm_states"], self.locals["episode_starts"]
            self.seen.append([[part.clone() for part in (*states.pi, *states.vf)], starts.clone()])
            return True

    readers = []
    for algorithm in (RecurrentPPO, PPOExt):
        readers.append(Reader())
        CASES["box"].make(algorithm).learn(32, callback=readers[-1])
    assert_equal(readers[0].seen, readers[1].seen, "locals")


def test_changed_rollouts_go_on_from_the_states():
    """If the length of rollouts or the backend is changed within an episode, the states are kept."""
    model = of_kind("lstm", backend="eager")
    model.learn(32)
    states, model.n_steps, model.backend = [*model._last_lstm_states], 8, "fused"
    model._apply_changed_options()
    assert model.rollout_buffer.buffer_size == 8
    assert_equal(states, [*model._last_lstm_states], "states")
    model.learn(32, reset_num_timesteps=False)


def test_engines():
    """`native` refuses recurrent policies by name; "auto" takes "fused"."""
    with pytest.raises(ValueError, match=r"`backend='native'`.*Lstm"):
        of_kind("lstm", backend="native")
    assert type(of_kind("lstm")._find_engine()).__name__ == "FusedEngine"


# Zips


@pytest.mark.parametrize("name", one_in(2, ["dict", "images", "shared, two layers", "gSDE"]))
def test_zips_of_recurrent_ppo(name, tmp_path):
    """A zip of RecurrentPPO is loaded, and trains on as RecurrentPPO would, to the bit."""
    case = CASES[name]
    case.make(RecurrentPPO).learn(64).save(tmp_path / "model")
    env = make_toys(**case.env)
    expected = train(RecurrentPPO.load(tmp_path / "model", env=env), 64)
    actual = train(PPOExt.load(tmp_path / "model", env=make_toys(**case.env), backend="eager"), 64)
    assert type(actual.model.policy).__module__ == "sb3_ppo_ext"
    assert_equal_runs(expected, actual)


def test_zips_for_recurrent_ppo(tmp_path):
    """RecurrentPPO loads a zip of PPOExt without options if it is told the policy."""
    for name, policy in (("box", MlpLstmPolicy), ("dict", MultiInputLstmPolicy), ("images", CnnLstmPolicy)):
        model = CASES[name].make(PPOExt).learn(32)
        model.save(tmp_path / name)
        loaded = RecurrentPPO.load(tmp_path / name, custom_objects=dict(policy_class=policy))
        assert_equal(model.policy.state_dict(), loaded.policy.state_dict(), name)
        assert_equal(model.policy.optimizer.state_dict(), loaded.policy.optimizer.state_dict(), name)


def test_zips_without_contrib(tmp_path):
    """A zip of RecurrentPPO is loaded without sb3-contrib, which is never imported."""
    CASES["box"].make(RecurrentPPO).save(tmp_path / "model")
    code = f"""
import sys
sys.modules["sb3_contrib"] = None
from sb3_ppo_ext import PPOExt
print(type(PPOExt.load({str(tmp_path / "model")!r}).policy).__name__)
"""
    assert run_fresh(code) == "MlpLstmPolicy\n"


@pytest.mark.parametrize("rnn", ["lstm", "gru", "mingru", "lru"])
def test_own_zips(rnn, tmp_path):
    """What is saved is loaded, with and without trust; a policy saved by itself, too."""
    model = of_kind(rnn, action_dist="beta")
    model.save(tmp_path / "model")
    model.policy.save(tmp_path / "policy")
    for trusted in (True, False):
        loaded = PPOExt.load(tmp_path / "model", env=make_toys(), trusted=trusted)
        assert_equal(model.policy.state_dict(), loaded.policy.state_dict(), "policy")
        loaded.learn(32)
        alone = type(model.policy).load(tmp_path / "policy", trusted=trusted)
        assert_equal(model.policy.state_dict(), alone.state_dict(), "policy")


def test_contribs_classes():
    """RecurrentPPO's own classes stand for ours; a class that inherits them is refused, with the remedy."""
    assert type(PPOExt(MlpLstmPolicy, make_toys()).policy) is sb3_ppo_ext.MlpLstmPolicy

    class Mine(MlpLstmPolicy):
        pass

    with pytest.raises(ValueError, match=r"inherits RecurrentPPO's .*let it inherit `sb3_ppo_ext.MlpLstmPolicy`"):
        PPOExt(Mine, make_toys())


# Bad input


@pytest.mark.parametrize(
    ("policy", "keywords", "message"),
    [
        ("MlpLstmPolicy", dict(rnn="rnn"), "`rnn='rnn'`.*lstm"),
        ("MlpLstmPolicy", dict(lstm_hidden_size=0), "`lstm_hidden_size=0`"),
        ("MlpLstmPolicy", dict(n_lstm_layers=1.5), "`n_lstm_layers=1.5`"),
        ("MlpLstmPolicy", dict(shared_lstm=True), "`shared_lstm=True`.*`enable_critic_lstm=False`"),
        ("MlpLstmPolicy", dict(enable_critic_lstm="no"), "`enable_critic_lstm='no'`.*True or False"),
        (
            "MlpLstmPolicy",
            dict(shared_lstm=True, enable_critic_lstm=False, share_features_extractor=False),
            "`shared_lstm=True`.*features extractors are not shared",
        ),
        ("MlpLstmPolicy", dict(lstm_kwargs=dict(batch_first=True)), "`lstm_kwargs=.*'batch_first' is not supported"),
        ("MlpLstmPolicy", dict(lstm_kwargs=dict(dropout=2.0)), "dropout.*2.0"),
        ("MlpLstmPolicy", dict(lstm_kwargs=[1]), "lstm_kwargs"),
        ("MlpLstmPolicy", dict(context_length=4), "context_length"),
        ("MlpTransformerPolicy", dict(lstm_hidden_size=4), "lstm_hidden_size"),
        ("MlpPolicy", dict(rnn="gru"), "rnn"),
        ("CnnLstmPolicy", {}, "only with images"),
    ],
)
def test_bad_input(policy, keywords, message):
    """The error names the argument, its value and the remedy."""
    with pytest.raises(ValueError, match=message):
        PPOExt(policy, make_toys(), policy_kwargs=keywords)


def test_single_observations_are_refused():
    """`evaluate_actions` says what it reads."""
    with pytest.raises(ValueError, match="use `predict` with its `state`"):
        of_kind("lstm").policy.predict_values(th.zeros(2, 3))


# GRU


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n_layers", [1, 2])
def test_gru_over_time(bias, n_layers):
    """Outputs, states and all gradients are those of PyTorch's GRU."""
    th.manual_seed(0)
    network = th.nn.GRU(3, 4, n_layers, bias=bias).double()
    inputs, hidden = th.randn(7, 5, 3).double().requires_grad_(), th.randn(n_layers, 5, 4).double().requires_grad_()
    weights = th.randn(7, 5, 4).double(), th.randn(n_layers, 5, 4).double()
    gradients = []
    for function in (network, partial(gru.over_time, network)):
        outputs, last = function(inputs, hidden)
        loss = (outputs * weights[0]).sum() + (last * weights[1]).sum()
        gradients.append([outputs, last, *th.autograd.grad(loss, [inputs, hidden, *network.parameters()])])
    for expected, actual in zip(*gradients, strict=True):
        th.testing.assert_close(actual, expected)


def test_gru_of_large_numbers():
    """Gates saturate where numbers are large, without warnings."""
    network, inputs = th.nn.GRU(1, 2), th.tensor([-1e30, 1e30, 0.0]).reshape(3, 1, 1)
    with np.errstate(all="raise", under="ignore"):
        outputs, _ = gru.over_time(network, inputs, th.zeros(1, 1, 2))
    th.testing.assert_close(outputs, network(inputs)[0])


@pytest.mark.parametrize(
    ("keywords", "of_critic"),
    [
        ({}, {"lstm_critic", "mlp_extractor.value_net", "value_net"}),
        (dict(enable_critic_lstm=False), {"critic", "mlp_extractor.value_net", "value_net"}),
        (dict(enable_critic_lstm=False, shared_lstm=True), {"mlp_extractor.value_net", "value_net"}),
    ],
)
def test_parameters_of_the_critic(keywords, of_critic):
    """The critic's optimiser has the parameters of its recurrent network, and none that the actor uses."""
    policy = PPOExt("MlpLstmPolicy", make_toys(), policy_kwargs={**SIZES, **keywords}).policy
    found = critic_parameters(policy)
    names = {name for name, parameter in policy.named_parameters() if parameter in found}
    assert {next(of for of in of_critic if name.startswith(f"{of}.")) for name in names} == of_critic
