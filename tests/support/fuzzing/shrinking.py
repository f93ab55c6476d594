"""Makes a program smaller that ends badly, as long as it ends in the same way."""

from dataclasses import replace

SIMPLE = {
    "observation_space": "spaces.Box(-1.0, 1.0, (3,))",
    "action_space": "spaces.Box(-1.0, 1.0, (1,))",
    "n_envs": "1",
    "kind": "'dummy'",
}
# Without the latter, programs would take long.
NEEDED = ("policy", "env", "device", "n_steps", "batch_size", "n_epochs")


def shrunk(program, run):
    """
    :param program: Program
    :param run: Function that returns the ``Outcome`` of a program
    :return: Smaller program with an ``Outcome`` about the same
    """
    about = run(program).about
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _smaller(program):
            if run(smaller).about == about:
                program, is_smaller = smaller, True
                break
    return program


def _smaller(program):
    for index in range(len(program.steps)):
        yield replace(program, steps=program.steps[:index] + program.steps[index + 1 :])
    if program.algorithm != "PPOExt":
        yield replace(program, algorithm="PPOExt")
    for name in program.model:
        if name not in NEEDED:
            yield replace(program, model={key: value for key, value in program.model.items() if key != name})
    yield from _simpler_environments(program)
    yield from _fewer_policy_kwargs(program)


def _simpler_environments(program):
    for name, value in program.env.items():
        if name not in SIMPLE:
            yield replace(program, env={key: other for key, other in program.env.items() if key != name})
        elif value != SIMPLE[name]:
            yield replace(program, env={**program.env, name: SIMPLE[name]})


def _fewer_policy_kwargs(program):
    for name in program.policy_kwargs:
        yield replace(program, policy_kwargs={key: value for key, value in program.policy_kwargs.items() if key != name})
