"""
Wrong calls of the extension module: `python extension_calls.py MODULE SEED N` makes them in a process of its own, which a
mistake in C may end. Each call is printed before it is made, so that the last line names the one that ended the process.
"""

import copy
import ctypes
import faulthandler
import gc
import importlib.util
import itertools
import pickle
import random
import sys

import numpy as np

# A call may raise these. Numbers beyond the range of floats are an OverflowError everywhere in Python.
REFUSALS = (TypeError, ValueError, OverflowError)
GUARD = np.float32(12345.0)


class Refusing:
    """Raises whatever it is asked."""

    def __bool__(self):
        raise ValueError("no truth")

    def __float__(self):
        raise ValueError("no number")

    __index__ = __buffer__ = __float__


class Guarded:
    """Makes arrays within larger ones, whose ends no call may change."""

    def __init__(self):
        self.whole = []

    def array(self, *shape):
        size = int(np.prod(shape))
        whole = np.full(size + 32, GUARD, np.float32)
        whole[16 : 16 + size] = np.linspace(-1, 1, size, dtype=np.float32)
        self.whole.append(whole)
        return whole[16 : 16 + size].reshape(shape)

    def are_untouched(self):
        return all((whole[:16] == GUARD).all() and (whole[-16:] == GUARD).all() for whole in self.whole)


def wrong_arrays(right, writable):
    """What is given in place of an array: other objects, types, shapes and memory."""
    yield from (None, 5, -1.5, "word", b"\x00\x00\x80?", (), [1.0], object(), np.float32, Refusing())
    for dtype in (np.float64, np.float16, np.int32, np.uint8, bool, ">f4", object, "f4,f4", "M8[s]", "S4"):
        yield np.zeros(right.shape, dtype)
    yield np.float32(1)
    yield right[..., None]
    yield right[None]
    yield right.reshape(-1)[: right.size - 1]
    yield np.zeros([n + 1 for n in right.shape], np.float32)
    yield np.zeros([0] * right.ndim, np.float32)
    yield np.zeros((1,) * 40, np.float32)
    if right.size > 1:  # A single number is contiguous.
        yield np.zeros([2 * n for n in right.shape], np.float32)[(slice(None, None, 2),) * right.ndim]
        yield np.broadcast_to(np.float32(1), right.shape)
    yield memoryview(bytearray(right.nbytes + 1))[1:].cast("f", right.shape)  # not aligned
    yield memoryview(bytes(right.nbytes)).cast("i", right.shape)
    yield (ctypes.c_double * right.size)()
    if writable:
        yield memoryview(bytes(right.nbytes)).cast("f", right.shape)
        read_only = right.view()
        read_only.flags.writeable = False
        yield read_only


WRONG_NUMBERS = (None, "1", b"1", [], object(), 1j, np.ones(2), float("nan"), float("inf"), 10**400, Refusing())
WRONG_NAMES = (None, 5, b"any", "", "abacus", "any\0", "tanh\0", "\udc80", np.str_("relu "), ["any"])


class Entries:
    """Right calls of each entry point: a function, its arguments, and what is wrong for each of them."""

    def __init__(self, module, rng):
        self.module, self.rng, self.guarded = module, rng, Guarded()
        self.sizes = [rng.randint(1, 40) for _ in range(rng.randint(2, 5))]
        self.n = rng.choice([1, 2, 5, 63, 64, 65, 130])
        self.layers = [self.layer(*self.sizes[:2])]
        for ends in zip(self.sizes[1:-1], self.sizes[2:], strict=True):
            self.layers += [*self.hidden(ends[0], len(self.layers) - 1), self.layer(*ends)]
        self.network = module.Network(self.layers)
        self.array = self.guarded.array
        self.network.forward(self.array(self.n, self.sizes[0]), self.array(self.n, self.sizes[-1]))
        self.tensors = [tuple(self.array(*shape) for _ in range(4)) for shape in [(3, 2), (7,), (0,), ()]]
        self.adam = module.Adam(self.tensors)
        self.threads = module.Threads(rng.randint(1, 3))

    def layer(self, n_in, n_out):
        array = self.guarded.array
        return array(n_out, n_in), array(n_out), array(n_out, n_in), array(n_out)

    def hidden(self, size, before):
        """What may lie between two linear layers."""
        norm = tuple(self.guarded.array(size) for _ in range(4))
        inner = [self.layer(size, 5), self.rng.choice(["relu", "gelu"]), self.layer(5, size)]
        return self.rng.choice([["tanh"], [norm, "silu"], [norm, *inner, before], []])

    def all(self):
        """Names, functions, right arguments, and wrong values for each argument."""
        n, first, last, array = self.n, self.sizes[0], self.sizes[-1], self.array
        steps, n_envs = self.rng.randint(1, 9), self.rng.randint(2, 5)
        x, out, latents = array(n, first), array(n, last), array(n, self.sizes[-2])
        rollout = [array(steps, n_envs) for _ in range(4)]
        vectors = [array(n_envs) for _ in range(2)]
        read, written = (lambda a: list(wrong_arrays(a, False))), (lambda a: list(wrong_arrays(a, True)))
        network, adam, number = self.network, self.adam, list(WRONG_NUMBERS)
        yield "Network", self.module.Network, (self.layers,), (self.wrong_layers(),)
        yield "Network.pack", network.pack, (), ()
        yield "Network.forward", network.forward, (x, out), (read(x), written(out))
        yield "Network.latents", network.latents, (latents,), (written(latents),)
        yield "Network.backward", network.backward, (out, False), (read(out), [Refusing(), np.ones(2)])
        threads, forth, back = self.threads, (network, x, out), (network, out)
        yield "Threads", self.module.Threads, (2,), ([*number, 0, -1, 257],)
        yield "Threads.forward", threads.forward, ([forth],), (list(self.wrong_parts(forth, [read(x), written(out)])),)
        wrong_backward = (list(self.wrong_parts(back, [read(out)])), [Refusing(), np.ones(2)])
        yield "Threads.backward", threads.backward, ([back], False), wrong_backward
        yield "Adam", self.module.Adam, (self.tensors,), (self.wrong_tensors(),)
        yield "Adam.norm", adam.norm, (), ()
        watched = [None, 5, (x,), [None], [x, np.ones(3)], [np.ones((3, 3), np.float32).T], [Refusing()]]
        yield "Watch", self.module.Watch, ([x],), (watched,)
        yield "Watch.has_changed", self.module.Watch([x]).has_changed, (), ()
        betas = [*number, -0.1, 1.0, 2]
        wrong_steps = ([*number, 0, -1, 0.5], number, number, betas, betas, number, number)
        yield "Adam.step", adam.step, (3, 1.0, 1e-3, 0.9, 0.999, 1e-5, 0.0), wrong_steps
        right = (*rollout[:3], *vectors, 0.9, 0.95, rollout[3])
        wrong = (*map(read, rollout[:3]), *map(read, vectors), number, number, written(rollout[3]))
        yield "gae", self.module.gae, right, wrong
        yield from self.losses()
        yield from self.steps()
        yield (
            "normalize",
            self.module.normalize,
            (vectors[0], 2, vectors[1]),
            (read(vectors[0]), [*number, 0], written(vectors[1])),
        )
        of_beta = (array(2, 6), array(2, 2, 2, 3, 8), 1000.0, array(2, 3))
        wrong_beta = (read(of_beta[0]), read(of_beta[1]), [*number, 0, -1], written(of_beta[3]))
        yield "sample_beta", self.module.sample_beta, of_beta, wrong_beta
        yield "use", self.module.use, ("any",), (list(WRONG_NAMES),)
        yield "available", self.module.available, (), ()

    def losses(self):
        """Calls for the loss of a Gaussian, of two choices with a weight for each sample, of Betas, and of gSDE."""
        array, number, n = self.array, list(WRONG_NUMBERS), 5
        read, written = (lambda a: list(wrong_arrays(a, False))), (lambda a: list(wrong_arrays(a, True)))
        options = (False, True, 0.2, 3.0, 0.1, 1.0, 0.5, 0.01, 0.1)
        families = (("gaussian", (1, 1, 1), None, (0.1, 1.0)), ("categorical", (3, 2), array(n), (0.0, 1.0)))
        families += (("beta", (2, 2, 2), None, (0.0, 1.0)), ("state_dependent_noise", (1, 1, 1), None, (0.1, 1.0)))
        for family, choices, weights, of_bounds in families:
            is_gaussian, has_latents = family == "gaussian", family == "state_dependent_noise"
            n_old = {"categorical": 5, "state_dependent_noise": 3}.get(family, 6)
            shape = (4, 3) if has_latents else (3,)
            actions, stds = array(n, len(choices)), [array(*shape), array(*shape)]
            actions[:] = 1
            old = np.full((n, n_old), 2.0) if family == "beta" else array(n, n_old)
            columns = (actions, *(array(n) for _ in range(4)), weights, old, *(array(n) for _ in range(5)))
            columns += (array(n, n_old), array(n), array(n))
            bounds = (array(3), array(3))
            kl = (0.0,) if has_latents else options[-1:]
            right = (family, choices, *stds, columns, bounds, *options[:-1], *kl, *of_bounds, 1000.0, True, 1e-6)
            names = [name for name in WRONG_NAMES if name is not None]
            wrong_choices = [None, [1], 5, (0,) * len(choices), (-1, 5, 1), ("a",) * 3, (2**62,) * 3, (2**70,), (), (2,)]
            wrong_columns = [None, [], (), columns[:-1], (*columns, columns[-1])]
            for i in range(len(columns)):
                values = [] if columns[i] is None else wrong_arrays(columns[i].astype(np.float32, copy=False), i > 6)
                values = (v for v in values if i != 6 or family != "beta" or getattr(v, "dtype", None) != np.float64)
                needs = i not in (5, 6, 12, 13, 14)
                wrong_columns += [(*columns[:i], v, *columns[i + 1 :]) for v in values if needs or v is not None]
            wrong_stds = [read(stds[0]), written(stds[1])] if is_gaussian or has_latents else [[], []]
            wrong_bounds = [None, [], 5]
            if is_gaussian:
                wrong_bounds += [(), bounds[:1], *((v, bounds[1]) for v in read(bounds[0])), (*bounds, bounds[0])]
                wrong_columns += [(*columns[:i], None, *columns[i + 1 :]) for i in (6, 13, 14)]
            yield "Loss", self.module.Loss, right, (names, wrong_choices, *wrong_stds, wrong_columns, wrong_bounds)
            arrays = [array(2, sum(choices) + 4 * has_latents), array(2), array(2, sum(choices)), array(2)]
            wrong = ([*number, -1, n - 1], [*number, 0], *map(read, arrays[:2]), *map(written, arrays[2:]))
            yield "Loss.add", self.module.Loss(*right).add, (1, n, *arrays, True), wrong

    def steps(self):
        """Calls for steps of the optimiser, with a Gaussian."""
        array, number, n = self.array, list(WRONG_NUMBERS), 5
        actor, critic = (self.module.Network([self.layer(3, 4), "tanh", self.layer(4, k)]) for k in (2, 1))
        columns = (array(n, 2), *(array(n) for _ in range(4)), None, None, *(array(n) for _ in range(5)), None, None, None)
        options = (False, False, 0.2, 3.0, 0.1, 1.0, 0.5, 0.01, 0.0, 0.0, 1.0, 1000.0, False, 0.0)
        loss = self.module.Loss("gaussian", (1, 1), array(2), array(2), columns, (), *options)
        features, invalid = array(n, 3), np.zeros((n, 2), bool)
        right = (actor, critic, loss, self.adam, features, invalid, 2)
        objects = [None, 5, object(), self.module.Network, self.threads]
        wrong = [[*objects, critic, loss], [*objects, actor, loss], [*objects, actor], [*objects, loss]]
        wrong_invalid = [5, object(), features, invalid[:-1], invalid[:, :-1], invalid.T, invalid.astype(np.uint8)]
        wrong += [list(wrong_arrays(features, False)), wrong_invalid, [*number, 0, -1]]
        yield "Steps", self.module.Steps, right, tuple(wrong)
        own, limits = [*number, -1, 0], [value for value in number if type(value) is not float or value != value]
        ends = [None, [2, 5], 5, (5, 2), (2, 2), (0, 5), (-1, 5), (2, 6), (2, None), (2**70,), ("a",), (2.0,), (Refusing(),)]
        wrong_steps = (
            ends,
            [*number, -1, 3],
            own,
            own,
            limits,
            limits,
            *[number] * 3,
            *[[*number, -0.1, 1.0]] * 2,
            *[number] * 2,
        )
        steps = self.module.Steps(*right)
        yield "Steps.make", steps.make, ((2, 5), 0, 1, 2, 0.5, 1.0, 1.0, 0.0, 1e-3, 0.9, 0.999, 1e-5, 0.0), wrong_steps

    def wrong_layers(self):
        first, rest = self.layers[0], self.layers[1:]
        yield from (None, 5, (), tuple(self.layers), {}, "word", [], [None], [5], [()], [first[:3]])
        yield [first, *[self.layer(self.sizes[1], self.sizes[1])] * 64]
        for wrong in (*(name for name in WRONG_NAMES if name != 5), -1, len(self.layers), 10**40, True, 0.0, "tanh"):
            yield [*self.layers, wrong]
            yield [wrong, *self.layers]
            yield [first, "tanh", wrong, *rest]
        yield from ([list(first)], [(*first, first[0])], [np.zeros((2, 2), np.float32)])
        yield [self.layer(self.sizes[0] + 1, self.sizes[1] + 1), self.layer(self.sizes[1], 3)]
        for n_in, n_out in ((0, 3), (3, 0), (0, 0)):
            yield [self.layer(n_in, n_out)]
        for i, right in enumerate(first):
            for wrong in wrong_arrays(right, writable=i > 1):
                yield [(*first[:i], wrong, *first[i + 1 :]), *rest]
                yield [*self.layers, (*first[:i], wrong, *first[i + 1 :])]

    @staticmethod
    def wrong_parts(right, wrong):
        """For a part of a call of several threads, and the wrong values of each of its arrays."""
        network, *arrays = right
        yield from (None, 5, (), (right,), {}, "word", [None], [5], [()], [right[:-1]], [list(right)], [right, right])
        yield from ([(*right, arrays[0])], [(arrays[0], *arrays)], [(None, *arrays)], [(type(network), *arrays)], [right] * 9)
        for i, values in enumerate(wrong):
            for value in values:
                yield [(network, *arrays[:i], value, *arrays[i + 1 :])]

    def wrong_tensors(self):
        first, rest = self.tensors[0], self.tensors[1:]
        yield from (None, 5, (), tuple(self.tensors), {}, "word", [None], [5], [()], [first[:3]], [list(first)])
        for i, right in enumerate(first):
            for wrong in wrong_arrays(right, writable=i != 1):
                yield [*rest, (*first[:i], wrong, *first[i + 1 :])]


def attempt(name, function, args, kwargs=None, must_raise=True):
    """Make a call, which raises one of the refusals, or nothing."""
    print(name, *(f"{type(arg).__name__}{getattr(arg, 'shape', '')}" for arg in args), *(kwargs or {}), flush=True)
    try:
        function(*args, **(kwargs or {}))
        message = ""
    except REFUSALS as error:
        message = str(error) or "without a message"
    assert message != "without a message", name
    assert message or not must_raise, f"{name} takes {args}, {kwargs}"


def call_wrongly(module, rng):
    """Every entry point with each argument wrong in each way, with too few, too many and unknown arguments."""
    entries = Entries(module, rng)
    for name, function, right, wrong in entries.all():
        function(*right)
        for n in {*range(len(right) + 3)} - {len(right)}:
            attempt(name, function, (right * 3 + (None,) * 3)[:n])
        attempt(name, function, right, {"unknown": 1})
        for i, values in enumerate(wrong):
            for value in values:
                attempt(f"{name}, argument {i}", function, (*right[:i], value, *right[i + 1 :]))
        function(*right)
    classes = ((module.Network, (entries.layers,)), (module.Adam, (entries.tensors,)), (module.Threads, (2,)))
    for cls, right in classes:
        made = cls(*right)
        attempt("new", cls.__new__, (cls,))
        attempt("new of object", object.__new__, (cls,))
        attempt("new of another class", cls.__new__, (list, *right))
        attempt("subclass", type, ("Sub", (cls,), {}))
        attempt("copy", copy.copy, (made,))
        attempt("pickle", pickle.dumps, (made,))
        attempt("attribute of the class", setattr, (cls, "forward", None))
        attempt("class", setattr, (made, "__class__", module.Adam if cls is module.Network else module.Network))
        for method in (module.Network.forward, module.Network.pack, module.Adam.step, module.Adam.norm):
            if method.__objclass__ is not cls:
                attempt("method of another class", method, (made,))
        made.__init__(*right)
        type(made).__init__(made)
    assert entries.guarded.are_untouched()


def call_at_random(module, rng, n):
    """Calls with random arguments, right or wrong."""
    for _ in range(n // 50):
        entries = Entries(module, rng)
        calls = list(entries.all())
        values = [v for *_, right, wrong in calls for v in (*right, *(w for ws in wrong for w in list(ws)[:40]))]
        for _ in range(50):
            name, function, right, _ = rng.choice(calls)
            args = [value if rng.random() < 0.8 else rng.choice(values) for value in right]
            if rng.random() < 0.05:
                args = args[: rng.randint(0, len(args))] + rng.sample(values, rng.randint(0, 2))
            attempt(name, function, args, must_raise=False)
        assert entries.guarded.are_untouched()


class Reentrant:
    """While its buffer or its truth is asked for, it uses the network for another number of rows, and changes the list."""

    def __init__(self, entries, array, n, layers=None):
        self.entries, self.array, self.n, self.layers = entries, array, n, layers

    def __bool__(self):
        x = self.entries.array(self.n, self.entries.sizes[0])
        self.entries.network.forward(x, self.entries.array(self.n, self.entries.sizes[-1]))
        if self.layers is not None:
            self.layers.clear()
            gc.collect()
        return True

    def __buffer__(self, flags):
        bool(self)
        return memoryview(self.array)

    def __release_buffer__(self, view):
        bool(self)
        view.release()


def call_again_within(module, rng):
    """Code that runs while arguments are read calls the same network; Python 3.12 and later run it for buffers, too."""
    entries = Entries(module, rng)
    network, n, array = entries.network, entries.n, entries.array
    for other in (1, n, 3 * n + 1, 1000):
        x, out, latents = array(n, entries.sizes[0]), array(n, entries.sizes[-1]), array(n, entries.sizes[-2])
        within = [Reentrant(entries, each, other) for each in (x, out, latents)]
        attempt("backward", network.backward, (out, within[1]), must_raise=False)
        attempt("forward", network.forward, (within[0], within[1]), must_raise=False)
        attempt("latents", network.latents, (within[2],), must_raise=False)
        network.forward(x, out)
        attempt("backward", network.backward, (within[1], within[1]), must_raise=False)
        threads = entries.threads
        attempt("Threads.forward", threads.forward, ([(network, within[0], within[1])],), must_raise=False)
        attempt("Threads.backward", threads.backward, ([(network, out)], within[1]), must_raise=False)
        attempt("Threads.backward", threads.backward, ([(network, within[1])], within[1]), must_raise=False)
        layers = [entries.layer(3, 4), entries.layer(4, 5)]
        layers[0] = (Reentrant(entries, layers[0][0], other, layers), *layers[0][1:])
        attempt("Network", module.Network, (layers,), must_raise=False)
        tensors = [tuple(array(3) for _ in range(4)) for _ in range(2)]
        tensors[0] = (Reentrant(entries, tensors[0][0], other, tensors), *tensors[0][1:])
        attempt("Adam", module.Adam, (tensors,), must_raise=False)
    assert entries.guarded.are_untouched()


def run_out_of_memory(module, rng):
    """Without memory, a MemoryError; the network can be used again."""
    import resource

    with open("/proc/self/statm") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    entries = Entries(module, rng)
    network, first, last = entries.network, entries.sizes[0], entries.sizes[-1]
    n = 10**8 // (first + last)
    x, out = np.zeros((n, first), np.float32), np.zeros((n, last), np.float32)
    wide = [tuple(np.zeros(shape, np.float32) for shape in ((4000, 3000), 4000, (4000, 3000), 4000))]
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**28, limits[1]))
    calls = [("Network", module.Network, (wide,)), ("forward", network.forward, (x, out))]
    for name, function, args in [*calls, ("Threads.forward", entries.threads.forward, ([(network, x, out)],))]:
        print(name, "without memory", flush=True)
        try:
            function(*args)
        except MemoryError:
            pass
        else:
            raise AssertionError(f"{name} found memory")
    resource.setrlimit(resource.RLIMIT_AS, limits)
    attempt("backward", network.backward, (entries.array(entries.n, last), False))
    attempt("latents", network.latents, (entries.array(entries.n, entries.sizes[-2]),))
    network.forward(entries.array(2, first), entries.array(2, last))
    network.backward(entries.array(2, last), False)
    assert entries.guarded.are_untouched()


def allocated():
    """Number of bytes that C has allocated, `None` where nobody counts them."""
    library = ctypes.CDLL(None)
    if hasattr(library, "__sanitizer_get_current_allocated_bytes"):
        count = library.__sanitizer_get_current_allocated_bytes
        count.restype = ctypes.c_size_t
        return count()
    if not hasattr(library, "mallinfo2"):
        return None

    class Info(ctypes.Structure):
        _fields_ = (("counts", ctypes.c_size_t * 10),)

    library.mallinfo2.restype = Info
    counts = library.mallinfo2().counts
    return counts[4] + counts[7]  # `hblkhd` and `uordblks`: in mappings of their own, and in the heap


def leak(module, seed):
    """Number of bytes that wrong calls have not given back, after the same calls have been made before."""
    counts = []
    for _ in range(4):
        call_wrongly(module, random.Random(seed))
        gc.collect()
        counts.append(allocated())
    return 0 if counts[0] is None else min(later - before for before, later in itertools.pairwise(counts))


def main(path, seed, n):
    faulthandler.enable()
    spec = importlib.util.spec_from_file_location("_mlp", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rng = random.Random(int(seed))
    for name in module.available():
        module.use(name)
        call_wrongly(module, rng)
        module.use(name)
        call_at_random(module, rng, int(n))
        module.use(name)
        call_again_within(module, rng)
    leaked = leak(module, int(seed))
    assert leaked < 4096, f"{leaked} bytes are lost"
    if sys.platform == "linux":
        run_out_of_memory(module, rng)
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
