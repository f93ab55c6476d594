"""
A covering array: few cells, each with an engine, a policy, actions, a kind of environment and some options, in which every
two values of these occur together that can.
"""

import itertools

import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from stable_baselines3.common.vec_env import VecNormalize
from support.engines import KEYS, VECTORS
from support.hybrid import KICK
from support.masks import make_masked
from support.options import SMALL, VALUES, is_legal, with_needs
from support.torch_envs import ToyTensors
from support.toys import BOX_ACTION, VECTOR, ToyEnv, make_toys

from sb3_ppo_ext import ActionMaskWrapper, PPOExt, VectorEnvAdapter

# "sim" is the backend "device" on a simulated device; "compile" takes seconds: see tests/engines/test_compiled.py.
ENGINES = ("eager", "fused", "native", "device", "sim")
# Policy and its keywords; a critic that reads more than the actor counts as a policy of its own.
POLICIES = {
    "mlp": ("MlpPolicy", {}),
    "own keys": ("MultiInputPolicy", KEYS),
    "lstm": ("MlpLstmPolicy", dict(lstm_hidden_size=4)),
    "gru": ("MlpLstmPolicy", dict(lstm_hidden_size=4, rnn="gru")),
    "transformer": ("MlpTransformerPolicy", dict(context_length=3, n_stacked=1, d_model=4, n_heads=1)),
}
ACTIONS = {
    "box": BOX_ACTION,
    "discrete": spaces.Discrete(3),
    "multi-discrete": spaces.MultiDiscrete([3, 2]),
    "multi-binary": spaces.MultiBinary(2),
    "hybrid": KICK,
}
ENVS = ("plain", "normalized", "adapted", "tensors")
# What each cell has a value of; every option besides is a factor, too, which may be absent.
ROOMS = {"engine": ENGINES, "policy": tuple(POLICIES), "actions": tuple(ACTIONS), "env": ENVS}
# Larger rates and tighter limits than those of the table would act more, and let rounding grow beyond the tolerances.
RATES: dict = {}
LIMITS: dict = {}
# A zip has no discounted returns of running episodes, with which rewards are normalised.
ELSEWHERE = {"backend", "normalize_reward", "clip_reward"}
OPTIONS = {name: [LIMITS.get(name, value) for value in values] for name, values in VALUES.items() if name not in ELSEWHERE}
ITEMS = [(name, value) for name, values in {**ROOMS, **OPTIONS}.items() for value in values]


def options_of(cell):
    """The options alone."""
    return {name: value for name, value in cell.items() if name not in ROOMS}


def items_of(cell):
    """Indices in `ITEMS` of what the cell consists of. Options that others need may have values that are not there."""
    return {number for number, (name, value) in enumerate(ITEMS) if name in cell and cell[name] == value}


def is_trainable(cell):
    """Whether what has a value in each room can be trained."""
    if cell.get("action_masking") and cell["env"] in ("adapted", "tensors"):
        return False  # Their masks are a part of the observations.
    if cell.get("normalize_obs") and cell["env"] == "normalized":
        return False  # Only one of them may normalise.
    if cell.get("amp_dtype") and cell["engine"] == "sim":
        return False  # The simulated device has no autocast.
    policy, _ = POLICIES[cell["policy"]]
    return is_legal(dict(options_of(cell), backend=backend_of(cell), policy=policy), ACTIONS[cell["actions"]])


def backend_of(cell):
    return "device" if cell["engine"] == "sim" else cell["engine"]


def complete(cell):
    """The cell together with the options that its options need."""
    needed = with_needs(options_of(cell))
    return {name: LIMITS.get(name, value) for name, value in needed.items()} | cell


def completions(cell):
    """All cells that can be trained and extend the given one by a value in each room."""
    cell = complete(cell)
    free = [name for name in ROOMS if name not in cell]
    for values in itertools.product(*(ROOMS[name] for name in free)):
        if is_trainable(longer := {**cell, **dict(zip(free, values, strict=True))}):
            yield longer


class CoveringArray:
    """
    Built greedily: each cell begins with two values that have not met, and grows by those that meet most for the first time.

    :param n_options: Largest number of options of a cell, with those that they need
    """

    def __init__(self, n_options=7):
        self.n_options, self.cells = n_options, []
        self.rng = np.random.default_rng(0)
        # For each item those that it has not met, and may meet
        self.unmet = [{j for j, other in enumerate(ITEMS) if other[0] != item[0]} for item in ITEMS]
        while any(self.unmet):
            one = max(range(len(ITEMS)), key=lambda i: len(self.unmet[i]))
            other = max(self.unmet[one], key=lambda j: len(self.unmet[j]))
            self._begin(one, other)

    def _begin(self, one, other):
        cells = list(completions(dict([ITEMS[one], ITEMS[other]])))
        if not cells:
            return self._meet({one, other})
        cells = [cells[i] for i in self.rng.permutation(len(cells))[:15]]
        cell = self._extended(max(cells, key=lambda cell: self._n_new(items_of(cell))))
        self.cells.append(cell)
        return self._meet(items_of(cell))

    def _n_new(self, items):
        """Number of first meetings among the items, counted from both sides."""
        return sum(len(self.unmet[item] & items) for item in items)

    def _meet(self, items):
        for item in items:
            self.unmet[item] -= items

    def _extended(self, cell):
        refused = set()
        while len(options_of(cell)) < self.n_options:
            items = items_of(cell)
            free = [i for i, (name, _) in enumerate(ITEMS) if name not in cell and i not in refused]
            gain, _, best = max(((len(self.unmet[i] & items), self.rng.random(), i) for i in free), default=(0, 0, 0))
            if gain == 0:
                break
            refused.add(best)
            longer = complete(dict([ITEMS[best]])) | cell
            if len(options_of(longer)) <= self.n_options and is_trainable(longer):
                cell = longer
        return cell


def make_env(cell, device):
    """Two environments of the cell's kind, whose episodes have at most five steps."""
    keywords = dict(
        observation_space=VECTORS if cell["policy"] == "own keys" else VECTOR, action_space=ACTIONS[cell["actions"]], length=5
    )
    if cell["env"] == "tensors":
        return ToyTensors(**keywords, device=device)
    if cell["env"] == "adapted":
        return VectorEnvAdapter(SyncVectorEnv([lambda: ToyEnv(**keywords)] * 2))  # SB3's `VecMonitor` cannot be copied.
    if cell.get("action_masking"):
        env = make_masked(wrapper=ActionMaskWrapper if "action_mask_key" in cell else None, **keywords)
    else:
        env = make_toys(**keywords)
    return normalized(env) if cell["env"] == "normalized" else env


def normalized(env):
    space = env.observation_space
    vectors = [key for key, part in space.items() if isinstance(part, spaces.Box)] if isinstance(space, spaces.Dict) else None
    return VecNormalize(env, norm_obs_keys=vectors)


def make(cell, device="cpu", backend=None):
    """
    :param cell: A cell
    :param device: Device of the model, and of an environment that steps in tensors
    :param backend: Another backend than the cell's
    """
    policy, keywords = POLICIES[cell["policy"]]
    options = SMALL | RATES | options_of(cell) | dict(backend=backend or backend_of(cell), device=device)
    return PPOExt(policy, make_env(cell, device), **options | dict(policy_kwargs=SMALL["policy_kwargs"] | keywords))


CELLS = CoveringArray().cells
