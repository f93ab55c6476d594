"""``backend="device"`` on a simulated device: the same training as on the CPU, with few transfers and without waiting."""

import copy
import math
import re

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    EvalCallback,
    StopTrainingOnMaxEpisodes,
)
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecFrameStack, VecMonitor, VecNormalize
from support import hybrid
from support.cases import one_in
from support.device_training import SMALL, assert_same, assert_same_training, same_draws, tensor_env, trained
from support.parity import assert_equal
from support.torch_envs import Broken, TorchCartPole, TorchPendulum
from support.toys import DICT, IMAGE, make_toys

from sb3_ppo_ext import PPOExt, TensorVecNormalize, TorchVecEnv, TrainingCheckpoint
from sb3_ppo_ext.common.guards import NonFiniteDataError, NonFiniteGradientError, NonFinitePolicyError
from sb3_ppo_ext.rollout.buffer import TensorRolloutBuffer

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You are trying to run PPOExt on the GPU"),
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
]
same_draws = pytest.fixture(same_draws)
SPACES = {
    "MlpPolicy": {},
    "CnnPolicy": dict(observation_space=IMAGE),
    "MultiInputPolicy": dict(observation_space=DICT),
}
TRANSFORMER = dict(context_length=6, d_model=16, n_heads=2, use_last_action=True, use_last_reward=True)
LSTM = dict(lstm_hidden_size=8, n_lstm_layers=2)
KEYS = dict(actor_keys=["joints", "gear"])
OF_SEQUENCES = {
    "MlpTransformerPolicy": {},
    "CnnTransformerPolicy": dict(env=dict(observation_space=IMAGE)),
    "MultiInputTransformerPolicy, different keys": dict(
        env=dict(observation_space=DICT), policy_kwargs={**TRANSFORMER, **KEYS}
    ),
    "MlpTransformerPolicy, shared": dict(policy_kwargs={**TRANSFORMER, "share_features_extractor": True}),
    "MlpTransformerPolicy, context 1": dict(policy_kwargs={**TRANSFORMER, "context_length": 1}),
    "MlpTransformerPolicy, context 40": dict(policy_kwargs={**TRANSFORMER, "context_length": 40}),
    "MlpTransformerPolicy, uneven": dict(n_steps=12, batch_size=6, accumulate_grad=2, priority_alpha=0.6, timesteps=48),
    "MlpLstmPolicy": dict(policy_kwargs=LSTM),
    "MlpLstmPolicy, shared": dict(policy_kwargs=dict(LSTM, shared_lstm=True, enable_critic_lstm=False)),
    "MlpLstmPolicy, accumulated": dict(policy_kwargs=LSTM, accumulate_grad=2, batch_size=6, advantage_norm="ema"),
    "CnnLstmPolicy": dict(policy_kwargs=LSTM, env=dict(observation_space=IMAGE)),
    "MultiInputLstmPolicy": dict(policy_kwargs=LSTM, env=dict(observation_space=DICT)),
}
TOGETHER = {
    "guards": dict(max_clip_fraction=0.01, target_kl=1e-3, bad_gradients="skip", learning_rate=1e-2),
    "frozen actor": dict(max_clip_fraction=0.3, clip_range=0.02, critic_learning_rate=1e-3, learning_rate=1e-2),
    "simba, Muon": dict(policy_kwargs=dict(net_type="simba", net_arch=[16]), optimizer="muon"),
}


@pytest.mark.usefixtures("same_draws")
@pytest.mark.parametrize("policy", SPACES)
def test_policies(sim, policy):
    """Each policy is trained in NumPy environments as by SB3's loop on the CPU."""
    assert_same_training(sim, policy=policy, env=SPACES[policy])


@pytest.mark.usefixtures("same_draws")
@pytest.mark.parametrize("case", one_in(3, OF_SEQUENCES, "MlpLstmPolicy, accumulated"))
def test_history_based_policies(sim, case):
    """Each history-based policy is trained in NumPy environments as on the CPU, with options that treat sequences alike."""
    assert_same_training(sim, policy=case.split(",")[0], **{"policy_kwargs": TRANSFORMER, **OF_SEQUENCES[case]})


@pytest.mark.usefixtures("same_draws")
def test_history_based_policies_in_tensor_environments(sim):
    """Transformers, their caches and their memory of earlier rollouts stay on the device, and train as in NumPy on the CPU."""
    options = {**SMALL, "batch_size": 64, "policy_kwargs": TRANSFORMER}
    expected = PPOExt("MlpTransformerPolicy", tensor_env("cpu"), backend="eager", **options).learn(16 * 16 * 2)
    for device in ("cpu", sim.name):
        actual = PPOExt("MlpTransformerPolicy", tensor_env(device), device=device, backend="device", **options)
        assert_same(expected, actual.learn(16 * 16 * 2))
    with sim.counting() as counts:
        actual.learn(16 * 16, reset_num_timesteps=False)
    assert counts.to_host + counts.items + counts.to_device <= BUDGET


@pytest.mark.parametrize("rnn", ["lstm", "gru", "mingru", "lru"])
def test_recurrent_policies_in_tensor_environments(sim, rnn):
    """Recurrent policies train on the device as on the CPU, and wait for it a few times in an iteration."""
    options = {**SMALL, "batch_size": 64, "policy_kwargs": dict(LSTM, rnn=rnn)}
    expected = PPOExt("MlpLstmPolicy", tensor_env("cpu"), backend="eager", **options).learn(16 * 16 * 2)
    for device in ("cpu", sim.name):
        actual = PPOExt("MlpLstmPolicy", tensor_env(device), device=device, **options).learn(16 * 16 * 2)
        assert type(actual._find_engine()).__name__ == "DeviceEngine"
        assert_same(expected, actual)
    with sim.counting() as counts:
        actual.learn(16 * 16, reset_num_timesteps=False)
    assert counts.to_host + counts.items <= BUDGET


def test_a_callback_that_does_nothing_changes_no_bit(sim):
    """Values of truncated episodes are rounded as without it, though it may read them at each step."""
    ends = []
    for callback in (None, Record()):
        env = make_toys(3, length=5)
        model = PPOExt("MlpPolicy", env, device=sim.name, **{**SMALL, "batch_size": 16, "vtrace": True})
        model.learn(16 * 3 * 2, callback)
        parameters = {name: tensor.cpu() for name, tensor in model.policy.state_dict().items()}
        ends.append([model.rollout_buffer.rewards, parameters])
    assert_equal(*ends, "with a callback")


@pytest.mark.usefixtures("same_draws")
@pytest.mark.parametrize("options", TOGETHER)
def test_options_together(sim, options):
    """Options that decide about steps of the optimiser, or change it, act as on the CPU."""
    assert_same_training(sim, **TOGETHER[options])


class Spoil(PPOExt):
    """Adds a loss that is infinite for some minibatches."""

    def extra_actor_loss(self, rollout_data, distribution):
        scale = th.where(rollout_data.old_log_prob.sum() > self.limit, math.inf, 0.1)
        return scale * distribution.distribution.mean.square().mean(), {}


def spoilt(device, backend, limit, **options):
    model = Spoil("MlpPolicy", make_toys(length=5), device=device, backend=backend, **{**SMALL, **options})
    model.limit = limit
    return model


@pytest.mark.usefixtures("same_draws")
def test_steps_that_are_not_finite_are_skipped(sim):
    """With ``bad_gradients="skip"``, the same steps are left out as on the CPU, and all others are made."""
    models = [
        spoilt(device, backend, -22.6, bad_gradients="skip").learn(128)
        for device, backend in (("cpu", "eager"), (sim.name, "device"))
    ]
    assert 0 < models[0].n_skipped_updates < 32
    assert models[0].n_skipped_updates == models[1].n_skipped_updates
    assert_same(*models)


@pytest.mark.usefixtures("same_draws")
def test_gradients_that_are_not_finite_are_refused(sim):
    """The error is raised at the end of the update, and it and the parameters are those of the CPU."""
    states, messages = [], []
    for device, backend in (("cpu", "eager"), (sim.name, "device")):
        model = spoilt(device, backend, -22.6)
        with pytest.raises(NonFiniteGradientError) as error:
            model.learn(128)
        states.append({name: tensor.cpu() for name, tensor in model.policy.state_dict().items()})
        messages.append(str(error.value))
    words, others = (re.split(r" (?=[-\d])", message) for message in messages)
    assert len(words) == len(others)
    for one, other in zip(words, others, strict=True):
        number, word = re.match(r"(-?[\d.]+(?:e[-+]?\d+)?)?(.*)", one, re.DOTALL).groups()
        assert other.endswith(word)
        if number is not None:
            assert float(other.removesuffix(word)) == pytest.approx(float(number), rel=0.01)  # of three digits
    for name, tensor in states[0].items():
        th.testing.assert_close(states[1][name], tensor, rtol=1e-3, atol=5e-5)


@pytest.mark.usefixtures("same_draws")
@pytest.mark.parametrize("n_epochs", [1, 10])
def test_target_kl_stops_at_the_same_step(sim, capsys, n_epochs):
    """The update ends at the same step as on the CPU, however late the host learns of it, and says so."""
    options = dict(target_kl=5e-4, learning_rate=1e-3, n_epochs=n_epochs, verbose=1, timesteps=32)
    models = [trained(device, backend, **options) for device, backend in (("cpu", "eager"), (sim.name, "device"))]
    said = [line.split(" due to")[0] for line in capsys.readouterr().out.splitlines() if "Early stopping" in line]
    assert len(said) == (0 if n_epochs == 1 else 2)
    assert said[: len(said) // 2] == said[len(said) // 2 :]
    assert models[0]._n_updates == models[1]._n_updates
    assert_same(*models)


def test_nan_is_not_past_target_kl(sim):
    """A KL divergence that is NaN does not end the update without a word: its steps are skipped, or raise an error."""
    model = trained(sim.name, "device", target_kl=100.0, bad_gradients="skip", n_epochs=3, timesteps=32)
    model.rollout_buffer.tensors["log_probs"][0, 0] = math.nan
    model.train()
    assert model.n_skipped_updates == 3  # one in each epoch
    model.bad_gradients = "raise"
    with pytest.raises(NonFiniteGradientError):
        model.train()


# Tensor environments


@pytest.mark.usefixtures("same_draws")
@pytest.mark.parametrize("env_class", [TorchPendulum, TorchCartPole])
def test_tensor_environments_train_as_numpy_environments(sim, env_class):
    """The same environments, stepped in tensors on the device, give the training that SB3's loop gives in NumPy on the CPU."""
    options = {**SMALL, "batch_size": 64}
    expected = PPOExt("MlpPolicy", tensor_env("cpu", env_class), backend="eager", **options).learn(16 * 16 * 2)
    for device in ("cpu", sim.name):
        actual = PPOExt("MlpPolicy", tensor_env(device, env_class), device=device, backend="device", **options)
        actual.learn(16 * 16 * 2)
        assert_same(expected, actual)
        episodes = [[(e["r"], e["l"]) for e in model.ep_info_buffer] for model in (expected, actual)]
        assert len(episodes[0]) > 10
        np.testing.assert_allclose(episodes[1], episodes[0], rtol=1e-4)
        assert expected.num_timesteps == actual.num_timesteps


@pytest.mark.usefixtures("same_draws")
def test_without_final_observations(sim):
    """Truncated episodes are valued at the last observation that was seen, which is said once, as in NumPy."""
    models = []
    for device, backend in (("cpu", "eager"), (sim.name, "device")):
        env = tensor_env(device, gives_final=False)
        model = PPOExt("MlpPolicy", env, device=device, backend=backend, **{**SMALL, "batch_size": 64})
        with pytest.warns(UserWarning, match="does not give the last observations") as warned:
            model.learn(16 * 16 * 2)
        assert len([w for w in warned if "last observations" in str(w.message)]) == 1
        models.append(model)
    assert_same(*models)


BUDGET = 10


def test_transfers_with_normalisation(sim):
    """Running statistics stay on the device, also where they are kept for the case that a rollout is refused."""
    env = TensorVecNormalize(tensor_env(sim.name))
    model = PPOExt("MlpPolicy", env, device=sim.name, **{**SMALL, "batch_size": 64}).learn(16 * 16)
    with sim.counting() as counts:
        model.learn(16 * 16, reset_num_timesteps=False)
    assert counts.to_host + counts.items + counts.to_device <= BUDGET


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(n_epochs=20, action_dist="beta", policy_kwargs=dict(net_type="simba", net_arch=[16])),
        dict(action_dist="squashed_gaussian", bounds_coef=0.1, kl_coef=0.1, kl_target=0.01),
        dict(advantage_norm="ema", target_kl=10.0, n_epochs=10, vtrace=True, priority_alpha=0.5, priority_segment=4),
        dict(optimizer="muon", max_clip_fraction=0.5, bad_gradients="skip", clip_range_vf=0.2),
    ],
    ids=str,
)
def test_transfers(sim, options):
    """A whole iteration with a tensor environment has at most ten transfers, whatever the numbers of epochs and of steps."""
    env = tensor_env(sim.name)
    model = PPOExt("MlpPolicy", env, device=sim.name, **{**SMALL, "batch_size": 64, **options})
    model.learn(16 * 16)
    with sim.counting() as counts:
        model.learn(16 * 16, reset_num_timesteps=False)
    waits = counts.to_host + counts.items
    assert waits <= BUDGET
    assert waits + counts.to_device <= BUDGET + 1
    assert counts.operations > 300


@pytest.mark.parametrize(("in_tuples", "action_dist"), [(False, "gaussian"), (True, "beta")])
def test_transfers_of_hybrid_actions(sim, in_tuples, action_dist):
    """Parts of actions are taken from what the policy samples on the device."""
    env = hybrid.TensorPassing(device=sim.name, in_tuples=in_tuples)
    options = {**SMALL, "batch_size": 64, "action_dist": action_dist, "kl_coef": 0.1}
    model = PPOExt("MlpPolicy", env, device=sim.name, **options).learn(8 * 16)
    with sim.counting() as counts:
        model.learn(8 * 16, reset_num_timesteps=False)
    assert counts.to_host + counts.items + counts.to_device <= BUDGET + 1


def test_transfers_of_numpy_environments(sim):
    """With NumPy environments, observations are copied once per step to the device, and actions once from it."""
    model = PPOExt("MlpPolicy", make_toys(length=5), device=sim.name, **{**SMALL, "n_steps": 64})
    model.learn(128)
    with sim.counting() as counts:
        model.learn(128, reset_num_timesteps=False)
    assert counts.to_host + counts.items <= 64 + BUDGET
    assert counts.to_device <= 64 + BUDGET


# Callbacks


class Record(BaseCallback):
    """Keeps what it reads of the local variables."""

    def __init__(self, *names):
        super().__init__()
        self.names, self.seen = names, []

    def _on_step(self):
        # Copied, since rewards are bootstrapped in place after the callback
        self.seen.append({name: copy.deepcopy(self.locals[name]) for name in self.names})
        return True


@pytest.mark.usefixtures("same_draws")
def test_callbacks_read_what_they_read_in_sb3(sim):
    """A callback finds the arrays and infos of SB3's loop, and reading them changes nothing."""
    names = ("n_steps", "actions", "clipped_actions", "new_obs", "rewards", "dones", "infos")
    models, records = [], []
    for device, backend in (("cpu", "eager"), (sim.name, "device")):
        record = Record(*names)
        model = PPOExt("MlpPolicy", tensor_env(device), device=device, backend=backend, **{**SMALL, "batch_size": 64})
        models.append(model.learn(16 * 16 * 2, callback=CallbackList([record])))
        records.append(record.seen)
    assert_same(*models)
    assert len(models[0].ep_info_buffer) > 10
    for one, other in zip(*records, strict=True):
        for name in names[1:6]:
            assert type(other[name]) is np.ndarray
            np.testing.assert_allclose(other[name], one[name], rtol=1e-4, atol=1e-5)
        assert one["n_steps"] == other["n_steps"]
        for info, expected in zip(other["infos"], one["infos"], strict=True):
            assert info.keys() == expected.keys()
            if info:
                np.testing.assert_allclose(
                    info["terminal_observation"], expected["terminal_observation"], rtol=1e-4, atol=1e-5
                )
                assert info["TimeLimit.truncated"] == expected["TimeLimit.truncated"]


class Halve(BaseCallback):
    """Halves the rewards in place, and sets back the critic in mid-rollout."""

    def _on_step(self):
        self.locals["rewards"] *= 0.5
        if self.n_calls == 9:
            th.nn.init.zeros_(self.model.policy.value_net.weight)
        return True


@pytest.mark.usefixtures("same_draws")
@pytest.mark.parametrize("makes_tensors", [True, False])
def test_callbacks_change_what_they_change_in_sb3(sim, makes_tensors):
    """Rewards that a callback changes in place, and parameters in mid-rollout, are those that the training uses."""
    models = []
    for device, backend in (("cpu", "eager"), (sim.name, "device")):
        env = tensor_env(device) if makes_tensors else make_toys(length=5)
        model = PPOExt("MlpPolicy", env, device=device, backend=backend, **{**SMALL, "batch_size": 16})
        models.append(model.learn(2 * 16 * env.num_envs, callback=Halve()))
    assert_same(*models)


def test_known_callbacks_do_not_copy(sim, tmp_path):
    """Callbacks of SB3 copy only what they read."""
    env = tensor_env(sim.name)
    model = PPOExt("MlpPolicy", env, device=sim.name, **{**SMALL, "batch_size": 64})
    callback = CallbackList([CheckpointCallback(10**6, str(tmp_path)), StopTrainingOnMaxEpisodes(10**6)])
    model.learn(16 * 16, callback=callback)
    with sim.counting() as counts:
        model.learn(16 * 16, callback=callback, reset_num_timesteps=False)
    assert counts.to_host + counts.items <= 16 + BUDGET  # ends of episodes at each of 16 steps


class Stop(BaseCallback):
    """Ends the training in the middle of the second rollout."""

    def _on_step(self):
        return self.n_calls < 16 + 14


@pytest.mark.usefixtures("same_draws")
def test_callback_ends_the_training(sim):
    """A callback that returns False ends the training at this step, and leaves the model as SB3's loop does."""
    stopped, rollouts = [], []
    for device, backend in (("cpu", "eager"), (sim.name, "device")):
        model = PPOExt("MlpPolicy", tensor_env(device), device=device, backend=backend, **{**SMALL, "batch_size": 64})
        model.learn(10_000, callback=Stop())
        assert model.num_timesteps == 30 * 16
        assert [episode["l"] for episode in model.ep_info_buffer] == [12] * 32
        stopped.append([model._last_obs, model._last_episode_starts])
        model.learn(16 * 16, reset_num_timesteps=False)
        rollouts.append([np.ravel(getattr(model.rollout_buffer, name)) for name in ("actions", "rewards", "values")])
    for expected, actual in (stopped, rollouts):
        for one, other in zip(expected, actual, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-4)


class Images(TorchPendulum):
    """Shows the pendulum as an image of one colour, with the channels at the end."""

    single_observation_space = spaces.Box(0, 255, (36, 40, 2), np.uint8)

    def observe(self, state):
        values = (super().observe(state)[:, :2] * 100 + 120).clamp(0, 255)
        return values[:, None, None, :].expand(-1, 36, 40, 2).to(th.uint8).clone()


@pytest.mark.usefixtures("same_draws")
@pytest.mark.parametrize("normalize_reward", [False, True], ids=["raw", "normalised"])
def test_images_of_tensor_environments(normalize_reward, sim):
    """Images with the channels at the end are transposed on the device, and train as in NumPy."""
    options = {**SMALL, "n_steps": 4, "batch_size": 16, "policy_kwargs": dict(features_extractor_kwargs=dict(features_dim=8))}
    options["normalize_reward"] = normalize_reward
    models = [
        PPOExt("CnnPolicy", tensor_env(device, Images, n=4), device=device, backend=backend, **options).learn(4 * 4)
        for device, backend in (("cpu", "eager"), ("cpu", "device"), (sim.name, "device"))
    ]
    assert models[2].observation_space.shape == (2, 36, 40)
    assert_same(*models[:2])
    assert_same(models[0], models[2])
    with sim.counting() as counts:
        models[2].learn(4 * 4, reset_num_timesteps=False)
    assert counts.to_host + counts.items + counts.to_device <= BUDGET


class WithLog(TorchVecEnv):
    """Logs a scalar, a number for each environment, and successes."""

    def _step(self, actions):
        step = super()._step(actions)
        speed = step.observations[:, 2]
        log = {"height": step.rewards.mean(), "reward/speed": speed, "is_success": speed > 0}
        return step._replace(log=log)


@pytest.mark.usefixtures("same_draws")
def test_log_of_the_environment(sim):
    """Scalars are averaged over the steps, numbers of environments over the ends of episodes, and successes as by SB3."""
    models, records = [], []
    for device, backend in (("cpu", "eager"), (sim.name, "device")):
        env = WithLog(TorchPendulum(16, device=device, has_own_generator=False, max_episode_steps=6))
        model = PPOExt("MlpPolicy", env, device=device, backend=backend, **{**SMALL, "batch_size": 64})
        record = Record("infos", "rewards") if device == "cpu" else None
        models.append(model.learn(16 * 16, callback=record, log_interval=10))
        records.append(record)
    expected, actual = models
    assert list(expected.ep_success_buffer) == list(actual.ep_success_buffer)
    assert 0 < np.mean(actual.ep_success_buffer) < 1
    speeds = [info["reward/speed"] for seen in records[0].seen for info in seen["infos"] if info]
    assert len(speeds) == 32
    heights = [seen["rewards"] for seen in records[0].seen]
    for logged in (expected.logger.name_to_value, actual.logger.name_to_value):
        np.testing.assert_allclose(logged["reward/speed"], np.mean(speeds), rtol=1e-4)
        np.testing.assert_allclose(logged["env/height"], np.mean(heights), rtol=1e-4)
        assert "env/is_success" not in logged


# Numbers that are not finite


@pytest.mark.parametrize("what", ["reward", "observation"])
@pytest.mark.parametrize("step", [5, 16])
def test_data_that_are_not_finite_are_refused(sim, monkeypatch, what, step):
    """The error names environment and step, and the model is left as it was before the rollout."""
    monkeypatch.setattr(Broken, "what", what)
    monkeypatch.setattr(Broken, "step_of_nan", step)
    model = PPOExt("MlpPolicy", tensor_env(sim.name, Broken), device=sim.name, **{**SMALL, "batch_size": 64})
    before = {name: tensor.clone() for name, tensor in model.policy.state_dict().items()}
    with pytest.raises(
        NonFiniteDataError, match=f"Environment 3: the {what} is not finite.*at step {step - 1} of the rollout"
    ):
        model.learn(16 * 16)
    assert model.num_timesteps == 0
    assert all(th.equal(before[name], tensor) for name, tensor in model.policy.state_dict().items())
    model.learn(16 * 16)


def test_policies_that_are_not_finite_are_refused(sim):
    """Parameters that are not finite are named."""
    model = PPOExt("MlpPolicy", tensor_env(sim.name), device=sim.name, **{**SMALL, "batch_size": 64})
    with th.no_grad():
        model.policy.action_net.bias.fill_(math.nan)
    with pytest.raises(NonFinitePolicyError, match=r"step 0 of the rollout.*action_net.bias"):
        model.learn(16 * 16)


# Saved models


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_counts_of_a_loaded_optimizer_are_on_the_host(sim, optimizer):
    """Counts of steps that were loaded to a device, as with CUDA, are on the host, where no step waits for them."""
    model = PPOExt("MlpPolicy", make_toys(), optimizer=optimizer, device="cpu", **SMALL).learn(32)
    parameters = model.get_parameters()
    states = [state for state in parameters["policy.optimizer"]["state"].values() if "step" in state]
    assert states
    for state in states:
        state["step"] = state["step"].to(sim.name)
    other = PPOExt("MlpPolicy", make_toys(), optimizer=optimizer, device="cpu", **SMALL)
    other.set_parameters(parameters)
    counts = [state["step"] for state in other.policy.optimizer.state.values() if "step" in state]
    assert {count.device.type for count in counts} == {"cpu"}
    assert {float(count) for count in counts} == {8.0}
    other.learn(32)


# Choice


def test_automatic_choice(sim):
    """Without an option, rollouts stay on a device that is not the CPU."""
    on_device = PPOExt("MlpPolicy", make_toys(), device=sim.name, **SMALL)
    assert on_device.rollout_buffer.storage == th.device(sim.name)
    on_cpu = PPOExt("MlpPolicy", tensor_env("cpu"), **{**SMALL, "batch_size": 64})
    assert on_cpu.rollout_buffer.storage.type == "cpu"
    for policy in ("MlpTransformerPolicy", "MlpLstmPolicy"):
        of_history = PPOExt(policy, make_toys(), device=sim.name, **SMALL)
        assert of_history.rollout_buffer.storage == th.device(sim.name)


def test_backend_can_be_changed(sim):
    """The rollout buffer follows ``backend`` when it is changed between two calls of ``learn``."""
    model = PPOExt("MlpPolicy", tensor_env(sim.name), device=sim.name, **{**SMALL, "batch_size": 64}).learn(256)
    model.backend = "eager"
    model.learn(256, reset_num_timesteps=False)
    assert model.rollout_buffer.storage.type == "cpu"
    model.backend = "device"
    model.learn(256, reset_num_timesteps=False)
    assert model.rollout_buffer.storage == th.device(sim.name)
    assert model.num_timesteps == 3 * 256


# With what is around a model


class Interrupt(BaseCallback):
    """Interrupts the training within a rollout."""

    def _on_step(self):
        if self.num_timesteps > 16 * 16 * 2 + 50:
            raise KeyboardInterrupt
        return True


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpTransformerPolicy"])
def test_resumed_training_is_the_same(tmp_path, policy):
    """An interrupted training in tensor environments goes on from its checkpoint to the same parameters, to the bit."""
    total = 16 * 16 * 4

    def make():
        return TensorVecNormalize(TorchVecEnv(TorchPendulum(16, max_episode_steps=12)))

    def checkpoints(name):
        return TrainingCheckpoint(16, tmp_path / name)

    kwargs = dict(policy_kwargs=TRANSFORMER) if policy == "MlpTransformerPolicy" else dict(advantage_norm="ema")
    kwargs |= {**SMALL, "batch_size": 64, "backend": "device"}
    expected = PPOExt(policy, make(), **kwargs).learn(total, callback=checkpoints("whole"))
    with pytest.raises(KeyboardInterrupt):
        PPOExt(policy, make(), **kwargs).learn(total, callback=[checkpoints("cut"), Interrupt()])
    resumed = PPOExt.resume(tmp_path / "cut", make(), device="cpu").learn(total, callback=checkpoints("cut"))
    assert expected.num_timesteps == resumed.num_timesteps == total
    for one, other in zip(expected.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert th.equal(one, other)


@pytest.mark.parametrize("wrapper", [VecNormalize, VecMonitor, lambda env: VecFrameStack(env, 2)])
def test_wrappers_of_sb3(wrapper):
    """Wrappers of SB3 around a tensor environment are stepped in NumPy, and train as with the reference."""
    models = [
        PPOExt("MlpPolicy", wrapper(tensor_env("cpu")), backend=backend, **{**SMALL, "batch_size": 64}).learn(16 * 16 * 2)
        for backend in ("eager", "device")
    ]
    assert isinstance(models[1].rollout_buffer, TensorRolloutBuffer)
    assert_same(*models)


def test_normalized_tensor_environments():
    """``TensorVecNormalize`` trains as SB3's ``VecNormalize``."""
    models = [
        PPOExt("MlpPolicy", wrapper(tensor_env("cpu")), backend="device", **{**SMALL, "batch_size": 64}).learn(16 * 16 * 2)
        for wrapper in (VecNormalize, TensorVecNormalize)
    ]
    assert_same(*models)


def test_evaluation_and_files(tmp_path):
    """``EvalCallback`` and ``evaluate_policy`` work with tensor environments, and zips load without being trusted."""
    model = PPOExt("MlpPolicy", tensor_env("cpu"), backend="device", **{**SMALL, "batch_size": 64})
    evaluation = EvalCallback(tensor_env("cpu"), n_eval_episodes=16, eval_freq=16, best_model_save_path=tmp_path, verbose=0)
    model.learn(16 * 16, callback=evaluation)
    mean, _ = evaluate_policy(model, tensor_env("cpu"), n_eval_episodes=16)
    assert -200 < mean < 0
    loaded = PPOExt.load(tmp_path / "best_model", tensor_env("cpu"), device="cpu", trusted=False)
    assert isinstance(loaded.rollout_buffer, TensorRolloutBuffer)
    loaded.learn(16 * 16)


class OwnInfos(PPOExt):
    """A subclass that reads the infos of each step."""

    def _update_info_buffer(self, infos, dones=None):
        self.seen = getattr(self, "seen", 0) + sum("episode" in info for info in infos)
        super()._update_info_buffer(infos, dones)


def test_subclass_that_reads_infos():
    """A subclass with its own ``_update_info_buffer`` gets the infos of each step."""
    model = OwnInfos("MlpPolicy", tensor_env("cpu"), backend="device", **{**SMALL, "batch_size": 64}).learn(16 * 16)
    assert model.seen == len(model.ep_info_buffer) == 16


def test_environments_elsewhere(sim):
    """A policy on another device than its tensor environments is refused, unless they are stepped in NumPy."""
    with pytest.raises(ValueError, match=r"`device='cpu'`.*environments step on sim:0"):
        PPOExt("MlpPolicy", tensor_env(sim.name), device="cpu", backend="device", **{**SMALL, "batch_size": 64})
    model = PPOExt("MlpPolicy", tensor_env(sim.name), device="cpu", backend="eager", **{**SMALL, "batch_size": 64})
    model.learn(16 * 16)
    chosen = PPOExt("MlpPolicy", tensor_env(sim.name), device="auto", **{**SMALL, "batch_size": 64})
    assert chosen.device.type == "sim"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*lru_cache", "ignore:.*torch.jit")
@pytest.mark.parametrize(
    "options",
    one_in(
        4, [dict(vtrace=True, target_kl=0.5, accumulate_grad=2), {}, dict(action_dist="squashed_gaussian"), dict(use_sde=True)]
    ),
    ids=str,
)
def test_compiled(quick_compiler, recwarn, options):
    """``backend="compile"`` keeps rollouts in tensors, compiles acting and loss once, and trains as the reference."""
    options = {**SMALL, "batch_size": 64, **options}
    models = [
        PPOExt("MlpPolicy", tensor_env("cpu"), backend=backend, **options).learn(16 * 16 * 2)
        for backend in ("eager", "compile")
    ]
    assert isinstance(models[1].rollout_buffer, TensorRolloutBuffer)
    assert_same(*models)
    assert models[1]._engines["compile"]._act.forward is not None
    assert not [warning for warning in recwarn if "cannot trace" in str(warning.message)]
