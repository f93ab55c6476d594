"""Tests of `model.export`: files that act as `predict`, in ONNX Runtime and as programs of torch.export."""

import copy
import io
import json
import sys

import numpy as np
import pytest
import scipy
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize, VecTransposeImage
from support import hybrid
from support.cases import one_in
from support.masks import make_masked
from support.parity import assert_equal
from support.toys import DICT, IMAGE, VECTOR, ToyEnv, make_toys

from sb3_ppo_ext import ActionMaskWrapper, FastDummyVecEnv, MlpPolicy, PPOExt
from sb3_ppo_ext.export.export import METADATA

onnxruntime = pytest.importorskip("onnxruntime")
# One process makes each file once.
pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("export"), pytest.mark.usefixtures("quick_export")]
SMALL = dict(n_steps=8, batch_size=8, n_epochs=1, device="cpu", seed=0)
TRANSFORMER = dict(context_length=4, d_model=8, n_heads=2, net_arch=[8])
DEEP = dict(TRANSFORMER, n_layers=2, ffn_dim=8, gate=True, share_features_extractor=False)
SEEN = dict(TRANSFORMER, use_last_action=True, use_last_reward=True)
LSTM = dict(lstm_hidden_size=8, net_arch=[8])
NETWORKS = {
    "MlpPolicy": dict(net_arch=[8]),
    "CnnPolicy": dict(net_arch=[8]),
    "MultiInputPolicy": dict(net_arch=[8]),
    "MlpTransformerPolicy": TRANSFORMER,
    "CnnTransformerPolicy": TRANSFORMER,
    "MultiInputTransformerPolicy": TRANSFORMER,
    "MlpLstmPolicy": LSTM,
    "CnnLstmPolicy": LSTM,
    "MultiInputLstmPolicy": LSTM,
}


def case(policy="MlpPolicy", env=None, policy_kwargs=None, wrap=None, **options):
    return policy, dict(env or {}), {**NETWORKS[policy], **(policy_kwargs or {})}, wrap, options


def normalize(env):
    env.seed(0)
    parts = env.observation_space.spaces if isinstance(env.observation_space, spaces.Dict) else {}
    keys = [key for key, part in parts.items() if isinstance(part, spaces.Box) and part.dtype == np.float32]
    return VecNormalize(env, norm_obs_keys=keys or None)


BOX = dict(action_space=spaces.Box(np.float32([-1, -2]), np.float32([1, 3])))
HYBRID = (
    dict(action_space=hybrid.SPACE)
    if hasattr(hybrid, "SPACE")
    else dict(
        action_space=spaces.Dict(
            arm=spaces.Box(-2.0, 3.0, (2,)),
            grip=spaces.Discrete(3),
            legs=spaces.Tuple([spaces.MultiBinary(2), spaces.MultiDiscrete([2, 4])]),
        )
    )
)
CASES = {
    "box": case(env=BOX, wrap=normalize),
    "gSDE": case(env=BOX, use_sde=True),
    "gSDE, squashed": case(env=BOX, use_sde=True, policy_kwargs=dict(squash_output=True)),
    "layer_norm": case(env=BOX, policy_kwargs=dict(net_type="layer_norm"), wrap=normalize),
    "simba": case(env=BOX, policy_kwargs=dict(net_type="simba", net_arch=dict(pi=[8, 8], vf=[4])), wrap=normalize),
    "simba, LSTM": case("MlpLstmPolicy", env=BOX, policy_kwargs=dict(net_type="simba")),
    "simba, transformer": case("MlpTransformerPolicy", env=BOX, policy_kwargs=dict(net_type="simba")),
    "squashed": case(env=BOX, action_dist="squashed_gaussian", wrap=normalize),
    "tanh of the mean": case(env=BOX, policy_kwargs=dict(mean_tanh=True)),
    "beta": case(env=BOX, action_dist="beta"),
    "beta, mode": case(env=BOX, action_dist="beta", deterministic_action="mode", wrap=normalize),
    "discrete": case(env=dict(action_space=spaces.Discrete(3))),
    "multi-discrete": case(env=dict(action_space=spaces.MultiDiscrete([3, 2]))),
    "multi-binary": case(env=dict(action_space=spaces.MultiBinary(3))),
    "hybrid": case(env=HYBRID),
    "hybrid, beta": case(env=HYBRID, action_dist="beta"),
    "hybrid, squashed, transformer": case(
        "MlpTransformerPolicy", env=HYBRID, action_dist="squashed_gaussian", policy_kwargs=dict(use_last_action=True)
    ),
    "discrete observations": case(env=dict(observation_space=spaces.Discrete(4))),
    "multi-discrete observations": case(env=dict(observation_space=spaces.MultiDiscrete([3, 2]))),
    "multi-binary observations": case(env=dict(observation_space=spaces.MultiBinary(4))),
    "float64 observations": case(env=dict(observation_space=spaces.Box(-1.0, 1.0, (3,), np.float64)), wrap=normalize),
    "images": case("CnnPolicy", env=dict(observation_space=IMAGE)),
    "images, channels last": case("CnnPolicy", env=dict(observation_space=spaces.Box(0, 255, (36, 40, 3), np.uint8))),
    "dict": case("MultiInputPolicy", env=dict(observation_space=DICT), wrap=normalize),
    "keys": case(
        "MultiInputPolicy", env=dict(observation_space=DICT), policy_kwargs=dict(actor_keys=["joints"]), wrap=normalize
    ),
    "stacked frames": case(wrap=lambda env: VecNormalize(VecFrameStack(env, 3))),
    "transformer": case("MlpTransformerPolicy", env=BOX, wrap=normalize),
    "transformer, deep": case("MlpTransformerPolicy", policy_kwargs=DEEP, action_dist="beta"),
    "transformer, last action and reward": case("MlpTransformerPolicy", env=BOX, policy_kwargs=SEEN),
    "transformer, normalised rewards": case(
        "MlpTransformerPolicy",
        env=BOX,
        policy_kwargs=SEEN,
        normalize_obs=True,
        normalize_reward=True,
    ),
    "transformer, discrete, last action": case(
        "MlpTransformerPolicy", env=dict(action_space=spaces.Discrete(3)), policy_kwargs=dict(use_last_action=True)
    ),
    "transformer, one step": case("MlpTransformerPolicy", policy_kwargs=dict(context_length=1)),
    "transformer, images": case("CnnTransformerPolicy", env=dict(observation_space=IMAGE)),
    "transformer, dict": case("MultiInputTransformerPolicy", env=dict(observation_space=DICT), wrap=normalize),
    "LSTM": case("MlpLstmPolicy", env=BOX, wrap=normalize),
    "GRU": case("MlpLstmPolicy", policy_kwargs=dict(rnn="gru", n_lstm_layers=2), action_dist="squashed_gaussian"),
    "MinGRU": case("MlpLstmPolicy", env=BOX, policy_kwargs=dict(rnn="mingru", n_lstm_layers=2)),
    "LRU": case("MlpLstmPolicy", env=BOX, policy_kwargs=dict(rnn="lru", n_lstm_layers=2)),
    "LSTM, images": case("CnnLstmPolicy", env=dict(observation_space=IMAGE)),
    "LSTM, dict": case("MultiInputLstmPolicy", env=dict(observation_space=DICT)),
    "masks": case(env=dict(masked=True), action_masking=True),
    "masks, normalised": case(env=dict(masked=True), action_masking=True, wrap=normalize),
    "masks, multi-discrete": case(env=dict(masked=True, action_space=spaces.MultiDiscrete([3, 2])), action_masking=True),
    "masks, LSTM": case("MlpLstmPolicy", env=dict(masked=True), action_masking=True),
    "masks in the observation": case(
        env=dict(masked=True, wrapper=ActionMaskWrapper), action_masking=True, action_mask_key="action_mask"
    ),
}


def make(name):
    policy, env, policy_kwargs, wrap, options = CASES[name]
    masked = env.pop("masked", False) if (env := dict(env)) else False
    toys = make_masked(2, **env) if masked else make_toys(2, **env)
    toys = toys if wrap is None else wrap(toys)
    model = PPOExt(policy, toys, policy_kwargs=policy_kwargs, **SMALL, **options).learn(16)
    with th.no_grad():  # so that actions differ
        for parameter in model.policy.action_net.parameters():
            parameter.add_(0.3 * th.randn(parameter.shape, generator=th.Generator().manual_seed(1)))
    return model


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A function from a case to its model and its file, made once in a session; tests must not change them."""
    found = {}

    def export(name, suffix=".onnx", deterministic=True):
        if (key := (name, suffix, deterministic)) not in found:
            model, path = make(name), tmp_path_factory.mktemp("exported") / f"policy{suffix}"
            before = copy.deepcopy(model.policy.state_dict())
            model.export(path, deterministic=deterministic)
            assert_equal(before, model.policy.state_dict(), "parameters")
            found[key] = model, path
        return found[key]

    return export


class File:
    """An ONNX file, or a program of torch.export, as a function of dictionaries."""

    def __init__(self, path):
        if path.suffix == ".onnx":
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            self.metadata = json.loads(session.get_modelmeta().custom_metadata_map[METADATA])
            self.names = [each.name for each in session.get_inputs()]
            self.run = lambda inputs: session.run(None, {name: inputs[name] for name in self.names})
        else:
            extra = {METADATA: ""}
            program = th.export.load(path, extra_files=extra).module()
            self.metadata = json.loads(extra[METADATA])
            order = [each["name"] for each in self.metadata["inputs"]]
            self.run = lambda inputs: [each.numpy() for each in program(*(th.from_numpy(inputs[name]) for name in order))]
        self.inputs = {each["name"]: each for each in self.metadata["inputs"]}
        self.outputs = [each["name"] for each in self.metadata["outputs"]]

    def __call__(self, inputs):
        return dict(zip(self.outputs, self.run(inputs), strict=True))

    def zeros(self, role, n):
        found = {name: each for name, each in self.inputs.items() if each["role"] == role}
        return {name: np.zeros([n if d == "batch" else d for d in p["shape"]], p["dtype"]) for name, p in found.items()}


def actions_of(model, predicted):
    """What `predict` returns, one array for each part of the action, in the order of the outputs."""
    space = model.action_space
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return [predicted]
    leaves = [list(_leaves(space, action)) for action in predicted]
    return [np.stack(column) for column in zip(*leaves, strict=True)]


def _leaves(space, action):
    if isinstance(space, spaces.Dict):
        for key in space.spaces:
            yield from _leaves(space[key], action[key])
    elif isinstance(space, spaces.Tuple):
        for part, each in zip(space.spaces, action, strict=True):
            yield from _leaves(part, each)
    else:
        yield action


def assert_acts_as_predict(model, file, n_steps):
    """In an environment, from its raw observations, with the actions of the file."""
    env = model.env
    while isinstance(env, VecNormalize | VecTransposeImage):
        env = env.venv
    n, state = env.num_envs, None
    carried = {**file.zeros("state", n), **file.zeros("last_reward", n)}
    raw, starts = env.reset(), np.ones(n, bool)
    for _ in range(n_steps):
        parts = raw if isinstance(raw, dict) else {"observation": raw}
        inputs = {name: np.asarray(parts[name], each["dtype"]) for name, each in file.inputs.items() if name in parts}
        keywords = {}
        if "action_mask" in file.inputs and "action_mask" not in parts:
            masks = np.stack(env.env_method("action_masks"))
            inputs["action_mask"], keywords["action_masks"] = masks.reshape(n, -1).astype(np.int8), masks
        named = file({**carried, **inputs, "episode_start": starts.astype(np.float32)})
        normalizer = model.get_vec_normalize_env()
        seen = raw if normalizer is None else normalizer.normalize_obs(raw)
        predicted, state = model.predict(seen, state, starts, deterministic=True, **keywords)
        for name, expected in zip(file.outputs, actions_of(model, predicted), strict=False):
            assert named[name].dtype == expected.dtype or isinstance(model.action_space, spaces.MultiBinary)
            np.testing.assert_allclose(named[name], expected, rtol=1e-4, atol=1e-4)
        raw, rewards, starts, _ = env.step(predicted)
        carried = {name.removeprefix("next_"): value for name, value in named.items() if name.startswith("next_")}
        if "last_reward" in file.inputs:
            state, carried["last_reward"] = state.with_rewards(rewards), rewards.astype(np.float32)


@pytest.mark.parametrize("suffix", [".onnx", pytest.param(".pt", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    one_in(
        len(CASES),
        CASES,
        "transformer, last action and reward",
        "transformer, normalised rewards",
        "GRU",
        "MinGRU",
        "LRU",
        "masks, normalised",
        "images, channels last",
    ),
)
def test_acts_as_predict(name, suffix, exported):
    """From raw observations of an environment, through several episodes, a file acts as `predict` does."""
    model, path = exported(name, suffix)
    assert_acts_as_predict(model, File(path), 12)


@pytest.mark.parametrize("suffix", [".pt", ".onnx"])
def test_checks_of_distributions_go_on(suffix, tmp_path):
    """PyTorch's exporters may switch them off for the whole process; other models need them."""
    before = th.distributions.Distribution._validate_args
    policy_kwargs = dict(rnn="gru", lstm_hidden_size=8)
    model = PPOExt("MlpLstmPolicy", make_toys(2), policy_kwargs=policy_kwargs, **SMALL)
    model.export(tmp_path / f"policy{suffix}")
    assert th.distributions.Distribution._validate_args == before


def test_half_precision(tmp_path):
    """Actions that `predict` rounds to float16 are those of the file but for the rounding."""
    toys = make_toys(2, action_space=spaces.Box(0, 1, (2,), np.float16))
    model = PPOExt("MlpPolicy", toys, action_dist="beta", **SMALL)
    model.export(path := tmp_path / "policy.pt")
    observations = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    found, expected = File(path)({"observation": observations})["action"], model.predict(observations, deterministic=True)[0]
    assert expected.dtype == np.float16
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("suffix", [".onnx", pytest.param(".pt", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", one_in(24, CASES, "hybrid, beta"))
def test_samples(name, suffix, exported):
    """With random numbers as inputs, the actions of many samples have the means of those of the policy."""
    model, path = exported(name, suffix, deterministic=False)
    file, n, generator = File(path), 4000, np.random.default_rng(0)
    raw = model.observation_space.sample()
    parts = raw if isinstance(raw, dict) else {"observation": raw}
    inputs = {**file.zeros("state", n), **file.zeros("last_reward", n), "episode_start": np.ones(n, np.float32)}
    for key, each in file.inputs.items():
        if each["role"] == "observation":
            part = np.ones(each["shape"][1:]) if key == "action_mask" else np.asarray(parts[key])
            if [*part.shape] != each["shape"][1:]:
                part = part.transpose(1, 2, 0)
            inputs[key] = np.repeat(part[np.newaxis], n, axis=0).astype(each["dtype"])
        elif each["role"].endswith("noise"):
            shape = (n, *each["shape"][1:])
            normal = each["role"] == "normal_noise"
            inputs[key] = (generator.standard_normal(shape) if normal else generator.uniform(size=shape)).astype(np.float32)
    found = [named for key, named in file(inputs).items() if not key.startswith("next_")]
    masks = np.ones((n, file.inputs["action_mask"]["shape"][1])) if "action_mask" in file.inputs else None
    repeated = {key: np.repeat(np.asarray(value)[np.newaxis], n, axis=0) for key, value in parts.items()}
    seen = repeated if isinstance(raw, dict) else repeated["observation"]
    seen = seen if (normalizer := model.get_vec_normalize_env()) is None else normalizer.normalize_obs(seen)
    if isinstance(seen, dict) and "action_mask" in seen:
        seen["action_mask"] = np.ones_like(seen["action_mask"])
    keywords = {} if masks is None else {"action_masks": masks}
    if model.use_sde:
        model.policy.reset_noise(n)  # a matrix for each observation
    predicted, _ = model.predict(seen, episode_start=np.ones(n, bool), **keywords)
    for actions, expected in zip(found, actions_of(model, predicted), strict=True):
        one, other = (np.asarray(each, float).reshape(n, -1) for each in (actions, expected))
        error = 5 * np.sqrt((one.var(axis=0) + other.var(axis=0)) / n) + 1e-6
        assert (np.abs(one.mean(axis=0) - other.mean(axis=0)) < error).all()
        assert (np.abs(one.std(axis=0) - other.std(axis=0)) < 0.08 * other.std(axis=0) + 1e-6).all()


def test_beta_samples_have_the_distribution(tmp_path):
    """Samples of Beta are those of the distribution with alpha and beta of the policy, by a Kolmogorov-Smirnov test."""
    model, n = make("beta"), 20_000
    model.export(tmp_path / "policy.onnx", deterministic=False)
    file, generator = File(tmp_path / "policy.onnx"), np.random.default_rng(0)
    observations = np.repeat(np.float32([[0.3, -0.5, 0.8]]), n, axis=0)
    shape = (n, *file.inputs["noise"]["shape"][1:])
    noise = dict(noise=generator.standard_normal(shape, np.float32), uniform=generator.uniform(size=shape).astype(np.float32))
    actions = file({"observation": observations, **noise})["action"]
    with th.no_grad():
        distribution = model.policy.get_distribution(th.as_tensor(observations[:1]))
    space = model.action_space
    for number in range(2):
        alpha, beta = distribution.alpha[0, number].item(), distribution.beta[0, number].item()
        positions = (actions[:, number] - space.low[number]) / (space.high[number] - space.low[number])
        assert scipy.stats.kstest(positions, scipy.stats.beta(alpha, beta).cdf).pvalue > 1e-3


def test_gaussian_sample_by_hand(tmp_path):
    """A sample of a Gaussian is the mean plus the standard deviation times the given number, clipped to the bounds."""
    model = make("box")
    with th.no_grad():
        model.policy.log_std.copy_(th.log(th.tensor([0.5, 2.0])))
    for deterministic in (True, False):
        model.export(tmp_path / f"{deterministic}.pt", deterministic=deterministic)
    files = {each: File(tmp_path / f"{each}.pt") for each in (True, False)}
    observations = np.float32([[0.3, -0.5, 0.8]])
    mean = files[True]({"observation": observations})["action"]
    for noise in (np.float32([[0.1, -0.1]]), np.float32([[9, 9]])):
        found = files[False]({"observation": observations, "noise": noise})["action"]
        expected = np.clip(mean + np.float32([0.5, 2.0]) * noise, model.action_space.low, model.action_space.high)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_masked_choices_are_never_made(exported):
    """With one valid choice, deterministic and sampled actions are that one."""
    generator = np.random.default_rng(0)
    for deterministic in (True, False):
        _, path = exported("masks, normalised", deterministic=deterministic)
        file = File(path)
        n = file.inputs["action_mask"]["shape"][1]
        noise = {} if deterministic else {"uniform": generator.uniform(size=(n, n)).astype(np.float32)}
        named = file({"observation": np.zeros((n, 3), np.float32), "action_mask": np.eye(n, dtype=np.int8), **noise})
        assert named["action"].tolist() == list(range(n))


def test_metadata(exported):
    """A file says what it is, in JSON."""
    metadata = File(exported("transformer, last action and reward")[1]).metadata
    assert metadata["policy"] == "MlpTransformerPolicy"
    assert metadata["action_distribution"] == "gaussian"
    assert metadata["deterministic"] is True
    assert metadata["normalized_observations"] is False
    assert metadata["num_timesteps"] == 16
    assert metadata["action_space"]["low"] == ["-1.0", "-2.0"]
    assert metadata["observation_space"] == {
        "kind": "Box",
        "shape": list(VECTOR.shape),
        "dtype": "float32",
        "low": ["-1.0"],
        "high": ["1.0"],
    }
    roles = {each["name"]: each["role"] for each in metadata["inputs"]}
    assert roles["history"] == roles["known"] == roles["last_action"] == "state"
    assert roles["last_reward"] == "last_reward"
    assert metadata["outputs"][0] == {"name": "action", "role": "action", "shape": ["batch", 2], "dtype": "float32"}


def test_the_actor_alone_is_in_the_file(exported):
    """A file has no parameters of the critic, and no inputs that only the critic reads."""
    paths = [exported("keys", suffix)[1] for suffix in (".onnx", ".pt")]
    for path in paths:
        assert File(path).inputs.keys() == {"joints"}
    program = th.export.load(paths[1])
    assert not [name for name in program.state_dict if "value_net" in name or "vf_" in name]


def test_statistics_of_a_file(tmp_path):
    """A model without its environment takes the statistics of a file, and other ones are refused."""
    model = make("box")
    model.env.save(tmp_path / "vecnormalize.pkl")
    model.save(tmp_path / "model.zip")
    model.export(tmp_path / "own.pt")
    loaded = PPOExt.load(tmp_path / "model.zip", device="cpu")
    loaded.export(tmp_path / "file.pt", vec_normalize=tmp_path / "vecnormalize.pkl")
    observations = {"observation": np.float32([[5.0, -2.0, 0.1]])}
    one, other = (File(tmp_path / name)(observations)["action"] for name in ("own.pt", "file.pt"))
    np.testing.assert_array_equal(one, other)
    loaded.export(tmp_path / "without.pt")
    assert not np.allclose(one, File(tmp_path / "without.pt")(observations)["action"])
    with pytest.raises(ValueError, match=r"vec_normalize=.*no such file"):
        loaded.export(tmp_path / "x.onnx", vec_normalize=tmp_path / "none.pkl")
    loaded.save(tmp_path / "model.zip")
    with pytest.raises(ValueError, match=r"vec_normalize=.*cannot be unpickled.*`VecNormalize.save`"):
        loaded.export(tmp_path / "x.onnx", vec_normalize=tmp_path / "model.zip")
    stacked = VecFrameStack(VecNormalize(make_toys(2)), 2)
    with pytest.raises(ValueError, match="stacked after `VecNormalize`"):
        PPOExt("MlpPolicy", stacked, **SMALL).export(tmp_path / "x.onnx")


def test_integers_in_a_box(tmp_path):
    """`predict` returns floats for them, and so does the file."""
    model = PPOExt("MlpPolicy", make_toys(action_space=spaces.Box(-2, 2, (2,), np.int32)), n_steps=8, device="cpu")
    model.export(tmp_path / "policy.pt")
    observations = np.stack([model.observation_space.sample() for _ in range(3)])
    found = File(tmp_path / "policy.pt")({"observation": observations})["action"]
    np.testing.assert_allclose(found, model.predict(observations, deterministic=True)[0], atol=1e-6)
    assert found.dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bounds_that_are_the_largest_numbers(dtype, tmp_path):
    """A policy is compared at numbers that environments have, where their bounds are the largest ones, as those of EnvPool."""
    largest = np.finfo(dtype)
    parts = {
        "one side": spaces.Box(largest.tiny, largest.max, (3,), dtype),
        "both": spaces.Box(-largest.max, largest.max, (2,), dtype),
    }
    env = FastDummyVecEnv([ToyEnv])
    env.observation_space = spaces.Dict(parts)
    model = PPOExt("MultiInputPolicy", env, **SMALL)
    model.export(tmp_path / "policy.pt")
    inputs = {name: np.ones((1, *part.shape), np.float32) for name, part in parts.items()}
    found = File(tmp_path / "policy.pt")(inputs)["action"]
    np.testing.assert_allclose(found, model.predict(inputs, deterministic=True)[0], atol=1e-6)


def test_channels_last_of_a_loaded_model(tmp_path):
    """A model without its environment is told that images come with the channels last."""
    model = make("images, channels last")
    model.save(tmp_path / "model.zip")
    loaded = PPOExt.load(tmp_path / "model.zip", device="cpu")
    loaded.export(tmp_path / "first.pt")
    loaded.export(tmp_path / "last.pt", channels_last=True)
    shapes = [File(tmp_path / f"{name}.pt").inputs["observation"]["shape"] for name in ("first", "last")]
    assert shapes == [["batch", 3, 36, 40], ["batch", 36, 40, 3]]


class Shifted(MlpPolicy):
    """Has a distribution of its own."""

    def _get_action_dist_from_latent(self, latent):
        return self.action_dist.proba_distribution(self.action_net(latent) + 0.5, self.log_std)


class Rule(MlpPolicy):
    """Acts in a way of its own in a corner, which random observations hardly reach."""

    def _predict(self, observation, deterministic=False):
        return super()._predict(observation, deterministic) + (observation[:, :1] > 90)


@pytest.mark.parametrize(
    ("policy_class", "deterministic", "message"),
    [
        (Shifted, True, "would not act as `predict`: in step 0"),
        (Shifted, False, "its actions are computed by `Shifted._get_action_dist_from_latent`"),
        (Rule, True, "its actions are computed by `Rule._predict`, which the file would not have"),
    ],
)
@pytest.mark.parametrize("suffix", [".onnx", pytest.param(".pt", marks=pytest.mark.slow)])
def test_nothing_is_written_if_the_file_would_act_differently(policy_class, deterministic, message, suffix, tmp_path):
    """A policy with methods of its own is refused, and a file of before stays."""
    path = tmp_path / f"policy{suffix}"
    path.write_text("before")
    model = PPOExt(policy_class, make_toys(2, **BOX), **SMALL)
    with pytest.raises(ValueError, match=message):
        model.export(path, deterministic=deterministic)
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_bfloat16(tmp_path):
    """A model in bfloat16 is exported for PyTorch; for ONNX Runtime, the message says how to export it in float32."""
    model = PPOExt("MlpPolicy", make_toys(2, **BOX), amp_dtype="bfloat16", **SMALL)
    model.save(tmp_path / "model.zip")
    with pytest.raises(ValueError, match=r"amp_dtype='bfloat16'.*`amp_dtype=None`"):
        model.export(tmp_path / "policy.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["model.zip"]
    model.export(tmp_path / "policy.pt")
    PPOExt.load(tmp_path / "model.zip", device="cpu", amp_dtype=None).export(tmp_path / "policy.onnx")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (dict(path="policy.zip"), "path='policy.zip'"),
        (dict(path=3), "path=3"),
        (dict(path=io.BytesIO()), "path="),
        (dict(path="a.onnx", deterministic=1), "deterministic=1"),
        (dict(path="a.onnx", vec_normalize=3), "vec_normalize=3"),
        (dict(path="a.onnx", channels_last="yes"), "channels_last='yes'"),
    ],
)
def test_bad_arguments(arguments, match, tmp_path, monkeypatch, exported):
    """Arguments that are not valid are refused, with a remedy."""
    monkeypatch.chdir(tmp_path)
    model, _ = exported("box")
    with pytest.raises(ValueError, match=match):
        model.export(**arguments)
    assert not list(tmp_path.iterdir())


def test_missing_package(tmp_path, monkeypatch):
    """Without onnxruntime, the message names the extra."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"sb3-ppo-ext\[export\]"):
        make("box").export(tmp_path / "policy.onnx")


def test_the_batch_has_a_name(exported):
    """The free dimension of all inputs and outputs has the same name."""
    session = onnxruntime.InferenceSession(exported("GRU")[1])
    shapes = {each.name: each.shape for each in (*session.get_inputs(), *session.get_outputs())}
    assert shapes["observation"] == ["batch", 3]
    assert shapes["hidden_state"] == shapes["next_hidden_state"] == [2, "batch", 8]
