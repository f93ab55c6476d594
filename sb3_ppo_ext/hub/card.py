"""The model card: what the page of a model on the Hub says, and the metadata that the Hub reads."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version

from sb3_ppo_ext.common.validation import described
from sb3_ppo_ext.hub.settings import as_code, as_text
from sb3_ppo_ext.options.values import NotCodeError

PACKAGES = ("sb3-ppo-ext", "stable-baselines3", "torch", "gymnasium", "numpy")
NO_REPOSITORY = "USER/NAME"


@dataclass(frozen=True)
class Evaluation:
    """
    Returns of a policy.

    :param mean: Mean return
    :param std: Standard deviation of the returns
    :param n_episodes: Number of episodes
    :param deterministic: Whether the policy took the mode of its distribution
    :param seed: Seed of the environments
    """

    mean: float
    std: float
    n_episodes: int
    deterministic: bool
    seed: int | None

    def described(self) -> str:
        """:return: The result in a sentence"""
        actions = "deterministic" if self.deterministic else "sampled"
        seed = "" if self.seed is None else f", with seed {self.seed} of the environment"
        episodes = "episode" if self.n_episodes == 1 else "episodes"
        return f"**{self.mean:.2f} ± {self.std:.2f}** over {self.n_episodes} {episodes} with {actions} actions{seed}"


@dataclass(frozen=True)
class Card:
    """
    What a model card says.

    :param env_id: Id of the environment
    :param policy: Name of the policy
    :param options: Options that differ from their defaults
    :param environment: Python code that makes the environments of the training
    :param num_timesteps: Number of time steps of the training
    :param total_timesteps: Argument of ``learn``, up to a rollout less
    :param evaluation: Returns of the model
    :param runs: Seed and last logged return of each training run in the plot
    :param command: Command that repeats the training, if one is known
    :param has_plot: Whether there is a plot, ``learning_curve.png``
    :param repo_id: Repository on the Hub
    :param omitted: What the training had and the code cannot make, such as wrappers
    """

    env_id: str
    policy: str
    options: Mapping[str, object]
    environment: str
    num_timesteps: int
    total_timesteps: int
    evaluation: Evaluation
    runs: Sequence[tuple[int | None, float]] = ()
    command: str | None = None
    has_plot: bool = False
    repo_id: str = NO_REPOSITORY
    omitted: Sequence[str] = ()

    def text(self) -> str:
        """:return: The file ``README.md``, with the metadata before it"""
        parts = [f"---\n{self._metadata()}\n---", f"# PPOExt on {self.env_id}", self._introduction(), self._usage()]
        parts += [self._plot()] if self.has_plot else []
        parts += [self._training(), self._versions()]
        return "\n\n".join(parts) + "\n"

    def _metadata(self) -> str:
        from huggingface_hub import EvalResult, ModelCardData

        task = "reinforcement-learning"
        result = EvalResult(
            task_type=task,
            task_name=task,
            dataset_type=self.env_id,
            dataset_name=self.env_id,
            metric_type="mean_reward",
            metric_name="mean_reward",
            metric_value=f"{self.evaluation.mean:.2f} +/- {self.evaluation.std:.2f}",
            verified=False,
        )
        tags = [self.env_id, "deep-reinforcement-learning", task, "stable-baselines3", "sb3-ppo-ext"]
        data = ModelCardData(
            library_name="stable-baselines3", pipeline_tag=task, tags=tags, model_name="PPOExt", eval_results=[result]
        )
        return str(data.to_yaml()).strip()

    def _introduction(self) -> str:
        return (
            f"A policy for `{self.env_id}`, trained for {self.num_timesteps:,} time steps by `PPOExt` of sb3_ppo_ext, a PPO "
            "for [Stable-Baselines3](https://github.com/DLR-RM/stable-baselines3) and "
            "[RL Zoo](https://github.com/DLR-RM/rl-baselines3-zoo).\n\n"
            f"Return of an episode: {self.evaluation.described()}."
        )

    def _usage(self) -> str:
        has_method = "action_masking" in self.options and "action_mask_key" not in self.options
        masks = ', action_masks=env.env_method("action_masks")' if has_method else ""
        return f"""\
## Usage

```python
from sb3_ppo_ext.hub import load_from_hub

model, env = load_from_hub("{self.repo_id}")
obs = env.reset()
actions, state = model.predict(obs, deterministic={self.evaluation.deterministic}{masks})
```

Nothing of the files is executed, unless `trusted=True` is given."""

    def _plot(self) -> str:
        lines = ["## Learning curve", "", "![Returns and statistics of the training](learning_curve.png)"]
        if self.runs:
            lines += ["", "| seed | last logged mean return |", "| --- | --- |"]
            lines += [f"| {'unknown' if seed is None else seed} | {last:.2f} |" for seed, last in self.runs]
        return "\n".join(lines)

    def _training(self) -> str:
        arguments = "".join(f"    {_argument(name, value)}\n" for name, value in self.options.items())
        again = f"```bash\n{self.command}\n```\n\nThe same options in Python:\n\n" if self.command else ""
        normalizes = self.environment.startswith("VecNormalize")
        wrapper = "from stable_baselines3.common.vec_env import VecNormalize\n" if normalizes else ""
        wrapper += "from torch import nn\n" if re.search(r"\bnn\.", arguments) else ""
        comments = "".join(f"# {what}, which is not in this file\n" for what in self.omitted)
        torch = "import torch as th\n" if re.search(r"\bth\.", arguments) else ""
        return f"""\
## Training

{again}```python
{torch}from stable_baselines3.common.env_util import make_vec_env
{wrapper}
from sb3_ppo_ext import PPOExt

{comments}env = {self.environment}
model = PPOExt(
    "{self.policy}",
    env,
{arguments})
model.learn({self.total_timesteps:_})
```"""

    def _versions(self) -> str:
        rows = [("Python", python_version()), *((name, _version(name)) for name in PACKAGES)]
        return "\n".join(["## Versions", "", "| package | version |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in rows)])


def _argument(name: str, value: object) -> str:
    """Argument of the constructor, or a comment if there is no code for the value."""
    try:
        return f"{name}={as_code(value)},"
    except NotCodeError:
        return f"# {name}: {as_text(value)}, which is not in this file"


def versions() -> dict[str, str]:
    """:return: Version of each package that a training run depends on"""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def command_of(folder: Path, seed: int | None = None) -> str | None:
    """
    :param folder: Folder with the ``command.txt`` of a training run by RL Zoo
    :param seed: Seed that the Zoo has drawn if none was given
    :return: Command that repeats it, without paths of the machine and passwords of a database; ``None`` if there is none
    """
    path = folder / "command.txt"
    words = path.read_text(encoding="utf-8").split() if path.is_file() else []
    ends = ("rl_zoo3/train.py", "rl_zoo3.train", "train")
    start = next((index for index, word in enumerate(words) if word.replace("\\", "/").endswith(ends)), None)
    if start is None:
        return None
    given = _rejoined(words[start + 1 :])
    if seed is not None and not any(word.split("=")[0] == "--seed" for word in given):
        given += ["--seed", str(seed)]
    return shlex.join(["rl_zoo3", "train", *(re.sub(r"://[^/]*@", "://", word) for word in given)])


def _rejoined(words: Sequence[str]) -> list[str]:
    """
    The Zoo joins the arguments with spaces, without the quotes that a shell needs. A value of ``-params`` and its kind, such
    as ``net_arch:[8, 8]``, may contain spaces itself; the next one begins with a name and a colon.
    """
    arguments: list[str] = []
    for word in words:
        goes_on = arguments and ":" in arguments[-1] and not re.match(r"-{1,2}[a-zA-Z]|[a-zA-Z_]\w*:", word)
        arguments = [*arguments[:-1], f"{arguments[-1]} {word}"] if goes_on else [*arguments, word]
    return arguments


def check_command(command: object) -> None:
    """
    :param command: Command that is given by the user
    :raises ValueError: if it would end its block in the card
    """
    if command is not None and (not isinstance(command, str) or "```" in command):
        raise ValueError(f"`command={described(command)}` is not valid: give the text of a shell command")
