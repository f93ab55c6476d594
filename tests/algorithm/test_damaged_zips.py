"""Zips that are damaged or made by someone else are refused with a `ValueError`, and take no memory."""

import base64
import io
import json
import subprocess
import sys
import zipfile
from copy import deepcopy

import pytest
import torch as th
from support.cases import one_in
from support.parity import assert_equal
from support.policies import make
from support.zips import Zip, packed, parts

from sb3_ppo_ext import PPOExt

OPTIONS = [
    dict(advantage_norm="ema", kl_coef=1.0, kl_target=0.01, adaptive_lr_kl=0.01),
    dict(action_dist="beta", optimizer="muon", critic_learning_rate=1e-3, learning_rate="lin_0.001"),
]


@pytest.fixture(scope="module", params=OPTIONS, ids=["kl", "muon"])
def model(request):
    return make(**request.param).learn(32)


def parameters_of(model):
    return deepcopy(model.get_parameters())


def test_optimizer_state_that_is_not_valid(model):
    """States that an optimiser could not go on from are refused, and nothing is changed."""
    before, good = parameters_of(model), model.get_parameters()["policy.optimizer"]
    groups, first = good["param_groups"], good["state"][0]
    wrong = [
        {**good, "state": {**good["state"], 0: {name: value[..., :1] for name, value in first.items() if value.ndim}}},
        {**good, "state": {**good["state"], 0: {name: th.zeros(()).expand(10**6) for name in first}}},
        {**good, "state": []},
        {"state": {}},
        {},
        [],
        "state",
    ]
    if "role" not in groups[0]:  # Groups of ours keep their hyperparameters, and find their parameters by name.
        wrong.append({**good, "state": {**good["state"], 0: {"step": first["step"]}}})
        wrong += [{**good, "param_groups": [{**groups[0], **change}]} for change in ({"lr": float("nan")}, {"params": []})]
        wrong.append({**good, "param_groups": groups + groups})
    for state in wrong:
        with pytest.raises(ValueError, match=r".") as refusal:
            model.set_parameters({**model.get_parameters(), "policy.optimizer": state})
        assert str(refusal.value)
        assert_equal(before, model.get_parameters(), "parameters")


def test_parameters_that_do_not_fit(model):
    """Parameters are not set in part: neither those before an error, nor those of a state that adapts."""
    before, good = parameters_of(model), model.get_parameters()
    changed = {name: value + 1 for name, value in good["policy"].items()}
    wrong = [
        {**good, "policy": changed, "further": {}},
        {**good, "policy": {**changed, "value_net.bias": th.zeros(3)}},
        {**good, "policy": dict(list(changed.items())[:-1])},
        {"policy": changed},
    ]
    learned = [name for name in good if not name.startswith("policy")]
    wrong += [
        {**good, "policy": changed, name: state} for name in learned for state in ({}, None, {**good[name], "value": "x"})
    ]
    wrong += [{**good, "policy": changed, name: {key: float("nan") for key in good[name]}} for name in learned]
    for parameters in wrong:
        with pytest.raises(ValueError, match=r"."):
            model.set_parameters(parameters)
        assert_equal(before, model.get_parameters(), "parameters")
    missing = {**good, "policy": dict(list(good["policy"].items())[:-1])}
    with pytest.raises(RuntimeError, match="Missing key"):
        model.set_parameters(missing)


def test_class_that_cannot_be_imported(model):
    """What a trusted zip cannot unpickle is a `ValueError` with the reason."""
    members = parts(Zip(model).content)
    missing = base64.b64encode(b"cnot_installed\nPolicy\n.").decode()
    data = json.loads(members["data"]) | {"policy_class": {":serialized:": missing}}
    with pytest.raises(ValueError, match=r"cannot be loaded \(ModuleNotFoundError: .*not_installed.*custom_objects"):
        PPOExt.load(io.BytesIO(packed({**members, "data": json.dumps(data).encode()})))


def test_errors_of_torch_name_the_file(model):
    """An error that PyTorch raises as a `ValueError` of its own says which file is damaged."""
    members = parts(Zip(model).content)
    policy = parts(members["policy.pth"])
    assert policy["archive/byteorder"] == b"little"
    members["policy.pth"] = packed({**policy, "archive/byteorder": b"middle"})
    for read in (PPOExt.load, model.set_parameters):
        with pytest.raises(ValueError, match=r"the file is not a whole model zip \(ValueError: .*endian"):
            read(io.BytesIO(packed(members)))


# Zips that claim to be large


def bombs(members, size):
    """Zips of a model with `size` bytes of zeros, each in another place."""
    zeros = bytes(size)
    inner = {"archive/data.pkl": b"\x80\x02}.", "archive/version": b"3", "archive/data/0": zeros}
    deflated = zipfile.ZIP_DEFLATED
    yield "foreign", packed({**members, "foreign": zeros}, deflated)
    yield "foreign.pth", packed({**members, "foreign.pth": zeros}, deflated)
    yield "data", packed({**members, "data": b"[" + zeros.replace(b"\0", b" ") + b"]"}, deflated)
    yield "system_info.txt", packed({**members, "system_info.txt": zeros}, deflated)
    yield "policy.pth", packed({**members, "policy.pth": packed(inner, deflated)})
    yield (
        "bytearray",
        packed(
            {**members, "policy.pth": packed({**inner, "archive/data.pkl": b"cbuiltins\nbytearray\n", "archive/data/0": b""})}
        ),
    )
    yield "bzip2", packed({**members, "policy.pth": zeros}, zipfile.ZIP_BZIP2)


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("where", one_in(2, [name for name, _ in bombs({}, 0)]))
def test_bombs_are_refused(where):
    """A member that expands is refused if it is needed, and ignored if it is not."""
    model = make()
    content = dict(bombs(parts(Zip(model).content), 10_000_000))[where]
    if where == "foreign":
        PPOExt.load(io.BytesIO(content), trusted=False)
        return
    for read in (PPOExt.load, model.set_parameters):
        with pytest.raises(ValueError, match="the file is not a whole model zip"):
            read(io.BytesIO(content))


def test_zip_that_was_packed_again(model):
    """A zip that another program has compressed is read."""
    loaded = PPOExt.load(io.BytesIO(packed(parts(Zip(model).content), zipfile.ZIP_DEFLATED)))
    assert_equal(model.policy.state_dict(), loaded.policy.state_dict(), "policy")


@pytest.mark.slow
@pytest.mark.integration
def test_memory_of_bombs(tmp_path):
    """A file of 0.1 MB that claims to have 100 takes less than 30, wherever its zeros are."""
    for name, content in bombs(parts(Zip(make()).content), 100_000_000):
        (tmp_path / name).write_bytes(content)
    code = """
import pathlib, resource, sys
from sb3_ppo_ext import PPOExt
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
paths = sorted(pathlib.Path(sys.argv[1]).iterdir())
PPOExt.load(sys.argv[1] + "/foreign")
before = peak()
for path in paths:
    for trusted in (True, False):
        try:
            PPOExt.load(path, trusted=trusted)
        except ValueError:
            pass
print(peak() - before)
"""
    printed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True).stdout
    assert float(printed) < 30
