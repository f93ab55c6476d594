"""
Importing or constructing changes nothing outside, classes are small, and types say something. That imports go one way is
checked by import-linter in `make lint`.
"""

import ast
import importlib
import inspect
import re
from functools import cached_property
from pathlib import Path
from types import FunctionType

import pytest
from support.processes import run_fresh

import sb3_ppo_ext

PACKAGE = Path(sb3_ppo_ext.__file__).parent


@pytest.mark.integration
def test_importing_is_light():
    """No import of ours brings the Zoo, what comes with it, plots or JAX."""
    heavy = {"rl_zoo3", "optuna", "sqlalchemy", "yaml", "pandas", "matplotlib", "jax", "huggingface_hub"}
    modules = ["sb3_ppo_ext", *(f"sb3_ppo_ext.{name}" for name in ("hub", "zoo", "zoo.import_hook", "zoo.__main__"))]
    code = f"""
import importlib, sys
for name in {modules}:
    importlib.import_module(name)
    print(name, {heavy} & set(sys.modules))
"""
    assert run_fresh(code).splitlines() == [f"{name} set()" for name in modules]


@pytest.mark.integration
def test_without_the_zoo():
    """The Zoo's absence is named, with the remedy, although what comes with it is missing too."""
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
    assert run_fresh(code) == "RL Zoo is not installed: `pip install 'sb3-ppo-ext[zoo]'`\n"


@pytest.mark.integration
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
    assert run_fresh(code) == "the same\n"


def test_version():
    """The package knows its version."""
    assert sb3_ppo_ext.__version__ == "0.1.0"


KINDS = (FunctionType, property, cached_property, classmethod, staticmethod)


def public_objects(module):
    """Classes and functions that a module defines, and what the classes define."""
    own = [value for name, value in vars(module).items() if not name.startswith("_") and is_defined_in(value, module)]
    for value in own:
        yield value.__qualname__, value
        for name, member in vars(value).items() if inspect.isclass(value) else ():
            if not name.startswith("_") and isinstance(member, KINDS):
                yield f"{value.__qualname__}.{name}", getattr(value, name)


def is_defined_in(value, module):
    # The public classes say that they are of the package.
    is_ours = getattr(value, "__module__", None) in (module.__name__, "sb3_ppo_ext")
    return is_ours and (inspect.isclass(value) or inspect.isfunction(value))


def test_everything_public_has_a_docstring():
    """Everything public is described by itself or by its parent."""
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for qualname, value in public_objects(importlib.import_module(name)):
            assert inspect.getdoc(value), f"{name}: {qualname}"


def lines_of_code(node, text):
    """Lines of a class without docstrings, comments and blank lines."""
    documented = [each.body[0] for each in ast.walk(node) if isinstance(each, DOCUMENTED) and ast.get_docstring(each)]
    docs = {line for each in documented for line in range(each.lineno, each.end_lineno + 1)}
    numbered = enumerate(text.splitlines()[node.lineno - 1 : node.end_lineno], node.lineno)
    return sum(number not in docs and bool(re.match(r"\s*[^\s#]", line)) for number, line in numbered)


DOCUMENTED = (ast.ClassDef, ast.FunctionDef)


def test_classes_are_small():
    """No class has more than 300 lines of code."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            assert not isinstance(node, ast.ClassDef) or lines_of_code(node, text) <= 300, f"{path}: {node.name}"


def test_any_is_rare():
    """`Any` is for what nobody knows: at most 20 in 1,000 lines, imports included, and its names are in one file."""
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    n_any, n_lines = sum(len(ANY.findall(text)) for text in texts.values()), sum(text.count("\n") for text in texts.values())
    assert n_any <= 0.02 * n_lines, (n_any, n_lines)
    named = [path.name for path, text in texts.items() if re.search(r": TypeAlias = Any$", text, re.MULTILINE)]
    assert set(named) == {"type_aliases.py", "loop.py"}


ANY = re.compile(r"\bAny\b")
