"""Numbers, callables and strings as schedules."""

import pickle

import numpy as np
import pytest
from stable_baselines3.common.utils import ConstantSchedule, LinearSchedule
from toys import ToyEnv

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.schedules import make_schedule


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.1, (0.1, 0.1, 0.1)),
        (1, (1.0, 1.0, 1.0)),
        (np.float32(0.5), (0.5, 0.5, 0.5)),
        ("lin_0.1", (0.1, 0.05, 0.0)),
        ("lin_3e-4", (3e-4, 1.5e-4, 0.0)),
        (lambda p: p**2, (1.0, 0.25, 0.0)),
        (LinearSchedule(1.0, 0.5, 0.5), (1.0, 0.5, 0.5)),
        (ConstantSchedule(0.2), (0.2, 0.2, 0.2)),
    ],
)
def test_values(value, expected):
    """At the start, in the middle and at the end of training."""
    schedule = make_schedule("learning_rate", value)
    assert [schedule(p) for p in (1.0, 0.5, 0.0)] == pytest.approx(expected)
    # `load` makes one of what is one already.
    assert [make_schedule("learning_rate", schedule)(p) for p in (1.0, 0.5, 0.0)] == pytest.approx(expected)


def test_can_be_pickled():
    assert pickle.loads(pickle.dumps(make_schedule("clip_range", "lin_0.2")))(0.5) == pytest.approx(0.1)


def test_string_acts_in_training(tmp_path):
    """Both are decayed, logged, saved, and can be given to `load`."""
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
