"""Train two algorithms in the same way, and compare everything observable bit for bit."""

from dataclasses import dataclass, field

import numpy as np
import torch as th
from support.toys import RolloutRecorder, record_log

# Wall-clock time is not comparable.
CLOCK = ("time/fps", "time/time_elapsed", "time/rollout_seconds", "time/update_seconds")


@dataclass
class Run:
    model: object
    recorder: RolloutRecorder
    logs: list = field(default_factory=list)


def train(model, timesteps, stop_at=None):
    """Train a model, and record everything observable."""
    log = record_log(model)
    recorder = RolloutRecorder(stop_at)
    model.learn(timesteps, callback=recorder)
    # The values that the last update recorded have not been dumped yet.
    logs = [*log.dumps, dict(model.logger.name_to_value)]
    return Run(model, recorder, [{k: v for k, v in dump.items() if k not in CLOCK} for dump in logs])


# Progress ends at 0; SB3's goes below it in a last rollout that ends past the end.
ATTRIBUTES = {"_current_progress_remaining": lambda model, name: max(getattr(model, name), 0.0)}


def assert_equal_runs(expected, actual):
    """The runs are equal bit for bit, including every value that the first one logs; the second one may log more."""
    a, b = expected.model, actual.model
    assert_equal(a.policy.state_dict(), b.policy.state_dict(), "policy")
    assert_equal(a.policy.optimizer.state_dict(), b.policy.optimizer.state_dict(), "optimizer")
    assert_equal(expected.recorder.rollouts, actual.recorder.rollouts, "rollouts")
    assert_equal(expected.recorder.steps, actual.recorder.steps, "steps")
    assert len(expected.logs) == len(actual.logs)
    logs = [{k: v for k, v in dump.items() if k in theirs} for theirs, dump in zip(expected.logs, actual.logs, strict=True)]
    assert_equal(expected.logs, logs, "logs")
    for name in ("num_timesteps", "_n_updates", "_current_progress_remaining", "_last_obs", "_last_episode_starts"):
        assert_equal(ATTRIBUTES.get(name, getattr)(a, name), getattr(b, name), name)
    assert_equal(
        [(episode["r"], episode["l"]) for episode in a.ep_info_buffer],
        [(episode["r"], episode["l"]) for episode in b.ep_info_buffer],
        "ep_info_buffer",
    )


def assert_equal(expected, actual, where="", **tolerances):
    """The structures, dtypes and bits are the same; with tolerances, floats of arrays only up to these."""
    if isinstance(expected, dict):
        assert expected.keys() == actual.keys(), where
        for key in expected:
            assert_equal(expected[key], actual[key], f"{where}.{key}", **tolerances)
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(actual), where
        for index, pair in enumerate(zip(expected, actual, strict=True)):
            assert_equal(*pair, f"{where}[{index}]", **tolerances)
    elif isinstance(expected, th.Tensor):
        assert expected.dtype == actual.dtype, where
        assert th.equal(expected, actual), where
    elif isinstance(expected, str | type(None)):
        assert expected == actual, where
    else:
        expected, actual = np.asarray(expected), np.asarray(actual)
        assert expected.dtype == actual.dtype, where
        if tolerances and expected.dtype.kind == "f":
            np.testing.assert_allclose(actual, expected, **tolerances, err_msg=where)
        else:
            np.testing.assert_array_equal(actual, expected, err_msg=where)
