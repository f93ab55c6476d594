"""Groups of parameters and their rules, against torch's own optimisers."""

import copy
import pickle
import re

import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.torch_layers import FlattenExtractor
from support.parity import assert_equal
from support.toys import DICT, IMAGE, make_toys
from support.training import before_steps
from support.zips import Zip
from torch import nn

from sb3_ppo_ext import MlpPolicy, PPOExt
from sb3_ppo_ext.update import optimizers
from sb3_ppo_ext.update.optimizers import MuonWithAdamW, critic_parameters, hidden_matrices

SMALL = dict(n_steps=16, batch_size=8, n_epochs=2, seed=3, device="cpu")
TOYS = make_toys()


def make(policy="MlpPolicy", env=TOYS, algorithm=PPOExt, **options):
    return algorithm(policy, env, **{**SMALL, **options})


def names(policy, parameters):
    return {name for name, parameter in policy.named_parameters() if parameter in parameters}


def with_gradients(policy, seed=0):
    generator = th.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        parameter.grad = th.randn(parameter.shape, generator=generator)
    return policy


def set_lr(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr


def test_sb3s_optimizer_by_default():
    """Without options the optimiser is the one that the policy has made."""
    assert_equal(make(algorithm=PPO).policy.optimizer.state_dict(), make().policy.optimizer.state_dict(), "optimizer")


# Who owns what

MLP_CRITIC = {f"mlp_extractor.value_net.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}
MLP_CRITIC |= {"value_net.weight", "value_net.bias"}
SEPARATE = dict(policy_kwargs=dict(share_features_extractor=False))


@pytest.mark.parametrize(
    ("policy", "observation_space", "options", "expected"),
    [
        ("MlpPolicy", None, {}, MLP_CRITIC),
        ("CnnPolicy", IMAGE, {}, {"value_net.weight", "value_net.bias"}),
        ("MlpPolicy", None, dict(policy_kwargs=dict(net_arch=[])), {"value_net.weight", "value_net.bias"}),
        ("MlpPolicy", None, dict(use_sde=True), MLP_CRITIC),
    ],
    ids=["mlp", "cnn", "linear", "gSDE"],
)
def test_parameters_of_the_critic(policy, observation_space, options, expected):
    """What the actor uses as well belongs to the actor."""
    env = make_toys(**({"observation_space": observation_space} if observation_space else {}))
    policy = make(policy, env, **options).policy
    assert names(policy, critic_parameters(policy)) == expected


def test_separate_extractors_of_the_critic():
    """With an extractor for each network, the critic's is the critic's."""
    policy = make("CnnPolicy", make_toys(observation_space=IMAGE), **SEPARATE).policy
    of_critic = names(policy, critic_parameters(policy))
    assert {name.split(".")[0] for name in of_critic} == {"vf_features_extractor", "value_net"}
    assert len(of_critic) == 2 + len(list(policy.vf_features_extractor.parameters()))


@pytest.mark.parametrize(
    ("policy", "observation_space", "options", "expected"),
    [
        ("MlpPolicy", None, {}, {"mlp_extractor.policy_net.2.weight", "mlp_extractor.value_net.2.weight"}),
        ("MlpPolicy", None, dict(use_sde=True), {"mlp_extractor.policy_net.2.weight", "mlp_extractor.value_net.2.weight"}),
        ("CnnPolicy", IMAGE, {}, {"features_extractor.linear.0.weight"}),
        ("CnnPolicy", IMAGE, SEPARATE, {f"{part}features_extractor.linear.0.weight" for part in ("", "vf_")}),
        (
            "MultiInputPolicy",
            DICT,
            {},
            {"features_extractor.extractors.camera.linear.0.weight"}
            | {f"mlp_extractor.{net}_net.{i}.weight" for net in ("policy", "value") for i in (0, 2)},
        ),
        (
            "MultiInputPolicy",
            DICT,
            dict(policy_kwargs=dict(actor_keys=["joints"])),
            {"vf_features_extractor.extractors.camera.linear.0.weight", "mlp_extractor.policy_net.2.weight"}
            | {f"mlp_extractor.value_net.{i}.weight" for i in (0, 2)},
        ),
    ],
    ids=["mlp", "gSDE", "cnn", "separate", "dict", "different keys"],
)
def test_hidden_matrices(policy, observation_space, options, expected):
    """Neither output layers, nor layers that read the observation, nor convolutions, biases or log_std are hidden matrices."""
    env = make_toys(**({"observation_space": observation_space} if observation_space else {}))
    policy = make(policy, env, **options).policy
    assert names(policy, hidden_matrices(policy)) == expected


class OwnLayers(FlattenExtractor):
    """Reads the observation by its own layer, followed by another one."""

    def __init__(self, observation_space):
        super().__init__(observation_space)
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3), nn.LayerNorm(3))

    def forward(self, observations):
        return self.layers(super().forward(observations))


def test_hidden_matrices_after_an_extractor_with_layers():
    """The first layer of the extractor reads the observation; those of the networks behind it do not."""
    policy = make(policy_kwargs=dict(features_extractor_class=OwnLayers)).policy
    networks = {f"mlp_extractor.{net}_net.{i}.weight" for net in ("policy", "value") for i in (0, 2)}
    assert names(policy, hidden_matrices(policy)) == {"features_extractor.layers.2.weight"} | networks


def test_hidden_matrices_of_a_transformer():
    """Both layers that read observations, that for windows and that for single steps, are none."""
    policy = make("MlpTransformerPolicy").policy
    hidden = names(policy, hidden_matrices(policy))
    of_transformer = {name for name in hidden if name.startswith("pi_transformer.")}
    assert of_transformer
    assert all(name.startswith("pi_transformer.blocks.") for name in of_transformer)
    assert {f"mlp_extractor.policy_net.{i}.weight" for i in (0, 2)} <= hidden


# Steps, against torch's optimisers


@pytest.mark.parametrize(
    ("name", "torchs"),
    [
        ("adam", lambda p: th.optim.Adam(p, lr=0.01, eps=1e-5, weight_decay=0.1)),
        ("adamw", lambda p: th.optim.AdamW(p, lr=0.01, eps=1e-5, weight_decay=0.1)),
        ("sgd", lambda p: th.optim.SGD(p, lr=0.01, weight_decay=0.1)),
    ],
)
def test_steps_are_torchs(name, torchs):
    """Steps are those of PyTorch's optimisers, with weight decay on everything but log_std."""
    policy = make(optimizer=name, weight_decay=0.1).policy
    copied = copy.deepcopy(policy)
    theirs = torchs([p for n, p in copied.named_parameters() if n != "log_std"])
    log_std = torchs([copied.log_std])
    log_std.param_groups[0]["weight_decay"] = 0.0
    set_lr(policy.optimizer, 0.01)
    for seed in range(3):
        with_gradients(policy, seed).optimizer.step()
        with_gradients(copied, seed)
        theirs.step()
        log_std.step()
    assert_equal(copied.state_dict(), policy.state_dict(), "policy")


def test_adamw_without_weight_decay():
    """PyTorch's default weight decay of 0.01 does not get in."""
    policy = make(optimizer="adamw").policy
    assert {group["weight_decay"] for group in policy.optimizer.param_groups} == {0.0}


def test_muon_steps_are_torchs():
    """Steps are those of PyTorch's Muon and AdamW on the two kinds of parameters."""
    policy = make(optimizer="muon", weight_decay=0.1, critic_learning_rate=0.02).policy
    copied = copy.deepcopy(policy)
    of_muon = hidden_matrices(copied)
    rest = [p for n, p in copied.named_parameters() if p not in of_muon and n != "log_std"]
    theirs = [
        th.optim.Muon(of_muon, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        th.optim.AdamW(rest, lr=0.01, eps=1e-5, weight_decay=0.1),
        th.optim.AdamW([copied.log_std], lr=0.01, eps=1e-5, weight_decay=0.0),
    ]
    set_lr(policy.optimizer, 0.01)
    for seed in range(3):
        with_gradients(policy, seed).optimizer.step()
        with_gradients(copied, seed)
        for optimizer in theirs:
            optimizer.step()
    assert_equal(copied.state_dict(), policy.state_dict(), "policy")


def test_gradients_of_muon_are_not_clipped():
    """Only the other gradients are clipped, and only their norm after it is logged."""
    policy = with_gradients(make(optimizer="muon").policy)
    of_muon = hidden_matrices(policy)
    before = {parameter: parameter.grad.clone() for parameter in policy.parameters()}
    norms = optimizers.clip_gradients(policy, 0.5)
    for parameter, gradient in before.items():
        assert th.equal(parameter.grad, gradient) == (parameter in of_muon)
    for name, members in (("muon_grad_norm", of_muon), ("grad_norm", before.keys() - of_muon)):
        assert norms[name].item() == pytest.approx(th.cat([before[p].flatten() for p in members]).norm().item(), rel=1e-5)
    logged = make(optimizer="muon").learn(32).logger.name_to_value
    assert {name for name in logged if "grad_norm" in name} == {
        f"train/{name}" for name in ("muon_grad_norm", "grad_norm", "grad_norm_clipped")
    }


def test_muon_is_one_optimizer():
    """The state covers all parameters, and a state dictionary brings it back whole."""
    policy = make(optimizer="muon").policy
    assert isinstance(policy.optimizer, MuonWithAdamW)
    set_lr(policy.optimizer, 0.01)
    with_gradients(policy).optimizer.step()
    assert len(policy.optimizer.state) == len(list(policy.parameters()))
    copied = make(optimizer="muon").policy
    copied.load_state_dict(policy.state_dict())
    copied.optimizer.load_state_dict(copy.deepcopy(policy.optimizer.state_dict()))  # torch does not copy
    for one in (policy, copied):
        set_lr(one.optimizer, 0.02)  # the parts see it after the load as well
        with_gradients(one, 1).optimizer.step(lambda: th.tensor(1.0))
    assert_equal(policy.state_dict(), copied.state_dict(), "policy")
    assert_equal(policy.optimizer.state_dict(), copied.optimizer.state_dict(), "optimizer")


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_muon(duplicate):
    """Both parts of a copied optimiser work on the copied parameters."""
    policy = with_gradients(make(optimizer="muon", learning_rate=0.01).policy)
    set_lr(policy.optimizer, 0.01)
    policy.optimizer.step()
    copied = duplicate(policy)
    for one in (policy, copied):
        with_gradients(one, 1).optimizer.step()
    assert_equal(policy.state_dict(), copied.state_dict(), "policy")
    copied.optimizer.step()
    assert not th.equal(policy.action_net.weight, copied.action_net.weight)


def test_muon_without_hidden_matrices():
    """Without hidden matrices AdamW takes all parameters, with a warning, for a tuner may draw such a network."""
    with pytest.warns(UserWarning, match="no hidden matrix.*net_arch"):
        model = make(optimizer="muon", policy_kwargs=dict(net_arch=[8]))
    model.learn(32)


def test_torch_without_muon(monkeypatch):
    """PyTorch before 2.9 is named as the reason."""
    monkeypatch.setattr(optimizers, "Muon", None)
    with pytest.raises(ValueError, match=r"`optimizer='muon'`.*torch 2\.9"):
        make(optimizer="muon")


def test_arguments_of_the_optimizer():
    """`optimizer_kwargs` go to the chosen class, and bad ones are refused."""
    policy = make(optimizer="sgd", policy_kwargs=dict(optimizer_kwargs=dict(momentum=0.5))).policy
    assert policy.optimizer.param_groups[0]["momentum"] == 0.5
    policy = make(optimizer="muon", policy_kwargs=dict(optimizer_kwargs=dict(momentum=0.5, eps=1e-6))).policy
    assert [group.get("momentum") for group in policy.optimizer.param_groups] == [0.5, None, None]
    with pytest.raises(ValueError, match="`optimizer_kwargs` has no option `momentums`"):
        make(optimizer="sgd", policy_kwargs=dict(optimizer_kwargs=dict(momentums=0.5)))
    with pytest.raises(ValueError, match=r"`weight_decay=0\.1`.*optimizer_kwargs"):
        make(weight_decay=0.1, policy_kwargs=dict(optimizer_kwargs=dict(weight_decay=0.1)))
    kwargs = dict(optimizer_kwargs=dict(momentum=0.5))
    model = make(optimizer="sgd", policy_kwargs=kwargs)
    assert model.policy_kwargs == kwargs == dict(optimizer_kwargs=dict(momentum=0.5))


def test_optimizer_class_of_the_user():
    """The second learning rate works with any class of optimiser."""
    policy_kwargs = dict(optimizer_class=th.optim.RMSprop, optimizer_kwargs=dict(alpha=0.9))
    model = make(critic_learning_rate=0.01, policy_kwargs=policy_kwargs).learn(32)
    assert type(model.policy.optimizer) is th.optim.RMSprop
    assert {(group["lr"], group["alpha"]) for group in model.policy.optimizer.param_groups} == {(3e-4, 0.9), (0.01, 0.9)}


def test_optimizer_class_of_the_policy_keeps_its_defaults():
    """A second rate changes neither class nor arguments, be they the user's or the policy's own."""

    class Own(MlpPolicy):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{**kwargs, "optimizer_class": th.optim.RMSprop, "optimizer_kwargs": {"alpha": 0.7}})

    for policy, policy_kwargs in (("MlpPolicy", dict(optimizer_class=th.optim.AdamW)), (Own, {}), ("MlpPolicy", {})):
        one = make(policy, policy_kwargs=policy_kwargs).policy.optimizer
        other = make(policy, policy_kwargs=policy_kwargs, critic_learning_rate=1e-3).policy.optimizer
        assert type(one) is type(other)
        (expected,) = one.param_groups
        for group in other.param_groups:
            weight_decay = 0.0 if len(group["params"]) == 1 else expected["weight_decay"]
            for name in expected.keys() - {"params", "lr"}:
                assert group[name] == (weight_decay if name == "weight_decay" else expected[name]), name


def test_weight_decay_that_a_class_does_not_take():
    """Weight decay for an optimiser that has none is refused."""
    with pytest.raises(ValueError, match="has no option `weight_decay`"):
        make(weight_decay=0.1, policy_kwargs=dict(optimizer_class=th.optim.Rprop))


def test_trunk_that_both_networks_share():
    """A trunk that both networks share belongs to the actor."""

    class SharedTrunk(MlpPolicy):
        def _build_mlp_extractor(self):
            super()._build_mlp_extractor()
            self.mlp_extractor.value_net = self.mlp_extractor.policy_net

    policy = make(SharedTrunk, critic_learning_rate=1e-3).policy
    assert names(policy, critic_parameters(policy)) == {"value_net.weight", "value_net.bias"}


# The second learning rate


def test_same_rate_for_both_is_one_optimizer():
    """Where nothing is clipped, a critic's rate equal to the actor's changes nothing."""
    one, two = (make(max_grad_norm=1e9, backend="eager", **o).learn(96) for o in ({}, dict(critic_learning_rate=3e-4)))
    assert_equal(one.policy.state_dict(), two.policy.state_dict(), "policy")


def test_rates_and_clipping_by_group():
    """Each group has its rate and its own norm, which is clipped to `max_grad_norm` by itself."""
    model = make(critic_learning_rate="lin_0.01", max_grad_norm=0.1, vf_coef=5.0)
    norms, groups = [], model.policy.optimizer.param_groups

    def look():
        norms.append([th.cat([p.grad.flatten() for p in g["params"]]).norm().item() for g in groups if len(g["params"]) > 1])
        assert {group["role"]: group["lr"] for group in groups} == {"actor": 3e-4, "critic": pytest.approx(0.005)}

    before_steps(model, look)
    model.learn(64, callback=lambda local, _: local["self"].num_timesteps <= 32)
    assert len(norms) == 8
    logged = model.logger.name_to_value
    assert logged["train/critic_learning_rate"] == pytest.approx(0.005)
    assert logged["train/grad_norm"] > 0.1
    assert logged["train/critic_grad_norm"] > 0.1
    assert logged["train/critic_grad_norm_clipped"] == pytest.approx(0.1)
    # log_std is a group of its own
    assert all(actor <= 0.1001 and critic == pytest.approx(0.1, rel=1e-4) for actor, critic in norms)


# States across zips

KINDS = {
    "SB3's": {},
    "critic": dict(critic_learning_rate=1e-3),
    "decay": dict(weight_decay=0.01),
    "both": dict(critic_learning_rate=1e-3, weight_decay=0.01),
}


def moments(model):
    return {
        name: model.policy.optimizer.state[parameter]
        for name, parameter in model.policy.named_parameters()
        if parameter in model.policy.optimizer.state
    }


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("before", KINDS)
@pytest.mark.parametrize("after", KINDS)
def test_moments_follow_their_parameters(before, after):
    """When a rate of the critic or weight decay comes or goes, the moments stay and the new hyperparameters hold."""
    model = make(**KINDS[before]).learn(32)
    options = dict(critic_learning_rate=None, weight_decay=0.0) | KINDS[after]
    loaded = Zip(model).load(env=make_toys(), **options)
    assert_equal(moments(model), moments(loaded), "moments")
    assert loaded.policy.optimizer.param_groups[-1]["weight_decay"] == options["weight_decay"]
    loaded.learn(32, reset_num_timesteps=False)


def test_moments_of_sb3s_zip():
    """The moments of a zip of PPO are kept under a second learning rate."""
    model = make(algorithm=PPO).learn(32)
    loaded = Zip(model).load(env=make_toys(), critic_learning_rate=1e-3)
    assert_equal(moments(model), moments(loaded), "moments")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, dict(optimizer="sgd"), "of the optimizer Adam, while `optimizer` is SGD"),
        (dict(optimizer="sgd"), dict(optimizer="adam"), "SGD, while `optimizer` is Adam"),
        (dict(optimizer="muon"), dict(optimizer="adamw"), "AdamW and Muon, while `optimizer` is AdamW"),
        (dict(optimizer="adamw"), dict(optimizer="muon"), "AdamW, while `optimizer` is AdamW and Muon"),
    ],
)
def test_another_optimizer(before, after, message):
    """The state of another optimiser is refused, and the remedy of the message works."""
    model = make(**before).learn(32)
    saved = Zip(model)
    with pytest.raises(ValueError, match=re.escape(message)):
        saved.load(env=make_toys(), **after)
    other = make(**after)
    other.set_parameters({"policy": saved.load().policy.state_dict()}, exact_match=False)
    assert_equal(model.policy.state_dict(), other.policy.state_dict(), "policy")
    other.learn(32)


def test_another_network():
    """SB3's message says which shapes differ."""
    model = make(weight_decay=0.1, policy_kwargs=dict(net_arch=[8]))
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.set_parameters(make(weight_decay=0.1).get_parameters())


def test_no_critic_apart():
    """A policy whose critic cannot be told from its actor is refused where that is needed."""
    from stable_baselines3.common.policies import ActorCriticPolicy

    class Shared(ActorCriticPolicy):
        def _build(self, lr_schedule):
            super()._build(lr_schedule)
            for module in (self.value_net, self.mlp_extractor.value_net):
                module.requires_grad_(False)
            self.values, self.latent = self.value_net, self.mlp_extractor.value_net
            del self.value_net, self.mlp_extractor.value_net

    for option in (dict(critic_learning_rate=1e-3), dict(max_clip_fraction=0.5)):
        with pytest.raises(ValueError, match=f"`{next(iter(option))}=.*no critic apart"):
            make(Shared, **option)


def test_discrete_actions_have_no_log_std():
    """Without log_std there is one group fewer."""
    model = make(env=make_toys(action_space=spaces.Discrete(3)), weight_decay=0.1).learn(32)
    assert len(model.policy.optimizer.param_groups) == 1
