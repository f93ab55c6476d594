"""Programs that load damaged zips of models."""

import inspect
import io
import random
from dataclasses import dataclass
from functools import cache

from gymnasium import spaces
from support.fuzzing.drawing import PREAMBLE, Step
from support.fuzzing.environments import make_env
from support.fuzzing.vocabulary import Broken, act, learn
from support.mutations import mutated
from support.parity import assert_equal
from support.zips import Zip

from sb3_ppo_ext import PPOExt

SMALL = dict(n_steps=8, batch_size=8, n_epochs=1, device="cpu", seed=0)
NET = dict(net_arch=[4])
TRANSFORMER = dict(net_arch=[4], d_model=4, n_heads=2, ffn_dim=4, context_length=3)
LEARNING = dict(advantage_norm="ema", kl_coef=0.1, kl_target=0.01, adaptive_lr_kl=0.01, action_dist="beta", optimizer="muon")
SCHEDULES = dict(learning_rate="lin_1e-3", clip_range=lambda progress: 0.1 * progress, critic_learning_rate=1e-3, use_sde=True)
VECTOR, BOX = spaces.Box(-1.0, 1.0, (3,)), spaces.Box(-1.0, 1.0, (2,))
# Policy, spaces and options of models that are saved
MODELS = {
    "plain": ("MlpPolicy", VECTOR, spaces.Discrete(3), dict(policy_kwargs=NET)),
    "learning": ("MlpPolicy", VECTOR, BOX, dict(policy_kwargs=NET, **LEARNING)),
    "schedules": ("MlpPolicy", VECTOR, BOX, dict(policy_kwargs=NET, **SCHEDULES)),
    "transformer": ("MlpTransformerPolicy", VECTOR, BOX, dict(policy_kwargs=TRANSFORMER)),
    "recurrent": ("MlpLstmPolicy", VECTOR, BOX, dict(policy_kwargs=dict(net_arch=[4], lstm_hidden_size=4))),
    "dictionary": ("MultiInputPolicy", spaces.Dict(a=VECTOR, b=spaces.Discrete(3)), BOX, dict(policy_kwargs=NET)),
}
WAYS = ["", ", trusted=False"] if "trusted" in inspect.signature(PPOExt.load).parameters else [""]


@dataclass(frozen=True)
class ZipProgram:
    """
    :param seed: Seed of the damage
    """

    seed: int
    is_wild = True  # Damaged parameters may be anything.

    def lines(self):
        """All statements."""
        rng = random.Random(self.seed)
        name, way = rng.choice(sorted(MODELS)), rng.choice(WAYS)
        load = f"PPOExt.load(io.BytesIO(content), env=environment({name!r}), device='cpu'{way})"
        return (
            Step("from support.fuzzing.zips import damaged, environment, set_in_place, use"),
            Step(f"content = damaged({name!r}, {self.seed})"),
            Step(f"set_in_place({name!r}, content{way})"),
            Step(f"model = {load}", may_refuse=True),
            Step("use(model)"),
        )

    def source(self):
        """The program as a file."""
        return "\n".join([PREAMBLE, *(step.text for step in self.lines())])


@cache
def _saved(name):
    policy, _, _, options = MODELS[name]
    return Zip(PPOExt(policy, environment(name), **SMALL, **options).learn(16))


def environment(name):
    """A new environment for a model of ``MODELS``."""
    return make_env(*MODELS[name][1:3])


def damaged(name, seed):
    """Zip of a model of ``MODELS``, damaged."""
    return mutated(_saved(name).content, random.Random(seed))


def use(model):
    """Act and train, unless the damage has made parameters or rollouts very large."""
    if all(parameter.abs().max() < 100 for parameter in model.policy.parameters()):
        act(model)
        if model.n_steps * model.n_epochs < 1000:
            learn(model, 16)


def set_in_place(name, content, **kwargs):
    """Set the parameters of a whole model. If they are refused, nothing changes."""
    model = _saved(name).load(device="cpu")
    before = _saved(name).load(device="cpu").get_parameters()
    try:
        model.set_parameters(io.BytesIO(content), device="cpu", **kwargs)
    except ValueError:
        try:
            assert_equal(before, model.get_parameters(), "parameters")
        except AssertionError as error:
            raise Broken(f"`set_parameters` has refused a zip, and changed {error}") from error
