"""Options that are changed between two calls of `learn` act, are checked, or are refused; what users set themselves stays."""

import copy
from functools import partial

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from support.options import SMALL, VALUES, make, random_state, set_random_state, with_needs
from support.parity import assert_equal
from support.torch_envs import TorchPendulum
from support.toys import Silent, ToyEnv, make_toys
from support.zips import Zip

from sb3_ppo_ext import MlpPolicy, PPOExt, TorchVecEnv
from sb3_ppo_ext.algorithm.changed_options import is_same, remembered
from sb3_ppo_ext.options import ALL_OPTIONS
from sb3_ppo_ext.rollout.buffer import TensorRolloutBuffer

# Values other than those of the small models, which act in the second half of a training
NEW_VALUES = {name: (VALUES.get(name) or row.examples)[0] for name, row in ALL_OPTIONS.items()}
NEW_VALUES |= dict(n_steps=4, batch_size=4, n_epochs=1, learning_rate="lin_0.01", gamma=0.5, gae_lambda=0.5, target_kl=1e-9)
NEW_VALUES |= dict(clip_range=1e-3, clip_range_vf=1e-3, ent_coef=0.5, dual_clip=1.001, policy_kwargs={}, seed=4)
NEW_VALUES |= dict(bounds_coef=10.0, kl_coef=100.0, kl_target=1e-9, priority_beta=0.0, priority_segment=3)
NEW_VALUES |= dict(clip_obs=0.1, clip_reward=0.01, lr_warmup=0.99, adaptive_lr_kl=1e-9, adaptive_lr_bounds=(1e-6, 1e-5))
REFUSED = {"use_sde", "policy_kwargs", "action_dist", "action_masking", "action_mask_key", "optimizer", "distributed"}
REFUSED |= {"normalize_value", "normalize_obs"}
# Options that need other settings than those of the table, to act here
BASES = {
    "adv_min_std": dict(advantage_norm="ema", adv_min_std=100.0),
    "bounds_limit": dict(bounds_coef=10.0, bounds_limit=0.1),
    "kl_target": dict(kl_coef=1.0, kl_target=100.0),
    "adaptive_lr_bounds": dict(adaptive_lr_kl=1e-9),
    "adaptive_lr_rule": dict(adaptive_lr_kl=2e-7),
    "dual_clip": dict(learning_rate=0.05),
    "normalize_freq": dict(normalize_obs=True, n_steps=4, batch_size=4),
    "bounds_coef": dict(bounds_limit=0.0),
    "max_clip_fraction": dict(learning_rate=0.05),
    "vf_clip_mode": dict(clip_range_vf=1e-3, learning_rate=0.05),
    "priority_beta": dict(priority_alpha=1.0, priority_segment=1, n_steps=4, batch_size=4),
    "adaptive_lr_kl": dict(n_steps=4, batch_size=4),
}
# Options that are seen elsewhere than in the parameters of the policy
SEEN_ELSEWHERE = {
    "stats_window_size": lambda model: model.ep_info_buffer.maxlen,
    "bad_gradients": lambda model: "train/skipped_updates" in model.logger.name_to_value,
    "backend": lambda model: type(model._find_engine()),
    "deterministic_action": lambda model: model.predict(np.zeros(3, np.float32), deterministic=True)[0].tolist(),
    "kl_target": lambda model: model.kl_coefficient.value,
    "adaptive_lr_rule": lambda model: model.adaptive_lr.value,
    "native_threads": lambda model: model._update_config().native_threads,  # equal to the bit
}


class OwnBuffer(RolloutBuffer):
    """A rollout buffer of a user."""


def assigned(model, buffer_class=OwnBuffer, n_steps=None):
    """Assign a rollout buffer to the model."""
    spaces_of_model = model.observation_space, model.action_space
    model.rollout_buffer = buffer_class(n_steps or model.n_steps, *spaces_of_model, device="cpu", n_envs=model.n_envs)
    return model.rollout_buffer


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_assigned_buffer(backend, tmp_path):
    """A rollout buffer that a user has assigned stays, whatever changes, with the current discount factors."""
    model = PPOExt("MlpPolicy", make_toys(), **SMALL, backend=backend)
    for buffer_class, factors in ((OwnBuffer, (0.5, 0.25)), (RolloutBuffer, (0.75, 0.5))):
        buffer = assigned(model, buffer_class)
        model.gamma, model.gae_lambda = factors
        model.set_env(VecNormalize(make_toys()))
        model.learn(32)
        assert model.rollout_buffer is buffer
        assert (buffer.gamma, buffer.gae_lambda, buffer.full) == (*factors, True)
    model.n_steps *= 2
    with pytest.raises(ValueError, match=r"n_steps=.*assigned to `rollout_buffer`"):
        model.learn(32)
    buffer = assigned(model)
    model.learn(32)
    assert model.rollout_buffer is buffer
    model.save(tmp_path / "model")
    assert type(PPOExt.load(tmp_path / "model", env=make_toys()).rollout_buffer) is TensorRolloutBuffer
    model.rollout_buffer_class = OwnBuffer
    model.learn(32)
    assert type(model.rollout_buffer) is OwnBuffer
    assert model.rollout_buffer is not buffer


def test_buffer_class_that_replaces_its_own_methods():
    """A buffer that `rollout_buffer_class` has made is made anew."""

    class Wrapped(RolloutBuffer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add = partial(self.add)

    model = PPOExt("MlpPolicy", make_toys(), rollout_buffer_class=Wrapped, **SMALL).learn(32)
    before = model.rollout_buffer
    model.n_steps *= 2
    model.learn(32)
    assert model.rollout_buffer is not before


def test_assigned_buffer_with_own_minibatches():
    """Options that need to know the samples of a minibatch are refused with it."""

    class OwnGet(RolloutBuffer):
        def get(self, batch_size=None):
            yield next(super().get(batch_size))

    model = PPOExt("MlpPolicy", make_toys(), **SMALL)
    assigned(model, OwnGet)
    model.learn(32)
    model.priority_alpha = 0.5
    with pytest.raises(ValueError, match="priority_alpha"):
        model.learn(32)


def bits(model):
    """What a training has come to."""
    return copy.deepcopy((model.policy.state_dict(), model.policy.optimizer.state_dict()["state"]))


def trained(name):
    """A trained model with what the option needs to have an effect."""
    needs = with_needs({name: NEW_VALUES[name]}) if name in VALUES else {}
    return make(BASES.get(name, {key: value for key, value in needs.items() if key != name})).learn(16)


@pytest.mark.many(one_in=5)
@pytest.mark.parametrize("name", [name for name in ALL_OPTIONS if name not in REFUSED and name != "seed"])
def test_changed_option(name):
    """A changed option acts as if it had been given to `load`, and has an effect."""
    model = trained(name)
    saved, env, state = Zip(model), copy.deepcopy(model.env), random_state()
    setattr(model, name, NEW_VALUES[name])
    models = [model]
    for options in ({name: NEW_VALUES[name]}, {}):
        models.append(saved.load(env=copy.deepcopy(env), force_reset=False, device="cpu", **options))
    for each in models:
        set_random_state(state)
        each.learn(16, reset_num_timesteps=False)
    model, loaded, unchanged = models
    assert_equal(bits(loaded), bits(model), "parameters")
    seen = SEEN_ELSEWHERE.get(name, lambda model: th.cat([p.flatten() for p in model.policy.parameters()]).tolist())
    assert seen(model) == seen(loaded) != seen(unchanged)


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("name", ALL_OPTIONS)
def test_invalid_change(name):
    """An invalid value is refused by name, as is each new value of some options, before anything happens."""
    model = trained(name)
    before, observations, valid = bits(model), model._last_obs, getattr(model, name)
    for value in [object(), *([NEW_VALUES[name]] if name in REFUSED else [])]:
        setattr(model, name, value)
        with pytest.raises(ValueError, match=f"`{name}="):
            model.learn(16)
    assert_equal(before, bits(model), "parameters")
    assert model.num_timesteps == 16
    assert model._last_obs is observations
    setattr(model, name, valid)
    model.learn(8, reset_num_timesteps=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lr_decay="linear", learning_rate="lin_0.1"), "`lr_decay='linear'`.*a schedule by itself"),
        (dict(batch_size=1), "`batch_size=1`.*2 or more"),
        (dict(ent_coef=lambda progress: "0"), "`ent_coef=.*returns '0'"),
        (dict(policy_class=MlpPolicy), "`policy_class=.*make a new model"),
        (dict(device=th.device("meta")), "`device=.*give it to `load`"),
        (dict(rollout_buffer_class=dict), "`rollout_buffer_class=<class 'dict'>`.*a class"),
        (dict(rollout_buffer_kwargs=dict(foo=1)), "`rollout_buffer_kwargs` has no option `foo`"),
        (dict(lr_schedule=-1.0), r"`lr_schedule=-1.0`.*at least 0"),
        (dict(lr_schedule=lambda: 1.0), "`lr_schedule=.*raises TypeError"),
        (dict(env=None), "`env=None`.*`set_env`"),
        (dict(env=ToyEnv()), "`env=.*`set_env`"),
        (dict(env=make_toys(3)), "`env=.*`set_env`"),
        (dict(env=make_toys(action_space=spaces.Discrete(2))), "`env=.*`set_env`"),
        (dict(verbose="loud"), "`verbose='loud'`"),
        (dict(tensorboard_log=5), "`tensorboard_log=5`"),
        (dict(use_sde=True), "`use_sde=True`"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_other_invalid_changes(changes, message):
    """Combinations of options, and the other arguments of the constructor, are checked as well."""
    model = make({}).learn(16)
    before = bits(model)
    for name, value in changes.items():
        setattr(model, name, value)
    with pytest.raises(ValueError, match=message):
        model.learn(16)
    assert_equal(before, bits(model), "parameters")


def test_changes_in_place():
    """Changes inside of a dictionary are noticed."""
    model = make(dict(policy_kwargs=dict(net_arch=[8]))).learn(16)
    model.policy_kwargs["net_arch"].append(8)
    with pytest.raises(ValueError, match="`policy_kwargs="):
        model.learn(16)


@pytest.mark.parametrize(
    "value", [1, "a", [1, [2]], (1, 2), {"a": [1], "b": {}}, np.zeros(2), th.zeros(2), None, print], ids=range(9)
)
def test_is_same(value):
    """A value is the same until it is changed."""
    assert is_same(remembered(value), value)
    for other in (2, "b", [1, [3]], {"a": [1]}, np.ones(2), True, object()):
        assert not is_same(remembered(value), other)


def test_other_arguments(tmp_path):
    """The other arguments of the constructor act as well."""

    class Own(RolloutBuffer):
        pass

    model = make({}).learn(16)
    model.rollout_buffer_class, model.tensorboard_log, model.verbose = Own, str(tmp_path), 0
    model.learn(16)
    assert type(model.rollout_buffer) is Own
    assert list(tmp_path.iterdir())


def test_seed():
    """A new seed makes what follows reproducible, environments included."""
    results = []
    for n_before in (16, 32):
        model = make({}).learn(n_before)
        model.set_parameters(make({}).get_parameters())
        model.seed = np.int64(5)
        results.append(bits(model.learn(16)))
    assert_equal(*results, "parameters")


def test_statistics():
    """A shorter window keeps the newest episodes, also where the timesteps go on."""
    model = make({}).learn(32)
    newest = list(model.ep_info_buffer)[-2:]
    model.stats_window_size = 2
    model._apply_changed_options()
    assert model.stats_window_size == 2
    assert list(model.ep_info_buffer) == newest


# What users set themselves


def rate_of(model):
    return model.policy.optimizer.param_groups[0]["lr"]


def test_own_schedules():
    """Schedules that a user has set stay, as in SB3, until the option itself is changed."""
    model = make(dict(lr_warmup=0.5)).learn(16)
    model.lr_schedule, model.clip_range = lambda progress: 0.005, 0.1
    for _ in range(2):
        model.learn(16)
        assert rate_of(model) == 0.005
        assert model.logger.name_to_value["train/clip_range"] == 0.1
    model.lr_warmup = 0.0
    model.lr_schedule = 0.006
    assert rate_of(model.learn(16)) == 0.006
    model.learning_rate = 1e-3
    assert rate_of(model.learn(16)) == 1e-3


def test_own_setup():
    """Users of SB3 call the methods of the setup themselves."""
    model = make(dict(adaptive_lr_kl=1e-9)).learn(16)
    model.learning_rate = 1e-3
    model._setup_lr_schedule()
    assert model.lr_schedule(1.0) == 1e-3
    model.learn(16, reset_num_timesteps=False)
    assert rate_of(model) == 1e-3
    assert model.lr_schedule is model.adaptive_lr
    assert model.adaptive_lr.value < 1e-3
    model._setup_model()
    assert model.adaptive_lr.value == 1e-3
    model.learn(16)


@pytest.mark.parametrize("algorithm", [PPO, type(make({}))])
def test_as_sb3(algorithm):
    """What SB3 lets users change, they can change in the same way."""
    model = algorithm("MlpPolicy", make_toys(), **SMALL).learn(16)
    model.lr_schedule = lambda progress: 0.003
    model.clip_range = lambda progress: 0.3
    model.ent_coef, model.vf_coef, model.max_grad_norm, model.target_kl = 0.1, 0.2, 0.3, 100.0
    model.n_epochs, model.batch_size = 3, 4
    model.learn(16, reset_num_timesteps=False)
    assert rate_of(model) == 0.003
    assert model.logger.name_to_value["train/n_updates"] == 5


def test_schedules_are_called_only_where_they_act():
    """Where nothing has been changed, `learn` calls no schedule beyond SB3's calls, for a schedule may have a state."""
    calls = []

    def schedule(progress):
        calls.append(progress)
        return 0.2

    model = make(dict(clip_range=schedule))
    calls.clear()
    model.learn(16).learn(16)
    assert calls == [0.0, 0.0]


# State


def test_state_is_kept():
    """What has adapted so far goes on under changed options, and begins anew from a new start."""
    options = dict(advantage_norm="ema", kl_coef=0.1, kl_target=1e-9, adaptive_lr_kl=1e-9)
    model = make(options).learn(32)
    adapted = {name: getattr(model, name).state_dict() for name in ("advantage_normalizer", "kl_coefficient", "adaptive_lr")}
    model.adv_ema_alpha, model.kl_target, model.adaptive_lr_kl = 0.5, 1e-8, 1e-8
    model._apply_changed_options()
    assert adapted == {name: getattr(model, name).state_dict() for name in adapted}
    assert (model.advantage_normalizer.alpha, model.kl_coefficient.target, model.adaptive_lr.target) == (0.5, 1e-8, 1e-8)
    model.kl_coef, model.learning_rate = 0.3, 1e-3
    model._apply_changed_options()
    assert (model.kl_coefficient.value, model.adaptive_lr.value) == (0.3, 1e-3)
    model.advantage_norm, model.kl_target, model.adaptive_lr_kl = "rollout", None, None
    model._apply_changed_options()
    assert model.advantage_normalizer is model.kl_coefficient is model.adaptive_lr is None


@pytest.mark.parametrize("options", [dict(weight_decay=0.01), dict(critic_learning_rate=1e-3)], ids=str)
def test_moments_are_kept(options):
    """Turning weight decay or a rate of the critic on and off keeps the moments of the optimiser."""
    model = make({}).learn(16)
    state = {p: copy.deepcopy(s) for p, s in model.policy.optimizer.state.items()}
    (name,) = options
    for value in (options[name], ALL_OPTIONS[name].default):
        setattr(model, name, value)
        model._apply_changed_options()
        assert_equal(
            {str(id(p)): s for p, s in state.items()}, {str(id(p)): s for p, s in model.policy.optimizer.state.items()}, ""
        )
    assert len(model.policy.optimizer.param_groups) == 1
    model.learn(16, reset_num_timesteps=False)


def test_penalty_that_is_turned_off():
    """A KL penalty is turned off together with its target, so that the zip can be loaded."""
    model = make(dict(kl_coef=0.5, kl_target=0.01)).learn(16)
    model.kl_coef = 0.0
    model.learn(16)
    assert Zip(model).load(env=make_toys()).kl_target is None


def test_failed_change():
    """If a change fails, the others act when it has been taken back."""
    model = make(dict(gamma=0.9)).learn(16)
    model.learning_rate, model.n_steps = 1e-3, 10**14
    with pytest.raises(ValueError, match=r"`n_steps=100000000000000`.*not fit into memory"):
        model.learn(16)
    model.learning_rate, model.n_steps = 2e-3, 8
    assert rate_of(model.learn(16)) == 2e-3


def test_refused_changes_come_first(monkeypatch):
    """Environments are not asked about a value that is refused anyway: Gymnasium's would call their methods."""
    model = make({})
    model.action_masking = True
    monkeypatch.setattr(model.env, "has_attr", lambda name: 1 / 0)
    with pytest.raises(ValueError, match=r"`action_masking=True`.*another value"):
        model.learn(16)


def test_other_environment():
    """Another environment of the same kind can be set, also by assignment."""
    model = make({}).learn(16)
    model.set_env(make_toys())
    model.learn(16)
    model.env = VecNormalize(make_toys(), norm_obs=False)
    model.learn(16)


class NewLength(Silent):
    """Changes the length of rollouts in the middle of a training."""

    def _on_rollout_end(self):
        self.model.n_steps = 4


@pytest.mark.parametrize("options", [dict(backend=name) for name in ("eager", "fused", "native", "device")], ids=str)
def test_shorter_rollouts_during_a_training(options):
    """The half of a rollout that a callback leaves empty is not learned from. SB3 fails as well, without a message."""
    model = make(dict(n_steps=8, **options))
    with pytest.raises(ValueError, match=r"`n_steps=4`.*for 8 steps; change `n_steps` between two calls"):
        model.learn(64, callback=NewLength())
    model.n_steps = 4
    model.learn(16)


def in_tensors():
    return TorchVecEnv(TorchPendulum(2, max_episode_steps=30))


def in_arrays():
    return make_vec_env("Pendulum-v1", 2)


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpTransformerPolicy"])
@pytest.mark.parametrize("kinds", [(in_tensors, in_arrays), (in_arrays, in_tensors)])
def test_other_kind_of_environments(kinds, policy):
    """`set_env` may change from arrays to tensors and back: the next training is that of a model that was loaded with them."""
    first, second = kinds
    model = PPOExt(policy, first(), n_steps=16, batch_size=16, n_epochs=1, seed=0, device="cpu").learn(32)
    saved, state = Zip(model), random_state()
    model.set_env(second())
    loaded = saved.load(env=second(), device="cpu")
    for each in (model, loaded):
        set_random_state(state)
        each.env.seed(3)
        each.learn(32)
    assert type(model.rollout_buffer) is type(loaded.rollout_buffer)
    assert_equal(bits(model), bits(loaded), "parameters")


@pytest.mark.parametrize(
    ("make_env", "backends"),
    [
        (in_arrays, ("fused", "fused")),
        (in_arrays, ("device", "fused")),
        (in_arrays, ("fused", "device")),
        (in_tensors, ("auto",) * 2),
    ],
)
def test_history_goes_on_after_a_change(make_env, backends):
    """A new rollout buffer begins with the last steps of the one before it, whichever of them is on the device."""
    first, second = backends
    options = dict(policy_kwargs=dict(context_length=8), n_steps=16, batch_size=16, n_epochs=1, device="cpu", seed=0)
    model = PPOExt("MlpTransformerPolicy", make_env(), backend=first, **options).learn(16)
    memory = model.rollout_buffer.remembered()
    last = [np.array(part) for part in memory[:3]]
    model.gamma, model.backend, old = 0.5, second, model.rollout_buffer
    model._apply_changed_options()
    model.rollout_buffer.reset()
    assert model.rollout_buffer is not old
    assert (last[2] >= 0).all()
    kept = model.rollout_buffer.memory
    for part, rows in zip(last, (kept.rows.observations, kept.rows.starts, kept.episodes), strict=True):
        assert np.array_equal(rows[:7].numpy(), part)
    model.learn(32, reset_num_timesteps=False)
    assert (kept.episodes >= 0).all()
