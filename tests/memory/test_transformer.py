"""Transformer policies see the last observations of the episode, and the same ones wherever they are evaluated."""

import math
from copy import deepcopy

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize
from support.cases import one_in
from support.memory import SETTINGS, SIZES, SMALL, evaluated, loud, make
from support.toys import VECTOR, ToyEnv, make_toys

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.memory.policies import Memory
from sb3_ppo_ext.memory.transformer import Block, Cache, GRUGate, Transformer
from sb3_ppo_ext.memory.windows import Sequences, WindowMemory
from sb3_ppo_ext.rollout import actors
from sb3_ppo_ext.rollout.buffer import TensorRolloutBuffer
from sb3_ppo_ext.update import minibatch_loss

# The network


def make_network(context_length, n_layers, gate, n_stacked):
    th.manual_seed(0)
    network = Transformer(3, context_length, **SIZES, n_layers=n_layers, gate=gate, n_stacked=n_stacked)
    loud(network)
    return network.double()


def random_episodes(n_sequences, n_steps, p=0.2):
    return th.from_numpy(np.cumsum(np.random.default_rng(0).random((n_sequences, n_steps)) < p, axis=1))


NETWORKS = [
    (1, 1, True, 4),
    (5, 1, True, 4),
    (5, 2, True, 2),
    (5, 2, False, 9),
    (11, 3, True, 4),
]


def test_outputs_are_stacked_features_and_a_small_token():
    """The stacked features come first and as they are, then the token at a quarter of its size."""
    network = make_network(5, 1, False, 3)
    features, episodes = th.randn(2, 4 + 6, 3).double(), th.zeros(2, 4 + 6, dtype=th.long)
    outputs = network(features, episodes)
    stacked = th.cat([features[:, 2 + i : 8 + i] for i in range(3)], dim=2)
    th.testing.assert_close(outputs[..., :9], stacked)
    with th.no_grad():
        for last in (network.layers[0].out, network.layers[0].ffn[-1]):
            last.weight.zero_()
            last.bias.zero_()
    present = network.stem(stacked)  # if the block adds nothing, the token is that of the present
    th.testing.assert_close(network(features, episodes)[..., 9:], present / 4)


@pytest.mark.parametrize(("context_length", "n_layers", "gate", "n_stacked"), NETWORKS)
def test_each_window_by_itself(context_length, n_layers, gate, n_stacked):
    """
    The output at each step of a sequence is that of its window alone, whatever is outside of the window and of the episode.
    """
    network, before = make_network(context_length, n_layers, gate, n_stacked), context_length - 1
    features, episodes = th.randn(3, before + 12, 3).double(), random_episodes(3, before + 12)
    outputs = network(features, episodes)
    assert outputs.shape == (3, 12, network.n_outputs)
    for i in range(3):
        for t in range(12):
            window, numbers = features[i, t : t + context_length].clone(), episodes[i, t : t + context_length]
            window[numbers != numbers[-1]] = 100.0
            alone = network(window[None], (numbers == numbers[-1])[None].long())
            th.testing.assert_close(outputs[i, t], alone[0, 0])


@pytest.mark.parametrize(("context_length", "n_layers", "gate", "n_stacked"), NETWORKS)
def test_cache(context_length, n_layers, gate, n_stacked):
    """Step by step, with the cache, the outputs are those of the whole sequence."""
    network, before = make_network(context_length, n_layers, gate, n_stacked), context_length - 1
    features, episodes = th.randn(3, before + 12, 3).double(), random_episodes(3, before + 12)
    cache = Cache(network, 3, before + 12)
    network(features[:, :before], episodes[:, :before], cache)
    steps = [network.step(features[:, t], episodes[:, t], cache) for t in range(before, before + 12)]
    th.testing.assert_close(th.stack(steps, dim=1), network(features, episodes))


@pytest.mark.parametrize(("context_length", "n_layers", "gate", "n_stacked"), NETWORKS)
def test_what_it_sees(context_length, n_layers, gate, n_stacked):
    """Each step depends on the last `context_length` steps of its episode, all of them, and on nothing else."""
    network, before = make_network(context_length, n_layers, gate, n_stacked), context_length - 1
    features = th.randn(2, before + 9, 3).double().requires_grad_()
    episodes = random_episodes(2, before + 9, p=0.1)
    outputs = network(features, episodes)
    for i in range(2):
        for t in range(9):
            gradient = th.autograd.grad(outputs[i, t].square().sum(), features, retain_graph=True)[0].abs().sum(dim=2) > 0
            expected = th.zeros_like(gradient)
            window = slice(t, t + context_length)
            expected[i, window] = episodes[i, window] == episodes[i, t + before]
            assert (gradient == expected).all()


@pytest.mark.parametrize("n_stacked", [1, 3])
def test_what_is_stacked(n_stacked):
    """The features of the last steps are outputs as they are; attention can pick a single step further back."""
    network = make_network(6, 1, False, n_stacked)
    network.blocks[0].distance_scores.data[:, [0, 1, 2, 3, 5]] = -math.inf
    features = th.randn(1, 6, 3).double().requires_grad_()
    outputs = network(features, th.zeros(1, 6, dtype=th.long))[0, 0]
    stacked, token = outputs.split([3 * n_stacked, network.d_model])
    assert stacked.equal(features[0, 6 - n_stacked :].flatten())
    seen = th.autograd.grad(token.square().sum(), features)[0][0].abs().sum(dim=1) > 0
    assert seen.tolist() == [False, True, False, n_stacked == 3, n_stacked == 3, True]


def test_attention_by_hand():
    """
    With one head and one layer, attention is a softmax of scaled products and scores of distances over the visible steps and
    the sink, which has no value.
    """
    block = Block(2, 4, 1, 4, gate=False).double()
    loud(block)
    tokens = th.randn(1, 4, 4).double()
    keys, values = block.keys_values(tokens)
    visible = th.tensor([[[True, True, True, True], [True, False, True, True]]])
    attended = th.zeros(1, 2, 4).double()
    query = block.query(block.norm(tokens))
    for i, seen in [(0, [0, 1, 2]), (1, [2, 3])]:
        scores = [query[0, i + 2] @ keys[0, j] / 2 + 8 * block.distance_scores[0, i + 2 - j] for j in seen]
        weights = th.softmax(th.stack([*scores, 8 * block.sink_scores[0]]), dim=0)
        attended[0, i] = sum(weight * values[0, j] for weight, j in zip(weights[:-1], seen, strict=True))
    attended *= 1 + block.norm(tokens[:, 2:]) @ block.factors.weight.T
    after = tokens[:, 2:] + block.out(attended)
    th.testing.assert_close(block(tokens[:, 2:], keys, values, visible), after + block.ffn(after))


def test_initial_sinks():
    """A sink weighs an eighth of a full context of equal tokens, so that each head says how much of its context there is."""
    block = Block(7, 8, 4, None, gate=False)
    block.init_weights()
    tokens, visible = th.zeros(1, 8, 8), th.arange(8)[None, None] >= 7 - th.tensor([0, 3, 7])[:, None, None]
    keys, _ = block.keys_values(tokens)
    weights = th.cat([block.attention(tokens[:, 7:], keys, each) for each in visible.unsqueeze(1)])[:, :, 0].sum(dim=-1)
    raw = th.exp(8 * block.distance_scores)
    parts = th.stack([raw[:, :n].sum(dim=1) / raw.sum(dim=1) for n in (1, 4, 8)])
    th.testing.assert_close(weights, parts / (parts + 1 / 8))
    th.testing.assert_close(weights[2], th.full((4,), 8 / 9))
    # The last head treats all steps alike.
    th.testing.assert_close(weights[:, 3], th.tensor([1 / 2, 4 / 5, 8 / 9]))


def test_initial_factors():
    """Initially the factors change nothing, and their slopes are not zero: they are learned from the first step on."""
    network = Transformer(3, 5, 4, 2)
    features, episodes = th.randn(2, 6, 3), th.zeros(2, 6, dtype=th.long)
    outputs = network(features, episodes)
    (factors,) = (block.factors for block in network.layers)
    assert not factors.weight.any()
    (slopes,) = th.autograd.grad(outputs.square().sum(), factors.weight)
    assert (slopes != 0).all()


def test_without_feed_forward_network():
    """By default, the token is what attention returns."""
    block = Block(2, 4, 1, None, gate=False)
    loud(block)
    tokens, visible = th.randn(1, 4, 4), th.ones(1, 2, 4, dtype=th.bool)
    th.testing.assert_close(
        block(tokens[:, 2:], *block.keys_values(tokens), visible) - tokens[:, 2:], attended_by(block, tokens)
    )
    kinds = [type(module).__name__ for module in Transformer(3, 5, 4, 2).modules()]
    assert "GELU" not in kinds
    assert kinds.count("LayerNorm") == 1


def attended_by(block, tokens):
    keys, values = block.keys_values(tokens)
    query, after = block.query(block.norm(tokens[:, 2:])), []
    for i in range(2):
        scores = keys[0, i : i + 3] @ query[0, i] / 2 + 8 * block.distance_scores[0].flip(0)
        weights = th.softmax(th.cat([scores, 8 * block.sink_scores]), dim=0)
        after.append(weights[:3] @ values[0, i : i + 3])
    return block.out(th.stack(after) * (1 + block.norm(tokens[0, 2:]) @ block.factors.weight.T))[None]


def test_small_observations_stay_small():
    """A tenth of the features gives a tenth of the values to attend to; with the usual epsilon, most of them."""
    network, features = Transformer(3, 5, 16, 4), 0.1 * th.randn(1, 5, 3)

    def size(scale):
        return network.layers[0].keys_values(network.single(scale * features))[1].norm().item()

    assert size(0.1) / size(1.0) == pytest.approx(0.1, rel=0.1)
    network.blocks[0].norm.eps = 1e-5
    assert size(0.1) / size(1.0) > 0.7


def test_gate_prefers_its_input():
    """The gate is the GRU of its paper, z = sigmoid(... - bias), which first lets its input through."""
    gate = GRUGate(3)
    x, y = th.randn(2, 4, 3)
    z = th.sigmoid(gate.of_input(x)[:, 3:] + gate.of_output(y)[:, 3:6] - 2.0)
    r = th.sigmoid(gate.of_input(x)[:, :3] + gate.of_output(y)[:, :3])
    candidate = th.tanh(gate.of_output(y)[:, 6:] + gate.of_reset(r * x))
    th.testing.assert_close(gate(x, y), (1 - z) * x + z * candidate)


# The same windows everywhere


class Stream(BaseCallback):
    """Keeps all that the policy has seen and done, over several rollouts."""

    def __init__(self, n_calls=None):
        super().__init__()
        self.n_most = n_calls
        self.steps, self.rollouts = [], []

    def _on_step(self):
        of = self.locals
        observation = map_observations(lambda part: part.numpy().copy(), of["obs_tensor"])
        starts = np.array(self.model._last_episode_starts)
        encoded = self.model.policy.encode_actions(of["clipped_actions"])[:, : self.model.policy.n_action_features]
        outcome = encoded, of["rewards"].copy()
        values, log_probs = (of[name].detach().numpy().ravel() for name in ("values", "log_probs"))
        self.steps.append((observation, starts, outcome, values, log_probs, np.array(of["actions"])))
        return self.n_most is None or self.n_calls < self.n_most

    def window(self, step, env, context_length, final=None):
        """The window of a step, built from what was recorded alone; `final` is an observation after it."""
        first = step
        while first > 0 and not self.steps[first][1][env]:
            first -= 1
        length = context_length if final is None else context_length - 1
        seen = [t for t in range(max(first, step - length + 1), step + 1)]
        frames = [map_observations(lambda part: part[env], self.steps[t][0]) for t in seen]
        before = [None if t == first else t - 1 for t in seen]
        if final is not None:
            frames.append(map_observations(lambda part, like: np.reshape(part, like.shape[1:]), final, self.steps[0][0]))
            before.append(step)
        return frames, before


def naive(model, stream, steps, env, finals=None):
    """Values and distribution of windows, each evaluated alone, padded at its beginning with nonsense of another episode."""
    policy, rows = model.policy, []
    for i, step in enumerate(steps):
        frames, before = stream.window(step, env, policy.context_length, None if finals is None else finals[i])
        n_missing = policy.context_length - len(frames)
        nothing = np.zeros(policy.n_action_features, np.float32), np.zeros(model.n_envs)
        before = [None] * n_missing + before
        done = [nothing if t is None else (stream.steps[t][2][0][env], stream.steps[t][2][1]) for t in before]
        frames = [map_observations(np.ones_like, frames[0])] * n_missing + frames
        episodes = np.arange(policy.context_length) >= n_missing
        starts = np.array([t is None for t in before])
        rewards = np.array([reward[env] for _, reward in done], np.float32)
        rows.append((frames, episodes, starts, np.stack([action for action, _ in done]), rewards))
    frames, *others = zip(*rows, strict=True)
    frames = map_observations(lambda *parts: np.stack(parts), *(frame for window in frames for frame in window))
    shape = (len(rows), policy.context_length)
    observations = map_observations(lambda part: th.from_numpy(part).unflatten(0, shape), frames)
    episodes, starts, actions, rewards = (th.from_numpy(np.stack(column)) for column in others)
    actions, rewards = actions if policy.use_last_action else None, rewards if policy.use_last_reward else None
    sequences = Sequences(observations, episodes, starts, actions, rewards)
    with th.no_grad():
        return policy.predict_values(sequences).flatten().numpy(), policy.get_distribution(sequences)


def trained(setting, n_rollouts=3, **options):
    """A model whose parameters stay as they are, and the stream of what it has seen."""
    model = make(**{**SETTINGS[setting], **options}, learning_rate=1e-30, gamma=0.9)
    loud(model.policy)
    stream = Stream()
    model.learn(n_rollouts * model.n_steps * model.n_envs, callback=stream)
    return model, stream


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("setting", one_in(2, SETTINGS))
def test_same_windows_everywhere(setting):
    """While collecting, in the update and in `predict`, the policy sees the windows that an observer has written down."""
    model, stream = trained(setting)
    collected = [np.array(column) for column in list(zip(*stream.steps, strict=True))[3:5]]
    for of_update, while_collecting in zip(evaluated(model), collected, strict=True):
        np.testing.assert_allclose(of_update, while_collecting[-model.n_steps :], rtol=1e-4, atol=1e-5)
    predicted = actions_of(model, stream)
    for env in range(model.n_envs):
        values, distribution = naive(model, stream, range(len(stream.steps)), env)
        np.testing.assert_allclose(values, collected[0][:, env], rtol=1e-4, atol=1e-5)
        expected = distribution.get_actions(deterministic=True).numpy().reshape(-1, *predicted[0].shape[1:])
        predicted_here = np.array([actions[env] for actions in predicted])
        np.testing.assert_allclose(predicted_here, model.policy._within_bounds(expected), rtol=1e-4, atol=1e-5)


def actions_of(model, stream):
    """What `predict` says, given what the environments have shown."""
    state, predicted = None, []
    for observation, starts, (last_actions, rewards), *_ in stream.steps:
        actions, state = model.predict(observation, state, starts, deterministic=True)
        predicted.append(actions)
        if state.last_actions is not None:
            # Not what `predict` said, but what was done
            state.last_actions[:, -1] = last_actions
        state = state.with_rewards(rewards)
    return predicted


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(
    "setting", ["plain", "longer than a rollout", "last action and reward", "shared transformer", "dictionaries"]
)
def test_bootstrapped_values(setting, monkeypatch):
    """
    The terminal observation of a truncated episode, and the last one of a rollout, are evaluated behind the window before
    them.
    """
    model = make(**{**SETTINGS[setting], "env": {"length": 4, **SETTINGS[setting].get("env", {})}}, learning_rate=1e-30)
    loud(model.policy)
    stream, truncations = Stream(), []
    note = actors.note_truncations

    def spy(config, episodes):
        for i, row in enumerate(episodes.rows.tolist()):
            observation = map_observations(lambda part, i=i: part[i].numpy(), episodes.observations)
            truncations.append((len(stream.steps) - 1, row % model.n_envs, observation, episodes.values[i].item()))
        note(config, episodes)

    monkeypatch.setattr(actors, "note_truncations", spy)
    estimate = model.rollout_buffer.compute_returns_and_advantage
    last = []
    model.rollout_buffer.compute_returns_and_advantage = lambda last_values, dones: (
        last.append((len(stream.steps) - 1, last_values.flatten().tolist())) or estimate(last_values, dones)
    )
    model.learn(3 * model.n_steps * model.n_envs, callback=stream)
    assert len(truncations) > 2
    for step, env, observation, value in truncations:
        assert naive(model, stream, [step], env, [observation])[0][0] == pytest.approx(value, rel=1e-4, abs=1e-5)
    for step, values in last[:-1]:
        for env in range(model.n_envs):
            assert naive(model, stream, [step + 1], env)[0][0] == pytest.approx(values[env], rel=1e-4, abs=1e-5)


def test_predict_step_by_step():
    """`predict` starts without a state, takes single observations or several, and forgets at the start of an episode."""
    model = make(env=dict(action_space=spaces.Discrete(3)), keywords=dict(use_last_action=True))
    loud(model.policy)
    rng = np.random.default_rng(0)
    observations = rng.uniform(-1, 1, (8, 3, 3)).astype(np.float32)

    def run(frames, starts=None):
        state, actions = None, []
        for t, frame in enumerate(frames):
            action, state = model.predict(frame, state, None if starts is None else starts[t], deterministic=True)
            actions.append(action)
        return np.array(actions), state

    together, state = run(observations)
    assert isinstance(state, Memory)
    assert state.observations.shape == (3, 5, 3)
    assert together.shape == (8, 3)
    alone = np.stack([run(observations[:, env])[0] for env in range(3)], axis=1)
    np.testing.assert_array_equal(together, alone)
    starts = np.zeros((8, 3), bool)
    starts[0], starts[5, 1] = True, True
    with_start, _ = run(observations, starts)
    np.testing.assert_array_equal(with_start[:, [0, 2]], together[:, [0, 2]])
    np.testing.assert_array_equal(with_start[5:, 1], run(observations[5:, 1])[0])
    assert any((run(o := rng.uniform(-1, 1, (6, 20, 3)).astype(np.float32))[0][5] != run(o[5:])[0][0]).tolist())


def test_bad_states():
    """
    A state of another number of environments, of another policy or without rewards is refused, and so are observations without
    a state.
    """
    model = make(keywords=dict(use_last_reward=True))
    observations = np.zeros((2, 3), np.float32)
    _, state = model.predict(observations)
    with pytest.raises(ValueError, match=r"of 2 environments.*3 observations"):
        model.predict(np.zeros((3, 3), np.float32), state)
    with pytest.raises(ValueError, match=r"with_rewards.*LastRewardWrapper"):
        model.predict(observations, state)
    model.predict(observations, state.with_rewards(np.ones(2)))
    model.predict(observations, state, episode_start=np.ones(2, bool))
    with pytest.raises(ValueError, match="context_length=4"):
        make(context_length=4).predict(observations, state)
    with pytest.raises(ValueError, match="state='tuple'"):
        model.predict(observations, (np.zeros(2),))
    with pytest.raises(ValueError, match="reads `Sequences`"):
        model.policy.predict_values(th.zeros(2, 3))


# Learning


def first_ratios(model):
    """Ratios of the first minibatch of the next update."""
    ratios, original = [], minibatch_loss.policy_loss

    def policy_loss(advantages, ratio, *args):
        ratios.append(ratio.detach().numpy().copy())
        return original(advantages, ratio, *args)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(minibatch_loss, "policy_loss", policy_loss)
        model.learn(model.n_steps * model.n_envs, reset_num_timesteps=False)
    return ratios[0]


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("setting", one_in(2, SETTINGS))
def test_first_ratio_is_one(setting):
    """Before the first step the ratio is 1, also in the second rollout, whose first windows reach back into the one before."""
    model = make(**SETTINGS[setting])
    loud(model.policy, scale=0.1)
    model.learn(model.n_steps * model.n_envs)
    np.testing.assert_allclose(first_ratios(model), 1.0, atol=1e-5)


def test_beginning_in_the_middle_of_an_episode():
    """A model that goes on without a reset and without its last rollout sees nothing of the time before."""
    model = make(learning_rate=1e-30, env=dict(p_end=0.0, length=1000))
    loud(model.policy)
    model._last_obs, model._last_episode_starts = model.env.reset(), np.zeros(2, bool)
    stream = Stream()
    model.learn(32, callback=stream, reset_num_timesteps=False)
    values, _ = naive(model, stream, range(16), 0)
    np.testing.assert_allclose(values, [step[3][0] for step in stream.steps], rtol=1e-4, atol=1e-5)


OPTIONS = {
    "long segments": dict(priority_alpha=0.6, vtrace=True, priority_segment=32),
    "small batches": dict(batch_size=5),
    "remainder": dict(batch_size=12),
    "large batch": dict(batch_size=64),
    "one environment": dict(n_envs=1),
}


@pytest.mark.many(one_in=5)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, tmp_path):
    """
    Each option acts on all samples and changes the policy; training, saving and training again is training straight through.
    """
    options = OPTIONS[name]
    model = make(**options)
    model.learn(2 * model.n_steps * model.n_envs)
    model.save(tmp_path / "model")
    loaded = PPOExt.load(tmp_path / "model", env=model.env)
    observations = np.stack([VECTOR.sample() for _ in range(4)])
    np.testing.assert_array_equal(*(m.predict(observations, deterministic=True)[0] for m in (model, loaded)))
    after = []
    for m in (model, loaded):
        before = {key: value.clone() for key, value in m.policy.state_dict().items()}
        m.set_random_seed(5)
        m.learn(2 * m.n_steps * m.n_envs)
        assert all(th.isfinite(value).all() for value in m.policy.state_dict().values())
        changed = {key for key, value in m.policy.state_dict().items() if not th.equal(value, before[key])}
        assert {"action_net.weight", "pi_transformer.stem.linear.weight", "pi_transformer.blocks.0.distance_scores"} <= changed
        after.append(m.policy.state_dict())
    for key, value in after[0].items():
        assert th.equal(value, after[1][key]), key


def drawn(n_steps, n_envs, size):
    """The draws of an epoch, with the length of their blocks."""
    memory = WindowMemory(4)
    TensorRolloutBuffer(n_steps, VECTOR, spaces.Discrete(2), "cpu", n_envs=n_envs, memory=memory)
    draws, length = memory.draws(size, size)
    return [draw.numpy() for draw in draws], length


def test_every_sample_once():
    """An epoch draws each sample once, in blocks of successive steps of one environment."""
    for n_steps, n_envs, expected, size in [(16, 2, 8, 16), (10, 3, 5, 8), (7, 1, 7, 7), (5, 4, 1, 3)]:
        draws, length = drawn(n_steps, n_envs, size)
        assert length == expected
        assert sorted(np.concatenate(draws)) == list(range(n_steps * n_envs))
        assert all(len(draw) <= max(size, length) for draw in draws)
        for draw in draws:
            blocks = draw.reshape(-1, length)
            assert (np.diff(blocks, axis=1) == 1).all()
            assert (blocks[:, 0] // n_steps == blocks[:, -1] // n_steps).all()


@pytest.mark.parametrize("size", [8, 15, 17, 64])
@pytest.mark.parametrize("n_envs", [1, 8])
@pytest.mark.parametrize("n_steps", [9, 17, 129])
def test_no_minibatch_of_one_sample(n_steps, n_envs, size):
    """Nothing could be subtracted from the advantage of a single sample; a rollout that fits is one minibatch."""
    lengths = [len(draw) for draw in drawn(n_steps, n_envs, size)[0]]
    assert min(lengths) > 1
    assert max(lengths) <= size
    assert (len(lengths) == 1) == (n_steps * n_envs <= size)


def test_callback_that_changes_the_policy():
    """From a change in the middle of a rollout on, values are what the new parameters make of all that can be seen."""
    model = make(learning_rate=1e-30)

    class Change(Stream):
        def _on_step(self):
            if self.n_calls == 20:
                loud(self.model.policy)
            return super()._on_step()

    stream = Change()
    model.learn(64, callback=stream)
    values, _ = naive(model, stream, range(20, 32), 0)
    np.testing.assert_allclose(values, [step[3][0] for step in stream.steps[20:]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stop_at", [20, 33])
def test_stopped_and_continued(stop_at):
    """A rollout after one that a callback has stopped goes on with what was kept."""
    model = make(learning_rate=1e-30, env=dict(p_end=0.0, length=1000))
    loud(model.policy)
    stream = Stream(stop_at)
    model.learn(96, callback=stream)
    # SB3 does not keep the step at which it was stopped
    stream.steps.pop()
    stream.n_most = None
    model.learn(64, callback=stream, reset_num_timesteps=False)
    values, _ = naive(model, stream, range(len(stream.steps)), 0)
    np.testing.assert_allclose(values, [step[3][0] for step in stream.steps], rtol=1e-4, atol=1e-5)


def test_tools_of_sb3(tmp_path):
    """`EvalCallback`, `evaluate_policy` with another number of environments, `VecNormalize` and zips work."""
    env = VecNormalize(make_toys(3))
    model = PPOExt("MlpTransformerPolicy", env, policy_kwargs=dict(SIZES, context_length=5), **SMALL)
    evaluation = EvalCallback(VecNormalize(make_toys(2), training=False), eval_freq=8, n_eval_episodes=3, verbose=0)
    model.learn(96, callback=evaluation)
    assert np.isfinite(evaluation.last_mean_reward)
    assert evaluation.n_calls == 32
    rewards, lengths = evaluate_policy(model, make_toys(1), 4, return_episode_rewards=True)
    assert len(rewards) == 4
    assert max(lengths) <= 7
    model.policy.save(tmp_path / "policy")
    loaded = type(model.policy).load(tmp_path / "policy")
    assert loaded.memory_kwargs == model.policy.memory_kwargs
    observation = VECTOR.sample()
    np.testing.assert_array_equal(
        loaded.predict(observation, deterministic=True)[0], model.predict(observation, deterministic=True)[0]
    )


@pytest.mark.parametrize("setting", ["plain", "shared transformer", "images", "dictionaries"])
def test_who_shares_a_transformer(setting):
    """By default, actor and critic share one where it may read images."""
    policy = make(**SETTINGS[setting]).policy
    assert policy.share_features_extractor == (setting != "plain")
    assert (policy.pi_transformer is policy.vf_transformer) == (setting != "plain")


def test_parameters_of_shared_and_separate_transformers(tmp_path):
    """A shared transformer does not silently become that of the critic, and the other way round the error says what to do."""
    models = {shared: make(keywords=dict(share_features_extractor=shared)).learn(32) for shared in (True, False)}
    for shared, model in models.items():
        other, before = models[not shared], deepcopy(model.get_parameters())
        other.save(tmp_path / "other")
        remedy = f"`share_features_extractor={shared}`.*share_features_extractor={not shared}"
        with pytest.raises(ValueError, match=remedy):
            model.set_parameters(tmp_path / "other")
        for name, value in model.get_parameters()["policy"].items():
            assert th.equal(value, before["policy"][name])
    with pytest.raises(ValueError, match="share_features_extractor=False"):
        models[True].set_parameters({"policy": models[False].policy.state_dict()}, exact_match=False)
    copies = {name: value.clone() for name, value in models[True].policy.state_dict().items()}
    for model in models.values():
        model.set_parameters({"policy": copies}, exact_match=False)
        th.testing.assert_close(dict(model.policy.state_dict()), copies, rtol=0, atol=0)


@pytest.mark.integration
def test_n_stacked_of_a_policy(tmp_path):
    """`n_stacked` sizes what is read of the present, is saved, and is at most what the first layer sees."""
    kwargs = dict(SIZES, context_length=5)
    for n_stacked, n_layers, expected in [(1, 1, 1), (3, 1, 3), (9, 1, 5), (9, 2, 3)]:
        model = PPOExt(
            "MlpTransformerPolicy", make_toys(1), policy_kwargs=dict(kwargs, n_stacked=n_stacked, n_layers=n_layers), **SMALL
        ).learn(16)
        model.save(tmp_path / "model")
        for one in (model, PPOExt.load(tmp_path / "model")):
            transformer = one.policy.pi_transformer
            assert transformer.stem.linear.in_features == expected * transformer.features_dim


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (dict(context_length=0), "context_length=0.*at least 1"),
        (dict(d_model=10, n_heads=4), "d_model=10.*multiple of n_heads=4"),
        (dict(n_layers=1.5), "n_layers=1.5.*an integer"),
        (dict(n_stacked=0), "n_stacked=0.*at least 1"),
        (dict(gate="yes"), "gate='yes'.*True or False"),
        (dict(contextlength=3), "context_length"),
    ],
)
def test_bad_keywords(keywords, message):
    """Bad keywords are refused before anything is built."""
    with pytest.raises(ValueError, match=message):
        PPOExt("MlpTransformerPolicy", ToyEnv(), policy_kwargs=keywords)


def test_own_buffers_are_refused():
    """Buffers of a user are refused, for they know nothing of the rollout before."""

    class OwnBuffer(RolloutBuffer):
        pass

    with pytest.raises(ValueError, match=r"rollout_buffer_class=.*has a buffer of its own"):
        make(rollout_buffer_class=OwnBuffer)


def test_images_are_held_once():
    """A rollout holds each image once, but for the few steps before it."""
    space = spaces.Box(0, 255, (36, 36, 1), np.uint8)
    model = make("CnnTransformerPolicy", dict(observation_space=space), context_length=32, n_steps=128, batch_size=128)
    buffer = model.rollout_buffer
    assert np.shares_memory(buffer.observations, buffer.memory.rows.observations.numpy())
    images = 128 * 2 * 36 * 36
    assert buffer.memory.rows.observations.nbytes <= 1.3 * images


class Asked(gym.Env):
    """Two cues in the first step; the eleventh and last one asks for one of them."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-1.0, 1.0, (5,), np.float32)  # cues, whether this is the first step, which one is asked for

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cues, self.asked, self.now = self.np_random.integers(2, size=2), int(self.np_random.integers(2)), 0
        return np.array([*(2 * self.cues - 1), 1, 0, 0], np.float32), {}

    def step(self, action):
        self.now += 1
        right = action == self.cues[self.asked]
        question = 3 + self.asked if self.now == 10 else -1
        return np.float32(np.arange(5) == question), float(self.now == 11 and right), self.now == 11, False, {}


@pytest.mark.slow
@pytest.mark.integration
def test_recalls_what_is_asked_for():
    """The present question decides which of two cues matters: a sum of both answers seven of eight combinations."""
    env = make_vec_env(Asked, 16, seed=0)
    model = PPOExt("MlpTransformerPolicy", env, n_steps=128, batch_size=256, seed=0, device="cpu").learn(100_000)
    assert np.mean([episode["r"] for episode in model.ep_info_buffer]) > 0.95
