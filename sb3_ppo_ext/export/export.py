"""Writes an actor into a file, and compares the file with ``predict`` before it takes its place."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
from stable_baselines3.common.vec_env import VecNormalize, VecTransposeImage, unwrap_vec_wrapper
from torch import nn

from sb3_ppo_ext.algorithm.changed_options import ChangedOptions
from sb3_ppo_ext.common.action_masks import choices_of
from sb3_ppo_ext.common.atomic_files import write_whole
from sb3_ppo_ext.common.guards import without_validation
from sb3_ppo_ext.common.hybrid_actions import FlatActionSpace, disassembled
from sb3_ppo_ext.common.pickles import read_pickled
from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.common.validation import check_type, refuse
from sb3_ppo_ext.distributions import family_of
from sb3_ppo_ext.envs.normalizer import Normalizer
from sb3_ppo_ext.export.actor import PLAIN, Actor, make_actor, reward_scale_of
from sb3_ppo_ext.export.ports import Port, described_space, to_tensors
from sb3_ppo_ext.options import ConfiguredPPO

# Suffixes of the formats
ONNX, PROGRAMS = ".onnx", (".pt", ".pt2")
# Key of the metadata in a file
METADATA = "sb3_ppo_ext"
# Sizes of the batches for which a file is compared with `predict`, and largest number of steps with a memory
BATCH_SIZES, MAX_STEPS = (1, 3), 100
# Largest differences that are rounding, in units of the width of the action space where it has one
TOLERANCE = 1e-4
# What is larger is no bound of observations, as the largest number of a type, which environments write for infinity
NO_BOUND = 1e6
# What only the critic needs
OF_CRITIC = ("value_net", "vf_features_extractor", "vf_transformer", "lstm_critic", "critic")
# A file that was written, as a function of arrays
Run = Callable[[list[np.ndarray]], list[np.ndarray]]


def export_actor(
    model: ChangedOptions,
    path: str | Path,
    deterministic: bool = True,
    vec_normalize: VecNormalize | str | Path | None = None,
    channels_last: bool | None = None,
) -> None:
    """
    See :meth:`sb3_ppo_ext.PPOExt.export`.

    :param model: Model
    :param path: Path of the file
    :param deterministic: Whether the file acts deterministically
    :param vec_normalize: Statistics of the observations, or the file with them
    :param channels_last: Whether the environment gives images with the channels last
    :raises ValueError: if an argument is not valid, or the actor cannot be exported
    :raises ImportError: if a package is missing
    """
    check_type("deterministic", deterministic, (bool, np.bool_), "give True or False")
    check_type("channels_last", channels_last, (bool, np.bool_, type(None)), "give True, False or None")
    path = _path_of(path)
    if path.suffix == ONNX and model.amp_dtype == "bfloat16":
        remedy = "ONNX Runtime has no matrix products in bfloat16 on CPUs; load the model with `amp_dtype=None`"
        refuse("amp_dtype", model.amp_dtype, f'{remedy}, or give a path that ends in ".pt"')
    run_file = _require(path)
    policy, normalizer = _without_critic(model.policy), _normalizer_of(model, vec_normalize)
    transposed = _transposed(model, channels_last)
    scale = reward_scale_of(getattr(model.policy, "normalizer", None) or normalizer)
    own = make_actor(policy, normalizer, True, transposed, scale)
    actor = own if deterministic else make_actor(policy, normalizer, False, transposed, scale)
    with th.no_grad():
        content = _captured(actor, path, _metadata(model, actor, normalizer))
        run = run_file(content)
        _compare_with_predict(own, normalizer, run if deterministic else _run_module(own))
        _compare_with_module(actor, run)
    write_whole(path, content)


def _without_critic(policy: Any) -> Any:
    """A copy of the actor on the CPU, so that the policy stays as it is."""
    # The distribution keeps tensors of the last call, which cannot be copied with their graphs.
    actor = copy.deepcopy(policy, {id(policy.action_dist): copy.copy(policy.action_dist), id(policy.optimizer): None})
    actor.mlp_extractor.value_net = nn.Identity()
    for name in OF_CRITIC:
        if isinstance(getattr(actor, name, None), nn.Module):
            setattr(actor, name, nn.Identity())
    actor.normalizer = None  # The file normalises by itself.
    actor.to("cpu").set_training_mode(False)
    return actor.requires_grad_(False)


def _path_of(path: str | os.PathLike[str]) -> Path:
    check_type("path", path, (str, Path), 'give the path of a file, such as "policy.onnx"')
    path = Path(path)
    if path.suffix not in (ONNX, *PROGRAMS):
        refuse("path", str(path), 'give one that ends in ".onnx", or in ".pt" for a program of torch.export')
    if path.is_dir():
        refuse("path", str(path), "it is a folder; give the path of a file")
    return path


def _require(path: Path) -> Callable[[bytes], Run]:
    """What runs the content of a file, if the packages for its format are installed."""
    if path.suffix in PROGRAMS:
        return _run_program
    try:
        _onnx_runtime()
        for name in ("onnx", "onnxscript"):
            importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{error.name} is not installed: `pip install 'sb3-ppo-ext[export]'`") from error
    return _run_onnx


def _normalizer_of(model: ConfiguredPPO, given: VecNormalize | str | Path | None) -> Any:
    own = getattr(model.policy, "normalizer", None)
    if own is not None and own.norm_obs:
        if given is not None:
            refuse("vec_normalize", given, "the model normalises observations with statistics of its own; give None")
        return own
    if isinstance(given, str | Path):
        given = read_pickled("vec_normalize", given, VecNormalize)
    normalizer = model.get_vec_normalize_env() if given is None else given
    if normalizer is None:
        return None
    check_type("vec_normalize", normalizer, VecNormalize, "give a `VecNormalize`, the file of one, or None")
    space = model.policy.observation_space
    parts = space.spaces if isinstance(space, spaces.Dict) else {PLAIN: space}
    for key, shape in _shapes(normalizer).items() if normalizer.norm_obs else ():
        if key not in parts or parts[key].shape not in (shape, (*shape[-1:], *shape[:-1])):
            remedy = (
                f"the model observes {space}; give its own. Frames that are stacked after `VecNormalize` cannot be exported"
            )
            refuse("vec_normalize", f"for {key!r} of shape {shape}", remedy)
    return normalizer


def _shapes(normalizer: VecNormalize) -> dict[str, tuple[int, ...]]:
    statistics = normalizer.obs_rms if isinstance(normalizer.obs_rms, dict) else {PLAIN: normalizer.obs_rms}
    return {key: tuple(np.shape(each.mean)) for key, each in statistics.items()}


def _transposed(model: Any, channels_last: bool | None) -> list[str]:
    """Keys of the images that are transposed between the environment and the policy."""
    if channels_last is None:
        wrapper: Any = None if model.env is None else unwrap_vec_wrapper(model.env, VecTransposeImage)
        channels_last = wrapper is not None and not wrapper.skip
    if not channels_last:
        return []
    space = model.policy.observation_space
    parts: dict[str, Any] = space.spaces if isinstance(space, spaces.Dict) else {PLAIN: space}
    return [key for key, part in parts.items() if is_image_space(part) and is_image_space_channels_first(part)]


def _metadata(model: ChangedOptions, actor: Actor, normalizer: VecNormalize | Normalizer | None) -> dict[str, object]:
    policy = model.policy
    family = family_of(policy.action_dist)
    try:
        own_version = version("sb3-ppo-ext")
    except PackageNotFoundError:
        own_version = "unknown"
    return {
        "version": own_version,
        "policy": type(policy).__name__,
        "observation_space": described_space(model.observation_space),
        "action_space": described_space(model.action_space),
        "action_distribution": None if family is None else family.name,
        "deterministic": actor.is_deterministic,
        "normalized_observations": bool(normalizer is not None and normalizer.norm_obs),
        "num_timesteps": int(model.num_timesteps),
        "inputs": [port.described() for port in actor.inputs()],
        "outputs": [port.described() for port in actor.outputs()],
    }


# Files


def _captured(actor: Actor, path: Path, metadata: dict[str, object]) -> bytes:
    inputs, outputs = actor.inputs(), actor.outputs()
    generator = np.random.default_rng(0)
    example = to_tensors([_example(port, 2, generator, actor) for port in inputs])
    batch = th.export.Dim("batch", min=1)
    shapes = (tuple({port.batch_dim: batch} for port in inputs),)
    try:
        with _quiet(), without_validation():
            program = th.export.export(actor, example, dynamic_shapes=shapes)
            if path.suffix in PROGRAMS:
                return _program_file(program, metadata)
            names = [[port.name for port in ports] for ports in (inputs, outputs)]
            exported: Any = th.onnx.export(
                program, (), input_names=names[0], output_names=names[1], dynamo=True, verbose=False
            )
    except Exception as error:  # PyTorch raises errors of many classes
        message = str(error).strip().splitlines()
        refuse("policy", type(actor.policy).__name__, f"PyTorch cannot export it ({type(error).__name__}: {message[:1]})")
    proto = exported.model_proto
    _name_batch(proto.graph, inputs[0].batch_dim)
    entry = proto.metadata_props.add()
    entry.key, entry.value = METADATA, json.dumps(metadata)
    content: bytes = proto.SerializeToString()
    return content


def _name_batch(graph: Any, batch_dim: int) -> None:
    """Name the dimension of the batch, where PyTorch has a number with a letter."""
    symbol = graph.input[0].type.tensor_type.shape.dim[batch_dim].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == symbol:
                dim.dim_param = "batch"


def _program_file(program: th.export.ExportedProgram, metadata: Kwargs) -> bytes:
    file = io.BytesIO()
    th.export.save(program, file, extra_files={METADATA: json.dumps(metadata)})
    return file.getvalue()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress and the warnings of the exporter, which are about its own code."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _onnx_runtime() -> ModuleType:
    """ONNX Runtime; if it is imported here, then without the telemetry, threads and database with which it comes."""
    name = "ORT_DISABLE_TELEMETRY"
    before = os.environ.get(name)
    try:
        os.environ.setdefault(name, "1")
        return importlib.import_module("onnxruntime")
    finally:
        if before is None:
            os.environ.pop(name, None)


def _run_onnx(content: bytes) -> Run:
    session = _onnx_runtime().InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    order = [each["name"] for each in json.loads(session.get_modelmeta().custom_metadata_map[METADATA])["inputs"]]
    # What the actor does not use is no input of the graph.
    return lambda arrays: session.run(None, {k: v for k, v in zip(order, arrays, strict=True) if k in names})


def _run_program(content: bytes) -> Run:
    return _run_module(th.export.load(io.BytesIO(content)).module())


def _run_module(module: nn.Module) -> Run:
    return lambda arrays: [each.numpy() for each in module(*to_tensors(arrays))]


# Comparison


def _compare_with_predict(actor: Actor, normalizer: VecNormalize | Normalizer | None, run: Run) -> None:
    """Compare the actions of deterministic actors, from one step to the next, until the first ones are forgotten."""
    generator = np.random.default_rng(1)
    states = [port for port in actor.inputs() if port.role == "state"]
    others = [port for port in actor.inputs() if port.role not in ("state", "last_reward")]
    n_steps = min(getattr(actor.policy, "context_length", 4) + 2, MAX_STEPS) if states else 2
    for n in BATCH_SIZES:
        state, carried = None, {port.name: port.zeros(n) for port in actor.inputs() if port not in others}
        for step in range(n_steps):
            inputs = {**carried, **{port.name: _example(port, n, generator, actor) for port in others}}
            if "episode_start" in inputs:
                # The first one of the batch continues, so that its history becomes full.
                inputs["episode_start"][slice(None) if step == 0 else 0] = float(step == 0)
            outputs = run([inputs[port.name] for port in actor.inputs()])
            named = dict(zip([port.name for port in actor.outputs()], outputs, strict=True))
            expected, state = _predict(normalizer, actor, inputs, state)
            for port, value in zip(actor.action_ports(), expected, strict=True):
                _check_equal(actor, port, value, named[port.name], f"step {step} of a batch of {n}")
            carried = {name.removeprefix("next_"): value for name, value in named.items() if name.startswith("next_")}
            if hasattr(state, "with_rewards"):
                rewards = generator.standard_normal(n).astype(np.float32)
                std, clip = actor.reward_scale or (1.0, np.inf)
                state, carried["last_reward"] = state.with_rewards((rewards / std).clip(-clip, clip)), rewards


def _predict(
    normalizer: Any, actor: Actor, inputs: dict[str, np.ndarray], state: tuple[np.ndarray, ...] | None
) -> tuple[list[Any], Any]:
    """Actions of ``predict``, one array for each part, and the next state."""
    observations = _normalized(normalizer, {key: inputs[key] for key in actor.parts})
    starts = inputs["episode_start"].astype(bool) if "episode_start" in inputs else None
    given = observations[PLAIN] if actor.is_plain else observations
    actions, state = actor.policy.predict(given, state, starts, deterministic=True)
    space = actor.policy.action_space
    if not isinstance(space, FlatActionSpace):
        return [actions], state
    columns = zip(*(disassembled(space.structure, action) for action in actions), strict=True)
    return [np.stack(column) for column in columns], state


def _normalized(normalizer: VecNormalize | None, observations: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What ``VecNormalize`` makes of them, of which parts may be missing or be added."""
    if normalizer is None or not normalizer.norm_obs:
        return observations
    statistics = normalizer.obs_rms if isinstance(normalizer.obs_rms, dict) else {PLAIN: normalizer.obs_rms}
    known = observations.keys() & statistics.keys()
    normalized = {key: normalizer._normalize_obs(observations[key], statistics[key]) for key in known}
    return {**observations, **{key: value.astype(np.float32) for key, value in normalized.items()}}


def _check_equal(actor: Actor, port: Port, expected: np.ndarray, found: np.ndarray, where: str) -> None:
    expected = np.asarray(expected)
    is_equal = expected.shape == found.shape
    if is_equal and np.issubdtype(expected.dtype, np.floating):
        low, high = port.bounds if port.bounds is not None else (-np.ones(()), np.ones(()))
        # `predict` rounds to the dtype of the action space, the file to float32 for a `Box`.
        relative = max(1e-6, float(np.finfo(expected.dtype).eps))
        is_equal = bool((np.abs(expected - found) <= TOLERANCE * (high - low) / 2 + relative * np.abs(expected)).all())
    elif is_equal:
        is_equal = np.array_equal(expected, found)
    if not is_equal:
        raise ValueError(
            f"The file would not act as `predict`: in {where}, {port.name!r} would be {found.tolist()}, and is "
            f"{expected.tolist()}. Nothing was written. Either {type(actor.policy).__name__} has methods of its own, which "
            "are not exported, or numbers are too large for float32: are the observations far from 0, and all alike?"
        )


def _compare_with_module(actor: Actor, run: Run) -> None:
    """With the same inputs, random numbers among them, the file returns what the module returns."""
    generator, module = np.random.default_rng(2), _run_module(actor)
    for n in BATCH_SIZES:
        inputs = [_example(port, n, generator, actor) for port in actor.inputs()]
        for port, expected, found in zip(actor.outputs(), module(inputs), run(inputs), strict=True):
            if expected.shape != found.shape or not np.allclose(expected, found, rtol=1e-3, atol=1e-3):
                raise ValueError(
                    f"The file would not compute what the policy computes: {port.name!r} is different. Nothing was written."
                )


def _example(port: Port, n: int, generator: np.random.Generator, actor: Actor) -> np.ndarray:
    """Values of an input for a comparison."""
    if port.role in ("normal_noise", "uniform_noise"):
        return port.noise(n, generator)
    if port.role == "episode_start" or port.name == "known":
        return (generator.random(port.batch_shape(n)) < 0.3).astype(np.float32)
    if port.role != "observation":
        return generator.standard_normal(port.batch_shape(n)).astype(np.float32)
    if port.name == actor.mask_key:
        return _example_of_masks(port, n, generator, actor)
    own: Any = actor.normalization_of(port.name)
    if own is not None and port.dtype == "float32":
        # Some of them are clipped.
        numbers = generator.standard_normal((n, *own.mean.shape)) * generator.choice([1.0, 20.0], (n, *own.mean.shape))
        return (own.mean.numpy() + own.std.numpy() * numbers).astype(np.float32)
    # A copy: the user's space keeps its generator.
    space = _with_moderate_samples(copy.deepcopy(actor.parts[port.name]))
    space.seed(int(generator.integers(2**31)))
    values = np.stack([space.sample() for _ in range(n)])
    if port.name in actor.transposed:
        values = values.transpose(0, 2, 3, 1)
    return np.ascontiguousarray(values).astype(port.dtype)


def _with_moderate_samples(space: spaces.Space) -> spaces.Space:
    """The same space, in which the largest numbers of a type are no bounds: networks have no numbers for such samples."""
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        return space
    low, high = np.where(space.low < -NO_BOUND, -np.inf, space.low), np.where(space.high > NO_BOUND, np.inf, space.high)
    return spaces.Box(low, high, dtype=space.dtype.type)


def _example_of_masks(port: Port, n: int, generator: np.random.Generator, actor: Actor) -> np.ndarray:
    """Masks with at least one valid choice of each action."""
    masks = (generator.random((n, int(np.prod(port.shape)))) < 0.5).astype(port.dtype)
    first = 0
    for n_choices in choices_of(actor.policy.action_space):
        masks[np.arange(n), first + generator.integers(n_choices, size=n)] = 1
        first += n_choices
    return masks.reshape(port.batch_shape(n))
