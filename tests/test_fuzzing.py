"""A sample of `make fuzz`: random programs and damaged zips end well or with a `ValueError`, or the fuzzer finds them."""

import multiprocessing
import os
import signal
import time
from collections import Counter
from dataclasses import replace

import pytest
from support.cases import one_in
from support.fuzzing import workers
from support.fuzzing.drawing import Program, Step, drawn
from support.fuzzing.shrinking import shrunk
from support.fuzzing.trials import run, run_seed, run_zip

pytestmark = pytest.mark.integration

PROGRAMS, ZIPS = 30, 10  # of one test


def findings(find, seeds):
    outcomes = {seed: find(seed) for seed in seeds}
    return {seed: outcome.details or outcome.message for seed, outcome in outcomes.items() if outcome.kind == "other"}


@pytest.mark.parametrize("start", one_in(10, range(0, 300, PROGRAMS)))
def test_programs_work_or_are_refused(start):
    """Models train, are saved, loaded, trained on and asked for actions, or are refused with a `ValueError` before."""
    assert not findings(run_seed, range(start, start + PROGRAMS))


@pytest.mark.parametrize("start", range(0, 50, ZIPS))
def test_damaged_zips_load_or_are_refused(start):
    """Damaged zips raise a `ValueError` and change nothing, or what is loaded works."""
    assert not findings(run_zip, range(start, start + ZIPS))


def test_programs_are_reproducible():
    """A program follows from its seed, and differs from others."""
    assert [drawn(seed) for seed in range(50)] == [drawn(seed) for seed in range(50)]
    assert len({drawn(seed).source() for seed in range(50)}) == 50


@pytest.mark.slow
def test_most_programs_train():
    """The sample is not empty: a good share of the programs trains to its end, and some are refused."""
    kinds = Counter(run_seed(seed).kind for seed in range(300, 330))
    assert kinds["trained"] >= 10
    assert kinds["refused"] >= 3


BAD = Program(
    0,
    env={"observation_space": "spaces.Box(-1.0, 1.0, (2, 3))", "action_space": "spaces.Discrete(2)", "n_envs": "3"},
    model={"policy": "'MlpPolicy'", "env": "env", "n_steps": "4", "batch_size": "4", "gamma": "0.5", "vtrace": "True"},
    policy_kwargs={"net_arch": "[4]"},
    steps=(Step("learn(model, 4)"), Step("act(model)"), Step("model.nothing")),
)


@pytest.mark.parametrize(
    ("step", "kind", "about"),
    [
        (Step("model.nothing"), "other", "AttributeError"),
        (Step("raise ValueError"), "other", "ValueError"),
        (Step("raise ValueError", may_refuse=True), "refused later", "ValueError"),
        (Step("model.policy.value_net.bias.data.fill_(float('nan')), finite(model)"), "other", "Broken"),
        (Step("model.predict = lambda *_, **__: (np.array(7), None); act(model)"), "other", "Broken"),
    ],
)
def test_what_is_wrong_is_found(step, kind, about):
    """Errors, and promises that do not hold, are findings; a `ValueError` is one unless a value may be refused."""
    outcome = run(replace(BAD, steps=(*BAD.steps[:-1], step)))
    assert outcome.kind == kind
    assert outcome.about.startswith(about)


def test_programs_are_made_smaller():
    """What a finding does not depend on is left out of its reproduction."""
    smaller = shrunk(BAD, run)
    assert [step.text for step in smaller.steps] == ["model.nothing"]
    assert "vtrace" not in smaller.model
    assert run(smaller).about == run(BAD).about


def act_up(question):
    if question == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if question == "hang":
        time.sleep(1000)
    return question


def test_crashes_and_hangs_are_found(monkeypatch):
    """The program that kills its process, or hangs, is named, and the others are run."""
    monkeypatch.setattr(workers, "CONTEXT", multiprocessing.get_context("fork"))  # which need not import anything
    answers = dict(workers.ask_all(act_up, ["one", "die", "two", "hang", "three"], jobs=1, seconds=1, start_up=30))
    assert [answers[question] for question in ("one", "two", "three")] == ["one", "two", "three"]
    assert answers["die"].about == "dies of SIGSEGV"
    assert answers["hang"].about == "hangs"
