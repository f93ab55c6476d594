"""The command line: ``python -m sb3_ppo_ext.zoo SCRIPT ...`` runs a script of RL Zoo with ``ppo_ext`` registered."""

import argparse
import runpy
import sys

from sb3_ppo_ext.zoo.entry_checks import one_line_errors
from sb3_ppo_ext.zoo.envpool_option import take_envpool_option
from sb3_ppo_ext.zoo.registration import register
from sb3_ppo_ext.zoo.resuming import arguments_to_resume

SCRIPTS = {
    "train": "rl_zoo3.train",
    "resume": "rl_zoo3.train",
    "enjoy": "rl_zoo3.enjoy",
    "record_video": "rl_zoo3.record_video",
    "record_training": "rl_zoo3.record_training",
    "load_from_hub": "rl_zoo3.load_from_hub",
    "push_to_hub": "rl_zoo3.push_to_hub",
    "benchmark": "rl_zoo3.benchmark",
    "plot_train": "rl_zoo3.plots.plot_train",
    "plot_from_file": "rl_zoo3.plots.plot_from_file",
    "all_plots": "rl_zoo3.plots.all_plots",
}


def main() -> None:
    """
    Run a script of RL Zoo with ``ppo_ext`` registered: ``python -m sb3_ppo_ext.zoo train --env CartPole-v1 ...``
    """
    parser = argparse.ArgumentParser(prog="python -m sb3_ppo_ext.zoo", description=main.__doc__, add_help=False)
    parser.add_argument("script", choices=SCRIPTS)
    if sys.argv[1:2] in (["-h"], ["--help"]):
        parser.print_help()
        return
    script = parser.parse_args(sys.argv[1:2]).script
    register()
    arguments = sys.argv[2:]
    if script == "resume":
        with one_line_errors():
            arguments = arguments_to_resume(_folder_to_resume(arguments))
    sys.argv = [f"{sys.argv[0]} {script}", *arguments]
    take_envpool_option()
    runpy.run_module(SCRIPTS[script], run_name="__main__", alter_sys=True)


def _folder_to_resume(arguments: list[str]) -> str:
    parser = argparse.ArgumentParser(
        prog="python -m sb3_ppo_ext.zoo resume",
        description="Go on with an interrupted training of ppo_ext in its own folder, from its newest checkpoint",
    )
    parser.add_argument("folder", help="folder of the run, such as logs/ppo_ext/CartPole-v1_1; trained with --save-freq")
    return parser.parse_args(arguments).folder


if __name__ == "__main__":
    main()
