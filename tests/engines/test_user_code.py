"""Whatever a callback may read or change in SB3, it reads and changes on every engine: each compared with SB3's PPO."""

import copy
from functools import partial

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, CheckpointCallback, EventCallback
from stable_baselines3.common.policies import ActorCriticPolicy
from support.cases import one_in
from support.masks import make_masked
from support.parity import assert_equal
from support.torch_envs import ToyTensors
from support.toys import Silent, make_toys
from torch import nn

from sb3_ppo_ext import MlpPolicy, PPOExt
from sb3_ppo_ext.engines.native.engine import NativeEngine
from sb3_ppo_ext.engines.native.policy import Perceptron
from sb3_ppo_ext.engines.registry import ENGINES
from sb3_ppo_ext.rollout.user_code import runs_user_code

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quick_compiler")]

SMALL = dict(n_steps=16, batch_size=16, n_epochs=2, seed=3, device="cpu", policy_kwargs=dict(net_arch=[8, 8]))
# The compiler plays no role while collecting, and takes seconds afterwards.
UNCOMPILED = [name for name in ENGINES if name != "compile"]
BACKENDS = [*UNCOMPILED, pytest.param("compile", marks=[pytest.mark.integration, pytest.mark.slow])]
AT = 5


def make(algorithm=PPO, **options):
    return algorithm("MlpPolicy", make_toys(), **{**SMALL, **options})


# What a callback reads


def read_in_a_helper(callback):
    return callback.locals["values"], callback.locals["log_probs"]


class InAHelper(BaseCallback):
    """Reads the locals in a function of its own, of which nothing can be known."""

    def _on_step(self):
        self.seen = [*getattr(self, "seen", []), *map(copy.deepcopy, read_in_a_helper(self))]
        return True


class ByGetattr(BaseCallback):
    """Reads the buffer by a name that is put together."""

    def _on_step(self):
        buffer = getattr(self.model, "rollout" + "_" + "buffer")
        rows = [getattr(buffer, name)[: buffer.pos].copy() for name in ("values", "log_probs", "rewards", "actions")]
        self.seen = [*getattr(self, "seen", []), *rows]
        return True


class AllLocals(BaseCallback):
    """Walks through all that there is."""

    NAMES = ("obs_tensor", "actions", "values", "log_probs", "clipped_actions", "new_obs", "rewards", "dones", "n_steps")

    def _on_step(self):
        found = {**self.locals}
        self.seen = [*getattr(self, "seen", []), *(copy.deepcopy(found[name]) for name in self.NAMES)]
        return True


class KeepsTheArrays(Silent):
    """Takes the arrays of the buffer once in each rollout."""

    def _on_rollout_start(self):
        buffer = self.model.rollout_buffer
        self.kept, self._on_step = [buffer.values, buffer.log_probs], self.read

    def read(self):
        n = self.model.rollout_buffer.pos
        self.seen = [*getattr(self, "seen", []), *(array[:n].copy() for array in self.kept)]
        return True


class CopiesTheBuffer(BaseCallback):
    """Copies the buffer at each step."""

    def _on_step(self):
        buffer = copy.deepcopy(self.model.rollout_buffer)
        self.seen = [*getattr(self, "seen", []), *(getattr(buffer, name)[: buffer.pos] for name in ("values", "log_probs"))]
        return True


class InAChild(EventCallback):
    """Lets a child callback read."""

    def __init__(self, child):
        super().__init__(child)
        self.child = child

    def _on_step(self):
        return self._on_event()

    @property
    def seen(self):
        return self.child.seen


def lambda_reader():
    """A function for SB3's own ``ConvertCallback``."""
    seen = []

    def read(local, _):
        seen.append(local.get("values").clone())
        return True

    read.seen = seen
    return read


READERS = {
    "a helper": InAHelper,
    "getattr": ByGetattr,
    "all locals": AllLocals,
    "kept arrays": KeepsTheArrays,
    "copies": CopiesTheBuffer,
    "a child": lambda: InAChild(InAHelper()),
    "a function": lambda_reader,
}


def seen_by(model, reader):
    """What the callback sees of rollouts in which every action is the mean: random numbers differ from engine to engine."""
    with th.no_grad():
        model.policy.log_std.fill_(-30.0)
    model.learn(32, callback=reader)
    return reader.seen


@pytest.mark.parametrize("reader", READERS)
def test_a_callback_reads_what_sb3_has(reader):
    """Values, log probabilities and the rows of the buffer are those of SB3, at each step."""
    assert_reads_what_sb3_has("native", reader)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_callback_reads_what_sb3_has_on_each_engine(backend):
    """All of it can be read on every engine."""
    assert_reads_what_sb3_has(backend, "all locals")


def assert_reads_what_sb3_has(backend, reader):
    expected = seen_by(make(), READERS[reader]())
    actual = seen_by(make(PPOExt, backend=backend), READERS[reader]())
    assert len(actual) == len(expected) >= 32 // 2
    for one, other in zip(expected, actual, strict=True):
        # The log probability of a mean is a sum of large numbers.
        np.testing.assert_allclose(np.asarray(other), np.asarray(one), rtol=1e-4, atol=1e-4)


# What a callback changes


class Writes(BaseCallback):
    """Writes into what the policy has chosen and estimated, as a script that relabels actions does."""

    def _on_step(self):
        self.locals["actions"][:] = 0.25
        self.locals["values"].fill_(0.5)
        self.locals["log_probs"].sub_(1.0)
        return True


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_callback_writes_is_stored(backend):
    """The buffer has what a callback has written into the arrays of a step."""
    plain, model = make(PPOExt, backend=backend).learn(32), make(PPOExt, backend=backend).learn(32, callback=Writes())
    assert np.unique(model.rollout_buffer.actions) == 0.25
    assert np.unique(model.rollout_buffer.values) == 0.5
    sb3 = make().learn(32, callback=Writes())
    np.testing.assert_array_equal(np.unique(sb3.rollout_buffer.actions), 0.25)
    assert not np.isclose(plain.rollout_buffer.values, 0.5).any()


def doubled_rewards(model):
    model.rollout_buffer.rewards *= 2


def another_discount(model):
    model.gamma = 0.5  # that of the values of truncated episodes, as in SB3


@pytest.mark.parametrize("write", [doubled_rewards, another_discount])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_callback_writes_in_the_middle_of_a_rollout(backend, write):
    """The rest of the rollout goes on from there, as in SB3."""
    expected, actual, unchanged = (
        rollout_with(model, change)
        for model, change in (
            (make(), lambda model, _: write(model)),
            (make(PPOExt, backend=backend), lambda model, _: write(model)),
            (make(), lambda *_: None),
        )
    )
    for name in ("rewards", "advantages", "returns"):
        one, other = (getattr(model.rollout_buffer, name) for model in (expected, actual))
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4, err_msg=name)
    assert not np.allclose(expected.rollout_buffer.rewards, unchanged.rollout_buffer.rewards)


def others(policy):
    """A policy with other parameters."""
    generator = th.Generator().manual_seed(0)
    with th.no_grad():
        other = copy.deepcopy(policy)
        for name, parameter in other.named_parameters():
            noise = th.randn(parameter.shape, generator=generator)
            parameter.copy_(th.full_like(parameter, -30.0) if name == "log_std" else parameter + noise)
    return other


def by_assign(model, other):
    model.policy.load_state_dict(other.state_dict(), assign=True)


def by_load(model, other):
    model.policy.load_state_dict(other.state_dict())


def by_data(model, other):
    for parameter, new in zip(model.policy.parameters(), other.parameters(), strict=True):
        parameter.data = new.data.clone()


def in_place_on_data(model, other):
    for parameter, new in zip(model.policy.parameters(), other.parameters(), strict=True):
        parameter.data.copy_(new.data)


def through_numpy(model, other):
    for parameter, new in zip(model.policy.parameters(), other.parameters(), strict=True):
        parameter.detach().numpy()[...] = new.detach().numpy()


def by_set_parameters(model, other):
    model.set_parameters({"policy": other.state_dict()}, exact_match=False)


def by_policy(model, other):
    other.optimizer = type(other.optimizer)(other.parameters(), lr=3e-4, eps=1e-5)
    model.policy = other


def by_module(model, other):
    model.policy.mlp_extractor, model.policy.action_net = other.mlp_extractor, other.action_net
    model.policy.value_net, model.policy.log_std = other.value_net, other.log_std


IN_PLACE = [by_load, in_place_on_data, through_numpy, by_set_parameters]
REPLACED = [by_assign, by_data, by_policy, by_module]


class Change(BaseCallback):
    """Changes the policy in the middle of a rollout."""

    def __init__(self, change, other):
        super().__init__()
        self.change, self.other = change, other

    def _on_step(self):
        if self.n_calls == AT:
            self.change(self.model, copy.deepcopy(self.other))
        return True


def rollout_with(model, change):
    """A rollout in which every action is the mean, and a callback changes the weights."""
    with th.no_grad():
        model.policy.log_std.fill_(-30.0)
    _, callback = model._setup_learn(10**6, Change(change, others(model.policy)))
    model._last_obs = np.ones_like(model._last_obs)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    return model


AT_ONCE = [(backend, change) for backend in UNCOMPILED for change in IN_PLACE]
AT_ONCE += [("eager", change) for change in REPLACED]
# A third of them, one for each engine and kind of change
AT_ONCE = [pytest.param(*case, marks=pytest.mark.slow if n % 3 else ()) for n, case in enumerate(AT_ONCE)]
AT_ONCE += [pytest.param("compile", IN_PLACE[0], marks=pytest.mark.integration)]


@pytest.mark.parametrize(("backend", "change"), AT_ONCE)
def test_weights_that_a_callback_changes_act_at_the_next_step(backend, change):
    """
    If the weights are changed in place, or with the reference in any way, actions, values and returns are SB3's, and so is
    what the update makes of them.
    """
    expected, actual = rollout_with(make(), change), rollout_with(make(PPOExt, backend=backend), change)
    unchanged = rollout_with(make(), lambda *_: None)
    assert np.allclose(expected.rollout_buffer.actions[:AT], unchanged.rollout_buffer.actions[:AT], atol=1e-5)
    assert not np.allclose(expected.rollout_buffer.actions[AT], unchanged.rollout_buffer.actions[AT], atol=1e-2)
    for name in ("actions", "values", "rewards", "advantages", "returns"):
        one, other = (getattr(model.rollout_buffer, name) for model in (expected, actual))
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4, err_msg=name)
    before = copy.deepcopy(actual.policy.state_dict())
    for model in (expected, actual):
        # Gradients at a standard deviation of 1e-13 would be mere rounding.
        with th.no_grad():
            model.policy.log_std.fill_(0.0)
        model.rollout_buffer.log_probs[:] = -2.0
        np.random.seed(0)
        model.train()
    assert_close(expected.policy.state_dict(), actual.policy.state_dict())
    assert before.keys() == actual.policy.state_dict().keys()


def assert_close(expected, actual):
    assert expected.keys() == actual.keys()
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("change", REPLACED, ids=lambda change: change.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_callback_replaces_acts_from_the_next_rollout_on(backend, change):
    """The next rollout is that of the new weights, with their values."""
    model = rollout_with(make(PPOExt, backend=backend), change)
    _, callback = model._setup_learn(10**6, None, reset_num_timesteps=False)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    observations = th.from_numpy(model.rollout_buffer.observations).flatten(0, 1)
    with th.no_grad():
        actions, values, _ = model.policy(observations, deterministic=True)
    np.testing.assert_allclose(model.rollout_buffer.values.ravel(), values.ravel(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(model.rollout_buffer.actions.reshape(actions.shape), actions, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", IN_PLACE + REPLACED, ids=lambda change: change.__name__)
def test_history_of_a_policy_whose_weights_change(change):
    """What a transformer has cached of the steps before is computed again."""
    policy_kwargs = dict(net_arch=[8], context_length=8, d_model=8, n_heads=2)

    class Stream(Change):
        def _on_step(self):
            seen.append(self.locals["values"].numpy().ravel())
            return super()._on_step()

    seen = []
    model = PPOExt("MlpTransformerPolicy", make_toys(p_end=0.0, length=100), **{**SMALL, "policy_kwargs": policy_kwargs})
    callback = Stream(change, others(model.policy))
    _, callback = model._setup_learn(10**6, callback)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    buffer, policy = model.rollout_buffer, model.policy
    steps = np.arange(AT, model.n_steps)
    for env in range(model.n_envs):
        with th.no_grad():
            expected = (
                policy.predict_values(buffer.memory.inputs(th.from_numpy(env * model.n_steps + steps), 1)).numpy().ravel()
            )
        np.testing.assert_allclose(buffer.values[AT:, env], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(buffer.values, np.stack(seen))
    assert (buffer.values[AT:].std(axis=0) > 0.1).all()


class Odd(ActorCriticPolicy):
    """Computes in its own way."""

    def forward(self, obs, deterministic=False):
        actions, values, log_prob = super().forward(obs, deterministic)
        return th.full_like(actions, 0.5), values, log_prob


def test_a_policy_of_another_kind_in_the_middle_of_a_rollout():
    """The extension module steps aside in the next rollout, and takes over again when it can."""

    class Swap(BaseCallback):
        def _on_step(self):
            if self.n_calls == AT:
                space = self.model.observation_space, self.model.action_space
                self.model.policy = Odd(*space, lambda _: 3e-4, net_arch=[8, 8])
            return True

    model = make(PPOExt, backend="auto")
    assert type(model._find_engine()) is NativeEngine
    first = model.policy
    model.learn(64, callback=Swap())
    assert (model.rollout_buffer.actions == 0.5).all()
    assert type(model._find_engine()) is not NativeEngine
    assert th.isfinite(model.policy.action_net.weight).all()
    model.policy = first
    assert type(model._find_engine()) is NativeEngine


def test_a_callback_that_sees_all_sees_nothing_else_changed():
    """Random numbers, and so the whole training, do not depend on whether a callback reads."""
    alone = make(PPOExt).learn(64)
    watched = make(PPOExt).learn(64, callback=AllLocals())
    for name, expected in alone.policy.state_dict().items():
        np.testing.assert_allclose(watched.policy.state_dict()[name], expected, rtol=1e-4, atol=1e-6, err_msg=name)


def test_subclass_that_reads_estimates():
    """A subclass of PPOExt may look at the buffer from any of its methods."""

    class Curious(PPOExt):
        def _update_info_buffer(self, infos, dones=None):
            super()._update_info_buffer(infos, dones)
            buffer = self.rollout_buffer
            if buffer.pos > 0:
                seen.append(buffer.values[buffer.pos - 1].copy())

    seen = []
    model = make(Curious, backend="native").learn(32)
    stored = model.rollout_buffer.values.reshape(2, 16).T
    np.testing.assert_allclose(np.stack(seen), stored[:-1], rtol=1e-5)


@pytest.mark.parametrize("action_space", [spaces.Discrete(3), spaces.MultiBinary(2)], ids=lambda space: type(space).__name__)
def test_actions_in_the_locals_have_sb3s_shapes(action_space):
    """Shapes and types of all locals are SB3's, for discrete and binary actions."""
    shapes = []
    for algorithm in (PPO, partial(PPOExt, backend="native")):
        reader = AllLocals()
        algorithm("MlpPolicy", make_toys(action_space=action_space), **SMALL).learn(32, callback=reader)
        shapes.append([(np.asarray(value).shape, np.asarray(value).dtype) for value in reader.seen])
    assert shapes[0] == shapes[1]


def test_in_the_reference_nothing_has_changed():
    """With a callback that reads everything the reference is still SB3, to the bit."""
    models = [make().learn(64, callback=AllLocals()), make(PPOExt, backend="eager").learn(64, callback=AllLocals())]
    assert_equal(*(model.policy.state_dict() for model in models), "policy")


class Callable:
    """An object that SB3 takes for a function."""

    def __init__(self):
        self.seen = []

    def __call__(self, local, _=None):
        self.seen.append(local["values"].shape)
        return True


class Duck:
    """Behaves like a callback without being one."""

    def __init__(self):
        self.seen, self.locals = [], {}

    def init_callback(self, model):
        self.model = model

    def update_locals(self, local):
        self.locals.update(local)

    def on_step(self):
        self.seen.append(self.locals["values"].shape)
        return True

    def __getattr__(self, name):
        if name.startswith("on_"):
            return lambda *args: None
        raise AttributeError(name)


def replaced(callback, seen):
    """A known callback with a method that is a callable object."""
    callback._on_step = lambda: callback.__dict__["spy"](callback.locals)
    callback.spy = seen
    return callback


@pytest.mark.parametrize("kind", ["callable", "duck", "replaced method"])
def test_objects_that_only_behave_like_callbacks(kind, tmp_path):
    """They read what SB3 has, too."""
    reader = Duck() if kind == "duck" else Callable()
    callback = {
        "callable": lambda: reader,
        "duck": lambda: CallbackList([CheckpointCallback(1000, tmp_path), reader]),
        "replaced method": lambda: replaced(CheckpointCallback(1000, tmp_path), reader),
    }[kind]()
    make(PPOExt, backend="native").learn(32, callback=callback)
    assert set(reader.seen) == {(2, 1)}


def test_method_of_a_known_class_that_was_replaced(monkeypatch, tmp_path):
    """A user may change SB3's classes."""

    def on_step(self):
        seen.append(self.locals["log_probs"].shape)
        return True

    seen = []
    monkeypatch.setattr(CheckpointCallback, "_on_step", on_step)
    make(PPOExt, backend="native").learn(32, callback=CheckpointCallback(1000, tmp_path))
    assert set(seen) == {(2,)}


def test_callbacks_that_refer_to_each_other(tmp_path):
    """A cycle is no reason to look forever."""
    one, other = CheckpointCallback(1000, tmp_path), CheckpointCallback(1000, tmp_path)
    one.friend, other.friend = other, one
    assert not runs_user_code(one)


class Meddler(BaseCallback):
    """Changes attributes of the model that its rollout reads."""

    def _on_step(self):
        if self.n_calls == AT:
            self.model.gamma = 0.5
        if self.n_calls == AT + 3:
            self.model._last_episode_starts = np.ones(2, bool)
        return True


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_attributes_that_a_callback_changes(backend):
    """The discount factor and the starts of episodes act at the step at which they do in SB3."""
    runs = []
    for algorithm in (PPO, partial(PPOExt, backend=backend)):
        model = make(algorithm)
        with th.no_grad():
            model.policy.log_std.fill_(-30.0)
        _, callback = model._setup_learn(10**6, Meddler())
        model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
        runs.append(model.rollout_buffer)
    for name in ("rewards", "episode_starts", "advantages"):
        one, other = (getattr(buffer, name) for buffer in runs)
        np.testing.assert_allclose(other, one, rtol=0 if backend == "eager" else 1e-4, atol=1e-4 * (backend != "eager"))


def test_a_custom_buffer_gets_what_sb3_gives():
    """The arguments of its `add` have SB3's shapes."""
    shapes = []

    class Buffer(RolloutBuffer):
        def add(self, obs, action, reward, episode_start, value, log_prob):
            found.add(tuple(np.shape(part) for part in (obs, action, reward, episode_start, value, log_prob)))
            super().add(obs, action, reward, episode_start, value, log_prob)

    for algorithm in (PPO, PPOExt):
        found = set()
        env = make_toys(action_space=spaces.Discrete(3))
        algorithm("MlpPolicy", env, rollout_buffer_class=Buffer, **SMALL).learn(32)
        shapes.append(found)
    assert shapes[0] == shapes[1]


class ReplacesLastObs(BaseCallback):
    """Assigns other observations to `_last_obs` once."""

    def _on_step(self):
        if self.n_calls == AT:
            self.model._last_obs = np.full_like(self.model._last_obs, 0.25)
        return True


@pytest.mark.parametrize("backend", BACKENDS)
def test_observations_that_a_callback_replaces(backend):
    """They are stored, and the observations after them are those of the environments, as in SB3."""
    stored = []
    for algorithm, options in ((PPO, {}), (PPOExt, {"backend": backend})):
        model = make(algorithm, **options)
        _, callback = model._setup_learn(10**6, ReplacesLastObs())
        model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
        stored.append(model.rollout_buffer.observations.copy())
    np.testing.assert_array_equal(*stored)
    assert (stored[0] == 0.25).all(axis=(1, 2)).tolist() == [step == AT - 1 for step in range(16)]


def swap_distribution(model):
    """A policy whose noise is drawn in another way."""
    space = model.observation_space, model.action_space
    model.policy = MlpPolicy(*space, lambda _: 3e-4, net_arch=[8, 8], action_dist="gaussian")


def swap_activation(model):
    """No parameter changes."""
    for net in (model.policy.mlp_extractor.policy_net, model.policy.mlp_extractor.value_net):
        net[1] = nn.ReLU()


def add_hook(model):
    """Nor does one here."""
    model.policy.action_net.register_forward_hook(lambda module, inputs, outputs: outputs + 1.0)


def replace_method(model):
    """Nor here."""
    predict_values = model.policy.predict_values
    model.policy.predict_values = lambda obs: predict_values(obs) + 1.0


def replace_method_of_a_part(model):
    """Nor here."""
    networks = model.policy.mlp_extractor
    forward = networks.forward_critic
    networks.forward_critic = lambda features: forward(features) + 1.0


def replace_method_of_the_distribution(model):
    """Nor here."""
    log_prob = model.policy.action_dist.log_prob
    model.policy.action_dist.log_prob = lambda actions: log_prob(actions) + 1.0


OTHERWISE = [swap_distribution, swap_activation, add_hook, replace_method]
OTHERWISE += [replace_method_of_a_part, replace_method_of_the_distribution]


@pytest.mark.parametrize("change", OTHERWISE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("when", ["in a rollout", "between rollouts", "on_rollout_start"])
def test_policies_that_compute_otherwise(change, when):
    """Values and log probabilities are those of the policy at the start of the rollout."""
    kwargs = dict(mean_tanh=True) if OTHERWISE.index(change) % 2 else dict(net_arch=[8, 8])

    class Changer(BaseCallback):
        def _on_rollout_start(self):
            if when == "on_rollout_start":
                change(self.model)

        def _on_step(self):
            if self.n_calls == AT and when == "in a rollout":
                change(self.model)
            return True

    model = make(PPOExt, backend="auto", policy_kwargs={"net_arch": [8, 8], **kwargs})
    model.learn(32)
    if when == "between rollouts":
        change(model)
    _, callback = model._setup_learn(10**6, Changer())
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    if when == "in a rollout":
        model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    buffer = model.rollout_buffer
    observations, actions = (th.from_numpy(array).flatten(0, 1) for array in (buffer.observations, buffer.actions))
    with th.no_grad():
        _, log_probs, _ = model.policy.evaluate_actions(observations, actions)
        last = model.policy.predict_values(th.from_numpy(model._last_obs)).flatten().numpy()
    np.testing.assert_allclose(buffer.log_probs.ravel(), log_probs.numpy(), rtol=1e-4, atol=1e-4)
    # The returns begin with the values of the last observations, which `predict_values` gives.
    alive = ~np.asarray(model._last_episode_starts, bool)
    expected = buffer.rewards[-1] + 0.99 * last - buffer.values[-1]
    np.testing.assert_allclose(buffer.advantages[-1][alive], expected[alive], rtol=1e-4, atol=1e-4)


def leave_doubles(buffer, *names):
    """Leave arrays of float64 in the buffer."""
    for name in names:
        setattr(buffer, name, getattr(buffer, name).astype(np.float64))


class LeavesDoubles(Silent):
    def _on_rollout_end(self):
        leave_doubles(self.model.rollout_buffer, "values", "log_probs", "advantages", "returns")


class LeavesDoublesAtOnce(BaseCallback):
    """Leaves them in the middle of a rollout."""

    def _on_step(self):
        leave_doubles(self.model.rollout_buffer, "rewards", "episode_starts", "values", "log_probs", "advantages")
        return True


@pytest.mark.parametrize(
    ("backend", "options", "callback"),
    [
        *((backend, {}, LeavesDoubles) for backend in UNCOMPILED),
        *(("native", options, LeavesDoubles) for options in ({"normalize_advantage": False}, {"clip_range_vf": 0.2})),
        ("native", {"advantage_norm": "rollout"}, LeavesDoubles),
        *((backend, {}, LeavesDoublesAtOnce) for backend in ("native", "fused", "eager")),
    ],
    ids=repr,
)
def test_doubles_in_the_buffer(backend, options, callback):
    """Each engine trains on them as on the same numbers in float32, as SB3 does."""
    # One after the other, since the environments share the generator of their space.
    expected, actual = (
        make(PPOExt, backend=backend, **options).learn(32, callback=callback) for callback in (AllLocals(), callback())
    )
    for key, value in expected.policy.state_dict().items():
        th.testing.assert_close(actual.policy.state_dict()[key], value, rtol=1e-4, atol=1e-6)


class ReplacesMasked(BaseCallback):
    """Assigns equal observations to `_last_obs`."""

    def _on_step(self):
        self.model._last_obs = self.model._last_obs.copy()
        return True


@pytest.mark.parametrize("backend", ["auto", "eager", "device"])
def test_masks_of_observations_that_a_callback_replaces(backend):
    """The masks are those with which the actions were drawn."""
    model = make_masked_model(backend)
    model.learn(32, callback=ReplacesMasked())
    assert abs(model.logger.name_to_value["train/approx_kl"]) < 1e-3


def make_masked_model(backend):
    return PPOExt("MlpPolicy", make_masked(), action_masking=True, backend=backend, **{**SMALL, "n_epochs": 1})


class RelabelsObservations(BaseCallback):
    """Writes into the observations and actions that the buffer has already."""

    def _on_step(self):
        buffer = self.model.rollout_buffer
        buffer.observations[: buffer.pos] = 0.0
        buffer.actions[: buffer.pos] = 0.0
        return True


def test_estimates_are_of_what_the_policy_saw():
    """Values and log probabilities are those at collection time, in few batches, whatever becomes of the rest of the row."""
    seen, calls, forward = [], [], Perceptron.__call__
    for callback in (Silent(), RelabelsObservations()):
        model = make(PPOExt, backend="native")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Perceptron, "__call__", lambda self, x: calls.append(self.n_outputs) or forward(self, x))
            patch.setattr(model, "train", lambda: None)
            model.learn(16, callback=callback)
        seen.append([model.rollout_buffer.values.copy(), model.rollout_buffer.log_probs.copy()])
    assert_equal(*seen, "with other rows")
    assert not model.rollout_buffer.observations[:-1].any()
    # Values of the rollout, of the last observations, and where an episode was truncated
    assert calls.count(1) < 10


KINDS = [("native", "arrays", "MlpPolicy")]
KINDS += [
    (backend, kind, policy)
    for backend in UNCOMPILED
    if backend != "native"  # which trains no others
    for kind in ("arrays", "tensors")
    for policy in ("MlpPolicy", "MlpLstmPolicy", "MlpTransformerPolicy")
]


@pytest.mark.parametrize("case", one_in(2, KINDS))
def test_a_callback_that_does_nothing_changes_no_bit(case):
    """The same rewards, values and parameters with a user's callback and without, when episodes are truncated."""
    backend, kind, policy = case
    ends = []
    for callback in (None, Silent()):
        env = ToyTensors(n_envs=3) if kind == "tensors" else make_toys(3, length=5)
        options = {**SMALL, "batch_size": 16, "vtrace": policy == "MlpPolicy", "policy_kwargs": {}}
        model = PPOExt(policy, env, backend=backend, **options).learn(16 * 3 * 2, callback)
        buffer = model.rollout_buffer
        ends.append([buffer.rewards, buffer.values, buffer.advantages, model.policy.state_dict()])
    assert_equal(*ends, "with a callback")


class KeepsTensors(BaseCallback):
    """Keeps the observations of all steps, and copies of them."""

    def _on_step(self):
        tensor = self.locals["obs_tensor"]
        self.kept = [*getattr(self, "kept", []), (tensor, tensor.clone())]
        return True


@pytest.mark.parametrize("make_env", [make_toys, ToyTensors], ids=["arrays", "tensors"])
@pytest.mark.parametrize("backend", ["native", "device", "fused", "eager"])
def test_kept_observations(backend, make_env):
    """What a callback keeps of a step stays as it was in later rollouts."""
    callback = KeepsTensors()
    PPOExt("MlpPolicy", make_env(), n_steps=4, batch_size=4, n_epochs=1, device="cpu", backend=backend).learn(24, callback)
    assert len(callback.kept) > 6
    assert all(tensor.equal(copied) for tensor, copied in callback.kept)


class ReplacesTheObservations(BaseCallback):
    """Lets the model learn from other observations than it has acted on."""

    def _on_step(self):
        self.model._last_obs = self.model._last_obs * np.float32(0.5)
        return True


@pytest.mark.parametrize("backend", ["native", "device", "fused", "eager"])
def test_replaced_observations(backend):
    """The observations in the place of the model's are those of the rollout, with every engine, as with SB3."""
    rows = [
        algorithm("MlpPolicy", make_toys(), n_steps=4, batch_size=4, n_epochs=1, device="cpu", seed=0, **kwargs)
        .learn(4, ReplacesTheObservations())
        .rollout_buffer.observations
        for algorithm, kwargs in ((PPO, {}), (PPOExt, dict(backend=backend)))
    ]
    np.testing.assert_allclose(rows[1], rows[0], rtol=1e-6)
