"""The tests themselves: where they lie, what they import, and that they say what they hold."""

import ast
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
MODULES = sorted(TESTS.rglob("test_*.py"))


def imported(tree):
    """Names of the modules that are imported anywhere in the tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def defined_tests(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.xdist_group("conventions")
def test_groups_stay_together(request):
    """One process has the tests that share what is made once: pytest-xdist tells their group by the end of their names."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("needs `--dist loadgroup`")
    assert request.node.nodeid.endswith("@conventions")


@pytest.mark.integration
def test_no_test_imports_another_test():
    """What several share is in `tests/support` or a fixture of a `conftest.py`."""
    tests = {"conftest", "tests", *(module.stem for module in MODULES)}
    for path in TESTS.rglob("*.py"):
        words = {word for name in imported(parsed(path)) for word in name.split(".")}
        assert not words & tests, path


@pytest.mark.integration
def test_every_test_has_a_docstring():
    """Each test says the property that it holds, and each module what its tests have in common."""
    for path in MODULES:
        tree = parsed(path)
        assert ast.get_docstring(tree), path
        assert not [test.name for test in defined_tests(tree) if not ast.get_docstring(test)], path


def test_folders_mirror_the_package():
    """The test of a module is found by the name of its folder."""
    folders = {path.parent.relative_to(TESTS) for path in MODULES} - {Path(".")}
    assert all((ROOT / "sb3_ppo_ext" / folder).is_dir() or (ROOT / folder).is_dir() for folder in folders), folders


def test_names_of_modules_are_unique():
    """Without packages of tests, pytest imports test modules by their own names."""
    assert not [name for name, number in Counter(path.stem for path in MODULES).items() if number > 1]
    assert not [path.stem for path in MODULES if path.stem in sys.stdlib_module_names]


@pytest.mark.integration
def test_no_test_is_defined_twice():
    """No test hides another one of the same name."""
    for path in MODULES:
        names = Counter(node.name for node in parsed(path).body if isinstance(node, ast.FunctionDef))
        assert not [name for name, number in names.items() if number > 1], path
