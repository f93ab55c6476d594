"""
The blocks of code in the documentation, and how the tests run them.

The Python blocks of a page run one after the other in one namespace, as in a notebook; so do its shell blocks, in one folder.
Comments in the Markdown, directly before a block and invisible to readers, say what is different:

- ``<!-- not run: needs CUDA -->``: the block is not run, for this reason.
- ``<!-- given: env = make_vec_env("CartPole-v1", n_envs=8) -->``: code that runs before the block, for what its text takes
  for granted.

Numbers written with underscores, such as ``100_000``, are lengths of trainings: they are cut to ``LENGTH``. The commands of RL
Zoo train for ``LENGTH`` steps, and `SHORT` replaces the values of other arguments. A YAML block holds entries of a file of
hyperparameters, each of which is trained with. By default, models and evaluations of Python blocks are as short as ``QUICK``.
"""

import inspect
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LENGTH = 256
QUICK = {"n_steps": 32, "n_epochs": 1, "n_eval_episodes": 1}
# Arguments of RL Zoo's commands that would make them long, with the values that replace theirs
SHORT = {"--n-trials": "2", "--n-jobs": "1", "--n-evaluations": "1", "--trial-id": "0", "--save-freq": str(LENGTH // 2)}
BLOCK = re.compile(
    r"(?:^<!-- (?P<marker>not run|given): (?P<text>.*?) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, with the line of its first line of code."""

    page: str
    line: int
    language: str
    code: str
    # Why it is not run, and code that runs before it, with the line of the latter
    not_run: str
    given: str
    given_line: int


def pages():
    """Paths of all pages whose blocks are run, relative to the root of the repository."""
    return ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md")))]


def blocks(page):
    """All fenced blocks with a language."""
    return list(blocks_in((ROOT / page).read_text(encoding="utf-8"), page))


def blocks_in(text, page="page"):
    """All fenced blocks with a language in a text."""

    def line(position):
        return text.count("\n", 0, position) + 1

    for found in BLOCK.finditer(text):
        marker, note = found["marker"], found["text"] or ""
        not_run, given = (note, "") if marker == "not run" else ("", note)
        given_line = line(found.start("text")) if given else 0
        yield Block(page, line(found.start("code")), found["language"], found["code"], not_run, given, given_line)


def script(page_blocks):
    """
    The Python code of all blocks that are run, each line with the number that it has on the page, so that a traceback points
    there.
    """
    lines = {}
    for block in page_blocks:
        if block.language == "python" and not block.not_run:
            for first, code in ((block.given_line, block.given), (block.line, block.code)):
                lines.update(enumerate(code.splitlines(), first))
    text = "\n".join(lines.get(number, "") for number in range(1, max(lines, default=0) + 1))
    return re.sub(r"\b\d+(?:_\d{3})+\b", lambda number: str(min(int(number[0].replace("_", "")), LENGTH)), text)


def commands(page_blocks):
    """The commands of all shell blocks and YAML blocks that are run: line on the page, and list of words."""
    found = []
    for block in page_blocks:
        if block.language == "bash" and not block.not_run:
            # A backslash continues a line; the number of lines stays the same.
            text = re.sub(r"\\\n", lambda _: " ", block.code)
            found += [(block.line, words) for words in map(_words, text.splitlines()) if words]
        elif block.language == "yaml" and not block.not_run:
            entries = re.findall(r"^(\w\S*):$", block.code, re.MULTILINE)
            train = ["rl_zoo3", "train", "--algo", "ppo_ext", "--env"]
            found += [(block.line, [*train, name, "-conf", block]) for name in entries]
    return found


def _words(line):
    return shlex.split(line, comments=True)


def module_and_arguments(words):
    """
    The Python module that a command runs, with its arguments, shortened.

    :raises ValueError: if it is another command than one of RL Zoo or of this package
    """
    if words[0] == "rl_zoo3":
        module, arguments = f"rl_zoo3.{words[1]}", words[2:]
    elif words[:2] == ["python", "-m"] and words[2].startswith(("rl_zoo3", "sb3_ppo_ext")):
        module, arguments = words[2], words[3:]
    else:
        raise ValueError(f"`{shlex.join(words)}` is not run by the tests: mark its block with `<!-- not run: reason -->`")
    return module, shortened(module, arguments)


def shortened(module, arguments):
    """The arguments of a command, with fewer steps and trials."""
    zoo = module in ("rl_zoo3.train", "rl_zoo3.enjoy", "rl_zoo3.record_video") or arguments[:1] == ["train"]
    if not zoo:
        return arguments
    # The last value of an argument counts.
    extra = [word for name, value in SHORT.items() if name in arguments for word in (name, value)]
    return [*arguments, "-n", str(LENGTH), *extra]


def quick_defaults(monkeypatch, *functions):
    """Let functions have ``QUICK`` by default."""
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        positional = [p for p in parameters if p.default is not p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        monkeypatch.setattr(function, "__defaults__", tuple(QUICK.get(p.name, p.default) for p in positional))
