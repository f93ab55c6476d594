"""Vectorised environments that return what they should not."""

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv
from support.toys import BOX_ACTION, VECTOR


class Bent(VecEnv):
    """
    Two environments with episodes of four steps, of which the second is truncated. From the third step on, ``bend`` changes
    what ``step`` returns, and ``bend_reset`` what ``reset`` returns.
    """

    def __init__(self, bend=None, bend_reset=None, observation_space=VECTOR, action_space=BOX_ACTION):
        super().__init__(2, observation_space, action_space)
        self.bend, self.bend_reset, self.t, self.rng = bend, bend_reset, 0, np.random.default_rng(0)

    def observe(self):
        space = self.observation_space
        if isinstance(space, spaces.Dict):
            return {key: np.stack([part.sample(), part.sample()]) for key, part in space.items()}
        return np.stack([space.sample(), space.sample()])

    def reset(self):
        self.observation_space.seed(0)
        observations = self.observe()
        return self.bend_reset(observations) if self.bend_reset else observations

    def step_async(self, actions):
        assert all(self.action_space.contains(action) for action in actions), actions

    def step_wait(self):
        self.t += 1
        done, last = self.t % 4 == 0, self.observe()
        infos = [{"TimeLimit.truncated": done and bool(index)} for index in range(2)]
        if done:
            for index, info in enumerate(infos):
                is_dict = isinstance(last, dict)
                info["terminal_observation"] = {k: v[index] for k, v in last.items()} if is_dict else last[index]
        result = self.observe(), self.rng.normal(size=2).astype(np.float32), np.array([done, done]), infos
        return self.bend(*result) if self.bend and self.t > 2 else result

    def close(self):
        pass

    def get_attr(self, attr_name, indices=None):
        return [None] * 2

    def set_attr(self, attr_name, value, indices=None):
        pass

    def env_method(self, method_name, *method_args, indices=None, **method_kwargs):
        return [None] * 2

    def env_is_wrapped(self, wrapper_class, indices=None):
        return [False] * 2


def observations(change):
    return lambda o, r, d, i: (change(o), r, d, i)


def rewards(change):
    return lambda o, r, d, i: (o, change(r), d, i)


def dones(change):
    return lambda o, r, d, i: (o, r, change(d), i)


def infos(change):
    return lambda o, r, d, i: (o, r, d, change(i))


def terminal(change):
    """Changes the terminal observation of a truncated episode."""

    def bend(o, r, d, i):
        if d[1]:
            i[1]["terminal_observation"] = change(i[1]["terminal_observation"])
        return o, r, d, i

    return bend


def _read_only(array):
    array.flags.writeable = False
    return array


# What is refused, with the message
REFUSED = {
    "observation of one": (
        observations(lambda o: o[:1]),
        r"observations .* \(2, 3\), not .* \(1, 3\): at step 2 .* 4 timesteps",
    ),
    "observations of three": (observations(lambda o: np.concatenate([o, o[:1]])), r"observations .* not .*\(3, 3\)"),
    "wide observations": (observations(lambda o: np.zeros((2, 4), np.float32)), r"observations .* not .*\(2, 4\)"),
    "narrow observations": (observations(lambda o: o[:, :1]), r"observations .* not .*\(2, 1\)"),
    "observations with a dimension more": (observations(lambda o: o[..., None]), r"observations .* not .*\(2, 3, 1\)"),
    "transposed observations": (observations(lambda o: np.ascontiguousarray(o.T)), r"observations .* not .*\(3, 2\)"),
    "a list of observations": (observations(list), r"observations .* not .*\(list\)"),
    "no observations": (observations(lambda o: None), "observations .* not None"),
    "objects as observations": (observations(lambda o: o.astype(object)), "observations .* not .*object"),
    "words as observations": (observations(lambda o: o.astype(str)), "observations .* not .*<U"),
    "complex observations": (observations(lambda o: o.astype(complex)), "observations .* not .*complex128"),
    "dictionary": (observations(lambda o: {"a": o}), r"observations .* not a dictionary with the keys \['a'\]"),
    "observations and infos": (observations(lambda o: (o, {})), r"observations .* not .*\(tuple\)"),
    "NaN among observations": (observations(lambda o: o * np.nan), "Environment 0: the observation is not finite"),
    "observations beyond float32": (
        observations(lambda o: o * np.float64(1e300)),
        "observation is not finite .*beyond the range of float32",
    ),
    "reward of one": (rewards(lambda r: r[:1]), r"rewards .* \(2,\), not .*\(1,\)"),
    "rewards of three": (rewards(lambda r: np.ones(3, np.float32)), r"rewards .* not .*\(3,\)"),
    "column of rewards": (rewards(lambda r: r[:, None]), r"rewards .* not .*\(2, 1\)"),
    "row of rewards": (rewards(lambda r: r[None]), r"rewards .* not .*\(1, 2\)"),
    "one reward": (rewards(lambda r: 1.0), r"rewards .* not 1.0"),
    "no rewards": (rewards(lambda r: None), "rewards .* not None"),
    "None as a reward": (rewards(lambda r: [None, 1.0]), "Environment 0: the reward is not finite"),
    "words as rewards": (rewards(lambda r: ["1", "2"]), "rewards .* not .*'1'"),
    "complex rewards": (rewards(lambda r: r.astype(complex)), "rewards .* not .*complex128"),
    "NaN in a list of rewards": (rewards(lambda r: [1.0, np.nan]), "Environment 1: the reward is not finite"),
    "done of one": (dones(lambda d: d[:1]), r"dones .* \(2,\), not .*\(1,\)"),
    "column of dones": (dones(lambda d: d[:, None]), r"dones .* not .*\(2, 1\)"),
    "one done": (dones(lambda d: False), "dones .* not False"),
    "no dones": (dones(lambda d: None), "dones .* not None"),
    "dones of 2": (dones(lambda d: d * 2), "dones .*0 and 1.* not .*int64"),
    "NaN as dones": (dones(lambda d: np.full(2, np.nan)), "dones .* not .*float64"),
    "words as dones": (dones(lambda d: d.astype(str)), "dones .* not .*<U"),
    "fewer infos": (infos(lambda i: i[:1]), "infos .* a list of 2 dictionaries"),
    "more infos": (infos(lambda i: [*i, {}]), "infos .* a list of 2 dictionaries"),
    "empty infos at the end of an episode": (
        lambda o, r, d, i: (o, r, d, [] if d.any() else i),
        "infos .* a list of 2 dictionaries",
    ),
    "no infos": (infos(lambda i: None), "infos .* a list of 2 dictionaries, not None"),
    "infos of Gymnasium": (infos(lambda i: {"a": 1, "b": 2}), r"infos .* not a dictionary with the keys \['a', 'b'\]"),
    "None as infos": (infos(lambda i: [None] * 2), r"infos .* not \[None, None\]"),
    "wide terminal observation": (terminal(lambda o: np.zeros(4)), r"terminal observation .* \(3,\), not .*\(4,\)"),
    "terminal number": (terminal(lambda o: 0.5), r"terminal observation .* not 0.5"),
    "terminal word": (terminal(lambda o: "end"), "terminal observation .* not 'end'"),
    "terminal dictionary": (terminal(lambda o: {"a": o}), r"terminal observation .* not a dictionary with the keys \['a'\]"),
    "step of Gymnasium": (
        lambda o, r, d, i: (o, r, d, d, i),
        "result of `step` .* a tuple of observations, rewards, dones and",
    ),
    "no result": (lambda *step: None, "result of `step` .* not None"),
}
# What is as good as the right thing
LEGAL = {
    "observations in float64": observations(lambda o: o.astype(np.float64)),
    "observations in float16": observations(lambda o: o.astype(np.float16).astype(np.float32)),
    "read-only observations": observations(_read_only),
    "observations of every other number": observations(lambda o: np.repeat(o, 2, axis=1)[:, ::2]),
    "rewards in float64": rewards(lambda r: r.astype(np.float64)),
    "list of rewards": rewards(lambda r: r.tolist()),
    "tuple of rewards": rewards(tuple),
    "objects as rewards": rewards(lambda r: r.astype(object)),
    "read-only rewards": rewards(_read_only),
    "list of dones": dones(lambda d: d.tolist()),
    "dones of 0 and 1": dones(lambda d: d.astype(int)),
    "dones in float32": dones(lambda d: d.astype(np.float32)),
    "tuple of infos": infos(tuple),
    "array of infos": infos(np.array),
    "no infos between ends of episodes": lambda o, r, d, i: (o, r, d, i if d.any() else []),
    "terminal observation in a batch of one": terminal(lambda o: o[None]),
    "list as terminal observation": terminal(lambda o: o.tolist()),
}
