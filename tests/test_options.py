"""Every option is saved and loaded, comes from Python, YAML and `-params`; and what cannot be combined is refused."""

import itertools
import re
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import optuna
import pytest
import yaml
from gymnasium import spaces
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from stable_baselines3 import PPO
from support.cases import listed
from support.hybrid import KICK
from support.options import (
    OF_MASKS,
    SMALL,
    WITH_POLICIES,
    is_legal,
    make,
    own_options,
    with_needs,
)
from support.parity import assert_equal
from support.toys import BOX_ACTION, make_toys
from support.zips import Zip
from support.zoo import config, saved

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.distributions import ACTION_DISTS, FAMILIES, ActionDist
from sb3_ppo_ext.engines.registry import ENGINES, Backend
from sb3_ppo_ext.options import ALL_OPTIONS, OWN_OPTIONS, table
from sb3_ppo_ext.options.constructor import PolicyName
from sb3_ppo_ext.options.reference import needed_by, reference
from sb3_ppo_ext.update.config import AdvantageNorm
from sb3_ppo_ext.update.losses import SURROGATES, SurrogateName
from sb3_ppo_ext.update.optimizers import OPTIMIZERS, OptimizerName
from sb3_ppo_ext.zoo.tuning import convert_ppo_ext_params

DOCS = Path(__file__).parents[1] / "docs"


def test_a_row_for_each_option():
    """Each option that the constructor adds has a row, and each row is of an argument, in whose attribute its value is."""
    model = PPOExt("MlpPolicy", "CartPole-v1", device="cpu")
    assert list(own_options()) == list(OWN_OPTIONS)
    assert ALL_OPTIONS.keys() == table.ROWS.keys()
    assert {name: getattr(model, name) for name in OWN_OPTIONS} == own_options()


def test_rows_accept_their_own_values():
    """Each row accepts its default and its examples, which differ from each other."""
    for name, row in ALL_OPTIONS.items():
        for value in (row.default, *row.examples):
            row.accepted.check(name, value)
        assert row.examples, name
        assert row.default not in row.examples, name


def test_every_option_is_documented():
    """The docstring of the constructor has a sentence for each option, and docs/options.md names each of ours."""
    for name, option in ALL_OPTIONS.items():
        assert re.fullmatch(r"[A-Z].*[\w`)]", option.doc), name
    for name in OWN_OPTIONS:
        assert f"`{name}" in (DOCS / "options.md").read_text(encoding="utf-8"), name


def test_reference_is_up_to_date():
    """If it is not: `python -m sb3_ppo_ext.options.reference > docs/options_reference.md`."""
    assert (DOCS / "options_reference.md").read_text(encoding="utf-8") == reference()


@pytest.mark.parametrize(
    ("choices", "registered"),
    [
        (Backend, ("auto", *ENGINES)),
        (SurrogateName, tuple(SURROGATES)),
        (ActionDist, [family.name for family in FAMILIES if family.name in ACTION_DISTS]),
        (OptimizerName, ("adam", *OPTIMIZERS, "muon")),
        (PolicyName, tuple(PPOExt.policy_aliases)),
    ],
    ids=["backend", "surrogate", "action_dist", "optimizer", "policy"],
)
def test_types_name_what_is_registered(choices, registered):
    """The Literal types, which an editor completes, list what is registered."""
    assert get_args(choices) == tuple(registered)


CONFLICTS = [
    needed_by(row) | {row.name: value} | dict(conflict.when.example)
    for row in ALL_OPTIONS.values()
    for value in row.examples
    for conflict in row.conflicts
    if conflict.when.example
]


@pytest.mark.parametrize("options", CONFLICTS, ids=str)
def test_each_conflict_is_refused(options):
    """What a row says cannot be combined is refused."""
    with pytest.raises(ValueError, match="is not valid"):
        make(options)


@pytest.mark.integration
def test_example_of_the_documentation():
    """The subclass with its own loss runs word for word, but for the number of steps: one rollout."""
    (code,) = re.findall(r"```python\n(import torch.*?)```", (DOCS / "options.md").read_text(encoding="utf-8"), re.DOTALL)
    namespace = {}
    exec(code.replace("50_000", "4096"), namespace)
    assert 0 < namespace["model"].logger.name_to_value["train/asymmetry"] < 1


# Pairs of values of two options, with what these need
PAIRS = [
    with_needs({one: value, other: other_value})
    for one, other in itertools.combinations(WITH_POLICIES, 2)
    for value, other_value in itertools.product(WITH_POLICIES[one], WITH_POLICIES[other])
]
ACTION_SPACES = [BOX_ACTION, spaces.Discrete(3), KICK]


@pytest.mark.parametrize("action_space", ACTION_SPACES, ids=["box", "discrete", "hybrid"])
def test_illegal_pairs(action_space):
    """Pairs that are not legal raise ValueError before anything is trained."""
    illegal = [pair for pair in PAIRS if not is_legal(pair, action_space)]
    assert len(illegal) > 10
    for options in illegal:
        with pytest.raises(ValueError, match=r"is not valid|gSDE|Box"):
            make(options, action_space)


def test_table_agrees_with_the_oracle():
    """The conflicts in the rows are those of `is_legal`, which is written independently."""
    rows = ALL_OPTIONS.values()
    fixed = {row.attribute: row.default for row in rows} | dict(policy_kwargs={}, rollout_buffer_class=None)
    for options, action_space in itertools.product([pair for pair in PAIRS if "policy" not in pair], ACTION_SPACES):
        model = SimpleNamespace(**{**fixed, **options}, action_space=action_space)
        changed = [row for row in rows if getattr(model, row.attribute) != fixed[row.attribute]]
        refused = [row.name for row in changed if any(conflict.when.holds(model) for conflict in row.conflicts)]
        assert bool(refused) != is_legal(options, action_space), (options, action_space, refused)


# Zips


def test_options_given_to_load():
    """Options given to `load` replace the saved ones; what was learned under these starts anew."""
    options = dict(advantage_norm="ema", kl_coef=0.1, kl_target=1e-9, adaptive_lr_kl=1e-9, ent_coef="lin_0.02")
    model = make(options).learn(32)
    load = partial(Zip(model).load, env=make_toys())
    loaded = load()
    assert loaded.kl_coefficient.value == model.kl_coefficient.value > 0.1
    assert loaded.adaptive_lr.value == model.adaptive_lr.value < 3e-4
    assert loaded.advantage_normalizer.state_dict() == model.advantage_normalizer.state_dict()
    assert loaded.ent_coef(0.5) == pytest.approx(0.01)
    loaded = load(kl_coef=0.7, learning_rate=1e-3, ent_coef="lin_0.01", advantage_norm="rollout")
    assert loaded.kl_coefficient.value == 0.7
    assert loaded.adaptive_lr.value == loaded.lr_schedule(1.0) == 1e-3
    assert loaded.ent_coef(0.5) == pytest.approx(0.005)
    assert loaded.advantage_normalizer is None
    loaded.learn(32, reset_num_timesteps=False)
    loaded = load(kl_target=None, adaptive_lr_kl=None, lr_decay="cosine", surrogate="spo")
    assert loaded.kl_coefficient is loaded.adaptive_lr is None
    loaded.learn(32, reset_num_timesteps=False)
    with pytest.raises(ValueError, match="`adaptive_lr_kl=1e-09`"):
        load(lr_decay="cosine")
    with pytest.raises(ValueError, match="has no option `vtrase`: did you mean `vtrace`"):
        load(vtrase=True)


def test_zips_of_ppo_take_options():
    """A zip of PPO takes options, and what PPO has not learned starts from the beginning."""
    model = PPO("MlpPolicy", make_toys(), **SMALL).learn(32)
    options = dict(advantage_norm="ema", kl_coef=0.1, kl_target=0.01, adaptive_lr_kl=0.01, vtrace=True)
    loaded = Zip(model).load(env=make_toys(), **options)
    assert_equal(model.policy.state_dict(), loaded.policy.state_dict(), "policy")
    loaded.learn(32, reset_num_timesteps=False)
    assert loaded.advantage_normalizer.state_dict()["weight"] == pytest.approx(1 - 0.95**2)


def test_ppo_loads_what_it_can_use():
    """PPO loads a zip whose options leave nothing behind beside the policy."""
    options = dict(advantage_norm="rollout", bounds_coef=0.1, vtrace=True, priority_alpha=0.5, lr_decay="cosine")
    model = make(options).learn(32)
    loaded = Zip(model).load(PPO, env=make_toys())
    assert_equal(model.policy.state_dict(), loaded.policy.state_dict(), "policy")
    loaded.learn(32)


def test_parameters_hold_what_was_learned():
    """`get_parameters` and `set_parameters` carry what options have learned from one model to another."""
    options = dict(advantage_norm="ema", kl_coef=0.1, kl_target=1e-9)
    model = make(options).learn(32)
    parameters = model.get_parameters()
    assert parameters.keys() == {"policy", "policy.optimizer", "advantage_normalizer", "kl_coefficient"}
    other = make(options)
    other.set_parameters(parameters)
    assert other.kl_coefficient.value == model.kl_coefficient.value
    plain = make({})
    plain.set_parameters(parameters)
    assert_equal(model.policy.state_dict(), plain.policy.state_dict(), "policy")
    other = make(options)
    other.set_parameters({"policy": model.policy.state_dict()}, exact_match=False)
    assert other.kl_coefficient.value == 0.1


def test_zips_that_lack_an_option(tmp_path):
    """An option that is younger than the zip has its default."""
    model = make(dict(surrogate="spo", kl_coef=0.1, advantage_norm="ema"))
    model.save(tmp_path / "model.zip", exclude=list(OWN_OPTIONS))
    loaded = PPOExt.load(tmp_path / "model.zip", env=make_toys())
    assert {name: getattr(loaded, name) for name in OWN_OPTIONS} == own_options()
    assert_equal(model.policy.state_dict(), loaded.policy.state_dict(), "policy")
    loaded.learn(32)


# RL Zoo

ZOO_OPTIONS = {
    **dict(normalize_obs=True, normalize_reward=True, clip_obs=5.0, clip_reward=4.0, normalize_freq="rollout"),
    **dict(advantage_norm="ema", adv_ema_alpha=0.1, adv_clip=3.0, bounds_coef=0.01, bounds_limit=1.0, clip_range_vf=0.2),
    **dict(vf_clip_mode="max", dual_clip=3.0, kl_coef=0.1, kl_target=0.02, ent_coef="lin_0.01", vtrace=True),
    **dict(priority_alpha=0.5, priority_segment=8, optimizer="adamw", weight_decay=0.01, lr_decay="cosine", lr_warmup=0.1),
    **dict(critic_learning_rate=0.002, max_clip_fraction=0.6, accumulate_grad=2, bad_gradients="skip", n_epochs=2),
    **dict(adv_ema_warm_start=False, adv_min_std=0.02, adv_shift_mean=False, vtrace_rho=1.2, vtrace_c=1.1),
    **dict(priority_beta=0.5, lr_min_fraction=0.1, action_dist="squashed_gaussian", backend="native"),
    **dict(native_threads=2, normalize_value=True, noise_color=0.5),
}
ADAPTIVE = dict(
    adaptive_lr_kl="lin_0.01", adaptive_lr_bounds=[0.0001, 0.002], surrogate="spo", learning_rate=0.001, lr_decay="constant"
)
ADAPTIVE |= dict(adaptive_lr_rule="proportional")
ADAPTIVE |= dict(action_dist="beta", deterministic_action="mode", use_sde=False, backend="device", amp_dtype="bfloat16")
ADAPTIVE |= dict(distributed="off", auxiliary_losses=dict(caps_temporal=0.1))


def test_zoo_options_are_all():
    """The tests with the Zoo below use every option but those of masks, which have tests of their own."""
    assert own_options().keys() - {*OF_MASKS} <= (ZOO_OPTIONS | ADAPTIVE).keys()


def assert_has_options(model, options):
    for name, value in options.items():
        if name not in ("ent_coef", "clip_range_vf", "learning_rate", "critic_learning_rate", "adaptive_lr_kl"):
            assert getattr(model, name) == value, name


def test_yaml(tmp_path, train_here, enjoy_here):
    """All options at once come from a file, as numbers, words and schedules; the agent can be watched."""
    entry = dict(n_envs=2, n_timesteps=512, policy="MlpPolicy", n_steps=64, batch_size=32) | ZOO_OPTIONS
    (tmp_path / "conf.yml").write_text(yaml.safe_dump({"Pendulum-v1": entry}))
    train_here("--env", "Pendulum-v1", "-conf", "conf.yml")
    model = PPOExt.load(saved(tmp_path, "Pendulum-v1"))
    assert_has_options(model, ZOO_OPTIONS)
    assert model.ent_coef(0.5) == pytest.approx(0.005)
    assert model.critic_lr_schedule(0.0) == pytest.approx(0.0002)
    assert model.advantage_normalizer.state_dict()["weight"] == pytest.approx(1 - 0.9**4)
    assert ZOO_OPTIONS.items() <= config(tmp_path, "Pendulum-v1").items()
    assert "Mean reward" in enjoy_here("Pendulum-v1", 200)


def test_params(tmp_path, train_here):
    """Options from the command line win over the entry of the environment."""
    given = [f"{name}:{value!r}" for name, value in ADAPTIVE.items()]
    train_here("--env", "Pendulum-v1", "-n", "512", "-params", "n_envs:2", "n_steps:64", *given)
    model = PPOExt.load(saved(tmp_path, "Pendulum-v1"))
    assert_has_options(model, ADAPTIVE)
    assert model.adaptive_lr.value != 0.001
    assert model.adaptive_lr_kl(0.5) == 0.005


def test_bad_option_from_the_command_line(tmp_path, train_here):
    """A bad option is refused with its message, and nothing is written."""
    with pytest.raises(SystemExit) as raised:
        train_here("--env", "Pendulum-v1", "-n", "512", "-params", "advantage_norm:'emma'")
    assert f"`advantage_norm='emma'` is not valid: give {listed(get_args(AdvantageNorm))}" in str(raised.value.code)
    assert not (tmp_path / "logs").exists()


@pytest.mark.integration
def test_tuning_keeps_options(tmp_path, train_here):
    """Trials start from the options of the entry, and `--trial-id` finds them again."""
    entry = dict(n_envs=2, n_timesteps=256, policy="MlpPolicy") | ZOO_OPTIONS
    (tmp_path / "conf.yml").write_text(yaml.safe_dump({"Pendulum-v1": entry}))
    arguments = ["--env", "Pendulum-v1", "-conf", "conf.yml", "--storage", "study.log", "--study-name", "s"]
    sampling = ["--n-trials", "2", "--n-startup-trials", "2", "--n-evaluations", "1", "--eval-episodes", "1"]
    train_here(*arguments, "-optimize", *sampling, "-n", "256", "--no-optim-plots")
    train_here(*arguments, "--trial-id", "0", "-n", "256")
    model = PPOExt.load(saved(tmp_path, "Pendulum-v1"))
    journal = JournalStorage(JournalFileBackend(str(tmp_path / "study.log")))
    sampled = convert_ppo_ext_params(optuna.load_study(storage=journal, study_name="s").trials[0].params)
    kept = {name: value for name, value in ZOO_OPTIONS.items() if name not in sampled}
    assert len(kept) > len(ZOO_OPTIONS) / 2
    assert_has_options(model, kept)
    assert_has_options(model, {name: value for name, value in sampled.items() if name in ZOO_OPTIONS})


@pytest.mark.parametrize("name", [name for name, row in ALL_OPTIONS.items() if row.needs is not None])
def test_without_what_it_needs(name):
    """An option that has no effect without another one says so, with the remedy; together with that, nothing is said."""
    row = ALL_OPTIONS[name]
    text = rf"`{name}=.*` has no effect without `{row.needs.name}"
    if name == "action_mask_key":  # The masks would be ordinary observations, and invalid actions would be chosen.
        with pytest.raises(ValueError, match="without `action_masking=True`"):
            make(without_needs(row))
        return
    with pytest.warns(UserWarning, match=text):
        make(without_needs(row))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has no effect without.*")
        make(with_needs({name: row.examples[0]}))
        if row.needs.instead is not None:
            make({name: row.examples[0], row.needs.instead: True})


def without_needs(row):
    """An option without the one that it needs."""
    needed = ALL_OPTIONS[row.needs.name]
    off = {needed.name: False} if needed.default is True else {}
    return {row.name: row.examples[0]} | off
