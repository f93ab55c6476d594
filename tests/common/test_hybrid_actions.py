"""Actions of dictionaries and tuples become vectors, and vectors such actions."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from support.hybrid import ACTION, SPACES, equal

from sb3_ppo_ext.common.guards import NonFinitePolicyError
from sb3_ppo_ext.common.hybrid_actions import FlatActionSpace, boxes_of, kinds_of, sample_space
from sb3_ppo_ext.common.plain_data import from_plain, to_plain

ALL = SPACES["all kinds"]


def sampled(space, n=5):
    space.seed(0)
    return [space.sample() for _ in range(n)]


@pytest.mark.parametrize("name", SPACES)
def test_there_and_back(name):
    """Actions of the space are its vectors, and the vectors are these actions, one by one and several at once."""
    space = SPACES[name]
    flat, actions = FlatActionSpace(space), sampled(space)
    vectors = flat.flattened(actions)
    assert vectors.shape == (5, *flat.shape)
    assert all(flat.contains(vector) for vector in vectors)
    found = flat.structured(vectors)
    # A number in float64 is rounded to float32.
    np.testing.assert_array_equal(flat.flattened(found), vectors)
    assert all(space.contains(action) for action in found)
    if name != "all kinds":
        assert all(map(equal, actions, found))
    assert equal(flat.structured(vectors[2]), found[2])


def test_columns():
    """Numbers of boxes come first, then those of categories, last those of zeros and ones; each kind in the space's order."""
    flat = FlatActionSpace(ALL)
    np.testing.assert_array_equal(flat.flattened([ACTION]), [[0.25, -0.5, 0.0625, 1, 3, 2, 0, 1]])
    assert equal(flat.structured(np.float32([0.25, -0.5, 0.0625, 1, 3, 2, 0, 1])), ACTION)
    assert (flat.n_continuous, flat.n_values, flat.n_binary) == (3, [2, 4, 3], 2)
    np.testing.assert_array_equal(flat.low, [-1, -1, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(flat.high, np.float32([1, 1, 0.1, 1, 3, 2, 1, 1]))
    box, categories, binary = (kind for kind, _ in kinds_of(flat))
    np.testing.assert_array_equal(box.high, flat.high[:3])
    assert categories == spaces.MultiDiscrete([2, 4, 3])
    assert binary == spaces.MultiBinary(2)
    assert [box.shape for box in boxes_of(ALL)] == [(2,), (1,)]


@pytest.mark.parametrize("name", SPACES)
def test_tensors(name):
    """Tensors have the shapes and dtypes of their spaces, float32 for float64, and the numbers of the arrays."""
    flat = FlatActionSpace(SPACES[name])
    vectors = flat.flattened(sampled(SPACES[name]))
    batched = flat.batched(th.from_numpy(vectors))
    np.testing.assert_array_equal(flat.flattened(batched), vectors)
    if name == "all kinds":
        assert {key: (part.dtype, tuple(part.shape)) for key, part in batched.items()} == {
            "aim": (th.float32, (5, 2)),
            "buttons": (th.int8, (5, 2)),
            "gears": (th.int64, (5, 2)),
            "push": (th.float32, (5, 1)),
            "target": (th.int64, (5,)),
        }
    if name == "tuple":
        assert isinstance(batched, tuple)
        assert batched[1].shape == (5, 2, 2)


def test_rounding_stays_within_bounds():
    """float32 has no 0.1; the nearest number is larger, and no action in float64."""
    flat = FlatActionSpace(ALL)
    assert flat.high[2] > ALL["push"].high[0]
    assert ALL.contains(flat.structured(flat.high))


CHANGES = {
    "without a part": lambda action: action.pop("aim"),
    "another part": lambda action: action.update(more=1),
    "another shape": lambda action: action.update(aim=np.zeros(3)),
    "no number": lambda action: action.update(target="left"),
    "out of range": lambda action: action.update(target=3),
    "negative": lambda action: action.update(gears=np.array([-1, 0])),
    "between integers": lambda action: action.update(target=0.5),
    "NaN among integers": lambda action: action.update(buttons=np.array([np.nan, 0])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_actions_of_the_space(change):
    """What is no action of the space is refused by name, among others that are."""
    actions = sampled(ALL)
    CHANGES[change](actions[3])
    with pytest.raises(ValueError, match=r"`actions=.*give .*actions of Dict"):
        FlatActionSpace(ALL).flattened(actions)


def test_no_list_of_actions():
    """Neither an array, nor a number, nor nothing is taken for actions."""
    for actions in (np.zeros((2, 8)), 5, None, [], [None]):
        with pytest.raises(ValueError, match="`actions="):
            FlatActionSpace(ALL).flattened(actions)


def test_not_finite():
    """Of a policy whose outputs are not finite, there are no actions."""
    with pytest.raises(NonFinitePolicyError, match="1 of 8 numbers"):
        FlatActionSpace(ALL).structured(np.float32([0, 0, 0, 0, 0, np.nan, 0, 0]))


def test_other_spaces_are_left_alone():
    """Only dictionaries and tuples have vectors, and vectors have none of their own."""
    box, flat = spaces.Box(-1.0, 1.0, (2,)), FlatActionSpace(ALL)
    assert sample_space(box) is box
    assert sample_space(flat) is flat
    assert sample_space(ALL) == flat
    assert kinds_of(box) == [(box, ...)]


def test_seeds():
    """A seed of the vectors is one of the space, from which users sample."""
    expected = sampled(ALL, 1)[0]
    FlatActionSpace(ALL).seed(0)
    assert equal(ALL.sample(), expected)


@pytest.mark.parametrize("name", SPACES)
def test_plain_form(name):
    """Spaces of actions can be read from a zip without unpickling."""
    assert from_plain(to_plain(SPACES[name])) == SPACES[name]
