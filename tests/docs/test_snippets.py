"""The code in README.md and docs/ runs as it stands there; ``tests/support/snippets.py`` says what is shortened."""

import inspect
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3.common.evaluation import evaluate_policy
from support.processes import run_apart
from support.snippets import ROOT, blocks, blocks_in, commands, module_and_arguments, pages, quick_defaults, script

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.options.places import NAMES_ELSEWHERE

PAGES = {page: blocks(page) for page in pages()}
LANGUAGES = {"python", "bash", "yaml"}
# Not code that runs: a citation, what a program prints, the contents of the site
OTHER_LANGUAGES = {"bibtex", "text"}


def with_code(*languages):
    """Pages with a block in one of the languages that is run."""
    return [page for page, found in PAGES.items() if any(b.language in languages and not b.not_run for b in found)]


def marks_of(page):
    """Pages that train for longer are run by ``make test-slow``."""
    return pytest.mark.slow if Path(page).stem in ("export", "memory", "options", "presets", "tensor_environments") else ()


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_says_why_not(page):
    """A block is in a language that is run or names none of them, and its commands are known or marked with a reason."""
    for block in PAGES[page]:
        assert block.language in LANGUAGES | OTHER_LANGUAGES, f"{page}:{block.line}"
        if block.language == "python":
            compile(block.code, f"{page}:{block.line}", "exec")
    for line, words in commands(PAGES[page]):
        try:
            module_and_arguments(words)
        except ValueError as error:
            pytest.fail(f"{page}:{line}: {error}")


@pytest.mark.parametrize("page", PAGES)
def test_no_marker_is_without_effect(page):
    """Each marker stands directly before a block."""
    text = (ROOT / page).read_text(encoding="utf-8")
    markers = text.count("<!-- not run") + text.count("<!-- given")
    assert markers == sum(bool(block.not_run) + bool(block.given) for block in PAGES[page])


@pytest.mark.integration
@pytest.mark.parametrize("page", [pytest.param(page, marks=marks_of(page)) for page in with_code("python")])
@pytest.mark.filterwarnings("ignore")
def test_python(page, tmp_path, monkeypatch, quick_compiler):
    """The Python blocks of a page run, one after the other."""
    monkeypatch.chdir(tmp_path)
    quick_defaults(monkeypatch, PPOExt.__init__, evaluate_policy)
    code = compile(script(PAGES[page]), str(ROOT / page), "exec")
    exec(code, {"__name__": "__main__"})


def run_commands(page, folder):
    """Run the commands of a page in one process, a fork of this one, which has imported everything."""
    commands_of_page = []
    for line, words in commands(PAGES[page]):
        if not isinstance(words[-1], str):
            path = folder / f"hyperparameters_{words[-1].line}.yml"
            path.write_text(words[-1].code)
            words = [*words[:-1], str(path)]
        commands_of_page.append((f"{page}:{line}: {' '.join(words)}", *module_and_arguments(words)))
    status, printed = run_apart(run_modules, folder, commands_of_page)
    assert status == 0, printed[-6000:]


def run_modules(folder, commands_of_page):
    os.chdir(folder)
    os.environ["SDL_VIDEODRIVER"] = "dummy"
    for title, module, arguments in commands_of_page:
        print(title, flush=True)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


@pytest.mark.integration
def test_commands_of_the_readme(tmp_path):
    """The commands of the README run, one after the other, in one folder."""
    run_commands("README.md", tmp_path)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("page", [page for page in with_code("bash", "yaml") if page != "README.md"])
def test_commands(page, tmp_path):
    """The commands of a page run, one after the other, in one folder."""
    run_commands(page, tmp_path)


def test_names_of_the_options_are_right():
    """What docs/coming_from.md gives as an argument of `PPOExt` is one."""
    text = (ROOT / "docs" / "coming_from.md").read_text()
    tables = [line.rsplit("|", 2)[1] for line in text.splitlines() if line.startswith("|")]
    given = {name for cell in tables for code in re.findall("`([^`]+)`", cell) for name in re.findall(r"(\w+)=", code)}
    # Arguments of policies and wrappers, and of rsl_rl
    others = {
        "log_std_init",
        "learn_std",
        "mean_tanh",
        "rnn",
        "lstm_hidden_size",
        "n_lstm_layers",
        "momentum",
        "net_arch",
        "net_type",
        "activation_fn",
    }
    others |= {"norm_obs", "norm_reward", "clip_obs", "clip_reward", "policy"} | {"schedule"}
    assert given - others <= set(inspect.signature(PPOExt).parameters)
    assert len(given) > 40


@pytest.mark.parametrize("name", NAMES_ELSEWHERE)
def test_names_of_other_libraries(name):
    """Whoever gives an option under a name of another library is told the name that docs/coming_from.md has for it."""
    with pytest.raises(ValueError, match=f"no option `{name}`: its name here is `{NAMES_ELSEWHERE[name]}`"):
        PPOExt("MlpPolicy", "CartPole-v1", **{name: 1})
    rows = [line.split("|") for line in (ROOT / "docs" / "coming_from.md").read_text().splitlines() if line.startswith("|")]
    assert any(f"`{name}" in row[1] and NAMES_ELSEWHERE[name] in row[-2] for row in rows)


@pytest.mark.parametrize(("algorithm", "section"), [(RecurrentPPO, "RecurrentPPO"), (MaskablePPO, "MaskablePPO")])
def test_defaults_of_sb3_contrib(algorithm, section):
    """The defaults of sb3-contrib's algorithms are those of `PPOExt`, except for those that the page names."""
    ours, theirs = (inspect.signature(one).parameters for one in (PPOExt, algorithm))
    differ = {name for name in theirs if name in ours and theirs[name].default != ours[name].default}
    text = (ROOT / "docs" / "coming_from.md").read_text().split(f"## sb3-contrib: {section}")[1].split("\n## ")[0]
    assert differ == {name for name in ("n_steps", "batch_size") if f"| `{name}` |" in text}
    for name in differ:
        assert f"| `{name}` | {theirs[name].default} | `{name}={theirs[name].default}`; ours is {ours[name].default} |" in text


TEXT = """\
<!-- not run: it needs a GPU -->
```python
model.to("cuda")
```

<!-- given: n = 1_000_000 -->
```python
n += 1  # more
m = 2_0, 300
```
```bash
rl_zoo3 train --n-trials 100 \\
    -params n:1
```
"""


def test_blocks_are_found():
    """Markers belong to the block that follows, lines keep their numbers, and lengths of trainings are cut."""
    first, second, third = blocks_in(TEXT)
    assert (first.not_run, second.not_run, third.language) == ("it needs a GPU", "", "bash")
    assert script([first, second]).splitlines() == ["", "", "", "", "", "n = 256", "", "n += 1  # more", "m = 2_0, 300"]
    [(line, words)] = commands([first, second, third])
    assert line == 12
    assert module_and_arguments(words) == (
        "rl_zoo3.train",
        ["--n-trials", "100", "-params", "n:1", "-n", "256", "--n-trials", "2"],
    )
    with pytest.raises(ValueError, match="mark its block"):
        module_and_arguments(["pip", "install", "."])
