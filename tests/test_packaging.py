"""What is installed: the wheel and the editable install carry the YAML files and the start-up hook, and take them away."""

import configparser
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest
import yaml
from support.cases import one_in

ROOT = Path(__file__).parent.parent
HOOK = "sb3_ppo_ext_zoo.pth"
HOOK_MODULE = "sb3_ppo_ext_zoo_hook"
SWITCH = "SB3_PPO_EXT_AUTOREGISTER"
# A checkout on the path would hide what is installed.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

# One process builds once.
pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("packaging")]


def run(*command, **kwargs):
    environment = {**ENVIRONMENT, **kwargs.pop("environment", {})}
    completed = subprocess.run(command, capture_output=True, text=True, env=environment, **kwargs)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def copy_checkout(target):
    ignored = shutil.ignore_patterns(
        ".*", "build", "dist", "demo", "logs", "*.egg-info", "__pycache__", "*.so", "MUJOCO_LOG.TXT"
    )
    shutil.copytree(ROOT, target, symlinks=True, ignore=ignored)


def build(kind, source, target):
    """Build with the backend itself, from a copy of the checkout and without a network."""
    target.mkdir()
    code = f"import sys; from setuptools.build_meta import build_{kind} as build; build({str(target)!r})"
    run(sys.executable, "-c", code, cwd=source)
    [built] = target.iterdir()
    return built


class Installation:
    """A virtual environment with this package, and with the dependencies of the present one in reach."""

    def __init__(self, folder, wheel):
        venv.create(folder)
        self.python = str(folder / "bin" / "python")
        site_packages = run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        self.site_packages = Path(site_packages.strip())
        # A folder named in a .pth file is searched, but its own .pth files are not read: no other hook, no other package.
        (self.site_packages / "zz_dependencies.pth").write_text(sysconfig.get_path("purelib"))
        self.pip("install", "--no-deps", "--no-index", str(wheel))

    def pip(self, *arguments):
        return run(sys.executable, "-m", "pip", "--python", self.python, *arguments)

    def run(self, code, **kwargs):
        # Not from the checkout, whose folder would be searched first
        return run(self.python, "-c", code, cwd=self.site_packages, **kwargs)


# The suite itself runs in an editable installation.
@pytest.fixture(scope="module", params=one_in(2, ["wheel", "editable"]))
def installation(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    copy_checkout(folder / "source")
    wheel = build(request.param, folder / "source", folder / "dist")
    installation = Installation(folder / "environment", wheel)
    installation.kind, installation.source = request.param, folder / "source"
    return installation


def test_source_distribution(tmp_path):
    """
    The source distribution has all of the checkout but the studies and the data of the benchmarks: package, hook, tests,
    scripts, documentation with its pictures.
    """
    copy_checkout(tmp_path / "source")
    # A link, to a folder of the package
    needed = [path for path in (tmp_path / "source").rglob("*") if "hyperparams" not in path.parts[-2:]]
    with tarfile.open(build("sdist", tmp_path / "source", tmp_path / "dist")) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    names = {path.relative_to(tmp_path / "source") for path in needed if path.is_file()}
    assert {str(name) for name in names if name.parts[0] != "benchmark" or name.suffix in (".md", ".yml")} <= packed
    assert not any(name.startswith("benchmark/studies") for name in packed)


def test_the_readme_on_an_index():
    """With the address of the repository, each link of the README leads to a file of the release, or was absolute before."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    assert setup["project_metadata"]("", "1.0") == {}
    url = "https://github.com/owner/name"
    metadata = setup["project_metadata"](url, "1.0")
    before, after = (ROOT / "README.md").read_text(), metadata["long_description"]
    title, badges, after = after.split("\n\n", 2)
    before_title, before_badges, before = before.split("\n\n", 2)
    assert (title, badges) == (before_title, setup["badges"](url, "1.0"))
    assert before_badges == setup["badges"]()
    links = re.findall(r"\]\(([^)\s]+)\)", after)
    assert len(links) == len(re.findall(r"\]\(([^)\s]+)\)", before))
    assert all(link.startswith(("https://", "#")) for link in links)
    ours = [link.removeprefix(f"{url}/").split("#")[0].split("/", 2) for link in links if link.startswith(url)]
    assert len(ours) > 10
    assert {(kind, tag) for kind, tag, _ in ours} == {("blob", "v1.0"), ("raw", "v1.0")}
    assert all((ROOT / path).is_file() for _, _, path in ours)
    assert all((ROOT / path).suffix in {".png", ".svg"} for kind, _, path in ours if kind == "raw")
    assert set(metadata["project_urls"]) == {"Source", "Documentation", "Changelog", "Issues"}


def test_badges():
    """They name the supported versions, and lead to a workflow, pages and a notebook that exist; in a checkout relatively."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    badge = re.compile(r"\[!\[(\w+)\]\([^)]+\)\]\(([^)]+)\)")
    line = setup["badges"]("https://github.com/owner/name", "1.0")
    found, relative = dict(badge.findall(line)), dict(badge.findall(setup["badges"]()))
    assert list(found) == list(relative) == ["Tests", "Documentation", "Colab", "Python"]
    assert (ROOT / ".github" / "workflows" / found["Tests"].rpartition("/")[2]).is_file()
    assert relative["Tests"] == found["Tests"].replace("https://github.com/owner/name", "../..")
    assert all((ROOT / target).is_file() for label, target in relative.items() if label != "Tests")
    notebook = "https://colab.research.google.com/github/owner/name/blob/v1.0/"
    for label, address in (("Documentation", "https://github.com/owner/name/blob/v1.0/"), ("Colab", notebook)):
        assert (ROOT / found[label].removeprefix(address)).is_file()
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    versions = re.findall(r"Python :: (3\.\d+)", metadata["metadata"]["classifiers"])
    assert f"python-{versions[0]}_to_{versions[-1]}-blue" in line


def test_citation():
    """The citation has the version, the title and the licence of the package."""
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == metadata["metadata"]["version"]
    assert citation["license"] == metadata["metadata"]["license"]
    assert citation["authors"] == [{"name": metadata["metadata"]["author"]}]


def test_workflows():
    """The workflows are valid YAML, and test and build for each version of Python that the metadata name."""
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    versions = re.findall(r"Python :: (3\.\d+)", metadata["metadata"]["classifiers"])
    workflows = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    assert workflows["ci"]["jobs"]["tests"]["strategy"]["matrix"]["python-version"] == versions
    build = re.search(r'^build = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert build.split() == [f"cp{version.replace('.', '')}-*" for version in versions]
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(path.read_text())


def test_yaml_and_types(installation):
    """The package finds its own hyperparameters, and says that it is typed."""
    found = "from importlib.util import find_spec; print(find_spec('sb3_ppo_ext').origin)"
    package = Path(installation.run(found).strip()).parent
    assert package.parent == (installation.source if installation.kind == "editable" else installation.site_packages)
    assert "Pendulum-v1" in (package / "zoo" / "hyperparams" / "ppo_ext.yml").read_text()
    assert (package / "py.typed").exists()
    assert (package / "engines" / "native" / "_mlp.pyi").exists()
    assert (package / "envs" / "parallel" / "_flags.pyi").exists()


def test_nothing_else_is_installed(installation):
    """No tests, no scripts and no set-up code lie at the top of site-packages."""
    installed = {path.name for path in installation.site_packages.iterdir()} - {"__pycache__", "zz_dependencies.pth"}
    wheel = {"sb3_ppo_ext", f"{HOOK_MODULE}.py"}
    rest = wheel if installation.kind == "wheel" else {"__editable__.sb3_ppo_ext-0.1.0.pth"}
    assert installed == {HOOK, "sb3_ppo_ext-0.1.0.dist-info", *rest}


def test_the_hook_registers(installation):
    """Importing the Zoo, or one of its modules, is enough."""
    code = """
from rl_zoo3 import ALGOS
assert ALGOS["ppo_ext"] is ALGOS["ppoext"]
from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER
from sb3_ppo_ext.zoo import tuning
assert HYPERPARAMS_SAMPLER["ppo_ext"] is tuning.sample_ppo_ext_params
assert HYPERPARAMS_CONVERTER["ppo_ext"] is tuning.convert_ppo_ext_params
print(ALGOS["ppo_ext"])
"""
    assert installation.run(code) == "<class 'sb3_ppo_ext.PPOExt'>\n"


@pytest.mark.slow  # It imports everything; `test_the_hook_is_light` sees that the hook is off.
def test_the_hook_can_be_switched_off(installation):
    """With the variable at 0 nothing is registered before the user asks for it."""
    code = """
from rl_zoo3 import ALGOS
print('ppo_ext' in ALGOS)
import sb3_ppo_ext.zoo
sb3_ppo_ext.zoo.register()
print('ppo_ext' in ALGOS)
"""
    assert installation.run(code, environment={SWITCH: "0"}) == "False\nTrue\n"


def test_the_hook_is_light(installation):
    """An interpreter that does not import the Zoo gets one more finder and one module, which is compiled already."""
    code = "import sys; print(*sorted(sys.modules)); print(len(sys.meta_path))"
    modules, finders = installation.run(code).splitlines()
    modules_switched_off, finders_switched_off = installation.run(code, environment={SWITCH: "0"}).splitlines()
    (installation.site_packages / HOOK).rename(installation.site_packages / "hidden")
    modules_without, finders_without = installation.run(code).splitlines()
    (installation.site_packages / "hidden").rename(installation.site_packages / HOOK)
    assert set(modules.split()) == {*modules_without.split(), HOOK_MODULE}
    assert modules_switched_off == modules_without
    assert int(finders) == int(finders_switched_off) + 1 == int(finders_without) + 1
    cached = f"import os, sys; print(os.path.exists(sys.modules['{HOOK_MODULE}'].__cached__))"
    assert installation.run(cached, environment={"PYTHONDONTWRITEBYTECODE": "1"}) == "True\n"


def test_the_hook_can_be_read(installation):
    """The hook is a module like any other, and the line that calls it is short."""
    lines = (installation.site_packages / HOOK).read_text().splitlines()
    assert len(lines) == 1
    assert len(lines[0]) < 160
    folder = installation.source if installation.kind == "editable" else installation.site_packages
    path = installation.run(f"import sys; print(sys.modules['{HOOK_MODULE}'].__file__)").strip()
    assert Path(path) == folder / f"{HOOK_MODULE}.py"
    code = f"import sys, {HOOK_MODULE} as hook; before = list(sys.meta_path); hook.install(); print(before == sys.meta_path)"
    assert installation.run(code) == "True\n"


BROKEN = {
    "absent": {},
    "broken": {"__init__.py": "raise RuntimeError('broken')"},
    "utils broken": {"__init__.py": "import rl_zoo3.utils", "utils.py": "raise RuntimeError('broken')"},
    "utils without ALGOS": {"__init__.py": "import rl_zoo3.utils", "utils.py": "OTHER = {}"},
    "no manager": {"__init__.py": "from rl_zoo3 import exp_manager", "exp_manager.py": "ExperimentManager = None"},
    "module missing": {"__init__.py": "from rl_zoo3 import hyperparams_opt"},
}


@pytest.mark.parametrize("name", one_in(3, BROKEN))
def test_broken_zoo(installation, name, tmp_path):
    """The hook neither hides nor changes what a broken Zoo does, and says nothing itself."""
    files = BROKEN[name]
    zoo = tmp_path / "first" / "rl_zoo3"
    zoo.mkdir(parents=True)
    for name, content in files.items():
        (zoo / name).write_text(content)
    prefix = f"import sys; sys.path.insert(0, {str(zoo.parent)!r})"
    if not files:
        shutil.rmtree(zoo)
        prefix = "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]"
    code = f"{prefix}\ntry:\n    import rl_zoo3\nexcept Exception as error:\n    print(repr(error))"
    outputs = []
    for switch in ("0", "1"):
        completed = subprocess.run(
            [installation.python, "-W", "always", "-c", code],
            capture_output=True,
            text=True,
            env={**ENVIRONMENT, SWITCH: switch},
            cwd=installation.site_packages.parent,
        )
        outputs.append((completed.returncode, completed.stdout, completed.stderr))
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == 0
    assert outputs[0][2] == ""


@pytest.mark.slow
def test_the_hook_among_other_finders(installation):
    """A finder that asks the others as ours does, and a loader that cannot be changed, are no obstacle."""
    code = """
import sys
class Delegating:
    def find_spec(self, name, path=None, target=None):
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)):
                return spec
sys.meta_path.insert(0, Delegating())
import rl_zoo3, pickle
pickle.dumps(rl_zoo3.utils.__loader__)
print("ppo_ext" in rl_zoo3.ALGOS)
"""
    assert installation.run(code) == "True\n"
    code = """
import sys
class Slotted:
    __slots__ = ("loader",)
    def __init__(self, loader): self.loader = loader
    def create_module(self, spec): return self.loader.create_module(spec)
    def exec_module(self, module): self.loader.exec_module(module)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "rl_zoo3.utils":
            from importlib.machinery import PathFinder
            spec = PathFinder.find_spec(name, path, target)
            spec.loader = Slotted(spec.loader)
            return spec
sys.meta_path.insert(1, Finder())
import rl_zoo3
print("ppo_ext" in rl_zoo3.ALGOS)
"""
    assert installation.run(code) == "False\n"


@pytest.fixture
def small_zoo(tmp_path):
    """Code that is to import a Zoo with nothing but what is registered."""
    (tmp_path / "rl_zoo3").mkdir()
    (tmp_path / "rl_zoo3" / "__init__.py").write_text("from rl_zoo3.utils import ALGOS")
    (tmp_path / "rl_zoo3" / "utils.py").write_text("ALGOS = {'ppo': None}")
    return f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import rl_zoo3; print(*rl_zoo3.ALGOS)"


def test_the_hook_without_the_package(installation, small_zoo):
    """The hook does no harm when it is left behind alone, as when the checkout of an editable install is gone."""
    gone = "import sys; sys.modules['sb3_ppo_ext'] = None  # importing it fails\n"
    assert installation.run(gone + small_zoo) == "ppo\n"


def test_the_hook_without_its_module(installation, tmp_path):
    """The line that calls the hook does no harm without its module either, and says nothing."""
    venv.create(tmp_path / "environment")
    python = tmp_path / "environment" / "bin" / "python"
    [site_packages] = (tmp_path / "environment" / "lib").glob("python*/site-packages")
    shutil.copy(installation.site_packages / HOOK, site_packages)
    command = [python, "-W", "always", "-c", "print('hello')"]
    completed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    assert (completed.stdout, completed.stderr) == ("hello\n", "")


def test_uninstall(installation, small_zoo):
    """Uninstalling takes everything away. (The last test of this module, for that reason.)"""
    installation.pip("uninstall", "-y", "sb3-ppo-ext")
    left = {path.name for path in installation.site_packages.iterdir()} - {"__pycache__"}
    assert left == {"zz_dependencies.pth"}
    assert installation.run(small_zoo) == "ppo\n"
