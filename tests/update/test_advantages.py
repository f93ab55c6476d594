"""V-trace against GAE and against its definition; normalisation against numbers computed by hand."""

import math

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_ppo_ext.rollout import gae
from sb3_ppo_ext.update.advantages import AdvantageNormalizer, normalize

T = th.tensor


def vtrace(**data):
    """V-trace from and to NumPy."""
    tensors = {name: th.as_tensor(part) if isinstance(part, np.ndarray) else part for name, part in data.items()}
    return [part.numpy() for part in gae.vtrace(**tensors)]


def rollout(n_steps=50, n_envs=3, seed=0):
    """A rollout with episodes that end in the middle and at its last step."""
    rng = np.random.default_rng(seed)
    return dict(
        rewards=rng.normal(size=(n_steps, n_envs)).astype(np.float32),
        values=rng.normal(size=(n_steps, n_envs)).astype(np.float32),
        log_ratio=rng.normal(size=(n_steps, n_envs)).astype(np.float32),
        episode_starts=(rng.random((n_steps, n_envs)) < 0.1).astype(np.float32),
        last_values=rng.normal(size=n_envs).astype(np.float32),
        last_dones=np.array([True] + [False] * (n_envs - 1)),
        gamma=0.97,
        gae_lambda=0.9,
    )


def gae_of_sb3(data):
    """Advantages and returns by SB3's buffer."""
    n_steps, n_envs = data["rewards"].shape
    space = spaces.Box(-1, 1, (1,))
    buffer = RolloutBuffer(n_steps, space, space, "cpu", data["gae_lambda"], data["gamma"], n_envs)
    for name in ("rewards", "values", "episode_starts"):
        setattr(buffer, name, data[name])
    buffer.compute_returns_and_advantage(T(data["last_values"]), data["last_dones"])
    return buffer.advantages, buffer.returns


@pytest.mark.parametrize("bar", [1.0, 2.5, math.inf])
def test_vtrace_on_policy_is_gae(bar):
    """With ratios of 1 and bars of at least 1, V-trace is GAE."""
    data = rollout() | dict(log_ratio=np.zeros((50, 3), np.float32))
    advantages, returns = vtrace(**data, rho_bar=bar, c_bar=bar)
    expected_advantages, expected_returns = gae_of_sb3(data)
    np.testing.assert_allclose(advantages, expected_advantages, atol=2e-6)
    np.testing.assert_allclose(returns, expected_returns, atol=2e-6)
    assert advantages.dtype == returns.dtype == np.float32


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.5), (math.inf, 0.0)])
def test_vtrace_is_its_definition(rho_bar, c_bar):
    """A_t = sum_k gamma^k (prod of lambda c) rho (r + gamma V' - V), up to the end of the episode."""
    data = rollout()
    advantages, returns = vtrace(**data, rho_bar=rho_bar, c_bar=c_bar)
    n_steps, n_envs = data["rewards"].shape
    ratio = np.exp(data["log_ratio"].astype(float))
    for env in range(n_envs):
        for first in range(n_steps):
            total, weight = 0.0, 1.0
            for step in range(first, n_steps):
                last = step == n_steps - 1
                done = data["last_dones"][env] if last else data["episode_starts"][step + 1, env]
                following = data["last_values"][env] if last else data["values"][step + 1, env]
                error = data["rewards"][step, env] + (0 if done else data["gamma"] * following) - data["values"][step, env]
                total += weight * min(rho_bar, ratio[step, env]) * error
                if done:
                    break
                weight *= data["gamma"] * data["gae_lambda"] * min(c_bar, ratio[step, env])
            assert advantages[first, env] == pytest.approx(total, abs=1e-5)
    np.testing.assert_allclose(returns, advantages + data["values"], atol=1e-5)


def test_vtrace_by_hand():
    """gamma 0.5, lambda 1, ratios 2 and 0.5: the first is cut to 1; TD errors 1 + 0.5 * 4 - 2 = 1 and 2 + 0.5 * 6 - 4 = 1."""
    advantages, returns = vtrace(
        rewards=np.float32([[1], [2]]),
        values=np.float32([[2], [4]]),
        log_ratio=np.log(np.float32([[2], [0.5]])),
        episode_starts=np.float32([[1], [0]]),
        last_values=np.float32([6]),
        last_dones=np.array([False]),
        gamma=0.5,
        gae_lambda=1.0,
    )
    assert advantages.flatten().tolist() == pytest.approx([1 + 0.5 * 1 * 0.5, 0.5])
    assert returns.flatten().tolist() == pytest.approx([3.25, 4.5])


def test_vtrace_does_not_move_a_true_value_function():
    """rho multiplies the whole error: with rewards 1 and V = 1 / (1 - gamma) the targets are V, whatever the bars."""
    values = np.full((20, 2), 10.0, np.float32)
    data = rollout(20, 2) | dict(rewards=np.ones((20, 2)), values=values, last_values=values[0], gamma=0.9)
    data |= dict(episode_starts=np.zeros((20, 2)), last_dones=np.zeros(2, bool))
    advantages, returns = vtrace(**data, rho_bar=0.5, c_bar=0.5)
    np.testing.assert_allclose(advantages, 0, atol=1e-6)
    np.testing.assert_allclose(returns, values, atol=1e-6)


def test_vtrace_extreme_ratio():
    """The log ratio is clamped to +-20 before exp."""
    data = rollout(2, 1) | dict(log_ratio=np.float32([[1000], [-1000]]), episode_starts=np.zeros((2, 1)))
    data |= dict(last_dones=np.array([False]))
    far, clamped = (
        vtrace(**data | dict(log_ratio=x), rho_bar=math.inf) for x in (data["log_ratio"], T([[20.0], [-20]]).numpy())
    )
    assert np.isfinite(far[0]).all()
    np.testing.assert_array_equal(far[0], clamped[0])


# Normalisation


def test_normalize():
    """With the unbiased standard deviation, sqrt(2) here; one advantage is left alone."""
    expected = [-1 / math.sqrt(2), 1 / math.sqrt(2)]
    assert normalize(T([1.0, 3.0])).tolist() == pytest.approx(expected)
    assert normalize(T([5.0])).tolist() == [5.0]


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (100.0, 30.0), (1e-3, 1.0)])
def test_first_rollout_is_normalized_by_itself(scale, shift):
    """With the warm start the first rollout is normalised by its own moments, whatever the scale."""
    advantages = th.randn(1000, dtype=th.float64) * scale + shift
    normalizer = AdvantageNormalizer(0.05, clip=100.0)
    normalizer.observe(advantages)
    th.testing.assert_close(normalizer.normalize(advantages), normalize(advantages), rtol=1e-5, atol=1e-5)


def test_ema_by_hand():
    """
    alpha 0.5; rollouts [1, 3] and [-4, 4], whose E[A] are 2 and 0, E[A^2] 5 and 16. After the second, the corrected averages
    are (2 / 4 + 0 / 2) / (3 / 4) = 2 / 3 and (5 / 4 + 16 / 2) / (3 / 4) = 37 / 3; Bessel's factor is 2.
    """
    normalizer = AdvantageNormalizer(0.5, clip=1.0)
    normalizer.observe(T([1.0, 3.0]))
    assert (normalizer.mean, normalizer.std) == pytest.approx((2.0, math.sqrt(2)))
    normalizer.observe(T([-4.0, 4.0]))
    std = math.sqrt(2 * (37 / 3 - 4 / 9))
    assert (normalizer.mean, normalizer.std) == pytest.approx((2 / 3, std))
    assert normalizer.normalize(T([4.0, 2 / 3, -100.0])).tolist() == pytest.approx([(4 - 2 / 3) / std, 0.0, -1.0], abs=1e-6)
    assert normalizer.clamped_fraction(T([4.0, 2 / 3, -100.0, 100.0])).item() == 0.5


def test_protomotions_scheme_by_hand():
    """
    alpha 0.05, min_std 0.02, clip 4. Three rollouts:

    mean, std in use     raw           normalised          clipped, in raw units   their mean, unbiased std
    0, 1                 0, 10         0, 4 (clipped)      0, 4                    2, 2.8284271
    0.1, 1.09142136      1, -1         0.824613, -1.007860 1, -1                   0, 1.4142136
    0.095, 1.10756097    0.095, 1.2025610                  0, 1
    """
    normalizer = AdvantageNormalizer(0.05, warm_start=False, min_std=0.02, clip=4.0)
    table = [
        ((0.0, 1.0), (0.0, 10.0), (0.0, 4.0), 0.5),
        ((0.1, 1.09142136), (1.0, -1.0), (0.82461241, -1.00785961), 0.0),
        ((0.095, 1.10756097), (0.095, 1.20256097), (0.0, 1.0), 0.0),
    ]
    for in_use, raw, normalised, clamped in table:
        normalizer.observe(T(raw))
        assert (normalizer.mean, normalizer.std) == pytest.approx(in_use, abs=1e-7)
        assert normalizer.normalize(T(raw)).tolist() == pytest.approx(normalised, abs=1e-6)
        assert normalizer.clamped_fraction(T(raw)).item() == clamped


def test_protomotions_scheme_is_slow_and_ours_is_not():
    """A raw standard deviation of 100 takes some 70 rollouts to be normalised to 1.1, and one with the warm start."""
    raw = 100 * th.randn(4096, generator=th.Generator().manual_seed(0))
    literal, ours = AdvantageNormalizer(0.05, warm_start=False, min_std=0.02), AdvantageNormalizer(0.05)
    n_rollouts = 0
    while n_rollouts == 0 or literal.normalize(raw).std() > 1.1:
        literal.observe(raw)
        n_rollouts += 1
    assert 68 < n_rollouts < 76
    ours.observe(raw)
    assert ours.normalize(raw).std() == pytest.approx(1, abs=0.01)


def test_min_std_and_shift():
    """Advantages that hardly differ are not blown up; the mean stays without the shift, and the divisor is the same."""
    raw = T([1.0, 1.0 + 1e-4], dtype=th.float64)
    normalizer = AdvantageNormalizer(0.05, min_std=0.5)
    normalizer.observe(raw)
    assert normalizer.normalize(raw).tolist() == pytest.approx([-1e-4, 1e-4])
    unshifted = AdvantageNormalizer(0.05, min_std=0.5, shift_mean=False)
    unshifted.observe(raw)
    assert unshifted.normalize(raw).tolist() == pytest.approx([2.0, 2.0002])
    unshifted = AdvantageNormalizer(0.05, shift_mean=False)
    unshifted.observe(T([1.0, 3.0]))
    assert unshifted.normalize(T([1.0])).item() == pytest.approx(1 / math.sqrt(2))


@pytest.mark.parametrize("clip", [2, np.uint8(2), 10**30])
def test_integers_as_clip(clip):
    """Unsigned integers have no negative, and PyTorch takes no integers beyond 64 bits."""
    normalizer, advantages = AdvantageNormalizer(0.5, clip=clip), th.tensor([-3.0, 0.0, 3.0])
    normalizer.mean, normalizer.std = 0.0, 1.0
    assert normalizer.normalize(advantages).tolist() == ([-2, 0, 2] if clip == 2 else [-3, 0, 3])


@pytest.mark.parametrize("warm_start", [True, False])
def test_normalizer_state(warm_start):
    """A loaded state goes on as if nothing had been; that of the other scheme is ignored."""
    rollouts = [th.randn(64, generator=th.Generator().manual_seed(seed)) * 3 + seed for seed in range(4)]
    one, other, wrong = (AdvantageNormalizer(0.3, w) for w in (warm_start, warm_start, not warm_start))
    for raw in rollouts[:2]:
        one.observe(raw)
    other.load_state_dict(one.state_dict())
    assert th.equal(one.normalize(rollouts[0]), other.normalize(rollouts[0]))
    for raw in rollouts[2:]:
        one.observe(raw)
        other.observe(raw)
    assert one.state_dict() == other.state_dict()
    fresh = wrong.state_dict()
    wrong.load_state_dict(one.state_dict())
    assert wrong.state_dict() == fresh


@pytest.mark.parametrize("alpha", [0.01, 0.5, 1.0])
def test_another_alpha_goes_on_with_the_averages(alpha):
    """With another alpha the averages of a constant scale stay right, whatever their weights were."""
    rollouts = [100 * th.randn(500, generator=th.Generator().manual_seed(seed)) + 50 for seed in range(11)]
    old, new = AdvantageNormalizer(0.05), AdvantageNormalizer(alpha)
    for raw in rollouts[:10]:
        old.observe(raw)
    new.load_state_dict(old.state_dict())
    new.observe(rollouts[10])
    assert new.std == pytest.approx(100, rel=0.1)
    assert new.mean == pytest.approx(50, abs=10)


@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rollout_that_is_not_finite(warm_start, bad):
    """A rollout that is not finite leaves no trace in the averages."""
    normalizer = AdvantageNormalizer(0.5, warm_start)
    normalizer.observe(T([1.0, 3.0]))
    before = normalizer.state_dict()
    normalizer.observe(T([1.0, bad]))
    assert normalizer.state_dict() == before


def test_equal_advantages_in_protomotions_scheme():
    """The 1e-8 of the scheme keeps the average of the standard deviations above 0."""
    normalizer = AdvantageNormalizer(1.0, warm_start=False)
    for _ in range(2):
        normalizer.observe(T([1.0, 1.0]))
    assert normalizer.std == pytest.approx(1e-8)


def test_large_offset_keeps_its_precision():
    """With moments in float64 a mean of 1e4 does not spoil a standard deviation of 1."""
    raw = th.randn(2048, generator=th.Generator().manual_seed(0)).double() + 1e4
    normalizer = AdvantageNormalizer(0.05)
    for _ in range(3):
        normalizer.observe(raw)
    assert normalizer.std == pytest.approx(raw.std().item(), rel=1e-5)
