"""Models are saved whole or not at all, to the paths that SB3 would save them to."""

import io
import pathlib
import warnings
import zipfile

import numpy as np
import pytest
import torch as th
from stable_baselines3 import PPO
from support.masks import make_masked
from support.policies import SMALL
from support.processes import run_fresh
from support.toys import ToyEnv, make_toys
from support.zips import Zip

from sb3_ppo_ext import PPOExt


def make(**options):
    return PPOExt("MlpPolicy", make_toys(), **SMALL, **options)


@pytest.mark.parametrize("as_type", [str, pathlib.Path])
@pytest.mark.parametrize("name", ["model", "model.zip", "model.abc", "new/model", "folder", "folder.zip", "1.5"])
def test_paths(name, as_type, tmp_path, monkeypatch):
    """Files have the names that SB3 gives them, with the same warnings."""
    written, warned = {}, {}
    for algorithm in (PPO, PPOExt):
        (tmp_path / algorithm.__name__ / "folder.zip").mkdir(parents=True)
        (tmp_path / algorithm.__name__ / "folder").mkdir()
        monkeypatch.chdir(tmp_path / algorithm.__name__)
        model = algorithm("MlpPolicy", make_toys(), **SMALL)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.save(as_type(name))
        written[algorithm] = {str(file.relative_to(pathlib.Path.cwd())) for file in pathlib.Path.cwd().rglob("*")}
        warned[algorithm] = [str(warning.message) for warning in caught]
    assert written[PPOExt] == written[PPO]
    assert warned[PPOExt] == warned[PPO]


def test_number_of_steps_that_is_a_float(tmp_path):
    """A model that was trained for 1e5 steps, as users write it, is loaded."""
    make().learn(32.0).save(tmp_path / "model")
    assert PPOExt.load(tmp_path / "model")._total_timesteps == 32


def test_large_statistics():
    """Averages of the squares of huge advantages are saved and loaded, though they are larger than any option may be."""
    model = make(advantage_norm="ema")
    model.advantage_normalizer.observe(th.tensor([1e30, -1e30]))
    averages = model.advantage_normalizer.state_dict()
    assert averages["average"][1] > 1e50
    loaded = Zip(model).load()
    assert loaded.advantage_normalizer.state_dict() == averages
    averages["average"][0] = float("inf")
    with pytest.raises(ValueError, match=r"advantage_normalizer\.average"):
        loaded.set_parameters({**loaded.get_parameters(), "advantage_normalizer": averages})


def test_what_load_cannot_change():
    """Another policy, gSDE or masks are refused by name; the values of the zip are accepted."""
    saved = Zip(make())
    for name, other in {"policy": "CnnPolicy", "use_sde": True, "action_masking": True}.items():
        with pytest.raises(ValueError, match=rf"`{name}={other!r}` is not valid: .* `load` cannot change"):
            saved.load(**{name: other})
    for name, same in {"policy": "MlpPolicy", "use_sde": False, "action_masking": False}.items():
        assert type(saved.load(**{name: same}).policy) is type(make().policy)
    with pytest.raises(ValueError, match=r"`action_masking=False`.*saved with `action_masking=True`"):
        Zip(masked := PPOExt("MlpPolicy", make_masked(), **SMALL, action_masking=True)).load(action_masking=False)
    assert Zip(masked).load(policy="MlpPolicy").action_masking


def test_open_file(tmp_path):
    """An open file is written from its position on, stays open with nothing left to write, and is refused as by SB3."""
    model = make()
    with (tmp_path / "file").open("w+b", buffering=2**20) as file:
        file.write(b"before")
        model.save(file)
        assert not file.closed
        assert file.tell() == (tmp_path / "file").stat().st_size
        PPOExt.load(file)
    assert (tmp_path / "file").read_bytes().startswith(b"beforePK")
    for algorithm in (PPO, PPOExt):
        model = algorithm("MlpPolicy", make_toys(), **SMALL)
        with pytest.raises(TypeError, match="invalid type"):
            model.save(1)
        with pytest.raises(ValueError, match="is closed"):
            model.save(file)


def test_attribute_that_does_not_pickle(tmp_path):
    """The former file is kept if an attribute cannot be pickled, and no temporary file is left; so is an open file."""
    model, path = make(), tmp_path / "model.zip"
    model.save(path)
    before, file = path.read_bytes(), io.BytesIO()
    model.of_the_user = (number for number in range(3))
    for target in (path, file):
        with pytest.raises(TypeError, match="pickle"):
            model.save(target)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    assert file.getvalue() == b""


@pytest.mark.integration
def test_full_disk(tmp_path):
    """The former file is kept if the disk is full, and no temporary file is left."""
    model, path = make(), tmp_path / "model.zip"
    model.save(path)
    before = path.read_bytes()
    code = """
import resource, signal, sys
from sb3_ppo_ext import PPOExt
model = PPOExt.load(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    model.save(sys.argv[1])
except OSError as error:
    print(error.strerror)
"""
    assert run_fresh(code, path) == "File too large\n"
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_further_members(tmp_path):
    """A zip to which members have been added loads as before, also in SB3."""
    path = tmp_path / "model.zip"
    make().save(path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("further", b"content")
    for algorithm in (PPO, PPOExt):
        algorithm.load(path)


class Successful(ToyEnv):
    """Says of each episode whether it succeeded, in a form of its choice."""

    def __init__(self, success):
        super().__init__()
        self.success = success

    def step(self, action):
        *rest, _ = super().step(action)
        return *rest, {"is_success": self.success}


@pytest.mark.parametrize("success", [np.array(True), np.array([1.0]), th.tensor(True), np.bool_(True), 1], ids=repr)
def test_success_in_any_form(success, tmp_path):
    """A model of an environment that says `is_success` with an array or a tensor of one number can be loaded, as in SB3."""
    model = PPOExt("MlpPolicy", Successful(success), **SMALL)
    model.learn(64)
    model.save(tmp_path / "model")
    loaded = PPOExt.load(tmp_path / "model")
    assert len(loaded.ep_success_buffer) == len(model.ep_success_buffer) > 0
    assert all(loaded.ep_success_buffer)


@pytest.mark.parametrize("success", [np.array([True, False]), np.array("yes"), th.zeros(2), th.tensor(1j)], ids=repr)
def test_success_that_is_no_number(success, tmp_path):
    """What has no mean is refused by name."""
    model = make()
    model.learn(16)
    model.ep_success_buffer.append(success)
    model.save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"ep_success_buffer.*give numbers"):
        PPOExt.load(tmp_path / "model")
