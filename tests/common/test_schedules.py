"""Numbers, callables and strings as schedules."""

import math
import pickle

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.utils import ConstantSchedule, LinearSchedule
from support.toys import ToyEnv

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.common.schedules import DecaySchedule, KLAdaptive, in_float32_range, is_constant, make_schedule, value_of


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.1, (0.1, 0.1, 0.1)),
        (1, (1.0, 1.0, 1.0)),
        (np.float32(0.5), (0.5, 0.5, 0.5)),
        ("lin_0.1", (0.1, 0.05, 0.0)),
        ("lin_3e-4", (3e-4, 1.5e-4, 0.0)),
        ("hold_0.1", (0.1, 0.1, 0.0)),
        (lambda p: p**2, (1.0, 0.25, 0.0)),
        (LinearSchedule(1.0, 0.5, 0.5), (1.0, 0.5, 0.5)),
        (ConstantSchedule(0.2), (0.2, 0.2, 0.2)),
    ],
)
def test_values(value, expected):
    """Values at the start, in the middle and at the end of the training."""
    schedule = make_schedule("learning_rate", value)
    assert [schedule(p) for p in (1.0, 0.5, 0.0)] == pytest.approx(expected)
    # `load` makes one of what is one already.
    assert [make_schedule("learning_rate", schedule)(p) for p in (1.0, 0.5, 0.0)] == pytest.approx(expected)


def test_linear_is_never_negative():
    """A last rollout that ends past the end has a learning rate of 0, where a negative one would unlearn."""
    linear = make_schedule("learning_rate", "lin_0.1")
    assert [make_schedule("clip_range", "hold_0.1")(p) for p in (0.7, 0.4, 0.25, -0.1)] == [0.1, 0.8 * 0.1, 0.5 * 0.1, 0.0]
    for schedule in (linear, DecaySchedule(ConstantSchedule(0.1), "linear", 0.0, 0.0)):
        assert [schedule(p) for p in (0.7, 0.25, -0.1)] == [0.7 * 0.1, 0.25 * 0.1, 0.0]
    model = PPOExt("MlpPolicy", ToyEnv(), n_steps=8, batch_size=8, learning_rate="lin_0.1").learn(9)
    assert model.num_timesteps == 16
    assert model.logger.name_to_value["train/learning_rate"] == 0.0


def test_can_be_pickled():
    """A pickled schedule gives the same values."""
    assert pickle.loads(pickle.dumps(make_schedule("clip_range", "lin_0.2")))(0.5) == pytest.approx(0.1)


def test_string_acts_in_training(tmp_path):
    """Strings as learning rate and clip ranges are decayed, logged and saved, and can be given to `load`."""
    options = dict(learning_rate="lin_0.01", clip_range="lin_0.4", clip_range_vf="lin_0.8")
    model = PPOExt("MlpPolicy", ToyEnv(), n_steps=8, batch_size=8, **options).learn(16)
    model.save(tmp_path / "model")

    def logged(model):
        names = ("learning_rate", "clip_range", "clip_range_vf")
        return [model.logger.name_to_value[f"train/{name}"] for name in names]

    assert logged(model) == [0.0, 0.0, 0.0]
    model.learn(16, callback=lambda local, _: local["self"].num_timesteps < 12)
    assert logged(model) == pytest.approx([0.005, 0.2, 0.4])
    assert model.policy.optimizer.param_groups[0]["lr"] == pytest.approx(0.005)

    loaded = PPOExt.load(tmp_path / "model", env=ToyEnv())
    assert loaded.lr_schedule(0.5) == pytest.approx(0.005)
    assert loaded.clip_range(0.5) == pytest.approx(0.2)
    assert loaded.clip_range_vf(0.5) == pytest.approx(0.4)
    loaded = PPOExt.load(tmp_path / "model", env=ToyEnv(), learning_rate="lin_0.02", clip_range="lin_0.2")
    assert loaded.lr_schedule(0.5) == pytest.approx(0.01)
    assert loaded.clip_range(0.5) == pytest.approx(0.1)


def test_value_of():
    """The value of a number is the number, and that of a schedule its value at the progress."""
    assert value_of(0.3, 0.5) == 0.3
    assert value_of(np.float32(0.5), 0.5) == 0.5
    assert value_of(LinearSchedule(1.0, 0.0, 1.0), 0.25) == 0.25


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.1, True),
        (np.float32(0.1), True),
        (ConstantSchedule(0.1), True),
        (make_schedule("ent_coef", 0.1), True),
        ("lin_0.1", False),
        (make_schedule("ent_coef", "lin_0.1"), False),
        (lambda p: 0.1, False),  # nobody can know
    ],
)
def test_is_constant(value, expected):
    """Numbers and constant schedules are known to be constant, other callables are not."""
    assert is_constant(value) is expected


# Decay and warm-up

AT = (0.0, 0.05, 0.1, 0.325, 0.55, 1.0, 1.02)  # how much of the training is done; the last rollout ends past the end
SQRT = math.sqrt(2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(decay="constant", min_fraction=0.0, warmup=0.1), (0, 0.5, 1, 1, 1, 1, 1)),
        (dict(decay="linear", min_fraction=0.0, warmup=0.0), (1, 0.95, 0.9, 0.675, 0.45, 0, 0)),
        (dict(decay="linear", min_fraction=0.2, warmup=0.1), (0, 0.5, 1, 0.8, 0.6, 0.2, 0.2)),
        (dict(decay="cosine", min_fraction=0.0, warmup=0.1), (0, 0.5, 1, (2 + SQRT) / 4, 0.5, 0, 0)),
        (dict(decay="cosine", min_fraction=0.5, warmup=0.1), (0, 0.5, 1, (6 + SQRT) / 8, 0.75, 0.5, 0.5)),
    ],
)
def test_decay(options, expected):
    """The factor at each fraction of the training, computed by hand; pickling changes nothing."""
    schedule = DecaySchedule(ConstantSchedule(2.0), **options)
    assert [schedule(1 - done) for done in AT] == pytest.approx([2 * factor for factor in expected])
    assert pickle.loads(pickle.dumps(schedule))(0.5) == schedule(0.5)


@pytest.mark.parametrize(
    ("warmup", "rollout", "expected"),
    [
        (0.001, 0.25, (1 / 2, 1, 1, 1)),
        (0.25, 0.25, (1 / 2, 1, 1, 1)),
        (0.26, 0.25, (1 / 3, 2 / 3, 1, 1)),
        (0.99, 0.25, (1 / 5, 2 / 5, 3 / 5, 4 / 5)),
        (0.3, 0.1, (1 / 4, 2 / 4, 3 / 4, 1)),  # Rounding makes 0.3 / 0.1 less than 3, and 3 * 0.1 more than 0.3.
        (0.001, 2.0, (1 / 2, 1, 1, 1)),  # a training of less than one rollout
    ],
)
def test_warmup_in_updates(warmup, rollout, expected):
    """A warm-up of k updates multiplies the rate of update i by i / (k + 1), and always acts on the first one."""
    schedule = DecaySchedule(ConstantSchedule(2.0), "constant", 0.0, warmup, rollout)
    assert [schedule(1 - i * rollout) for i in (1, 2, 3, 4)] == pytest.approx([2 * factor for factor in expected])


def test_long_warmup():
    """With small rollouts, the warm-up is linear in the progress; after it, the decay does not depend on the rollouts."""
    coarse, fine, limit = (DecaySchedule(ConstantSchedule(1.0), "linear", 0.1, 0.2, r) for r in (0.05, 1e-6, 0.0))
    for done in (0.01, 0.1, 0.2, 0.5, 1.0):
        assert fine(1 - done) == pytest.approx(limit(1 - done), rel=1e-4)
    assert [coarse(0.5), coarse(0.0)] == [limit(0.5), limit(0.0)]


def test_warmup_of_a_schedule():
    """The factor of the warm-up multiplies a schedule."""
    schedule = DecaySchedule(LinearSchedule(1.0, 0.0, 1.0), "constant", 0.0, 0.5)
    assert [schedule(p) for p in (0.75, 0.5, 0.25)] == pytest.approx([0.375, 0.5, 0.25])


# What follows the KL divergence


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.016, 2.0), (0.0149, 1.0), (0.01, 1.0), (0.0067, 1.0), (0.0066, 0.5), (0.0, 1.0), (math.nan, 1.0)]
)
def test_kl_coefficient(kl, factor):
    """The coefficient is doubled above 1.5 times the target, and halved below the target / 1.5."""
    coefficient = KLAdaptive(0.2, target=0.01, factor=2.0, tolerance=1.5, bounds=(0.0, 1.0))
    coefficient.update(kl)
    assert coefficient.value == pytest.approx(0.2 * factor)


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.021, 1 / 1.5), (0.02, 1.0), (0.005, 1.0), (0.004, 1.5), (0.0, 1.0), (math.inf, 1 / 1.5)]
)
def test_learning_rate(kl, factor):
    """The rate is divided by 1.5 above twice the target, and multiplied by 1.5 below half of the target and above 0."""
    rate = KLAdaptive(1e-3, target=0.01, factor=1 / 1.5, tolerance=2.0, bounds=(1e-5, 1e-2))
    rate.update(kl)
    assert rate.value == rate(0.3) == pytest.approx(1e-3 * factor)


@pytest.mark.parametrize(
    ("kl", "ratio"),
    [(0.0144, 1.2), (0.01, 1.0), (0.0064, 0.8), (0.04, 1.5), (0.0025, 1 / 1.5), (0.0, 1.0), (-1e-9, 1.0), (math.nan, 1.0)],
)
def test_changes_in_proportion(kl, ratio):
    """Without a tolerance, a learning rate is divided by sqrt(KL / target), and a coefficient multiplied, by 1.5 at most."""
    for factor, expected in ((1 / 1.5, 0.3 / ratio), (1.5, 0.3 * ratio)):
        value = KLAdaptive(0.3, target=0.01, factor=factor, tolerance=None, bounds=(0.0, 1.0))
        value.update(kl)
        assert value.value == pytest.approx(expected)


def test_extreme_changes_in_proportion():
    """The largest change stays the largest, also if the target is 0, or the KL divergence is infinite or hardly above 0."""
    for kl, target, ratio in ((1e-6, 0.0, 1.5), (math.inf, 0.01, 1.5), (1e308, 1e-308, 1.5), (5e-324, 1e308, 1 / 1.5)):
        rate = KLAdaptive(0.3, target=lambda progress, target=target: target, factor=1 / 1.5, tolerance=None, bounds=(0, 1))
        rate.update(kl, 0.5)
        assert rate.value == pytest.approx(0.3 / ratio)


def test_proportional_rule_finds_the_rate():
    """
    Where the KL divergence grows with the square of the learning rate, the rate that has the target is found from all starts;
    with a threshold, it is found but for a factor of sqrt(2).
    """
    right, reached = 1e-3, {2.0: [], None: []}
    for tolerance, ends in reached.items():
        for start in (1e-5, 1e-4, 3e-4, 1e-2):
            rate = KLAdaptive(start, target=0.01, factor=1 / 1.5, tolerance=tolerance, bounds=(1e-5, 1e-2))
            for _ in range(20):
                rate.update(0.01 * (rate.value / right) ** 2)
            ends.append(rate.value)
    assert reached[None] == pytest.approx([right] * 4)
    assert max(reached[2.0]) > 1.2 * min(reached[2.0])


def test_bounds_of_what_follows_the_kl():
    """The value stays within its bounds, at the start and however often it is adapted."""
    rate = KLAdaptive(1e-3, target=0.01, factor=1 / 1.5, tolerance=2.0, bounds=(1e-5, 1e-2))
    assert KLAdaptive(1.0, target=0.01, factor=1 / 1.5, tolerance=2.0, bounds=(1e-5, 1e-2)).value == 1e-2
    for kl, bound in ((1.0, 1e-5), (1e-6, 1e-2)):
        for _ in range(30):
            rate.update(kl)
        assert rate.value == bound


def test_state_of_what_follows_the_kl():
    """A saved value is taken up again, unless the user has chosen another start."""

    def rate(start, bounds=(1e-5, 1e-2)):
        return KLAdaptive(start, target=0.01, factor=1 / 1.5, tolerance=2.0, bounds=bounds)

    learned = rate(1e-3)
    learned.update(1.0)
    for other, expected in ((rate(1e-3), 1e-3 / 1.5), (rate(2e-3), 2e-3), (rate(1e-3, (9e-4, 1e-2)), 9e-4)):
        other.load_state_dict(learned.state_dict())
        assert other.value == pytest.approx(expected)


def test_range_of_float32():
    """Numbers keep their value, in double precision, and those that float32 does not have are infinite."""
    largest = float(np.finfo(np.float32).max)
    assert [in_float32_range(value) for value in (0, 0.1, 10**30, largest)] == [0.0, 0.1, 1e30, largest]
    assert [in_float32_range(value) for value in (math.inf, 1e39, 10**300)] == [math.inf] * 3


NEEDED = {
    "adv_clip": {"advantage_norm": "ema"},
    "adv_min_std": {"advantage_norm": "ema"},
    "bounds_limit": {"bounds_coef": 0.1},
}
LARGE = [(name, 10**30) for name in ("vf_coef", "dual_clip", "adv_clip", "adv_min_std", "bounds_limit", "weight_decay")]
LARGE += [(name, 1e300) for name in ("clip_range", "clip_range_vf", "adv_clip")]


@pytest.mark.parametrize(("name", "value"), LARGE)
def test_large_numbers(name, value):
    """Integers beyond 64 bits act as numbers, and floats beyond float32 as infinity, although PyTorch refuses both."""
    options = dict(n_steps=8, batch_size=8, n_epochs=1, bad_gradients="skip", backend="eager", **NEEDED.get(name, {}))
    model = PPOExt("MlpPolicy", ToyEnv(), **options, **{name: value}).learn(8)
    assert all(th.isfinite(parameter).all() for parameter in model.policy.parameters())
