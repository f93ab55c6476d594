"""What is saved of a policy and its action distribution, and what is refused when it is loaded."""

import numpy as np
import pytest
import torch as th
from stable_baselines3 import PPO
from support.cases import one_in
from support.parity import assert_equal
from support.policies import BOUNDED, POLICIES, SCHEDULE, SMALL, make
from support.processes import run_fresh
from support.toys import BOX_ACTION, make_toys
from support.zips import Zip


@pytest.mark.integration
@pytest.mark.parametrize("action_dist", one_in(2, BOUNDED))
def test_zip_in_another_process(action_dist, tmp_path):
    """A process that imports nothing but the package loads the zip and predicts the same."""
    model = make(action_dist).learn(32)
    model.save(tmp_path / "model")
    observation = np.float32([0.1, 0.2, -0.3])
    code = f"""
import sb3_ppo_ext
model = sb3_ppo_ext.PPOExt.load({str(tmp_path / "model")!r}, device="cpu")
print(model.action_dist, model.predict({observation.tolist()}, deterministic=True)[0].tolist())
"""
    assert run_fresh(code) == f"{action_dist} {model.predict(observation, deterministic=True)[0].tolist()}\n"


KEYWORDS = [
    dict(action_dist="squashed_gaussian", log_std_init=-0.5),
    dict(action_dist="squashed_gaussian", learn_std=False, share_features_extractor=False),
    dict(action_dist="beta", deterministic_action="mode"),
    dict(mean_tanh=True, learn_std=False, log_std_init=-0.5, ortho_init=False, activation_fn=th.nn.ReLU),
    dict(share_features_extractor=False, net_arch=[4]),
]


@pytest.mark.parametrize(("policy_class", "observation_space"), POLICIES)
@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
def test_policy_alone(keywords, policy_class, observation_space, tmp_path):
    """`policy.save` and `policy.load` keep the class, every keyword, and the parameters."""
    policy = policy_class(observation_space, BOX_ACTION, SCHEDULE, **keywords)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            th.nn.init.normal_(parameter, std=0.1)
    policy.save(tmp_path / "policy.pth")
    loaded = policy_class.load(tmp_path / "policy.pth")
    data, again = policy._get_constructor_parameters(), loaded._get_constructor_parameters()
    assert {k: v for k, v in data.items() if k != "lr_schedule"} == {k: v for k, v in again.items() if k != "lr_schedule"}
    assert keywords.items() <= data.items()
    assert_equal(policy.state_dict(), loaded.state_dict(), "policy")
    observation = observation_space.sample()
    expected = policy.predict(observation, deterministic=True)[0]
    np.testing.assert_array_equal(loaded.predict(observation, deterministic=True)[0], expected)


@pytest.mark.integration
def test_action_distribution_of_a_zip_is_kept():
    """Another distribution is refused: the parameters of a Gaussian would fit a squashed one, and mean something else."""
    zips = {action_dist: Zip(make(action_dist)) for action_dist in ["gaussian", *BOUNDED]}
    for action_dist, saved in zips.items():
        assert saved.load(action_dist=action_dist).action_dist == action_dist
        for other in zips.keys() - {action_dist}:
            refused = pytest.raises(
                ValueError, match=f"`action_dist='{other}'`.*the saved parameters are those of '{action_dist}'"
            )
            with refused:
                saved.load(action_dist=other)
            with refused:
                make(other).set_parameters(saved.open())
            for exact_match in (True, False):
                with refused:
                    make(other).set_parameters({"policy": make(action_dist).policy.state_dict()}, exact_match=exact_match)
            if other != "gaussian":
                with refused:
                    make(other).policy.load_state_dict(make(action_dist).policy.state_dict(), strict=False)
        with pytest.raises(ValueError, match=r"`action_dist='betta'`.*\"gaussian\""):
            saved.load(action_dist="betta")
    # SB3's PPO does not know the option, and must not take the policy for a Gaussian.
    for action_dist in BOUNDED:
        with pytest.raises(ValueError, match=f"saved by PPOExt with `action_dist='{action_dist}'`.*PPOExt.load"):
            zips[action_dist].load(PPO)
        # Nor a policy of its own class take what looks like its parameters.
        with pytest.raises(RuntimeError, match=f"action_distribution_{action_dist}"):
            PPO("MlpPolicy", make_toys(), **SMALL).policy.load_state_dict(make(action_dist).policy.state_dict())


@pytest.mark.parametrize("exact_match", [True, False])
def test_parameters_of_earlier_versions(exact_match):
    """Parameters that name the action distribution in the earlier way are taken, and checked as well."""
    for name in BOUNDED:
        model, other = make(name, seed=1), make(name)
        parameters = model.policy.state_dict()
        old = {key.replace("action_distribution_", "law_"): value for key, value in parameters.items()}
        assert f"law_{name}" in old
        other.set_parameters({"policy": old, "policy.optimizer": model.policy.optimizer.state_dict()}, exact_match=exact_match)
        assert_equal(parameters, other.policy.state_dict(), "policy")
        assert f"law_{name}" in old
        for wrong in {"gaussian", *BOUNDED} - {name}:
            with pytest.raises(ValueError, match=f"the saved parameters are those of '{name}'"):
                make(wrong).set_parameters({"policy": old}, exact_match=exact_match)


def test_zips_of_ppo_are_gaussian():
    """A zip of SB3's PPO is loaded as a Gaussian, and as nothing else."""
    saved = Zip(PPO("MlpPolicy", make_toys(), **SMALL))
    assert saved.load().action_dist == "gaussian"
    with pytest.raises(ValueError, match="the saved parameters are those of 'gaussian'"):
        saved.load(action_dist="beta")
