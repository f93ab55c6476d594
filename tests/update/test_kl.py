"""The KL penalty, and what adapts to the KL divergence."""

import math
import warnings

import pytest
from gymnasium import spaces
from support.toys import BOX_ACTION
from support.training import logged, make, run


@pytest.mark.parametrize(
    "action_space",
    [BOX_ACTION, spaces.Discrete(3), spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(2)],
    ids=lambda space: type(space).__name__,
)
def test_kl_penalty_holds_the_policy_back(action_space):
    """The larger the coefficient, the smaller the KL divergence of the update."""
    env = dict(action_space=action_space)
    divergences = [
        logged(run(env_kwargs=env, kl_coef=kl_coef, learning_rate=3e-3, n_epochs=10))["train/kl"]
        for kl_coef in (1e-9, 1.0, 100.0)
    ]
    assert divergences[0] > divergences[1] > divergences[2] > 0


def test_kl_is_exact():
    """The KL divergence of the first minibatch is 0, and the log is the mean over the last epoch, as its estimate is."""
    one = run(kl_coef=1e-12, batch_size=32, n_epochs=1)
    assert logged(one)["train/kl"] == pytest.approx(0, abs=1e-9)
    two = run(kl_coef=1e-12, batch_size=32, n_epochs=20, learning_rate=3e-3, timesteps=64)
    assert logged(two)["train/kl"] == pytest.approx(logged(two)["train/approx_kl"], rel=0.3)


@pytest.mark.parametrize(("backend", "rel"), [("eager", 1e-6), ("native", 1e-3)])
def test_kl_of_unknown_families_is_estimated(backend, rel, monkeypatch):
    """For an unknown distribution the estimate is the penalty, in the reference to the bit."""
    monkeypatch.setattr("sb3_ppo_ext.update.estimates.parameters", lambda distribution: None)
    options = dict(backend=backend, learning_rate=3e-3, n_epochs=10)
    divergences = [run(kl_coef=kl_coef, **options) for kl_coef in (1e-9, 100.0)]
    small, large = map(logged, reversed(divergences))
    assert small["train/kl"] < large["train/kl"]
    assert small["train/kl"] == pytest.approx(small["train/approx_kl"], rel=rel)


def test_kl_coefficient_follows_what_it_multiplies(monkeypatch):
    """The coefficient adapts to the exact KL divergence, not to its estimate."""
    monkeypatch.setattr("sb3_ppo_ext.update.losses.kl_divergence", lambda old, new: 5.0 + 0 * new.distribution.mean.sum(dim=1))
    model = run(kl_coef=0.1, kl_target=4.0, backend="fused")  # The extension module has its own.
    assert logged(model)["train/kl"] == 5.0
    assert model.kl_coefficient.value == 0.1
    model.kl_coefficient.target = 3.0
    model.learn(32)
    assert model.kl_coefficient.value == 0.2


def test_rules_of_what_follows_the_kl():
    """
    The coefficient changes by 2 outside of 1.5 times the target, within a factor of a million; the learning rate by 1.5
    outside of twice.
    """
    model = make(kl_coef=0.1, kl_target=0.01, adaptive_lr_kl=0.01)
    for kl, coefficient, rate in ((0.0151, 2, 1), (0.0149, 1, 1), (0.0201, 2, 1 / 1.5), (0.0066, 0.5, 1), (0.0049, 0.5, 1.5)):
        for adaptive, factor in ((model.kl_coefficient, coefficient), (model.adaptive_lr, rate)):
            before = adaptive.value
            adaptive.update(kl)
            assert adaptive.value == pytest.approx(factor * before)
    for kl, bound in ((1.0, 1e5), (1e-9, 1e-7)):
        for _ in range(60):
            model.kl_coefficient.update(kl)
        assert model.kl_coefficient.value == pytest.approx(bound)


@pytest.mark.parametrize("options", [dict(kl_coef=1.0), dict(kl_coef=1.0, kl_target=0.01), dict(adaptive_lr_kl=0.01)], ids=str)
def test_one_step_per_update(options):
    """Before the only step the policy has not moved: a warning says that the option does nothing."""
    with pytest.warns(UserWarning, match="n_epochs=1, or lower batch_size=32"):
        make(n_epochs=1, batch_size=32, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(n_epochs=1, batch_size=16, **options)
        make(n_epochs=1, batch_size=32)


def test_kl_coefficient_adapts():
    """
    The coefficient is doubled after each update whose KL was too large, halved after each that was too small; it is used and
    logged.
    """
    for target, factor in ((1e-6, 2.0), (10.0, 0.5)):
        model = make(kl_coef=0.1, kl_target=target, learning_rate=3e-3)
        used = []
        for n_rollouts in (1, 2, 3):
            model.learn(32 * n_rollouts, reset_num_timesteps=False, callback=lambda local, _: True)
            used.append(logged(model)["train/kl_coef"])
        # The second call makes two rollouts, the third three
        assert used == pytest.approx([0.1, 0.1 * factor**2, 0.1 * factor**5])
        assert model.kl_coefficient.value == pytest.approx(0.1 * factor**6)


def test_learning_rate_follows_the_kl():
    """The rate is divided or multiplied by 1.5 after each update, within its bounds; the critic keeps its own."""
    for target, factor in ((1e-9, 1 / 1.5), (100.0, 1.5)):
        model = run(adaptive_lr_kl=target, critic_learning_rate=5e-4, timesteps=96)
        values = logged(model)
        assert values["train/learning_rate"] == pytest.approx(3e-4 * factor**2)
        assert values["train/critic_learning_rate"] == 5e-4
        rates = {group["role"]: group["lr"] for group in model.policy.optimizer.param_groups}
        assert rates == {"actor": pytest.approx(3e-4 * factor**2), "critic": 5e-4}
        assert model.adaptive_lr.value == pytest.approx(3e-4 * factor**3)
    model = run(adaptive_lr_kl=100.0, adaptive_lr_bounds=[1e-5, 4e-4], timesteps=96)
    assert logged(model)["train/learning_rate"] == 4e-4


@pytest.mark.parametrize("target", [1e-9, 0.01, 100.0])
def test_learning_rate_in_proportion(target):
    """The rate is divided by the square root of the ratio of the KL divergence to its target, by 1.5 at most."""
    model = make(adaptive_lr_kl=target, adaptive_lr_rule="proportional", learning_rate=2e-3)
    for _ in range(3):
        before = model.adaptive_lr.value
        model.learn(32, reset_num_timesteps=False)
        values = logged(model)
        assert values["train/learning_rate"] == before
        ratio = min(max(math.sqrt(values["train/approx_kl"] / target), 1 / 1.5), 1.5)
        assert model.adaptive_lr.value == pytest.approx(before / ratio)


def test_rate_follows_a_falling_kl():
    """The KL divergence that the rate is adapted to may depend on the progress, and is logged then."""
    model = make(adaptive_lr_kl="lin_0.01")
    for kl, progress, factor in ((0.006, 1.0, 1), (0.006, 0.25, 1 / 1.5), (0.004, 1.0, 1.5), (1e-9, 0.0, 1 / 1.5)):
        before = model.adaptive_lr.value
        model.adaptive_lr.update(kl, progress)
        assert model.adaptive_lr.value == pytest.approx(factor * before)
    # After the rollouts, 0.75, 0.5, 0.25 and none of the training is left.
    model = run(adaptive_lr_kl=lambda progress: 100.0 if progress > 0.4 else 1e-9, timesteps=128)
    assert model.adaptive_lr.value == pytest.approx(3e-4)
    assert logged(model)["train/adaptive_lr_kl"] == 1e-9
    assert "train/adaptive_lr_kl" not in logged(run(adaptive_lr_kl=0.01))


@pytest.mark.filterwarnings("ignore:`kl_coef`, `kl_target` and `adaptive_lr_kl` depend")
def test_rounding_adapts_nothing():
    """With one step per update, the KL divergence is 0, in which rounding may leave a little more."""
    options = dict(n_epochs=1, batch_size=32, kl_coef=1.0, kl_target=0.01, adaptive_lr_kl=0.01, learning_rate=1e-3)
    model = make(env_kwargs=dict(action_space=spaces.Discrete(3)), **options)
    divergences = []
    for _ in range(10):
        divergences.append(logged(model.learn(32, reset_num_timesteps=False))["train/kl"])
    assert max(map(abs, divergences)) < 1e-6
    assert (model.kl_coefficient.value, model.adaptive_lr.value) == (1.0, 1e-3)


def test_target_kl_logs_its_epochs():
    """The number of epochs that were begun is logged."""
    assert logged(run(target_kl=100.0))["train/epochs"] == 3
    assert logged(run(target_kl=1e-9, learning_rate=0.01))["train/epochs"] == 1


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_kl_coef_that_is_set_to_0(backend):
    """Between two calls of `learn` it turns the penalty off, although it had a target."""
    model = make(kl_coef=0.5, kl_target=0.01, backend=backend).learn(32)
    assert "train/kl" in logged(model)
    model.kl_coef = 0.0
    model.learn(32, reset_num_timesteps=False)
    assert not {"train/kl", "train/kl_coef"} & logged(model).keys()
