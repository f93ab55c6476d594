"""Keywords and action spaces that do not go with an action distribution are refused, or warned of."""

import warnings

import numpy as np
import pytest
from gymnasium import spaces
from support.cases import listed
from support.policies import BOUNDED, SCHEDULE, SMALL, make
from support.toys import BOX_ACTION, VECTOR, ToyEnv, make_toys

from sb3_ppo_ext import MlpLstmPolicy, MlpPolicy, MlpTransformerPolicy, PPOExt
from sb3_ppo_ext.distributions import ACTION_DISTS

BAD_KEYWORDS = [
    (dict(action_dist="betta"), {}, BOX_ACTION, f"`action_dist='betta'`.*{listed(ACTION_DISTS)}"),
    (dict(action_dist=None), {}, BOX_ACTION, "`action_dist=None`"),
    (dict(action_dist="beta", deterministic_action="median"), {}, BOX_ACTION, "`deterministic_action='median'`.*or \"mode\""),
    (dict(action_dist="squashed_gaussian", deterministic_action="mode"), {}, BOX_ACTION, "`deterministic_action='mode'`"),
    (dict(action_dist="beta", use_sde=True), {}, BOX_ACTION, "`action_dist='beta'`.*`use_sde=False`"),
    (dict(action_dist="squashed_gaussian", use_sde=True), {}, BOX_ACTION, "`action_dist='squashed_gaussian'`.*use_sde=False"),
    (dict(use_sde=True), dict(mean_tanh=True), BOX_ACTION, "`mean_tanh=True`.*`use_sde=False`"),
    (dict(use_sde=True), dict(learn_std=False), BOX_ACTION, "`learn_std=False`.*`use_sde=False`"),
    (dict(action_dist="beta"), {}, spaces.Discrete(3), "`action_dist='beta'`.*not a Box"),
    (dict(action_dist="squashed_gaussian"), {}, spaces.MultiBinary(3), "`action_dist='squashed_gaussian'`.*not a Box"),
    ({}, dict(mean_tanh=True), spaces.Discrete(3), "`mean_tanh=True`.*not a Box"),
    ({}, dict(learn_std=False), spaces.MultiDiscrete([2, 2]), "`learn_std=False`.*not a Box"),
    ({}, dict(mean_tanh="yes"), BOX_ACTION, "`mean_tanh='yes'`.*True or False"),
    ({}, dict(learn_std=0.5), BOX_ACTION, r"`learn_std=0\.5`.*True or False"),
    (dict(action_dist="beta"), {}, spaces.Box(0, 10, (2,), np.int64), "`action_dist='beta'`.*integers"),
    (dict(action_dist="beta"), dict(mean_tanh=True), BOX_ACTION, "`mean_tanh=True`.*bounded already"),
    (dict(action_dist="squashed_gaussian"), dict(mean_tanh=True), BOX_ACTION, "`mean_tanh=True`.*bounded already"),
    (dict(action_dist="beta"), dict(learn_std=False), BOX_ACTION, "`learn_std=False`.*no standard deviation"),
    (dict(action_dist="squashed_gaussian"), dict(log_std_init=3.0), BOX_ACTION, r"`log_std_init=3\.0`.*between -5 and 2"),
]


@pytest.mark.parametrize(("options", "policy_kwargs", "space", "message"), BAD_KEYWORDS, ids=str)
def test_bad_action_distribution(options, policy_kwargs, space, message):
    """Bad values are refused by the algorithm and by a policy alone, before anything of it is built."""
    with pytest.raises(ValueError, match=message):
        PPOExt("MlpPolicy", ToyEnv(action_space=space), policy_kwargs=policy_kwargs, **options)
    with pytest.raises(ValueError, match=message):
        MlpPolicy(VECTOR, space, SCHEDULE, **options, **policy_kwargs)


BAD_COMBINATIONS = [
    (dict(action_dist="beta", bounds_coef=0.1), {}, r"`bounds_coef=0\.1`.*the mean cannot leave the bounds"),
    (dict(bounds_coef=0.1), dict(mean_tanh=True), r"`bounds_coef=0\.1`.*the mean cannot leave the bounds"),
    ({}, dict(action_dist="beta"), "`action_dist='beta'`.*argument of the algorithm"),
    (dict(action_dist="beta"), dict(deterministic_action="mode"), "`deterministic_action='mode'`.*argument of the algorithm"),
    ({}, dict(mean_tahn=True), "`policy_kwargs` has no option `mean_tahn`: did you mean `mean_tanh`"),
    (dict(action_dist="beta"), dict(net_archi=[8]), "`policy_kwargs` has no option `net_archi`: did you mean `net_arch`"),
]


@pytest.mark.parametrize(("options", "policy_kwargs", "message"), BAD_COMBINATIONS, ids=str)
def test_bad_combination(options, policy_kwargs, message):
    """Options of the algorithm and keywords of the policy that exclude each other are refused."""
    with pytest.raises(ValueError, match=message):
        PPOExt("MlpPolicy", ToyEnv(), policy_kwargs=policy_kwargs, **options)


def test_infinite_bounds():
    """Bounded distributions and `mean_tanh` refuse infinite bounds, and say what to do."""
    space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    for action_dist in BOUNDED:
        with pytest.raises(ValueError, match="infinite bound"):
            PPOExt("MlpPolicy", ToyEnv(action_space=space), action_dist=action_dist)
        half_infinite = spaces.Box(-1.0, np.inf, (2,), np.float32)
        for bad in (space, half_infinite):
            with pytest.raises(ValueError, match=r"infinite bound.*finite ones"):
                MlpPolicy(VECTOR, bad, SCHEDULE, action_dist=action_dist)
    with pytest.raises(ValueError, match=r"`mean_tanh=True`.*infinite bound.*finite ones"):
        MlpPolicy(VECTOR, space, SCHEDULE, mean_tanh=True)
    wide = spaces.Box(-1e300, 1e300, (2,), np.float64)
    with pytest.raises(ValueError, match=r"`mean_tanh=True`.*infinite bound in float32"):
        MlpPolicy(VECTOR, wide, SCHEDULE, mean_tanh=True)


@pytest.mark.parametrize(
    ("low", "high", "dimension"),
    [([-1, -1], [1, 60], 1), ([-1, -1, -1], [1, 30, 1], 1), ([-100], [100], 0), ([-1, 0, 0, 0], [40, 0, 0.1, 0.1], 0)],
)
def test_wide_box(low, high, dimension):
    """
    A very wide dimension, by itself or beside the others, gets a warning, for it is hardly meant to be explored from end to
    end.
    """
    space = spaces.Box(np.float32(low), np.float32(high))
    with pytest.warns(UserWarning, match=f"very wide in its dimension {dimension}"):
        MlpPolicy(VECTOR, space, SCHEDULE, action_dist="beta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MlpPolicy(VECTOR, space, SCHEDULE)
        for low, high in [(BOX_ACTION.low, BOX_ACTION.high), ([-1, 2, 2], [1, 2, 2]), ([-0.01, -1], [0.01, 1])]:
            MlpPolicy(VECTOR, spaces.Box(np.float32(low), np.float32(high)), SCHEDULE, action_dist="beta")


def test_standard_deviation_of_beta():
    """`log_std_init`, which entries of the Zoo have, gets a warning that it has no effect on Beta."""
    with pytest.warns(UserWarning, match=r"`log_std_init=-2\.0` has no effect"):
        make("beta", policy_kwargs=dict(log_std_init=-2.0))


@pytest.mark.parametrize("name", ["mass_near_bounds", "concentration", "std"])
def test_reserved_names(name):
    """A subclass's loss cannot log under the names of the statistics."""

    class Hooked(PPOExt):
        def extra_actor_loss(self, rollout_data, distribution):
            return 0.0, {name: 1.0}

    with pytest.raises(ValueError, match=name):
        Hooked("MlpPolicy", make_toys(), action_dist="beta", **SMALL).learn(32)


@pytest.mark.parametrize("policy_class", [MlpTransformerPolicy, MlpLstmPolicy])
@pytest.mark.parametrize("name", ["extract_features", "_predict", "get_distribution"])
def test_methods_that_a_memory_does_not_call(policy_class, name):
    """A class that overrides one of them would be updated in another way than it acts, and is refused by name."""
    own = type("Own", (policy_class,), {name: lambda self, *args, **kwargs: None, "__module__": __name__})
    with pytest.raises(ValueError, match=rf"its own `{name}` would not be called in all steps"):
        PPOExt(own, make_toys(), **SMALL)
    acting = type("Own", (policy_class,), {"_get_action_dist_from_latent": _shifted, "__module__": __name__})
    PPOExt(acting, make_toys(), **SMALL).learn(32)


def _shifted(self, latent):
    return self.action_dist.proba_distribution(self.action_net(latent) + 1, self.log_std)
