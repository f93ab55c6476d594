"""NumPy's numbers as options become Python's, so that every model that is saved can be loaded."""

import copy

import numpy as np
import pytest
import torch as th
from support.options import in_few_sets, make
from support.parity import assert_equal
from support.zips import Zip

from sb3_ppo_ext.common.plain_data import python_numbers
from sb3_ppo_ext.options import ALL_OPTIONS
from sb3_ppo_ext.options.reference import needed_by

OF_NUMPY = {bool: np.bool_, int: np.int64, float: np.float32}


def in_numpy(value):
    if type(value) in (list, tuple):
        return type(value)(map(in_numpy, value))
    if isinstance(value, dict):
        return {key: in_numpy(part) for key, part in value.items()}
    return OF_NUMPY.get(type(value), lambda same: same)(value)


def types_in(value):
    if isinstance(value, dict | list | tuple):
        return {kind for part in (value.values() if isinstance(value, dict) else value) for kind in types_in(part)}
    return {type(value)}


OPTIONS = [needed_by(row) | {name: row.examples[0]} for name, row in ALL_OPTIONS.items() if name != "n_steps"]
OPTIONS += [
    dict(n_steps=16, verbose=0, rollout_buffer_kwargs={}, sde_sample_freq=2, use_sde=True),
    dict(optimizer="adamw", policy_kwargs=dict(optimizer_kwargs=dict(betas=(0.5, 0.9), eps=1e-3))),
    dict(policy_kwargs=dict(log_std_init=-0.5, ortho_init=False, net_arch=dict(pi=[4], vf=[4, 4]))),
]


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("options", in_few_sets(OPTIONS), ids=str)
def test_each_option(options):
    """The model is that of Python's numbers, up to their precision; its zip loads, and what was given is not changed."""
    given = in_numpy(options)
    before = copy.deepcopy(given)
    model = make(given).learn(16)
    for name in options:
        value = getattr(model, ALL_OPTIONS[name].attribute if name in ALL_OPTIONS else name)
        assert not any(issubclass(kind, np.generic) for kind in types_in(value)), name
    assert types_in(given) == types_in(before)
    assert given == before
    for trusted in (True, False):
        loaded = Zip(model).load(trusted=trusted)
        assert_equal(model.policy.state_dict(), loaded.policy.state_dict(), "policy")
    python = make({name: python_numbers(value) for name, value in given.items()}).learn(16)
    assert_equal(python.get_parameters(), model.get_parameters(), "parameters")


def test_arguments_of_load():
    """`load` and `custom_objects` convert as well."""
    saved = Zip(make({}))
    for loaded in (saved.load(weight_decay=np.float64(0.01)), saved.load(custom_objects={"weight_decay": np.float64(0.01)})):
        assert type(loaded.weight_decay) is float
        assert type(Zip(loaded).load().policy.optimizer.param_groups[0]["weight_decay"]) is float


def test_numbers_that_a_callback_sets():
    """A learning rate of NumPy's type in the optimiser does not spoil the zip."""
    model = make({})
    model.policy.optimizer.param_groups[0]["lr"] = np.float64(0.1)
    assert Zip(model).load().policy.optimizer.param_groups[0]["lr"] == 0.1


def test_conversion():
    """Containers are new where a number is replaced, and the same object where none is."""
    untouched = {"a": [1, (2.0, "x")], "b": th.nn.ReLU}
    assert python_numbers(untouched) is untouched
    given = {"a": [np.int8(1), (np.float16(0.5), np.bool_(True))], "b": np.longdouble(2)}
    converted = python_numbers(given)
    assert converted == {"a": [1, (0.5, True)], "b": 2.0}
    assert types_in(converted) == {int, float, bool}
    assert types_in(given) == {np.int8, np.float16, np.bool_, np.longdouble}
