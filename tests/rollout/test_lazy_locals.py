"""Local variables that are made when a callback reads them."""

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.callbacks import CallbackList, EveryNTimesteps, StopTrainingOnMaxEpisodes

from sb3_ppo_ext.rollout.lazy_locals import LaterArrays, LazyLocals, keep_lazily


@pytest.fixture
def variables():
    """Arrays of two tensors, and a plain value."""
    return LazyLocals(rewards=LaterArrays(th.ones(3)), new_obs=LaterArrays({"a": th.zeros(3, 2)}), n_steps=4)


def later(variables, name):
    return dict.__getitem__(variables, name)


def test_nothing_is_made_before_it_is_read(variables):
    """Passing the variables on, as callbacks do to their children, makes nothing."""
    held = LazyLocals(total=1)
    held.update(variables)
    assert not later(held, "rewards").made
    assert set(held) == {"total", "rewards", "new_obs", "n_steps"}
    assert type(held["rewards"]) is np.ndarray
    assert later(variables, "rewards").made
    assert not later(variables, "new_obs").made


@pytest.mark.parametrize(
    "read",
    [
        dict,
        lambda variables: {**variables},
        lambda variables: variables.copy(),
        lambda variables: dict(variables.items()),
        lambda variables: dict(zip(variables.keys(), variables.values(), strict=True)),
        lambda variables: {name: variables.get(name) for name in variables},
        lambda variables: {name: variables.pop(name) for name in list(variables)},
        lambda variables: {} | dict(variables),
    ],
)
def test_every_way_of_reading(variables, read):
    """However the variables are read, arrays are found."""
    found = read(variables)
    assert type(found) is dict
    np.testing.assert_array_equal(found["rewards"], np.ones(3))
    np.testing.assert_array_equal(found["new_obs"]["a"], np.zeros((3, 2)))
    assert found["n_steps"] == 4


def test_missing_variables(variables):
    """A variable that does not exist is missing as from any dictionary."""
    assert variables.get("infos") is None
    assert variables.pop("infos", 7) == 7
    with pytest.raises(KeyError):
        variables["infos"]


def test_what_is_written(variables):
    """Arrays that were read are the new values of the tensors; the tensors of the environment are not written to."""
    rewards, observations = later(variables, "rewards"), later(variables, "new_obs")
    source = rewards.source
    assert rewards.tensors() is source
    variables["rewards"] *= 5.0
    assert rewards.tensors().tolist() == [5.0] * 3
    assert source.tolist() == [1.0] * 3
    variables["new_obs"]["a"][1] = 2.0
    assert observations.tensors()["a"].sum() == 4.0


def test_a_training_loop_of_a_user(variables):
    """Callbacks that were given a plain dictionary keep it, share it as before, and nothing is made for them."""
    inner = StopTrainingOnMaxEpisodes(1)
    callback = CallbackList([EveryNTimesteps(2, CallbackList([inner]))])
    given = dict(total=1)
    for each in (callback, *callback.callbacks, inner):
        each.locals = given
    keep_lazily(callback)
    callback.update_locals(variables)
    assert not later(variables, "rewards").made
    assert not later(variables, "new_obs").made
    assert inner.locals is callback.locals
    assert inner.locals["total"] == 1
    assert inner.locals["rewards"].sum() == 3.0
