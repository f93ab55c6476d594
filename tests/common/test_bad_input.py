"""Bad input gets a ValueError that names argument, value and remedy, before anything is trained or written."""

import io
import re
from fractions import Fraction
from functools import partial
from types import MappingProxyType, SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import ARS, QRDQN, TQC, TRPO, CrossQ
from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize
from support.cases import listed
from support.parity import assert_equal
from support.toys import DICT, IMAGE, VECTOR, Brittle, ToyEnv, make_toys
from support.zips import Zip, packed, parts

import sb3_ppo_ext
from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.common.guards import find_non_finite
from sb3_ppo_ext.update.losses import SURROGATES


def short(value):
    """Name of a test, without addresses, which differ from process to process."""
    return re.sub(r" at 0x\w+", "", str(value))[:80]


BAD_OPTIONS = [
    # (options, what the message says)
    (dict(n_steps=0), "`n_steps=0`.*an integer of at least 1"),
    (dict(n_steps=2.5), "`n_steps=2.5`.*an integer"),
    (dict(n_epochs=-1), "`n_epochs=-1`.*of at least 1"),
    (dict(n_epochs=True), "`n_epochs=True`.*an integer"),
    (dict(batch_size=0), "`batch_size=0`.*of at least 1"),
    (dict(batch_size=1), "`batch_size=1`.*2 or more, or `normalize_advantage=False`"),
    (dict(n_steps=1), "`n_steps=1`.*n_envs=1"),
    (dict(gamma=1.01), "`gamma=1.01`.*between 0 and 1"),
    (dict(gamma=-0.1), "`gamma=-0.1`.*between 0 and 1"),
    (dict(gamma=float("nan")), "`gamma=nan`.*between 0 and 1"),
    (dict(gamma="0.99"), "`gamma='0.99'`.*a number.*leave out the quotes"),
    (dict(gamma="1e-1"), "`gamma='1e-1'`.*a number.*in YAML, write 0.1:"),
    (dict(adv_clip="inf"), "`adv_clip='inf'`.*in YAML `.inf`"),
    (dict(use_sde=True, sde_sample_freq=1.5), "`sde_sample_freq=1.5`.*an integer"),
    (dict(clip_coef=0.2), "no option `clip_coef`: its name here is `clip_range`"),
    (dict(num_envs=8), "no option `num_envs`: it is `n_envs` of `make_vec_env`"),
    (dict(context_length=8), "no option `context_length`: it goes into `policy_kwargs` of a transformer policy"),
    (dict(net_arch=[8]), "no option `net_arch`: it goes into `policy_kwargs`$"),
    (dict(caps_temporal=1.0), "no option `caps_temporal`: it goes into `auxiliary_losses`"),
    (dict(betas=(0.9, 0.9)), "no option `betas`: it goes into `policy_kwargs=dict.optimizer_kwargs"),
    (dict(callback=None), "no option `callback`: it is an argument of `learn`"),
    (dict(env_kwargs={}), "no option `env_kwargs`: it is an argument of `make_vec_env`"),
    (dict(policy_kwargs=dict(gamma=0.9)), "no option `gamma`: it is an argument of `PPOExt` itself"),
    (dict(gamma=None), "`gamma=None`.*a number"),
    (dict(gae_lambda=1.5), "`gae_lambda=1.5`.*between 0 and 1"),
    (dict(ent_coef=-0.1), "`ent_coef=-0.1`.*of at least 0"),
    (dict(vf_coef=-1), "`vf_coef=-1`.*of at least 0"),
    (dict(max_grad_norm=-0.5), "`max_grad_norm=-0.5`.*of at least 0"),
    (dict(target_kl=-0.01), "`target_kl=-0.01`.*of at least 0"),
    (dict(learning_rate=-1e-3), "`learning_rate=-0.001`.*of at least 0"),
    (dict(learning_rate="3e-4"), "`learning_rate='3e-4'`.*lin_0.001"),
    (dict(learning_rate="cos_3e-4"), "`learning_rate='cos_3e-4'`.*lin_0.001"),
    (dict(learning_rate="hold_"), "`learning_rate='hold_'`.*lin_0.001"),
    (dict(learning_rate="lin_fast"), "`learning_rate='lin_fast'`.*lin_0.001"),
    (dict(learning_rate="lin_-1"), "`learning_rate=-1.0`.*of at least 0"),
    (dict(learning_rate=None), "`learning_rate=None`.*a number"),
    (dict(clip_range=-0.2), "`clip_range=-0.2`.*of at least 0"),
    (dict(clip_range="lin_"), "`clip_range='lin_'`.*lin_0.001"),
    (dict(clip_range_vf=0), "`clip_range_vf=0`.*greater than 0"),
    (dict(clip_range_vf="lin_0"), "`clip_range_vf=0.0`.*greater than 0"),
    (dict(seed=-1), "`seed=-1`.*between 0 and"),
    (dict(seed="a"), "`seed='a'`.*an integer"),
    (dict(normalize_advantage="False"), "`normalize_advantage='False'`.*True or False"),
    (dict(use_sde="yes"), "`use_sde='yes'`.*True or False"),
    (dict(use_sde=True, sde_sample_freq=None), "`sde_sample_freq=None`.*an integer"),
    (dict(learning_rate=float("inf")), "`learning_rate=inf`.*at least 0"),
    (dict(vf_coef=float("inf")), "`vf_coef=inf`"),
    (dict(gamma=Fraction(9, 10)), r"`gamma=Fraction\(9, 10\)`.*a number"),
    (dict(rollout_buffer_kwargs=dict(foo=1)), "`rollout_buffer_kwargs` has no option `foo`"),
    (dict(stats_window_size=-1), "`stats_window_size=-1`"),
    (dict(policy_kwargs="dict(net_arch=[8])"), "`policy_kwargs=.*a dictionary"),
    (dict(policy_kwargs="dict(net_arch=[8])", action_dist="beta"), "`policy_kwargs=.*a dictionary"),
    (dict(policy_kwargs=dict(net_archs=[8])), "`policy_kwargs` has no option `net_archs`: did you mean `net_arch`"),
    (dict(rollout_buffer_class="RolloutBuffer"), "`rollout_buffer_class='RolloutBuffer'`.*a class"),
    (dict(rollout_buffer_class=0), "`rollout_buffer_class=0`.*a class"),
    (dict(rollout_buffer_class=dict), "`rollout_buffer_class=<class 'dict'>`.*a class"),
    (dict(rollout_buffer_class=DictRolloutBuffer), "`rollout_buffer_class=.*does not store such observations"),
    (dict(rollout_buffer_class=lambda *args: None), "`rollout_buffer_class=.*a class"),
    (dict(rollout_buffer_class=lambda *args, **kwargs: None), "`rollout_buffer_class=.*it returns None"),
    (dict(rollout_buffer_kwargs=[1]), r"`rollout_buffer_kwargs=\[1\]`.*a dictionary"),
    (dict(device="gpu"), "`device='gpu'`.*cuda"),
    (dict(device="meta"), "`device='meta'`.*cannot compute here"),
    (dict(device="xla"), "`device='xla'`.*cannot compute here"),
    (dict(tensorboard_log=5), "`tensorboard_log=5`.*path of a folder"),
    (dict(tensorboard_log=b"logs"), "`tensorboard_log=b'logs'`.*path of a folder"),
    (dict(verbose="loud"), "`verbose='loud'`.*0, 1 or 2"),
    (dict(ent_coef=10**400), r"`ent_coef=10+\.\.\.` is not valid: it is too large"),
    (dict(max_grad_norm=10**400), "`max_grad_norm=10.*it is too large"),
    (dict(target_kl=10**400), "`target_kl=10.*it is too large"),
    (dict(vf_coef=1e39), r"`vf_coef=1e\+39`.*it is too large"),
    (dict(n_epochs=10**30), "`n_epochs=10.*it is too large"),
    (dict(n_steps=10**14), "`n_steps=100000000000000`.*not fit into memory"),
    (dict(n_steps=10**18), "`n_steps=1000000000000000000`.*not fit into memory"),
    (dict(learning_rate=lambda progress: None), "`learning_rate=.*raises TypeError.*returns a number"),
    (dict(learning_rate=lambda: 1e-3), "`learning_rate=.*raises TypeError.*returns a number"),
    (dict(clip_range=lambda progress: "0.2"), "`clip_range=.*returns '0.2' at the start.*returns a number"),
    (dict(clip_range_vf=lambda progress: float("nan")), "`clip_range_vf=.*returns nan at the start"),
    (dict(ent_coef=lambda progress: -progress), "`ent_coef=.*returns -1.0 at the start"),
    (dict(critic_learning_rate=lambda progress: 1 / 0), "`critic_learning_rate=.*raises ZeroDivisionError"),
    (dict(advantage_norm="emma"), '`advantage_norm=\'emma\'`.*"minibatch", "rollout" or "ema"'),
    (dict(adv_ema_alpha=0.0), "`adv_ema_alpha=0.0`.*between 0 and 1"),
    (dict(adv_ema_warm_start="no"), "`adv_ema_warm_start='no'`.*True or False"),
    (dict(adv_min_std=0.0), "`adv_min_std=0.0`.*greater than 0"),
    (dict(adv_clip=-4.0), "`adv_clip=-4.0`.*greater than 0"),
    (dict(adv_shift_mean=None), "`adv_shift_mean=None`.*True or False"),
    (dict(bounds_coef=-1.0), "`bounds_coef=-1.0`.*at least 0"),
    (dict(bounds_coef="0.1"), "`bounds_coef='0.1'`.*a number"),
    (dict(bounds_limit=-1.1), "`bounds_limit=-1.1`.*at least 0"),
    (dict(vf_clip_mode="min"), '`vf_clip_mode=\'min\'`.*"clip" or "max"'),
    (dict(surrogate="trpo"), f"`surrogate='trpo'`.*{listed(SURROGATES)}"),
    (dict(surrogate="spo", clip_range=0.0), "`clip_range=0.0`.*divides by it"),
    (dict(dual_clip=1.0), "`dual_clip=1.0`.*greater than 1"),
    (dict(dual_clip=3.0, surrogate="spo"), '`dual_clip=3.0`.*for `surrogate="clip"`'),
    (dict(kl_coef=float("nan")), "`kl_coef=nan`.*at least 0"),
    (dict(kl_coef=1.0, kl_target=0.0), "`kl_target=0.0`.*greater than 0"),
    (dict(ent_coef="cos_0.1"), "`ent_coef='cos_0.1'`.*lin_0.001"),
    (dict(vtrace=1.0), "`vtrace=1.0`.*True or False"),
    (dict(vtrace_rho=0), "`vtrace_rho=0`.*greater than 0"),
    (dict(vtrace_c=-0.5), "`vtrace_c=-0.5`.*at least 0"),
    (dict(priority_alpha=-0.5), "`priority_alpha=-0.5`.*at least 0"),
    (dict(priority_beta=1.5), "`priority_beta=1.5`.*between 0 and 1"),
    (dict(priority_segment=0), "`priority_segment=0`.*at least 1"),
    (dict(optimizer="lion"), '`optimizer=\'lion\'`.*"adam", "adamw", "sgd" or "muon"'),
    (dict(optimizer="sgd", policy_kwargs=dict(optimizer_class=th.optim.SGD)), "`optimizer='sgd'`.*`optimizer_class`"),
    (dict(weight_decay=-0.1), "`weight_decay=-0.1`.*at least 0"),
    (dict(critic_learning_rate=-0.1), "`critic_learning_rate=-0.1`.*at least 0"),
    (dict(critic_learning_rate="lin"), "`critic_learning_rate='lin'`.*lin_0.001"),
    (dict(normalize_value=1.0), "`normalize_value=1.0`.*True or False"),
    (dict(policy_kwargs=dict(normalize_value=True)), "`normalize_value=True`.*argument of the algorithm"),
    (dict(lr_decay="exponential"), "`lr_decay='exponential'`.*\"cosine\""),
    (dict(lr_decay="linear", learning_rate="lin_0.1"), "`lr_decay='linear'`.*`learning_rate` is a schedule by itself"),
    (dict(lr_decay="linear", critic_learning_rate="lin_0.1"), "`lr_decay='linear'`.*`critic_learning_rate` is a schedule"),
    (dict(lr_min_fraction=2.0), "`lr_min_fraction=2.0`.*between 0 and 1"),
    (dict(lr_warmup=1.0), "`lr_warmup=1.0`.*less than 1"),
    (dict(adaptive_lr_kl=0.0), "`adaptive_lr_kl=0.0`.*greater than 0"),
    (dict(adaptive_lr_kl="lin_0"), "`adaptive_lr_kl=0.0`.*greater than 0"),
    (dict(adaptive_lr_kl="0.01"), "`adaptive_lr_kl='0.01'`.*lin_0.001"),
    (dict(adaptive_lr_kl=lambda progress: -0.01), "`adaptive_lr_kl=.*returns -0.01 at the start"),
    (dict(adaptive_lr_kl=0.01, adaptive_lr_rule="linear"), '`adaptive_lr_rule=\'linear\'`.*"threshold" or "proportional"'),
    (dict(adaptive_lr_kl=0.01, lr_decay="cosine"), '`adaptive_lr_kl=0.01`.*`lr_decay="constant"`'),
    (dict(adaptive_lr_kl=0.01, lr_warmup=0.1), "`adaptive_lr_kl=0.01`.*no `lr_warmup`"),
    (
        dict(adaptive_lr_kl=0.01, learning_rate="hold_0.001"),
        "`adaptive_lr_kl=0.01`.*a number as `learning_rate`.*or `adaptive_lr_kl=None`",
    ),
    (dict(adaptive_lr_bounds=1e-3), "`adaptive_lr_bounds=0.001`.*the least and the largest"),
    (dict(adaptive_lr_bounds=(1e-3,)), "`adaptive_lr_bounds=.*the least and the largest"),
    (dict(adaptive_lr_bounds=(0.0, 1e-3)), "`adaptive_lr_bounds.0.=0.0`.*greater than 0"),
    (dict(adaptive_lr_bounds=(1e-2, 1e-3)), "`adaptive_lr_bounds.1.=0.001`.*of at least 0.01"),
    (dict(max_clip_fraction=1.5), "`max_clip_fraction=1.5`.*between 0 and 1"),
    (dict(accumulate_grad=0), "`accumulate_grad=0`.*at least 1"),
    (dict(accumulate_grad=1.5), "`accumulate_grad=1.5`.*an integer"),
    (dict(bad_gradients="ignore"), '`bad_gradients=\'ignore\'`.*"raise" or "skip"'),
    (dict(n_step=5), "PPOExt has no option `n_step`: did you mean `n_steps`"),
    (dict(zzz=5), "PPOExt has no option `zzz`: there are accumulate_grad"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=short)
def test_bad_option(options, message):
    """The constructor refuses each bad value, and names argument, value and remedy."""
    with pytest.raises(ValueError, match=message):
        PPOExt("MlpPolicy", ToyEnv(), **options)


BAD_POLICY_KWARGS = [
    ({5: 5}, "`policy_kwargs` has no option `5`"),
    (dict(net_arch="[8]"), r"`net_arch='\[8\]'`.*sizes of the hidden layers"),
    (dict(net_arch=8), "`net_arch=8`.*sizes of the hidden layers"),
    (dict(net_arch=[8, 0]), r"`net_arch\[1\]=0`.*of at least 1"),
    (dict(net_arch=[8, 8.0]), r"`net_arch\[1\]=8.0`.*an integer"),
    (dict(net_arch=[10**5, 10**9]), r"`policy_kwargs=.*`, does not fit into memory"),
    (dict(net_arch=dict(pi=[8], vf="8")), r"`net_arch\['vf'\]='8'`.*sizes"),
    (dict(net_arch=dict(pi=[None])), r"`net_arch\['pi'\]\[0\]=None`.*an integer"),
    (dict(net_arch=dict(policy=[8])), r"`net_arch\['policy'\]=\[8\]`.*the keys are"),
    (dict(activation_fn="relu"), "`activation_fn='relu'`.*torch.nn.ReLU"),
    (dict(activation_fn=th.nn.ReLU()), r"`activation_fn=ReLU\(\)`.*torch.nn.ReLU"),
    (dict(activation_fn=th.nn.Linear), "`activation_fn=.*Linear.*missing 2 required"),
    (dict(activation_fn=th.nn.GLU), "`activation_fn=.*GLU.*changes the shape"),
    (dict(ortho_init="no"), "`ortho_init='no'`.*True or False"),
    (dict(share_features_extractor="no"), "`share_features_extractor='no'`.*True or False"),
    (dict(log_std_init=float("nan")), "`log_std_init=nan`.*between -20 and 20"),
    (dict(log_std_init=-1e6), r"`log_std_init=-1000000.0`.*between -20 and 20"),
    (dict(log_std_init="0"), "`log_std_init='0'`.*a number"),
    (dict(log_std_init=th.tensor([0.0, 50.0])), "`log_std_init=50.0`.*between -20 and 20"),
    (dict(squash_output=True), "squash_output=True is only available when using gSDE"),
    (dict(features_extractor_class="cnn"), "`features_extractor_class='cnn'`.*BaseFeaturesExtractor"),
    (dict(features_extractor_class=dict), "`features_extractor_class=<class 'dict'>`.*BaseFeaturesExtractor"),
    (dict(features_extractor_class=th.nn.ReLU), "`features_extractor_class=.*ReLU.*BaseFeaturesExtractor"),
    (dict(features_extractor_kwargs=[1]), r"`features_extractor_kwargs=\[1\]`.*a dictionary"),
    (dict(features_extractor_kwargs=dict(features_dim=3)), "`features_extractor_kwargs` has no option `features_dim`"),
    (dict(features_extractor_class=th.nn.Tanh()), "`features_extractor_class=Tanh.*give a class"),
    (dict(optimizer_class="adam"), "`optimizer_class='adam'`.*torch.optim"),
    (dict(optimizer_class=th.nn.ReLU), "`optimizer_class=.*ReLU.*torch.optim"),
    (dict(optimizer_class=th.optim.LBFGS), "`optimizer_class=.*LBFGS.*without a closure"),
    (dict(optimizer_class=th.optim.SparseAdam), "`optimizer_class=.*SparseAdam.*dense gradients"),
    (dict(optimizer_kwargs=dict(momentum=0.9)), "`optimizer_kwargs={'momentum': 0.9}` is not valid: TypeError"),
    (dict(optimizer_kwargs=dict(betas=(2, 2))), "`optimizer_kwargs=.*is not valid: ValueError: Invalid beta"),
    (dict(optimizer_kwargs=dict(eps="1e-5")), "`optimizer_kwargs.'eps'.='1e-5'`.*in YAML, write 0.00001"),
    (dict(optimizer_kwargs=dict(lr=1e-3)), "`optimizer_kwargs=.*`learning_rate`"),
]
BAD_MEMORY = [
    (dict(d_model=None), "`d_model=None`.*an integer"),
    (dict(ffn_dim=0), "`ffn_dim=0`.*of at least 1"),
    (dict(ffn_dim="128"), "`ffn_dim='128'`.*an integer"),
    (dict(n_layers=10**6), "`n_layers=1000000`.*too large; give an integer up to 1000"),
    (dict(n_heads=3), "`d_model=64`.*multiple of n_heads=3"),
    (dict(context_length=0), "`context_length=0`.*of at least 1"),
    (dict(gate="yes"), "`gate='yes'`.*True or False"),
]


@pytest.mark.parametrize(
    ("policy", "policy_kwargs", "message"),
    [
        *(("MlpPolicy", *bad) for bad in BAD_POLICY_KWARGS),
        *(("MlpTransformerPolicy", *bad) for bad in BAD_MEMORY),
    ],
    ids=short,
)
def test_bad_policy_kwargs(policy, policy_kwargs, message):
    """Each bad value in `policy_kwargs` is refused by name, before anything is trained."""
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        PPOExt(policy, ToyEnv(), n_steps=8, batch_size=8, policy_kwargs=policy_kwargs)


class OwnPolicy(ActorCriticPolicy):
    """A policy with an architecture of its own."""

    def __init__(self, *args, net_arch=None, **kwargs):
        super().__init__(*args, net_arch=[len(net_arch)], **kwargs)


@pytest.mark.parametrize(
    ("policy", "policy_kwargs"),
    [
        ("MlpPolicy", dict(net_arch=[])),
        ("MlpPolicy", dict(net_arch=(np.int64(8),))),
        ("MlpPolicy", dict(net_arch=dict(vf=[8], qf=[8]))),
        ("MlpPolicy", dict(net_arch=[dict(pi=[8], vf=[8])])),
        ("MlpPolicy", dict(activation_fn=partial(th.nn.LeakyReLU, 0.2))),
        ("MlpPolicy", dict(ortho_init=0, features_extractor_kwargs=None, optimizer_kwargs=None)),
        ("MlpPolicy", dict(log_std_init=th.tensor([0.0, -1.0]))),
        ("MlpPolicy", dict(optimizer_class=th.optim.RMSprop, optimizer_kwargs=dict(alpha=0.9))),
        ("MlpPolicy", dict(optimizer_class=partial(th.optim.Adam, eps=1e-3))),
        (OwnPolicy, dict(net_arch="small")),
    ],
    ids=short,
)
@pytest.mark.filterwarnings("ignore:As shared layers in the mlp_extractor")
def test_legal_policy_kwargs(policy, policy_kwargs):
    """What SB3's policies take is taken, and policies of users may give the keywords another meaning."""
    PPOExt(policy, ToyEnv(), n_steps=8, batch_size=8, policy_kwargs=policy_kwargs).learn(8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model.zip"
    PPOExt("MlpPolicy", ToyEnv(), n_steps=16, batch_size=8).learn(16).save(path)
    return path


@pytest.mark.many(one_in=5)
@pytest.mark.parametrize(("options", "message"), [bad for bad in BAD_OPTIONS if "policy_kwargs" not in bad[0]], ids=short)
def test_bad_option_of_load(options, message, saved):
    """`load` refuses each bad value too, where SB3 checks nothing at all."""
    with pytest.raises(ValueError, match=message.replace("PPOExt has", "PPOExt.load has").replace("batch_size", ".*")):
        PPOExt.load(saved, env=ToyEnv(), **options)


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.MultiDiscrete([2, 2]), spaces.MultiBinary(2)], ids=short)
def test_bounds_loss_without_bounds(space):
    """Discrete actions have no bounds: constructor and `load` refuse the bounds loss for them."""
    env = ToyEnv(action_space=space)
    with pytest.raises(ValueError, match=r"`bounds_coef=0\.01` is not valid: .* has no bounds"):
        PPOExt("MlpPolicy", env, bounds_coef=0.01)
    saved = Zip(PPOExt("MlpPolicy", env))
    with pytest.raises(ValueError, match=re.escape("`bounds_coef=0.01` is not valid")):
        saved.load(bounds_coef=0.01)


class OwnDraws(RolloutBuffer):
    def get(self, batch_size=None):
        yield from super().get(batch_size)


class OwnEstimates(RolloutBuffer):
    def compute_returns_and_advantage(self, last_values, dones):
        super().compute_returns_and_advantage(last_values, dones)


@pytest.mark.parametrize(
    "options",
    [
        dict(advantage_norm="rollout"),
        dict(advantage_norm="ema"),
        dict(vtrace=True),
        dict(kl_coef=0.1),
        dict(priority_alpha=0.5),
        dict(accumulate_grad=2),
    ],
    ids=short,
)
def test_options_that_draw_minibatches(options):
    """Options that draw minibatches themselves refuse a buffer with its own `get`; other options work with it."""
    (name,) = options
    with pytest.raises(ValueError, match=f"`{name}=.*OwnDraws.*its own `get`"):
        PPOExt("MlpPolicy", ToyEnv(), rollout_buffer_class=OwnDraws, **options)
    others = dict(bounds_coef=0.1, critic_learning_rate=1e-3, max_clip_fraction=0.5, surrogate="spo", ent_coef="lin_0.1")
    others |= dict(normalize_advantage=False, advantage_norm="ema")  # which nothing is normalised by
    PPOExt("MlpPolicy", ToyEnv(), n_steps=16, batch_size=8, rollout_buffer_class=OwnDraws, **others).learn(32)


def test_vtrace_or_own_estimates():
    """V-trace refuses a buffer that estimates advantages in its own way, for one of the estimates would be lost."""
    with pytest.raises(ValueError, match=r"`vtrace=True`.*OwnEstimates"):
        PPOExt("MlpPolicy", ToyEnv(), rollout_buffer_class=OwnEstimates, vtrace=True)
    PPOExt("MlpPolicy", ToyEnv(), n_steps=16, batch_size=8, rollout_buffer_class=OwnEstimates, priority_alpha=0.5).learn(32)


@pytest.mark.parametrize(
    ("value", "text"), [("x" * 1000, "x{299}\\.\\.\\."), (10**5000, "10+\\.\\.\\.|<int>")], ids=["text", "number"]
)
def test_long_values_are_shortened(value, text):
    """A long value does not hide the message, and one that Python does not print does not replace it."""
    with pytest.raises(ValueError, match=f"`vf_coef='?({text})` is not valid"):
        PPOExt("MlpPolicy", ToyEnv(), vf_coef=value)


@pytest.mark.parametrize("options", [dict(batch_size=1), dict(n_steps=1), dict(clip_range_vf=-1.0), dict(learning_rate="a")])
def test_also_an_assertion_error(options):
    """Where SB3 raises AssertionError, code that catches it keeps working."""
    for algorithm in (PPO, PPOExt):
        with pytest.raises(AssertionError):
            algorithm("MlpPolicy", ToyEnv(), **options)


def test_options_of_a_mixin_and_a_subclass():
    """Whatever a constructor takes, `load` takes as well."""

    class Mixin:
        def __init__(self, *args, foo=1, **kwargs):
            super().__init__(*args, **kwargs)
            self.foo = foo

    class Sub(Mixin, PPOExt):
        pass

    saved = Zip(Sub("MlpPolicy", ToyEnv(), foo=2, n_steps=8, batch_size=8, device="cpu"))
    assert saved.load(Sub, foo=4).foo == 4
    with pytest.raises(ValueError, match="has no option `fooo`: did you mean `foo`"):
        saved.load(Sub, fooo=4)
    with pytest.raises(ValueError, match="no option `monitor_wrapper`"):
        PPOExt("MlpPolicy", ToyEnv(), monitor_wrapper=True)


def test_unknown_option_is_also_a_type_error():
    """An unknown option raises what any Python call raises for an unknown keyword."""
    with pytest.raises(TypeError):
        PPOExt("MlpPolicy", ToyEnv(), n_step=5)


def test_options_of_subclasses():
    """A subclass may add options and pass the others on."""

    class Mine(PPOExt):
        def __init__(self, *args, extra=1, **kwargs):
            super().__init__(*args, **kwargs)
            self.extra = extra

    assert Mine("MlpPolicy", ToyEnv(), extra=2, n_steps=8, batch_size=8).extra == 2
    with pytest.raises(ValueError, match="Mine has no option `extras`: did you mean `extra`"):
        Mine("MlpPolicy", ToyEnv(), extras=2)


@pytest.mark.parametrize(
    "options",
    [
        dict(gamma=1.0, gae_lambda=0.0),
        dict(gamma=np.float32(0.9), n_steps=np.int64(8)),
        dict(learning_rate=0.0, clip_range=0),
        dict(max_grad_norm=float("inf")),
        dict(batch_size=1, normalize_advantage=False),
        dict(n_steps=1, normalize_advantage=False),
        dict(target_kl=0.0),
        dict(batch_size=4096),
        dict(device="cuda:0"),
        dict(learning_rate=np.float32(1e-3), clip_range=np.int64(1), clip_range_vf=np.float16(0.5)),
        dict(seed=np.int64(3)),
        dict(use_sde=0, normalize_advantage=1),
        dict(use_sde=True, sde_sample_freq=-2),
        dict(stats_window_size=0),
        dict(rollout_buffer_class=partial(RolloutBuffer, gamma=0.5)),
        dict(policy_kwargs=MappingProxyType(dict(net_arch=[8]))),
        dict(clip_range=float("inf"), target_kl=float("inf"), max_grad_norm=1e30),
        dict(verbose=False, tensorboard_log=None, n_epochs=np.int64(1)),
        dict(clip_range=lambda progress: np.array(0.2), ent_coef=lambda progress: th.tensor(0.0)),
        dict(clip_range_vf=lambda progress: 0.1 * (1 - progress)),
        dict(clip_range=lambda progress: undefined_as_yet.clip_range),  # noqa: F821
    ],
    ids=short,
)
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
@pytest.mark.filterwarnings("ignore:.*there is no CUDA here")
def test_legal_extremes(options, monkeypatch):
    """Extreme values that SB3 takes and that make sense are taken."""
    model = PPOExt("MlpPolicy", ToyEnv(), **{"n_steps": 8, "batch_size": 8, **options})
    monkeypatch.setitem(globals(), "undefined_as_yet", SimpleNamespace(clip_range=0.2))
    model.learn(8)


@pytest.mark.skipif(th.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none():
    """Without CUDA the model is on the CPU, as in SB3, and says so."""
    with pytest.warns(UserWarning, match="`device='cuda'`: there is no CUDA here"):
        assert PPOExt("MlpPolicy", ToyEnv(), device="cuda").device.type == "cpu"


def test_schedules_are_checked_once():
    """Making a model calls a schedule once to check it, since a schedule may have a state."""
    calls = []

    def schedule(progress):
        calls.append(progress)
        return 0.2

    PPOExt("MlpPolicy", ToyEnv(), clip_range=schedule)
    assert calls == [1.0]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("MlpPolcy", "`policy='MlpPolcy'`.*MlpPolicy, CnnPolicy, MultiInputPolicy"),
        (None, "`policy=None`.*a name or a class"),
        (["MlpPolicy"], r"`policy=\['MlpPolicy'\]`.*a name or a class"),
        (dict, "`policy=<class 'dict'>`.*a name or a class"),
        (SAC.policy_aliases["MlpPolicy"], "`policy=.*SACPolicy.*a name or a class"),
    ],
    ids=short,
)
def test_bad_policy(policy, message):
    """What is no policy of PPO is refused, with the names that exist."""
    with pytest.raises(ValueError, match=message):
        PPOExt(policy, ToyEnv())


@pytest.mark.parametrize(
    ("env_spaces", "message"),
    [
        (dict(observation_space=spaces.Tuple([spaces.Discrete(2)])), "observation space Tuple.*FlattenObservation"),
        (dict(observation_space=spaces.Dict(a=DICT)), "under the key 'a', has a Dict"),
        (dict(observation_space=spaces.Text(3)), "has a Text"),
        (dict(action_space=spaces.Text(3)), "action space Text.* is not supported: use Box, .* or a Dict or Tuple of these"),
        (dict(action_space=spaces.Dict()), "action space Dict.* is empty"),
        (dict(action_space=spaces.Tuple([spaces.Dict()])), "under 0 is empty"),
        (dict(action_space=spaces.Dict(a=spaces.Tuple([spaces.Text(3)]))), "under 'a', under 0 is a Text"),
        (dict(action_space=spaces.Dict(a=spaces.Box(-np.inf, np.inf, (2,)))), "under 'a' has an infinite bound"),
        (dict(action_space=spaces.Tuple([spaces.Box(0, 9, (2,), np.int64)])), "under 0 is Box.* a Box of floats"),
        (dict(action_space=spaces.Tuple([spaces.Box(0, 1, ())])), "under 0 is Box.* at least one dimension"),
        (dict(action_space=spaces.Dict(a=spaces.Discrete(3, start=1))), "under 'a' does not start at 0"),
        (dict(action_space=spaces.Dict(a=spaces.MultiBinary([2, 2]))), "under 'a' has 2 dimensions"),
        (dict(action_space=spaces.Box(-np.inf, np.inf, (2,))), r"infinite bound.*\[-1, 1\]"),
        (dict(action_space=spaces.MultiBinary([2, 3])), "has 2 dimensions: use a flat MultiBinary"),
        (dict(action_space=spaces.MultiDiscrete([[2, 3], [2, 3]])), "has 2 dimensions: use a flat MultiDiscrete"),
        (dict(observation_space=spaces.MultiDiscrete([[2, 3], [2, 3]])), "has 2 dimensions: use a flat MultiDiscrete"),
        (dict(observation_space=spaces.Dict()), "is empty"),
        (dict(observation_space=spaces.Box(-1, 1, ())), r"no dimension: give it the shape \(1,\)"),
        (dict(observation_space=spaces.Box(-1, 1, (3, 0))), r"has no number in it \(its shape is \(3, 0\)\)"),
        (dict(observation_space=spaces.Dict(a=spaces.Box(-1, 1, (0,)), b=DICT["gear"])), "under the key 'a', has no number"),
        (dict(observation_space=spaces.MultiDiscrete(np.zeros(0, int))), "has no number in it"),
        (dict(observation_space=spaces.Discrete(3, start=1)), "does not start at 0.*shift the values by 1.*TransformObs"),
        (dict(observation_space=spaces.MultiDiscrete([2, 2], start=[0, 1])), "does not start at 0"),
        (dict(action_space=spaces.Discrete(3, start=-1)), "does not start at 0.*shift the values by -1.*TransformAction"),
        (dict(action_space=spaces.MultiDiscrete([2, 2], start=[1, 0])), "does not start at 0"),
        (dict(action_space=spaces.MultiDiscrete(np.zeros(0, int))), "has no number in it"),
        (dict(action_space=spaces.Box(-1, 1, (0,))), "has no number in it"),
    ],
    ids=short,
)
@pytest.mark.parametrize("vectorised", [False, True])
def test_unsupported_space(env_spaces, message, vectorised):
    """Spaces that SB3 does not support raise a ValueError that is also what SB3 raises."""
    if vectorised and "observation_space" in env_spaces:
        pytest.skip("SB3's DummyVecEnv does not take it")
    env = ToyEnv(**env_spaces)
    with pytest.raises(ValueError, match=message) as caught:
        PPOExt("MlpPolicy", DummyVecEnv([lambda: env]) if vectorised else env)
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, NotImplementedError)


def test_space_and_policy_that_do_not_fit():
    """SB3's own refusals of a policy for a space are ValueErrors as well."""
    with pytest.raises(ValueError, match="You must use `MultiInputPolicy`"):
        PPOExt("MlpPolicy", ToyEnv(observation_space=DICT))
    with pytest.raises(ValueError, match="You should use NatureCNN only with images"):
        PPOExt("CnnPolicy", ToyEnv())
    with pytest.raises(ValueError, match="can only be used with continuous actions"):
        PPOExt("MlpPolicy", ToyEnv(action_space=spaces.Discrete(2)), use_sde=True)


SMALL_IMAGE = spaces.Box(0, 255, (30, 40, 3), np.uint8)


@pytest.mark.parametrize(
    ("policy", "space", "message"),
    [
        ("MlpPolicy", DICT, "MultiInputPolicy"),
        ("CnnPolicy", DICT, "MultiInputPolicy"),
        ("MultiInputPolicy", VECTOR, "`policy='.*reads dictionaries.*`MlpPolicy` for anything else"),
        ("MultiInputPolicy", IMAGE, "`policy='.*reads dictionaries.*`CnnPolicy` for images"),
        ("CnnPolicy", VECTOR, "`policy='.*only with images"),
        ("CnnPolicy", spaces.Box(0, 1, (36, 36, 1)), "`policy='.*normalize_images=False"),
        ("CnnPolicy", SMALL_IMAGE, "images of 30 x 40 pixels, and NatureCNN needs 36 x 36"),
        ("MultiInputPolicy", spaces.Dict(camera=SMALL_IMAGE), "the part 'camera'.*30 x 40 pixels"),
        ("MultiInputPolicy", spaces.Dict({"a.b": VECTOR}), "no module with the name 'a.b'"),
    ],
    ids=short,
)
@pytest.mark.parametrize("memory", [False, True], ids=["plain", "memory"])
@pytest.mark.parametrize("by_name", [True, False], ids=["name", "class"])
def test_policy_for_other_observations(policy, space, message, memory, by_name):
    """Each of the six policies, by name or as a class, refuses observations that it cannot read."""
    name = policy.replace("Policy", "TransformerPolicy") if memory else policy
    with pytest.raises(ValueError, match=message):
        PPOExt(name if by_name else getattr(sb3_ppo_ext, name), ToyEnv(observation_space=space))


def test_own_extractor_reads_anything():
    """A features extractor of the user's decides what a policy reads, also in a zip."""
    model = PPOExt(
        ActorCriticPolicy, ToyEnv(observation_space=DICT), policy_kwargs=dict(features_extractor_class=OwnExtractor)
    )
    Zip(model).load(env=ToyEnv(observation_space=DICT))


class OwnExtractor(BaseFeaturesExtractor):
    """Reads the part `joints` alone."""

    def __init__(self, observation_space):
        super().__init__(observation_space, 3)

    def forward(self, observations):
        return observations["joints"]


# Zips


OTHERS = {
    A2C: "A2C",
    TRPO: "TRPO",
    ARS: "ARS",
    DQN: "DQN",
    QRDQN: "QR-DQN",
    SAC: "SAC",
    TQC: "TQC",
    CrossQ: "CrossQ",
    TD3: "TD3 or DDPG",
    DDPG: "TD3 or DDPG",
}


@pytest.mark.parametrize("algorithm", OTHERS, ids=OTHERS.values())
def test_zip_of_another_algorithm(algorithm, tmp_path):
    """The algorithm that saved the zip is named, and nothing of the zip is unpickled."""
    discrete = dict(action_space=spaces.Discrete(2)) if algorithm in (DQN, QRDQN) else {}
    path = tmp_path / "other.zip"
    algorithm("MlpPolicy", ToyEnv(**discrete)).save(path)
    for load in (PPOExt.load, PPOExt("MlpPolicy", ToyEnv(**discrete)).set_parameters):
        with pytest.raises(ValueError, match=re.escape(f"{path} was saved by {OTHERS[algorithm]}, not by")):
            load(str(path))


def test_zip_of_a_subclass_of_ppo(tmp_path):
    """A zip of a subclass of SB3's PPO is loaded."""

    class Mine(PPO):
        pass

    Mine("MlpPolicy", ToyEnv()).save(tmp_path / "mine")
    PPOExt.load(tmp_path / "mine")


class RecurrentNeighbour(ActorCriticPolicy):
    """As if it were defined in a module of the user's, `dqn.recurrent`."""


RecurrentNeighbour.__module__ = "dqn.recurrent"


class ContribPolicy(ActorCriticPolicy):
    """As if SB3-Contrib had a recurrent policy that fits."""


ContribPolicy.__module__ = "sb3_contrib.common.recurrent.policies"


class Remembering(PPOExt):
    """A subclass that uses a policy of SB3-Contrib, and says so."""

    policy_aliases = {**PPOExt.policy_aliases, "ContribPolicy": ContribPolicy}  # noqa: RUF012


def test_zip_is_not_taken_for_another_algorithm(tmp_path):
    """
    Neither the name of a user's module, nor a policy that the class itself names, nor an attribute that was left out makes a
    zip one of another algorithm.
    """
    for model, exclude in [
        (PPO(RecurrentNeighbour, ToyEnv()), []),
        (Remembering("ContribPolicy", ToyEnv()), []),
        (PPO("MlpPolicy", ToyEnv()), ["clip_range", "n_epochs"]),
    ]:
        model.save(tmp_path / "model", exclude=exclude)
        custom_objects = {"policy_class": type(model.policy)}
        loaded = (Remembering if isinstance(model, Remembering) else PPOExt).load(
            tmp_path / "model", custom_objects=custom_objects
        )
        assert_equal(model.policy.state_dict(), loaded.policy.state_dict(), "policy")


def test_stats_window_size_of_load(saved):
    """`stats_window_size` given to `load` acts, where SB3's `load` sets an attribute that nobody reads."""
    assert PPOExt.load(saved, env=ToyEnv(), stats_window_size=3).learn(16).ep_info_buffer.maxlen == 3


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (None, "`env=None`"),
        (5, "`env=5`.*a `VecEnv`, or the id"),
        (ToyEnv, "`env=<class .*it is a class; give an instance"),
        ([ToyEnv()], r"`env=\[.*a `VecEnv`"),
        ("NoSuchEnv-v0", "`env='NoSuchEnv-v0'`.*NoSuchEnv` doesn't exist"),
        ("no id", "`env='no id'`.*Malformed"),
        (gym.vector.SyncVectorEnv([ToyEnv]), r"`env=SyncVectorEnv.*`sb3_ppo_ext.VectorEnvAdapter\(env\)`"),
    ],
    ids=short,
)
def test_no_environment(env, message):
    """No environment, or something that is none, is refused."""
    with pytest.raises(ValueError, match=message) as caught:
        PPOExt("MlpPolicy", env)
    assert isinstance(caught.value, gym.error.UnregisteredEnv) == isinstance(env, str)


def test_truncated_zip(saved, tmp_path):
    """A zip that was cut anywhere is refused, given by name or as an open file."""
    whole = saved.read_bytes()
    for length in [0, 1, 100, *range(1000, len(whole), len(whole) // 25), len(whole) - 1]:
        (tmp_path / "cut.zip").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut.zip is not a whole model zip.*earlier checkpoint"):
            PPOExt.load(tmp_path / "cut.zip")
        with pytest.raises(ValueError, match="the file is not a whole model zip"):
            PPOExt.load(io.BytesIO(whole[:length]))


def test_damaged_zip(saved):
    """A flipped bit anywhere either changes nothing or raises a ValueError."""
    whole = saved.read_bytes()
    expected = PPOExt.load(saved).policy.state_dict()
    rng = np.random.default_rng(0)
    refused = 0
    for position in [*rng.integers(len(whole), size=60), *range(len(whole) - 600, len(whole), 9)]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << rng.integers(8)
        try:
            model = PPOExt.load(io.BytesIO(bytes(damaged)))
        except ValueError:
            refused += 1
        else:
            assert_equal(expected, model.policy.state_dict(), "policy")
    assert refused > 60


def test_zip_whose_sizes_are_wrong(saved):
    """Wrong sizes in the directory of the zip, which no checksum covers, are refused."""
    whole = saved.read_bytes()
    directory = [match.start() for match in re.finditer(rb"PK\x01\x02", whole)][-6:]
    for entry in directory:
        for byte in range(24, 28):  # of the size
            damaged = bytearray(whole)
            damaged[entry + byte] ^= 1
            with pytest.raises(ValueError, match="not a whole model zip"):
                PPOExt.load(io.BytesIO(bytes(damaged)))


@pytest.mark.parametrize("lost", ["data", "policy.pth", "policy.optimizer.pth"])
def test_incomplete_zip(saved, lost):
    """A zip without one of its members is refused, and the member is named."""
    members = parts(saved.read_bytes())
    del members[lost]
    with pytest.raises(ValueError, match=lost):
        PPOExt.load(io.BytesIO(packed(members)))


def test_missing_file(tmp_path):
    """A missing file raises FileNotFoundError, as SB3's `load` does."""
    with pytest.raises(FileNotFoundError):
        PPOExt.load(tmp_path / "nothing.zip")


def test_zip_given_in_other_ways(saved):
    """A zip is loaded by its name with or without extension, as `str` or `Path`, and as an open file."""
    expected = PPOExt.load(saved).policy.state_dict()
    with open(saved, "rb") as file:
        sources = [str(saved), saved.with_suffix(""), io.BytesIO(saved.read_bytes()), file]
        for source in sources:
            assert_equal(expected, PPOExt.load(source).policy.state_dict(), "policy")


# Environments that return NaN or infinity

NAN, INF = np.float32("nan"), np.float32("inf")
BAD_DICT = DICT.sample() | {"joints": np.float32([0, INF, 0])}


def brittle(wrap=lambda env: env, n_envs=3, **kwargs):
    """Vectorised environments of which the one in the middle is brittle."""
    middle = n_envs // 2
    kwargs = {"length": 1000, "p_end": 0.0, **kwargs}
    ordinary = {k: v for k, v in kwargs.items() if k in ("observation_space", "p_end", "length")}
    return wrap(DummyVecEnv([(lambda i=i: Brittle(**kwargs) if i == middle else ToyEnv(**ordinary)) for i in range(n_envs)]))


@pytest.mark.parametrize(
    ("kwargs", "wrap", "message"),
    [
        (dict(observation=np.float32([0, NAN, 0])), None, r"observation .*\(nan at index \(1,\)\) at step 9 "),
        (dict(observation=np.float32([INF, 0, 0])), None, r"observation .*\(inf at index \(0,\)\) at step 9 "),
        (dict(reward=float("nan")), None, r"reward .*\(nan\) at step 9 "),
        (dict(reward=float("-inf")), None, r"reward .*\(-inf\) at step 9 "),
        (dict(observation=np.float32([0, NAN, 0]), at=0), None, r"observation .*at step 0 "),
        (dict(observation=np.float32([0, NAN, 0]), at=0), VecNormalize, r"observation .*at step 0 "),
        (dict(reward=float("nan")), lambda env: VecNormalize(VecNormalize(env), norm_obs=False), r"reward .*at step 9 "),
        (dict(observation=np.float32([0, NAN, 0])), VecNormalize, r"observation .*\(nan at index \(1,\)\) at step 9 "),
        (dict(reward=float("inf")), VecNormalize, r"reward .*\(inf\) at step 9 "),
        (dict(observation=np.float32([0, NAN, 0])), lambda env: VecFrameStack(env, 2), r"observation .*at step 9 "),
        (
            dict(observation=BAD_DICT, observation_space=DICT),
            None,
            r"observation .*'joints': inf at index \(1,\)\) at step 9 ",
        ),
        (
            dict(observation=np.float32([0, NAN, 0]), length=10),
            None,
            r"terminal observation .*\(nan at index \(1,\)\) at step 9 ",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_environment_that_is_not_finite(kwargs, wrap, message):
    """The environment's index and the step are named, and the model stays as it was, so that it can go on."""
    env = brittle(wrap or (lambda env: env), **kwargs)
    model = PPOExt("MultiInputPolicy" if "observation_space" in kwargs else "MlpPolicy", env, n_steps=16, batch_size=48)
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    with pytest.raises(ValueError, match=f"Environment 1: the {message}"):
        model.learn(1000)
    assert_equal(before, model.policy.state_dict(), "policy")
    assert model.num_timesteps == model._n_updates == 0
    assert len(model.ep_info_buffer or []) == 0
    assert model.rollout_buffer.pos == 0
    # The environment is well again, and no statistics are spoilt.
    model.learn(48, reset_num_timesteps=False)
    assert model._n_updates > 0
    assert all(th.isfinite(parameter).all() for parameter in model.policy.parameters())


def test_another_number_of_environments():
    """`set_env` raises SB3's message as a ValueError, too."""
    model = PPOExt("MlpPolicy", make_toys(2), n_steps=8, batch_size=8)
    with pytest.raises(ValueError, match="number of environments to be set is different"):
        model.set_env(make_toys(3))


def test_observation_beyond_float32():
    """A number that is finite for the environment, but not in float32, in which policies read it, is named."""
    assert find_non_finite(np.array([[0, 1e38]])) is None
    env = brittle(observation=np.array([0, 0, 1e39]), observation_space=spaces.Box(-np.inf, np.inf, (3,), np.float64))
    with pytest.raises(ValueError, match=r"observation .*\(1e\+39 at index \(2,\), beyond the range of float32\) at step 9 "):
        PPOExt("MlpPolicy", env, n_steps=16, batch_size=48).learn(48)


def test_rollouts_before_the_bad_one_count():
    """Only the rollout that failed is taken back."""
    expected = PPOExt("MlpPolicy", brittle(at=10**6), n_steps=16, batch_size=48, seed=0).learn(48)
    model = PPOExt("MlpPolicy", brittle(reward=float("nan"), at=20), n_steps=16, batch_size=48, seed=0)
    with pytest.raises(ValueError, match="at step 3 of the rollout, after 57 timesteps"):
        model.learn(1000)
    assert_equal(expected.policy.state_dict(), model.policy.state_dict(), "policy")
    assert_equal(expected.policy.optimizer.state_dict(), model.policy.optimizer.state_dict(), "optimizer")
    assert model.num_timesteps == 48


def test_integer_observations_are_not_checked_for_nan():
    """Observations of integers, which cannot be NaN, train without the check."""
    PPOExt("CnnPolicy", make_toys(observation_space=IMAGE), n_steps=8, batch_size=8).learn(16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(total_timesteps="2000"), "`total_timesteps='2000'`.*a number"),
        (dict(total_timesteps=float("nan")), "`total_timesteps=nan`.*at least 0"),
        (dict(total_timesteps=-5), "`total_timesteps=-5`.*at least 0"),
        (dict(total_timesteps=32, log_interval=0), "`log_interval=0`.*at least 1"),
        (dict(total_timesteps=32, callback="x"), "`callback='x'`.*a `BaseCallback`"),
        (dict(total_timesteps=32, callback=[print]), "`callback=.*a `BaseCallback`"),
    ],
    ids=str,
)
def test_bad_arguments_of_learn(arguments, message, tmp_path):
    """They are refused before anything is made or written."""
    model = PPOExt("MlpPolicy", ToyEnv(), n_steps=16, batch_size=16, device="cpu", tensorboard_log=str(tmp_path / "tb"))
    with pytest.raises(ValueError, match=message):
        model.learn(**arguments)
    assert not (tmp_path / "tb").exists()


def test_remedies_that_fit():
    """A remedy is one that works where it is given."""
    model = PPOExt("MlpPolicy", ToyEnv(), n_steps=16, batch_size=16, device="cpu")
    with pytest.raises(ValueError, match="ids are for the constructor and `resume`"):
        model.set_env("CartPole-v1")
    with pytest.raises(ValueError, match=r"`target_kl='None'`.*`null` in YAML"):
        PPOExt("MlpPolicy", ToyEnv(), target_kl="None")
    with pytest.raises(ValueError, match="between 0 and 4294967295"):
        PPOExt("MlpPolicy", ToyEnv(), seed=-1)
    with pytest.raises(ValueError, match=r"`y`: it takes none"):
        PPOExt("MlpPolicy", ToyEnv(), policy_kwargs=dict(features_extractor_kwargs=dict(y=1)))


class ConcatVecEnv:
    """As SuperSuit's with `base_class="gymnasium"`, by its module."""

    __module__ = "supersuit.vector.concat_vec_env"


def test_vectorised_environments_of_supersuit():
    """The message names SuperSuit's argument that makes a `VecEnv` of SB3."""
    with pytest.raises(ValueError, match=r'base_class="stable_baselines3"'):
        PPOExt("MlpPolicy", ConcatVecEnv())
