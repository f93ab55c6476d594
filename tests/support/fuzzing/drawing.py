"""Draws programs that use PPOExt: what they consist of is Python source, so that each is its own reproduction."""

import random
from dataclasses import dataclass, replace

from gymnasium import spaces
from support.fuzzing import policy_keywords
from support.fuzzing.values import SCHEDULES, evaluated, extreme, legal, rubbish
from support.options import is_legal

from sb3_ppo_ext.options import ALL_OPTIONS
from sb3_ppo_ext.options.reference import needed_by

PREAMBLE = "from support.fuzzing.vocabulary import *"
BOX = "spaces.Box(np.float32([-1, -2]), np.float32([1, 3]))"
VECTOR = "spaces.Box(-1.0, 1.0, (3,))"
# Expression -> what kind of policy reads it
OBSERVATIONS = {
    VECTOR: "vector",
    "spaces.Box(-float('inf'), float('inf'), (2,))": "vector",
    "spaces.Box(-1.0, 1.0, (2, 3))": "vector",
    "spaces.Box(-1.0, 1.0, (3,), np.float64)": "vector",
    "spaces.Box(-1.0, 1.0, (1,), np.float16)": "vector",
    "spaces.Box(-5, 5, (2,), np.int64)": "vector",
    "spaces.Box(0, 9, (3,), np.uint8)": "vector",
    "spaces.Box(np.float32([-1, 0, 2]), np.float32([1, 0, float('inf')]))": "vector",
    "spaces.Box(0, 255, (8, 8, 3), np.uint8)": "vector",
    "spaces.Discrete(4)": "vector",
    "spaces.MultiDiscrete([3, 2])": "vector",
    "spaces.MultiBinary(3)": "vector",
    "spaces.Box(0, 255, (36, 36, 1), np.uint8)": "image",
    "spaces.Box(0, 255, (3, 36, 36), np.uint8)": "image",
    f"spaces.Dict(a={VECTOR}, b=spaces.Discrete(3))": "dict",
    f"spaces.Dict(a={VECTOR}, b=spaces.Box(-9.0, 9.0, (2, 2), np.float64))": "dict",
    f"spaces.Dict(a=spaces.MultiBinary(2), b={VECTOR}, c=spaces.MultiDiscrete([2, 3]))": "dict",
    f"spaces.Dict(a=spaces.Box(0, 255, (36, 36, 1), np.uint8), b={VECTOR})": "dict",
}
RARE_OBSERVATIONS = (
    "spaces.Box(-1.0, 1.0, (0,))",
    "spaces.Box(-1.0, 1.0, (2, 0))",
    "spaces.Box(-1.0, 1.0, ())",
    "spaces.Box(1.0, 1.0, (2,))",
    "spaces.Box(-1e30, 1e30, (2,))",
    "spaces.Box(-1e300, 1e300, (2,), np.float64)",
    "spaces.Box(0, 255, (4, 4, 3), np.uint8)",
    "spaces.Box(0, 1, (3, 4), bool)",
    "spaces.Discrete(1)",
    "spaces.Discrete(3, start=5)",
    "spaces.Discrete(3, start=-1)",
    "spaces.MultiDiscrete([1])",
    "spaces.MultiDiscrete([[2, 3], [4, 5]])",
    "spaces.MultiDiscrete([2, 3], start=[1, 4])",
    "spaces.MultiBinary((2, 2))",
    "spaces.MultiBinary(1)",
    "spaces.Dict()",
    "spaces.Dict(a=spaces.Box(-1.0, 1.0, (0,)))",
    "spaces.Dict(a=spaces.Box(-1.0, 1.0, (0,)), b=spaces.Box(-1.0, 1.0, (2, 0)))",
    f"spaces.Dict(a=spaces.Box(-1.0, 1.0, (0,)), b={VECTOR})",
    "spaces.Dict(a=spaces.Discrete(3, start=2))",
    f"spaces.Dict(a=spaces.Dict(b={VECTOR}))",
    f"spaces.Dict({{'a.b': {VECTOR}, '': spaces.Discrete(2)}})",
    f"spaces.Tuple([{VECTOR}, spaces.Discrete(2)])",
    "spaces.Text(5)",
    "spaces.Sequence(spaces.Discrete(2))",
)
ACTIONS = (
    BOX,
    "spaces.Box(-1.0, 1.0, (1,))",
    "spaces.Box(-1.0, 1.0, (2, 2))",
    "spaces.Box(-2.0, 2.0, (2,), np.float64)",
    "spaces.Discrete(3)",
    "spaces.Discrete(2)",
    "spaces.MultiDiscrete([3, 2])",
    "spaces.MultiBinary(2)",
    f"spaces.Dict(a={BOX}, b=spaces.Discrete(3))",
    f"spaces.Tuple([spaces.MultiBinary(2), spaces.Dict(a=spaces.MultiDiscrete([2, 3]), b={BOX})])",
)
RARE_ACTIONS = (
    "spaces.Box(-3, 3, (2,), np.int64)",
    "spaces.Box(0, 255, (2,), np.uint8)",
    "spaces.Box(-1.0, 1.0, (2,), np.float16)",
    "spaces.Box(0.5, 0.5, (2,))",
    "spaces.Box(np.float32([0, -1]), np.float32([0, 1]))",
    "spaces.Box(-1e30, 1e30, (2,))",
    "spaces.Box(-3e38, 3e38, (1,))",
    "spaces.Box(-1e300, 1e300, (1,), np.float64)",
    "spaces.Box(1e-30, 1e-29, (1,))",
    "spaces.Box(-float('inf'), float('inf'), (2,))",
    "spaces.Box(-1.0, 1.0, (0,))",
    "spaces.Box(-1.0, 1.0, ())",
    "spaces.Discrete(1)",
    "spaces.Discrete(3, start=1)",
    "spaces.Discrete(3, start=-1)",
    "spaces.MultiDiscrete([1, 1])",
    "spaces.MultiDiscrete([[2, 3], [4, 5]])",
    "spaces.MultiDiscrete([2, 3], start=[1, 4])",
    "spaces.MultiBinary((2, 2))",
    "spaces.MultiBinary(1)",
    "spaces.Dict(a=spaces.Discrete(2))",
    "spaces.Tuple([spaces.Discrete(2)])",
    "spaces.Dict(a=spaces.Box(-1.0, 1.0, (2,), np.float64), b=spaces.Box(-3e38, 3e38, (1,)))",
    "spaces.Dict(a=spaces.Box(-1e300, 1e300, (1,), np.float64))",
    "spaces.Dict(a=spaces.Box(0, 9, (2,), np.int64))",
    "spaces.Dict(a=spaces.Tuple([]))",
    "spaces.Tuple([spaces.Text(3), spaces.Discrete(2)])",
    "spaces.Text(3)",
)
POLICIES = {
    "vector": ("'MlpPolicy'",) * 4
    + ("'MlpTransformerPolicy'", "'MlpLstmPolicy'", "ActorCriticPolicy", "MlpPolicy", "OwnPolicy"),
    "image": ("'CnnPolicy'", "'CnnPolicy'", "'CnnTransformerPolicy'", "'CnnLstmPolicy'", "'MlpPolicy'", "CnnPolicy"),
    "dict": (
        *("'MultiInputPolicy'",) * 3,
        *("'MultiInputTransformerPolicy'", "'MultiInputLstmPolicy'", "MultiInputPolicy", "MultiInputActorCriticPolicy"),
    ),
}
RARE_POLICIES = (
    "'Nope'",
    "5",
    "None",
    "nn.Linear",
    "PPO",
    "'MultiInputPolicy'",
    "'CnnPolicy'",
    "'MlpPolicy'",
    "MultiInputPolicy",
)
RARE_POLICIES += (
    "'CnnTransformerPolicy'",
    "'MultiInputTransformerPolicy'",
    "'MlpTransformerPolicy'",
    "'MultiInputLstmPolicy'",
)
OTHERS = {
    "sde_sample_freq": ("-1", "1", "3", "'x'", "float('nan')", "0", "None", "10**400"),
    "rollout_buffer_class": ("RolloutBuffer", "OwnBuffer", "DictRolloutBuffer", "ReplayBuffer", "5", "int", "dict"),
    "rollout_buffer_kwargs": ("{}", "dict(nope=1)", "5", "dict(gamma=0.5)", "dict(n_envs=9)"),
    "tensorboard_log": ("5", "b'x'", "object()", "['x']", "True"),
    "verbose": ("0", "2", "'x'", "None", "float('nan')", "-1"),
    "device": (
        "'cpu'",
        "'auto'",
        "'cuda:99'",
        "'meta'",
        "5",
        "None",
        "'nope'",
        "th.device('cpu')",
        "'mps'",
        "'cpu:7'",
        "'xla'",
    ),
    "nope": ("1",),
    "backend": ("'compile?'", "None", "5"),
    "policy_kwargs": ("5", "'x'", "[]", "dict(nope=1)", "{5: 5}", "{'net_arch': {5: [4]}}"),
    "env": ("None", "5", "'Nope-v9'", "object()", "int", "'CartPole-v1'", "spaces.Discrete(2)", "[]"),
}
# No environment has a key for masks, and auxiliary losses are dictionaries.
DRAWN = sorted(set(ALL_OPTIONS) - {"policy_kwargs", "action_mask_key", "auxiliary_losses"})
# What SB3's users change between two calls of `learn`
CHANGED = (*DRAWN, "sde_sample_freq")
# Arguments of ``load`` that nothing is refused for
HARMLESS = (", custom_objects={'learning_rate': 1e-3, 'clip_range': lambda _: 0.1}", ", force_reset=False")
# Only pickle can save what a user has written.
CUSTOM = ("lambda", "partial", "Own")


@dataclass(frozen=True)
class Step:
    """
    :param text: Statement
    :param may_refuse: Whether it may raise a ``ValueError``, since a value has been given that may not be legal
    """

    text: str
    may_refuse: bool = False


@dataclass(frozen=True)
class Program:
    """
    :param seed: What it was drawn with
    :param env: Arguments of ``make_env``
    :param model: Arguments of the model
    :param policy_kwargs: Its ``policy_kwargs``, unless they are among these arguments
    :param steps: What is done with the model
    :param algorithm: Name of its class
    :param is_wild: Whether values are so large that a training may stop with an error about values that are not finite
    """

    seed: int
    env: dict
    model: dict
    policy_kwargs: dict
    steps: tuple = ()
    algorithm: str = "PPOExt"
    is_wild: bool = False

    def lines(self):
        """All statements."""
        model = _arguments({"policy_kwargs": policy_keywords.source(self.policy_kwargs), **self.model})
        env = Step(f"env = make_env({_arguments(self.env)})")
        return (env, Step(f"model = {self.algorithm}({model})", may_refuse=True), *self.steps)

    def source(self):
        """The program as a file."""
        return "\n".join([PREAMBLE, *(step.text for step in self.lines())])


def _arguments(given):
    return ", ".join(f"{name}={value}" for name, value in given.items())


def drawn(seed):
    """The program of a seed."""
    rng = random.Random(seed)
    mode = rng.choices(["legal", "extreme", "rubbish"], [7, 2, 2])[0]
    env, kind, has_box = _env(rng, mode)
    options = _options(rng, env["action_space"], mode)
    policy = rng.choice(RARE_POLICIES if mode == "rubbish" and rng.random() < 0.15 else POLICIES[kind])
    keywords = _policy_kwargs(rng, policy, kind, has_box, options)
    # A user's policy may give the keywords another meaning.
    if mode == "rubbish" and rng.random() < 0.3 and policy != "OwnPolicy":
        keywords = policy_keywords.with_rubbish(rng, keywords)
    model = {"policy": policy, "env": "env", "device": "'cpu'", "n_steps": "8", "batch_size": "8", "n_epochs": "2"}
    model |= options
    if mode == "rubbish" and rng.random() < 0.4:
        name = rng.choice(sorted(OTHERS))
        model[name] = rng.choice(OTHERS[name])
    algorithm = "OwnModel" if rng.random() < 0.05 else "PPOExt"
    steps = _steps(rng, mode, env)
    wild = mode == "extreme" or bool({"rewards", "nan_at"} & env.keys()) or "1e30" in env["observation_space"]
    if model["env"] != "env":
        steps = tuple(replace(step, may_refuse=True) for step in steps)  # `env` has other spaces.
    program = Program(seed, env, model, keywords, steps, algorithm, wild)
    if rng.random() < 0.3:
        may_refuse = steps[-1].may_refuse or any(word in program.source() for word in CUSTOM)
        program = replace(program, steps=(*steps, Step("reloaded(model, env, trusted=False)", may_refuse)))
    return program


def _env(rng, mode):
    observation, action = rng.choice(list(OBSERVATIONS)), rng.choice(ACTIONS)
    kind = OBSERVATIONS[observation]
    if mode != "legal" and rng.random() < 0.4:
        observation = rng.choice(RARE_OBSERVATIONS)
        kind = "dict" if "Dict" in observation else "vector"
    if mode != "legal" and rng.random() < 0.4:
        action = rng.choice(RARE_ACTIONS)
    env = {"observation_space": observation, "action_space": action}
    way = rng.choice(["dummy", "dummy", "dummy", "gym", "bare", "fast", "adapter", "same step"])
    if "Sequence" in observation or "Text" in observation or "Dict(a=spaces.Dict" in observation:
        way = "gym"  # SB3 cannot vectorise them.
    if mode == "rubbish" and rng.random() < 0.05:
        way = "vector"
    env |= {"n_envs": "1" if way == "gym" else str(rng.choice([1, 2, 3])), "kind": repr(way)}
    if wrappers := _wrappers(rng, observation, action, way):
        env["wrappers"] = repr(wrappers)
    if rng.random() < 0.4:
        env |= {"length": str(rng.choice([1, 2, 9, 100])), "p_end": rng.choice(["0.0", "0.5", "1.0"])}
    if rng.random() < 0.1:
        env["rewards"] = repr(rng.choice(["zero", "large", "huge", "numpy", "array", "bool", "nan", "infinite"]))
    if rng.random() < 0.05:
        env["infos"] = repr(rng.choice(["success", "rubbish"]))
    env |= rng.choice([{}, {}, {}, {}, {"reuses": "True"}])
    if mode == "extreme" and rng.random() < 0.05:
        env["nan_at"] = str(rng.choice([0, 1, 3]))
    return env, kind, "spaces.Box" in action


def _wrappers(rng, observation, action, way):
    if way in ("gym", "vector") or rng.random() < 0.7:
        return ()
    plain = observation.startswith("spaces.Box") and "uint8" not in observation and "0)" not in observation
    vectors = (["normalize"], ["stack"], ["normalize", "stack"]) if plain and ", ())" not in observation else ()
    check = [] if "Dict" in action or "Tuple" in action else [["check"]]  # SB3 cannot check them.
    return tuple(rng.choice([["normalize reward"], ["monitor"], *check, *vectors]))


def _options(rng, action, mode):
    """Options with those that they need, most of the time without conflicts."""
    space, options = eval(action, {"spaces": spaces, **_numpy()}), {}
    for name in rng.sample(DRAWN, rng.choice([0, 1, 2, 3, 4, 6, 9])):
        needed = {key: _shown(value) for key, value in needed_by(ALL_OPTIONS[name]).items()} if rng.random() < 0.8 else {}
        more = {**needed, **options, name: legal(rng, name)}
        if rng.random() < 0.1 or _goes_together(more, space):
            options = more
    draw = {"extreme": extreme, "rubbish": rubbish, "legal": None}[mode]
    if draw is not None and rng.random() < 0.5:
        for name in rng.sample(DRAWN, rng.choice([1, 1, 2])):
            options[name] = draw(rng, name)
    return options


def _goes_together(options, space):
    drives_rate = options.get("adaptive_lr_kl", "None") != "None" or "constant" not in options.get("lr_decay", "constant")
    if drives_rate and {options.get("learning_rate"), options.get("critic_learning_rate")} & set(SCHEDULES):
        return False
    plain = {name: _plain(text) for name, text in options.items()}
    return is_legal({name: value for name, value in plain.items() if value is not None}, space)


def _plain(text):
    try:
        return evaluated(text)
    except Exception:
        return None


def _numpy():
    import numpy as np

    return {"np": np, "float": float}


def _shown(value):
    return "float('inf')" if value == float("inf") else repr(value)


def _policy_kwargs(rng, policy, kind, has_box, options):
    memory, uses_sde = policy_keywords.memory_of(policy), "True" in options.get("use_sde", "")
    keywords = policy_keywords.drawn(rng, memory, has_box, uses_sde, kind)
    if "action_dist" in options and rng.random() < 0.9:
        for name in ("mean_tanh", "learn_std", "log_std_init"):
            keywords.pop(name, None)
    if "optimizer" in options and rng.random() < 0.9:
        keywords.pop("optimizer_class", None)
        keywords.pop("optimizer_kwargs", None)
    if "optimizer_class" in keywords:
        keywords.pop("optimizer_kwargs", None)
    return keywords


def _steps(rng, mode, env):
    """Train, save, load, train on and predict, with changes in between."""
    callback = rng.choice(["", "", "", "", ", callback=ReadAll()", ", callback=ReadAll(stop_at=5)", ", progress_bar=False"])
    steps = [Step(f"learn(model, {rng.choice([1, 16, 20, 32, 33, 20.0])}{callback})"), Step("act(model)")]
    changes = [_change(rng, mode, env) for _ in range(rng.choice([0, 0, 1, 1, 2]))]
    for step in (step for change in changes for step in change):
        # What has been changed counts from then on.
        steps.append(Step(step.text, step.may_refuse or steps[-1].may_refuse))
    options = _load_options(rng, mode, env)
    may_refuse = steps[-1].may_refuse or options not in ("", *HARMLESS)
    texts = ("learn(model, 16, reset_num_timesteps=False)", "act(model)", "act(model, deterministic=False)")
    steps += [Step(text, may_refuse) for text in (f"model = reloaded(model, env{options})", *texts)]
    if rng.random() < 0.2:
        steps.append(Step(f"resumed(model, make_env({_arguments(env)}))", may_refuse))
    return tuple(steps)


def _load_options(rng, mode, env):
    if rng.random() < 0.7:
        # Environments that are wrapped anew must be reset.
        return rng.choice(["", "", *HARMLESS[: 1 if env["kind"] == "'gym'" else 2]])
    name = rng.choice(DRAWN)
    return f", {name}={_value(rng, mode, name)}"


def _value(rng, mode, name):
    if name not in ALL_OPTIONS:
        return rng.choice(OTHERS[name])
    choose = {"legal": legal, "extreme": extreme, "rubbish": rubbish}[mode if rng.random() < 0.7 else "legal"]
    return choose(rng, name)


def _change(rng, mode, env):
    """What users do between two trainings, and a training that sees it."""
    go_on = Step("learn(model, 16, reset_num_timesteps=False)")
    if rng.random() < 0.3:
        name = rng.choice(CHANGED)
        return Step(f"model.{name} = {_value(rng, mode, name)}", may_refuse=True), replace(go_on, may_refuse=True)
    texts = [
        "model.set_parameters(model.get_parameters())",
        "model.set_parameters(Zip(model).open())",
        "model = copied(model)",
        "model = pickled(model)",
        "model = policy_reloaded(model)",
        f"model.set_env(make_env({_arguments(env)}))",
        "model.set_random_seed(3)",
    ]
    return Step(rng.choice(texts)), go_on
