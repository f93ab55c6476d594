"""With `trusted=False` nothing of a file is executed, and the model is the same as with `trusted=True`."""

import base64
import contextlib
import io
import json
import pathlib
import pickle

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.utils import LinearSchedule
from support.cases import one_in
from support.parity import assert_equal
from support.policies import BOUNDED, make
from support.toys import BOX_ACTION, DICT, IMAGE, make_toys
from support.zips import Zip, packed, parts

from sb3_ppo_ext import MlpPolicy, PPOExt, TransformerExtractor

pytestmark = pytest.mark.integration

DISCRETE = spaces.Discrete(3)
TRANSFORMER = dict(context_length=4, d_model=8, n_heads=2)
CONFIGURATIONS = [
    dict(),
    *(dict(action_dist=name) for name in BOUNDED),
    dict(advantage_norm="ema", kl_coef=1.0, kl_target=0.01, adaptive_lr_kl="lin_0.01"),
    dict(optimizer="muon", critic_learning_rate=1e-3, lr_decay="cosine", lr_warmup=0.1),
    dict(learning_rate="lin_0.001", clip_range="lin_0.2", ent_coef="lin_0.01"),
    dict(learning_rate=LinearSchedule(1e-3, 1e-4, 0.5), clip_range_vf=0.2, weight_decay=np.float64(0.01)),
    dict(policy="MlpTransformerPolicy", policy_kwargs=TRANSFORMER, vtrace=True),
    dict(policy="MultiInputTransformerPolicy", observation_space=DICT, policy_kwargs=TRANSFORMER),
    dict(policy="MultiInputPolicy", observation_space=DICT, policy_kwargs=dict(learn_std=False)),
    dict(policy="MultiInputPolicy", observation_space=DICT, policy_kwargs=dict(actor_keys=["joints"], critic_keys=["gear"])),
    dict(policy="CnnPolicy", observation_space=IMAGE, action_space=DISCRETE),
    dict(use_sde=True, policy_kwargs=dict(activation_fn=th.nn.ReLU, optimizer_class=th.optim.SGD, optimizer_kwargs={})),
    dict(action_space=spaces.MultiDiscrete([2, 3]), policy_kwargs=dict(features_extractor_class=FlattenExtractor)),
    dict(action_space=spaces.MultiBinary(3), policy=MlpPolicy, seed=np.int64(1)),
]


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@pytest.mark.parametrize("options", one_in(2, CONFIGURATIONS), ids=range(len(CONFIGURATIONS)))
def test_same_model(options):
    """The model has the same attributes, predicts the same, and is the same after training on."""
    spaces_of_env = {name: options[name] for name in ("observation_space", "action_space") if name in options}
    others = {name: value for name, value in options.items() if name not in spaces_of_env}
    model = make(env=make_toys(**spaces_of_env), **others).learn(32)
    saved = Zip(model)
    env = model.env
    one, other = (saved.load(trusted=trusted, device="cpu") for trusted in (True, False))
    for name in vars(one).keys() | vars(other).keys():
        mine, its = getattr(one, name), getattr(other, name)
        assert type(mine) is type(its), name
        if callable(mine) and not isinstance(mine, type | th.nn.Module):
            assert mine(0.3) == its(0.3)
        elif isinstance(mine, int | float | str | spaces.Space | type | None):
            assert mine == its, name
    observation = model.observation_space.sample()
    for deterministic in (True, False):
        actions = []
        for each in (one, other):
            th.manual_seed(0)
            actions.append(each.predict(observation, deterministic=deterministic)[0])
        np.testing.assert_array_equal(*actions)
    for each in (one, other):
        each.set_env(env)
        each.seed = 3
        each.set_random_seed(3)
        each.learn(32, reset_num_timesteps=False)
    assert_equal(one.get_parameters(), other.get_parameters(), "parameters")


def pickled_in_data(trap, content):
    """The zip with the trap in place of each attribute in turn."""
    members = parts(content)
    data = json.loads(members["data"])
    serialized = {":type:": "<class 'Trap'>", ":serialized:": base64.b64encode(trap).decode()}
    for name in [*data, "further"]:
        yield name, packed({**members, "data": json.dumps({**data, name: serialized}).encode()})


def pickled_in_members(trap, content):
    """The zip with the trap in place of each member in turn, and of each member of the zips in it."""
    members = parts(content)
    for name, member in [*members.items(), ("further.pth", b""), ("tensors.pth", b""), ("training_state.pkl", b"")]:
        yield name, packed({**members, name: trap})
        if name.endswith(".pth") and member:
            inner = parts(member)
            for inner_name in inner:
                yield f"{name}/{inner_name}", packed({**members, name: packed({**inner, inner_name: trap})})


@pytest.mark.parametrize("planted", [pickled_in_data, pickled_in_members])
def test_nothing_is_executed(planted, tmp_path):
    """A pickle in any attribute and any member is not executed; the file loads without it, or is refused."""
    path, model = tmp_path / "executed", make(policy_kwargs=dict(activation_fn=th.nn.ReLU))
    trap, content = pickle.dumps(Trap(path), protocol=2), Zip(model).content
    executed = 0
    for where, zipped in planted(trap, content):
        for read in (lambda file: PPOExt.load(file, trusted=False), lambda file: model.set_parameters(file, trusted=False)):
            with contextlib.suppress(ValueError):
                read(io.BytesIO(zipped))
            assert not path.exists(), where
        with contextlib.suppress(ValueError):
            PPOExt.load(io.BytesIO(zipped))
        executed += path.exists()
        path.unlink(missing_ok=True)
    # The traps work: trusted files are unpickled.
    assert executed >= (50 if planted is pickled_in_data else 0)


def test_what_custom_objects_replace_is_not_unpickled(tmp_path):
    """Neither with `trusted=True`: a pickle that is replaced is not executed."""
    path, model = tmp_path / "executed", make(policy_kwargs=dict(activation_fn=th.nn.ReLU))
    trap = pickle.dumps(Trap(path), protocol=2) + b"sb3_ppo_ext."
    for name, zipped in pickled_in_data(trap, Zip(model).content):
        if hasattr(model, name):
            loaded = PPOExt.load(io.BytesIO(zipped), custom_objects={name: getattr(model, name)})
            assert type(getattr(loaded, name)) is type(getattr(model, name))
            assert not path.exists(), name
            with pytest.raises(ValueError, match=r"`policy_kwargs|Stored kwargs"):
                PPOExt.load(io.BytesIO(zipped), custom_objects={name: getattr(model, name)}, policy_kwargs=dict(net_arch=[3]))
            assert not path.exists(), name


class MyPolicy(ActorCriticPolicy):
    pass


class MyExtractor(FlattenExtractor):
    pass


CUSTOM = {
    "policy_class": (dict(policy=MyPolicy), "test_untrusted.MyPolicy"),
    "policy_kwargs": (dict(policy_kwargs=dict(features_extractor_class=MyExtractor)), "test_untrusted.MyExtractor"),
    "learning_rate": (dict(learning_rate=lambda progress: progress * 1e-3), "<lambda>"),
}


@pytest.mark.parametrize("name", CUSTOM)
def test_custom_classes(name):
    """A class or function of the user is refused by its name, unless it is given."""
    options, culprit = CUSTOM[name]
    model = make(**options)
    with pytest.raises(ValueError, match=rf"`{name}` in the file is or contains .*{culprit}.*custom_objects.*trusted=True"):
        Zip(model).load(trusted=False)
    given = {name: getattr(model, name)} | ({"lr_schedule": model.lr_schedule} if name == "learning_rate" else {})
    loaded = Zip(model).load(trusted=False, custom_objects=given)
    assert getattr(loaded, name) is getattr(model, name)
    assert_equal(model.get_parameters(), loaded.get_parameters(), "parameters")


def test_attribute_of_the_user():
    """Plain attributes of the user are loaded, others are refused."""
    model = make()
    model.mine = {"numbers": (1, np.arange(3))}
    loaded = Zip(model).load(trusted=False)
    assert loaded.mine["numbers"][0] == 1
    np.testing.assert_array_equal(loaded.mine["numbers"][1], np.arange(3))
    model.mine = MyExtractor
    with pytest.raises(ValueError, match=r"`mine` in the file.*MyExtractor"):
        Zip(model).load(trusted=False)
    assert Zip(model).load(trusted=False, custom_objects={"mine": 1}).mine == 1


def test_other_zips():
    """Zips without the plain form are refused with the remedy; their parameters are read without unpickling."""
    saved = Zip(PPO("MlpPolicy", make_toys(), n_steps=16, batch_size=8, device="cpu", policy_kwargs=dict(net_arch=[8, 8])))
    with pytest.raises(ValueError, match=r"the file was not saved by this version of PPOExt.*trusted=True"):
        saved.load(trusted=False)
    model = make()
    model.set_parameters(saved.open(), trusted=False)
    assert_equal(model.policy.state_dict(), saved.load().policy.state_dict(), "policy")


def test_plain_form_of_something_else():
    """A plain form that names another class, or hides a method, is refused."""
    members = parts(Zip(make()).content)
    plain, data = json.loads(members["sb3_ppo_ext.json"]), json.loads(members["data"])
    for wrong in ({"class": "os.system"}, {"class": "torch.nn.Module"}, {"schedule": ["torch.optim.Adam", {"dict": []}]}):
        changed = {**members, "sb3_ppo_ext.json": json.dumps({**plain, "policy_class": wrong}).encode()}
        with pytest.raises(ValueError, match=r"`policy_class` in the file is or contains (os.system|torch.nn|torch.optim)"):
            PPOExt.load(io.BytesIO(packed(changed)), trusted=False)
    for wrong in (1, {}, {"array": ["|O", [1], "AAAAAAAAAAA="]}, {"tuple": 1}, {"class": 3}, [], {"x": 1}):
        changed = {**members, "sb3_ppo_ext.json": json.dumps({**plain, "policy_class": wrong}).encode()}
        with pytest.raises(ValueError, match=r"the file|policy"):
            PPOExt.load(io.BytesIO(packed(changed)), trusted=False)
    wrong = {"predict": None, "num_timesteps": "x", "_n_updates": -1, "ep_info_buffer": [{"r": "x", "l": 1}]}
    for name, value in (wrong | {"ep_success_buffer": 1.5}).items():
        changed = {**members, "data": json.dumps({**data, name: value}).encode()}
        for trusted in (True, False):
            with pytest.raises(ValueError, match=rf"`{name}=|'{name}'|float"):
                PPOExt.load(io.BytesIO(packed(changed)), trusted=trusted)


def test_policy_alone(tmp_path):
    """Policies are read without unpickling, and refused if they have other classes, or none of the plain form."""
    extractor = dict(features_extractor_class=TransformerExtractor, features_extractor_kwargs=dict(d_model=4, n_heads=1))
    space = spaces.Box(-1, 1, (2, 3))
    policy = MlpPolicy(space, BOX_ACTION, lambda _: 0.1, action_dist="beta", **extractor)
    policy.save(tmp_path / "policy")
    loaded = MlpPolicy.load(tmp_path / "policy", trusted=False)
    assert_equal(policy.state_dict(), loaded.state_dict(), "policy")
    assert loaded.action_dist_name == "beta"

    MlpPolicy(space, BOX_ACTION, lambda _: 0.1, features_extractor_class=MyExtractor).save(tmp_path / "policy")
    with pytest.raises(ValueError, match=r"policy has test_untrusted.MyExtractor.*trusted=True"):
        MlpPolicy.load(tmp_path / "policy", trusted=False)
    ActorCriticPolicy(space, BOX_ACTION, lambda _: 0.1).save(tmp_path / "policy")
    MlpPolicy.load(tmp_path / "policy")
    with pytest.raises(ValueError, match="was not saved by a policy of this version"):
        MlpPolicy.load(tmp_path / "policy", trusted=False)


def test_nothing_of_a_policy_is_executed(tmp_path):
    """A pickle in any member of a policy's file is not executed."""
    file, path = io.BytesIO(), tmp_path / "executed"
    MlpPolicy(spaces.Box(-1, 1, (3,)), BOX_ACTION, lambda _: 0.1).save(file)
    members, trap = parts(file.getvalue()), pickle.dumps(Trap(path), protocol=2)
    inner = parts(members["archive/state_dict.pth"])
    changed = [packed({**members, name: trap}) for name in members]
    changed += [packed({**members, "archive/state_dict.pth": packed({**inner, name: trap})}) for name in inner]
    for content in changed:
        with contextlib.suppress(ValueError):
            MlpPolicy.load(io.BytesIO(content), trusted=False)
        assert not path.exists()
    with pytest.raises(ValueError, match="not a policy"):
        MlpPolicy.load(io.BytesIO(packed({**members, "archive/data.pkl": trap})))
    assert path.exists()
