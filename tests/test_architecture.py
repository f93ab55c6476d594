"""Imports go one way, and importing or constructing changes nothing outside."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sb3_ppo_ext

PACKAGE = Path(sb3_ppo_ext.__file__).parent
ALLOWED = {
    "zoo": {"callbacks", "ppo_ext", "schedules", "storage", "tuning", "validation", "vec_env"},
    "callbacks": set(),
    "plot_run": set(),
    "storage": set(),
    "tuning": set(),
    "vec_env": {"validation"},
    "ppo_ext": {
        "advantages",
        "backends",
        "buffers",
        "collecting",
        "compiled_update",
        "native_collecting",
        "native_policy",
        "lean_update",
        "native_update",
        "optimizers",
        "options",
        "policies",
        "saving",
        "schedules",
        "sequences",
        "transformer_policies",
        "update",
        "validation",
        "vec_env",
    },
    "update": {
        "advantages",
        "buffers",
        "distributions",
        "guards",
        "losses",
        "metrics",
        "optimizers",
        "schedules",
        "sequences",
        "validation",
    },
    "native_update": {
        "buffers",
        "guards",
        "heads",
        "lean_update",
        "losses",
        "native_minibatches",
        "native_policy",
    },
    "native_minibatches": {"heads", "metrics"},
    "transformer_policies": {"observations", "policies", "sequences", "transformer", "validation"},
    "memory": {"observations", "sequences", "transformer"},
    "extractors": {"validation"},
    "transformer": set(),
    "sequences": {"observations"},
    "observations": set(),
    "lean_update": {"buffers", "native_policy", "observations", "update"},
    "compiled_update": {"buffers", "lean_update", "validation"},
    "native_collecting": {"guards", "native_policy", "observations"},
    "backends": {"native_policy"},
    "native_policy": {"_mlp", "heads", "policies"},
    "heads": {"distributions"},
    "collecting": {"guards", "memory", "observations", "sequences"},
    "options": {"backends", "buffers", "optimizers", "policies", "schedules", "transformer_policies", "validation"},
    "optimizers": {"validation"},
    "policies": {"distributions", "validation"},
    "schedules": {"validation"},
    "saving": set(),
    "advantages": set(),
    "buffers": {"observations", "sequences"},
    "distributions": set(),
    "guards": set(),
    "losses": set(),
    "metrics": set(),
    "validation": set(),
    "__init__": {"extractors", "policies", "ppo_ext", "transformer_policies", "vec_env"},
}
ONLY_IN_ZOO = {"rl_zoo3", "optuna", "yaml"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path.name}"
            yield node.module


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_imports_go_one_way(path):
    """Each module imports what lies below it; RL Zoo and Optuna are for `zoo` and what it alone imports."""
    names = list(imports(path))
    assert {name.split(".")[1] for name in names if name.startswith("sb3_ppo_ext.")} <= ALLOWED[path.stem]
    if path.stem not in ("zoo", "tuning", "storage"):
        assert not {name.split(".")[0] for name in names} & ONLY_IN_ZOO


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_is_light():
    """The Zoo and Optuna stay out."""
    assert run("import sys, sb3_ppo_ext; print({'rl_zoo3', 'optuna', 'pandas'} & set(sys.modules))") == "set()\n"


def test_without_the_zoo():
    """Its absence is named, with the remedy, although what comes with it is missing too."""
    code = """
import sys
sys.modules["yaml"] = None
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "rl_zoo3" else find_spec(name)
import sb3_ppo_ext.zoo
try:
    sb3_ppo_ext.zoo.register()
except ImportError as error:
    print(error)
"""
    assert run(code) == "RL Zoo is not installed: `pip install 'sb3-ppo-ext[zoo]'`\n"


def test_no_global_side_effects():
    """Import and construction without seed leave random states, threads, dtypes and flags of torch as SB3 leaves them."""
    code = """
import random, numpy as np, torch as th, warnings
import stable_baselines3
from stable_baselines3 import PPO
from torch.distributions import Distribution

def state():
    return (random.getstate(), str(np.random.get_state()), th.get_num_threads(), th.get_num_interop_threads(),
            th.get_default_dtype(), th.backends.cudnn.benchmark, th.backends.cudnn.deterministic,
            th.are_deterministic_algorithms_enabled(), th.is_grad_enabled(), th.get_float32_matmul_precision(),
            Distribution._validate_args, str(warnings.filters), str(np.geterr()))

methods = {name: value for name, value in vars(PPO).items()}
before, rng = state(), th.get_rng_state()
from sb3_ppo_ext import PPOExt
assert state() == before and th.equal(th.get_rng_state(), rng)
PPO("MlpPolicy", "CartPole-v1", device="cpu")
after, rng = state(), th.get_rng_state()
PPOExt("MlpPolicy", "CartPole-v1", device="cpu")
assert state() == after
assert methods == {name: value for name, value in vars(PPO).items()}
print("the same")
"""
    assert run(code) == "the same\n"


def test_version():
    assert sb3_ppo_ext.__version__ == "0.1.0"


def public_definitions(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from public_definitions(child)


SAID_BY_PARENT = {"copy", "update", "learn"}
SAID_BY_PARENT |= {"sample", "position", "latents", "parameters", "statistics", "actions_from_params", "log_prob_from_params"}
SAID_BY_PARENT |= {
    "pack",
    "noise",
    "log_prob",
    "described",
    "make",
    "entropies",
    "laws",
    "gradient",
    "run",
    "reset",
    "step_async",
    "step_wait",
    "close",
}
SAID_BY_PARENT |= {"get_images", "get_attr", "set_attr", "env_method", "env_is_wrapped"}


def test_everything_public_has_a_docstring():
    """But for methods whose parent says it all."""
    for path in PACKAGE.rglob("*.py"):
        for node in public_definitions(ast.parse(path.read_text())):
            assert ast.get_docstring(node) or node.name in SAID_BY_PARENT, f"{path.name}: {node.name}"
