"""``python -m sb3_ppo_ext.export RUN_FOLDER``: export the agent of a training run with RL Zoo, or of a zip file."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from sb3_ppo_ext.common.validation import refuse


def main(arguments: Sequence[str] | None = None) -> None:
    """
    :param arguments: Arguments of the command line, those of this process by default
    """
    parser = argparse.ArgumentParser(prog="python -m sb3_ppo_ext.export", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run, such as logs/ppo_ext/CartPole-v1_1, or a zip file")
    parser.add_argument("-o", "--output", type=Path, help="path of the file (default: policy.onnx in the folder)")
    parser.add_argument("--load-best", action="store_true", help="export best_model.zip instead of the last model")
    parser.add_argument("--stochastic", action="store_true", help="take random numbers as inputs, and sample actions")
    parser.add_argument("--channels-last", action="store_true", help="the environment gives images with the channels last")
    parser.add_argument("--trusted", action="store_true", help="load objects that can execute code, see docs/checkpoints.md")
    given = parser.parse_args(arguments)
    try:
        zip_file, statistics = _find(given.run, given.load_best)
        output = given.output or zip_file.with_name("policy.onnx")
        # The class is in a module above this one.
        algorithm = importlib.import_module("sb3_ppo_ext").PPOExt
        model = algorithm.load(zip_file, device="cpu", trusted=given.trusted)
        model.export(output, not given.stochastic, statistics, channels_last=given.channels_last)
    except (ValueError, ImportError) as error:
        sys.exit(f"error: {error}")
    print(f"{zip_file} -> {output}" + ("" if statistics is None else f", with the statistics of {statistics}"))


def _find(run: Path, load_best: bool) -> tuple[Path, Path | None]:
    """Zip file of the model, and the file with the statistics of ``VecNormalize`` if there is one."""
    if run.is_file():
        return run, None
    found = sorted(run.glob("*/args.yml"))
    # Without this file of the Zoo: it names the folder after the environment, with a number behind it.
    env_name = found[0].parent.name if len(found) == 1 else run.resolve().name.rpartition("_")[0]
    zip_file = run / ("best_model.zip" if load_best else f"{env_name}.zip")
    if not env_name and not load_best:
        refuse("run", str(run), "it is not the folder of a run of RL Zoo; give that, or a zip file")
    if not zip_file.is_file():
        refuse("run", str(run), f"there is no {zip_file.name} in it; give the folder of a run, or a zip file")
    statistics = run / env_name / "vecnormalize.pkl"
    return zip_file, statistics if statistics.is_file() else None


if __name__ == "__main__":
    main()
