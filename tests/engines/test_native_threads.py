"""Networks of the native engine on several threads: the numbers of one thread, to the bit."""

import copy
import itertools
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from support.cases import one_in
from support.engines import make, updated
from support.toys import make_toys

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.engines.native import compiled_steps
from sb3_ppo_ext.engines.native import policy as native_policy

_mlp = pytest.importorskip("sb3_ppo_ext.engines.native._mlp", reason="the extension module was not built")


@pytest.fixture(params=_mlp.available())
def instruction_set(request):
    _mlp.use(request.param)
    yield request.param
    _mlp.use(_mlp.available()[0])


class Net:
    """A network with random parameters, and a minibatch."""

    def __init__(self, sizes, n, seed=0, activation="tanh", is_residual=False):
        rng = np.random.default_rng(seed)

        def normal(*shape):
            return rng.normal(size=shape).astype(np.float32)

        def linear(n_in, n_out):
            weight = normal(n_out, n_in) / np.sqrt(n_in, dtype=np.float32)
            return weight, normal(n_out), normal(n_out, n_in), normal(n_out)

        def norm(size):
            return tuple(normal(size) for _ in range(4))

        self.layers = [linear(*sizes[:2])]
        for ends in itertools.pairwise(sizes[1:]):
            if is_residual:
                layers = [norm(ends[0]), linear(ends[0], 40), activation, linear(40, ends[0]), len(self.layers) - 1]
                self.layers += [*layers, norm(ends[0])]
            self.layers += [linear(*ends)] if is_residual else [activation, linear(*ends)]
        self.network = _mlp.Network(self.layers)
        self.x, self.out, self.d_out = normal(n, sizes[0]), np.empty((n, sizes[-1]), np.float32), normal(n, sizes[-1])

    def forth(self):
        return self.network, self.x, self.out

    def back(self):
        return self.network, self.d_out

    def results(self):
        return [self.out.copy(), *(array.copy() for layer in self.layers if isinstance(layer, tuple) for array in layer[2:])]


def on_one_thread(nets):
    for net in nets:
        net.network.forward(net.x, net.out)
        for add in (False, True):
            net.network.backward(net.d_out, add)
    return [array for net in nets for array in net.results()]


def on(threads, nets):
    threads.forward([net.forth() for net in nets])
    for add in (False, True):
        threads.backward([net.back() for net in nets], add)
    return [array for net in nets for array in net.results()]


def assert_equal(expected, actual):
    for one, other in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("n", one_in(5, [0, 1, 2, 63, 64, 65, 200, 256, 257, 700]))
@pytest.mark.parametrize("sizes", [(5, 7), (17, 33, 6), (40, 100, 16, 2), (17, 256, 256, 6)])
def test_networks(instruction_set, sizes, n):
    """Outputs and gradients equal those of one thread to the bit, for several networks at once, of other sizes as well."""

    def nets():
        some = [Net(sizes, n), Net((*sizes[:1], 9), 2 * n + 1, 1, "relu"), Net(sizes, n, 2, "gelu")]
        return [*some, Net(sizes, n, 3, "silu", is_residual=True)]

    expected = on_one_thread(nets())
    for n_threads in (1, 2, 3, 7):
        assert_equal(expected, on(_mlp.Threads(n_threads), nets()))


def test_many_times():
    """Every one of many calls gives the same numbers, however the threads share the work."""
    nets, threads = [Net((17, 128, 128, 3), 150, seed) for seed in range(2)], _mlp.Threads(4)
    expected = on_one_thread(nets)
    for _ in range(300):
        assert_equal(expected, on(threads, nets))


def test_latents_and_one_thread_afterwards():
    """What a network keeps for `latents` and `backward` does not depend on who has computed it."""
    sizes, threads = (17, 64, 64, 3), _mlp.Threads(3)
    one, other = Net(sizes, 300), Net(sizes, 300)
    one.network.forward(one.x, one.out)
    threads.forward([other.forth()])
    latents = np.empty((2, 300, 64), np.float32)
    for net, out in zip((one, other), latents, strict=True):
        net.network.latents(out)
        net.network.backward(net.d_out, False)
    assert_equal([latents[0], *one.results()], [latents[1], *other.results()])


@pytest.mark.integration
def test_other_threads_run_meanwhile():
    """Other threads of Python run while the threads compute, but none may use their networks."""
    net, threads, done = Net((64, 256, 256, 64), 20000), _mlp.Threads(2), threading.Event()

    def compute():
        for _ in range(50):
            threads.forward([net.forth()])
        done.set()

    worker = threading.Thread(target=compute)
    worker.start()
    refused = set()
    while not done.is_set() and len(refused) < 2:
        for call in (net.network.pack, lambda: threads.forward([])):
            try:
                call()
            except RuntimeError as error:
                refused.add(str(error))
    assert refused == {"another thread computes with this network", "another thread uses these threads"}
    worker.join()
    net.network.pack()


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads")
def test_threads_end():
    """Threads start when they are first needed, and end with the object."""
    before, threads, net = tasks(), _mlp.Threads(4), Net((17, 128, 128, 3), 200)
    assert not tasks() - before
    threads.forward([net.forth()])
    # Meanwhile, threads of earlier tests may end.
    started = tasks() - before
    assert len(started) == 3
    del threads
    assert not started & tasks()


def tasks():
    """Numbers of the threads of this process."""
    return set(os.listdir("/proc/self/task"))


FORKS = """
import importlib.util, os, sys
import numpy as np
spec = importlib.util.spec_from_file_location("_mlp", sys.argv[1])
mlp = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mlp)
rng = np.random.default_rng(0)
weight, bias, x, out = (rng.normal(size=shape).astype(np.float32) for shape in ((128, 128), 128, (500, 128), (500, 128)))
network, threads = mlp.Network([(weight, bias, weight.copy(), bias.copy())]), mlp.Threads(3)
network.forward(x, out)
expected = out.copy()

def check():
    out[:] = 0
    for _ in range(50):
        threads.forward([(network, x, out)])
        threads.backward([(network, out)], False)
    assert (out == expected).all()

check()
for depth in range(2):
    pid = os.fork()
    if pid:
        check()
        assert os.waitpid(pid, 0)[1] == 0
        sys.exit(0)
    check()
if os.fork() == 0:
    del threads  # without its threads
    os._exit(0)
assert os.wait()[1] == 0
"""


@pytest.mark.integration
@pytest.mark.skipif(sys.platform == "win32", reason="cannot fork")
def test_fork():
    """After a fork, parent and child compute the same, each with threads of its own; all end by themselves."""
    result = subprocess.run([sys.executable, "-c", FORKS, _mlp.__file__], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("n", "error", "message"),
    [(0, ValueError, "1 to 256 threads, not 0"), (257, ValueError, "not 257"), (1.5, TypeError, "float")],
)
def test_bad_numbers(n, error, message):
    """The message names the range."""
    with pytest.raises(error, match=message):
        _mlp.Threads(n)


def test_bad_parts():
    """A network can take part once; a call that is refused leaves the networks usable."""
    net, other, threads = Net((3, 8, 2), 5), Net((3, 8, 2), 5), _mlp.Threads(2)
    with pytest.raises(ValueError, match="network of its own"):
        threads.forward([net.forth(), net.forth()])
    with pytest.raises(ValueError, match=r"x must be .* shape \(n, 3\)"):
        threads.forward([net.forth(), (other.network, other.out, other.out)])
    with pytest.raises(TypeError, match="a tuple of a Network and 2 arrays"):
        threads.forward([net.back()])
    with pytest.raises(ValueError, match="8 parts, not 9"):
        threads.forward([net.forth()] * 9)
    assert_equal(on_one_thread([net, other]), on(threads, [net, other]))


# The option

WIDE = dict(net_arch=[128, 128])
CASES = {
    "box": dict(batch_size=96),
    "discrete": dict(env=dict(action_space=spaces.Discrete(4)), batch_size=128),
    "gSDE": dict(use_sde=True, batch_size=128),
    "accumulated": dict(batch_size=64, accumulate_grad=3),
    "auxiliary losses": dict(batch_size=128, kl_coef=0.1, bounds_coef=0.1),
    "blocks": dict(batch_size=400),
}


@pytest.fixture
def made(monkeypatch):
    """Numbers of threads that engines have asked for."""
    numbers, original = [], native_policy.extension.module.Threads

    def threads(n):
        numbers.append(n)
        return original(n)

    monkeypatch.setattr(native_policy.extension, "module", SimpleNamespace(**{**vars(_mlp), "Threads": threads}))
    return numbers


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("name", one_in(2, CASES))
def test_update(name, made, monkeypatch):
    """An update in several threads is that of one thread, to the bit, and so is the rollout after it."""
    for module in (native_policy, compiled_steps):
        monkeypatch.setattr(module, "BLOCK", 300)
    case = {"n_steps": 200, "policy_kwargs": WIDE, **CASES[name]}
    models = [make(**copy.deepcopy(case), native_threads=n).learn(1200) for n in (1, 2, 3)]
    for model in models[1:]:
        for parameter, expected in zip(model.policy.parameters(), models[0].policy.parameters(), strict=True):
            assert th.equal(parameter, expected)
        np.testing.assert_array_equal(model.rollout_buffer.values, models[0].rollout_buffer.values)
    assert made == [2, 3]


def test_change_between_trainings(made):
    """The number can be changed like any option, is saved, and 1 ends the threads."""
    model = make(policy_kwargs=WIDE)
    for n in (2, 2, 4, 1):
        model.native_threads = n
        updated(model.learn(32), "native")
        threads = model._engines["native"].native.threads
        assert (threads is None) == (n == 1)
    assert made == [2, 4]


def test_saved(tmp_path):
    """The number is saved, and may be another one after loading."""
    make(policy_kwargs=WIDE, native_threads=2).save(tmp_path / "model")
    assert PPOExt.load(tmp_path / "model").native_threads == 2
    assert PPOExt.load(tmp_path / "model", env=make_toys(), native_threads=3).learn(32).native_threads == 3


@pytest.mark.parametrize("backend", ["eager", "fused", "auto"])
def test_other_engines(backend, made):
    """Another engine trains as without the option, also one that `"auto"` chooses, and starts no threads."""
    options = dict(backend=backend, policy_kwargs=dict(net_arch=[8], activation_fn=th.nn.Mish))
    models = [make(**copy.deepcopy(options), native_threads=n).learn(64) for n in (1, 2)]
    for one, other in zip(*(model.policy.parameters() for model in models), strict=True):
        assert th.equal(one, other)
    assert made == []


@pytest.mark.parametrize("n", [0, -1, 1.5, 257, "two", None, True])
def test_bad_options(n):
    """Anything but an integer from 1 to 256 is refused, and named."""
    with pytest.raises(ValueError, match="native_threads"):
        make(native_threads=n)
