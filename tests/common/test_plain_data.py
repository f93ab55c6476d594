"""The plain form of attributes: everything that is built in comes back as it was, and nothing else."""

import json
import pathlib
from collections import OrderedDict, UserDict, UserList, deque

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.torch_layers import NatureCNN
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from support.parity import assert_equal

import sb3_ppo_ext
from sb3_ppo_ext.common.plain_data import NotPlainError, from_plain, python_numbers, to_plain, to_plain_or_culprit
from sb3_ppo_ext.schedules import DecaySchedule, HoldThenLinearToZero, KLAdaptive, LinearToZero

NESTED = spaces.Dict(OrderedDict(z=spaces.Discrete(2), a=spaces.Dict(b=spaces.MultiBinary(1))))
SPACES = [
    spaces.Box(-1, np.inf, (2, 3)),
    spaces.Box(0, 255, (3,), np.uint8),
    spaces.Box(np.array([-1.0, 0.0]), np.array([0.1, 1.0]), dtype=np.float64),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete([[2, 3]], start=[[1, 2]], dtype=np.int32),
    spaces.MultiBinary(3),
    spaces.MultiBinary([3, 2]),
    NESTED,
]
SCHEDULES = [
    FloatSchedule(0.1),
    FloatSchedule(LinearSchedule(1.0, 0.1, 0.5)),
    FloatSchedule(ConstantSchedule(np.float32(1))),
    DecaySchedule(FloatSchedule(LinearToZero(0.1)), "cosine", 0.1, 0.2),
    FloatSchedule(HoldThenLinearToZero(0.1)),
    KLAdaptive(1.0, 0.01, 2.0, 1.5, (1e-3, 1e3)),
    KLAdaptive(1e-3, 0.01, 1 / 1.5, None, (1e-5, 1e-2)),
]
VALUES = [None, True, 1, 1.5, float("inf"), "x", [1, [2.0]], (1, ("x",)), {"a": {1: (2,)}}, OrderedDict(b=1, a=2)]
VALUES += [deque([{"r": np.float64(1)}], maxlen=3), np.float32(0.1), np.bool_(True), np.str_("x"), pathlib.Path("a")]
VALUES += [np.zeros((2, 0, 3), np.uint8), np.array([[1, -2]], ">i2"), np.array(5.0), th.device("cuda:0")]
CLASSES = [th.nn.ReLU, th.nn.Tanh, th.optim.AdamW, NatureCNN, RolloutBuffer]


def through_json(value):
    return from_plain(json.loads(json.dumps(to_plain(value))))


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values(value):
    """Type and value are the same."""
    again = through_json(value)
    assert type(again) is type(value)
    if isinstance(value, np.ndarray):
        assert_equal(value, again, "array")
    else:
        assert again == value
    if isinstance(value, deque):
        assert again.maxlen == value.maxlen
        assert type(again[0]["r"]) is np.float64


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_spaces(space):
    """Spaces are equal, of the same shape and dtype, and with their parts in the same order."""
    again = through_json(space)
    assert again == space
    assert (again.shape, again.dtype) == (space.shape, space.dtype)
    if isinstance(space, spaces.Dict):
        assert list(again) == list(space)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)
def test_schedules(schedule):
    """Schedules have the same values, of the same type."""
    again = through_json(schedule)
    for progress in (1.0, 0.7, 0.0):
        assert again(progress) == schedule(progress)
        assert type(again(progress)) is type(schedule(progress))


def test_schedule_of_the_zoo():
    """The schedule that RL Zoo makes from `lin_0.1` comes back."""
    from rl_zoo3.utils import SimpleLinearSchedule

    assert through_json(FloatSchedule(SimpleLinearSchedule(0.1)))(0.5) == 0.05


def test_classes_of_this_package():
    """Every public class that a model can hold is known."""
    public = [value for value in vars(sb3_ppo_ext).values() if isinstance(value, type)]
    for each in CLASSES + [each for each in public if issubclass(each, th.nn.Module)]:
        assert through_json(each) is each
    schedules = {type(schedule) for schedule in SCHEDULES} | {LinearToZero, HoldThenLinearToZero}
    assert {each for each in public if "__call__" in vars(each)} <= schedules


class Mine:
    pass


UNKNOWN = [
    (Mine, "test_plain_data.Mine"),
    (Mine(), "test_plain_data.Mine"),
    ([{"a": (Mine,)}], "test_plain_data.Mine"),
    (FloatSchedule(lambda progress: progress), "test_plain_data.<lambda>"),
    (np.array([Mine()]), "numpy.ndarray of objects"),
    (type("ReLU", (th.nn.ReLU,), {"__module__": "torch.nn.modules.activation"}), "torch.nn.modules.activation.ReLU"),
    ({1}, "builtins.set"),
]


@pytest.mark.parametrize(("value", "culprit"), UNKNOWN, ids=[culprit for _, culprit in UNKNOWN])
def test_unknown_classes(value, culprit):
    """Whatever has another class is refused by its name, on both ways."""
    with pytest.raises(NotPlainError) as refusal:
        to_plain(value)
    assert refusal.value.culprit == culprit
    with pytest.raises(NotPlainError) as refusal:
        from_plain(json.loads(json.dumps(to_plain_or_culprit(value))))
    assert refusal.value.culprit == culprit


@pytest.mark.parametrize("name", ["os.system", "torch.nn.Module", "torch.load", "sb3_ppo_ext.PPOExt", "ReLU", ""])
def test_names_that_are_not_known(name):
    """A name of anything else is not looked up."""
    with pytest.raises(NotPlainError):
        from_plain({"class": name})
    with pytest.raises(NotPlainError):
        from_plain({"schedule": [name, {"dict": []}]})


class ListConfig(UserList):
    """As OmegaConf's, by its module."""

    __module__ = "omegaconf.listconfig"


class DictConfig(UserDict):
    """As OmegaConf's, by its module."""

    __module__ = "omegaconf.dictconfig"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (ListConfig([32, np.int64(16)]), [32, 16]),
        (DictConfig(net_arch=ListConfig([8]), other=DictConfig(pi=ListConfig([4]))), {"net_arch": [8], "other": {"pi": [4]}}),
        ({"net_arch": ListConfig([8])}, {"net_arch": [8]}),
    ],
)
def test_containers_of_hydra(given, expected):
    """Lists and dictionaries of OmegaConf become Python's, at any depth; others stay the same objects."""
    converted = python_numbers(given)
    assert converted == expected
    assert json.loads(json.dumps(converted)) == expected
    assert python_numbers(expected) is expected


def test_models_from_hydra(tmp_path):
    """A model takes them as arguments, and its zip has none of them."""
    kwargs = DictConfig(net_arch=DictConfig(pi=ListConfig([8]), vf=ListConfig([4])))
    bounds = ListConfig([1e-5, 1e-2])
    model = sb3_ppo_ext.PPOExt(
        "MlpPolicy", "CartPole-v1", policy_kwargs=kwargs, adaptive_lr_kl=0.01, adaptive_lr_bounds=bounds
    )
    assert model.policy_kwargs == {"net_arch": {"pi": [8], "vf": [4]}}
    assert [layer.out_features for layer in model.policy.mlp_extractor.value_net if hasattr(layer, "out_features")] == [4]
    model.save(tmp_path / "model")
    assert sb3_ppo_ext.PPOExt.load(tmp_path / "model", trusted=False).policy_kwargs == model.policy_kwargs
