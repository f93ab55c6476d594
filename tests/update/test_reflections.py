"""Reflections of vectors, as users write them."""

import numpy as np
import pytest
import torch as th

from sb3_ppo_ext.update.reflections import parse_reflection

CPU = th.device("cpu")
X = th.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


def test_signed_permutation():
    """An entry is an index, or an index with a sign; minus element 0 can be written."""
    mirrored = parse_reflection("obs", [[0, -1], 2, [1, 1]]).on(CPU)(X)
    assert mirrored.tolist() == [[-1, 3, 2], [-4, 6, 5]]


def test_matrix():
    """A matrix that is its own inverse reflects at any plane."""
    assert parse_reflection("obs", dict(matrix=[[0, 1, 0], [1, 0, 0], [0, 0, -1]])).on(CPU)(X).tolist() == [
        [2, 1, -3],
        [5, 4, -6],
    ]
    tilted = parse_reflection("obs", dict(matrix=[[0.6, 0.8], [0.8, -0.6]])).on(CPU)
    assert tilted(th.tensor([2.0, 1.0])).tolist() == pytest.approx([2.0, 1.0])  # on the plane
    assert tilted(th.tensor([-1.0, 2.0])).tolist() == pytest.approx([1.0, -2.0])  # perpendicular to it


@pytest.mark.parametrize("value", [[[1, -1], [0, -1]], dict(matrix=[[0, -1], [-1, 0]])], ids=["permutation", "matrix"])
def test_normalized_vectors(value):
    """The reflection of normalised vectors is the normalised reflection."""
    reflection, rng = parse_reflection("obs", value), np.random.default_rng(0)
    mean, std, raw = np.array([3.0, -1.0]), np.array([0.5, 4.0]), rng.normal(size=(5, 2))
    normalized = th.tensor((raw - mean) / std, dtype=th.float32)
    expected = (-raw[:, ::-1] - mean) / std
    np.testing.assert_allclose(reflection.on(CPU, mean, std)(normalized), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [[1, [0, -1]], [1, 2, 0], dict(matrix=[[2.0]])])
def test_what_is_no_involution(value):
    """The mirror of the mirror must be the original: a rotation is refused."""
    with pytest.raises(ValueError, match=r"`obs=.*applied twice"):
        parse_reflection("obs", value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, r"give a list with an index or \[index, sign\]"),
        ("012", "give a list"),
        (dict(matrices=[[1]]), "give a list"),
        ([0, -1], r"give a list|\[-1, 1\] is no index"),
        ([0, [1, 2]], r"\[1, 2\] is no index"),
        ([0, [1, 1, 1]], "give a list"),
        ([0, 1.0], "give a list"),
        ([True, False], "give a list"),
        ([0, 0], "each index from 0 to 1 must occur once"),
        ([0, 2], "each index from 0 to 1 must occur once"),
        (dict(matrix=[[1, 0], [0]]), "no lists of numbers of one length"),
        (dict(matrix=[[1, 0]]), r"no square matrix.*\(1, 2\)"),
        (dict(matrix=[["a"]]), "no lists of numbers"),
        (dict(matrix=[[float("nan")]]), "no square matrix of finite numbers"),
    ],
    ids=str,
)
def test_bad_reflections(value, message):
    """What is no reflection is refused by name, with its value and the remedy."""
    with pytest.raises(ValueError, match=f"`where=.*{message}"):
        parse_reflection("where", value)
