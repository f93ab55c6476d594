"""
Trains, saves, loads and trains on models with random options, policies, spaces and environments: `make fuzz N=1000 SEED=0`.

Each number from SEED to SEED + N - 1 is a program of its own. Its model works, or is refused with a ``ValueError`` before it
trains; everything else is a finding. `make fuzz N=1 SEED=...` runs one program again, and prints it.
"""

import argparse
import sys
import time
from collections import Counter, defaultdict

from support.fuzzing.drawing import drawn
from support.fuzzing.shrinking import shrunk
from support.fuzzing.trials import KINDS, run, run_seed, run_zip
from support.fuzzing.workers import Worker, ask_all
from support.fuzzing.zips import ZipProgram


def main():
    """:return: Exit status, 1 if there are findings"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=1000, help="number of programs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program")
    parser.add_argument("--zips", action="store_true", help="load damaged zips instead")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--no-shrink", action="store_true", help="print programs as they were drawn")
    arguments = parser.parse_args()
    find, draw = (run_zip, ZipProgram) if arguments.zips else (run_seed, drawn)
    seeds = range(arguments.seed, arguments.seed + arguments.n)
    outcomes = dict(shown(ask_all(find, seeds, arguments.jobs)))
    if arguments.n == 1:
        print(draw(arguments.seed).source(), outcomes[arguments.seed], sep="\n")
    print(summary(outcomes), flush=True)
    found = by_cause(outcomes)
    print_report(found, outcomes, draw, not arguments.no_shrink)
    return bool(found)


def shown(answers):
    """The answers, with a line for each finding."""
    start = time.monotonic()
    for done, (seed, outcome) in enumerate(answers, start=1):
        if outcome.kind == "other":
            print(f"seed {seed}: {outcome.about}", flush=True)
        if done % 500 == 0:
            print(f"{done} programs, {time.monotonic() - start:.0f} seconds", flush=True)
        yield seed, outcome


def summary(outcomes):
    """How many programs ended in which way."""
    kinds = Counter(outcome.kind for outcome in outcomes.values())
    lines = [f"{kinds[kind]:6d} {kind}" for kind in KINDS]
    for kind in ("refused", "refused later", "stopped by a guard"):
        about = Counter(outcome.about for outcome in outcomes.values() if outcome.kind == kind)
        lines.append(f"{kind}: " + ", ".join(f"{name} {number}" for name, number in about.most_common()))
    suspicious = defaultdict(list)
    for seed, outcome in outcomes.items():
        for text in outcome.warnings:
            suspicious[text].append(seed)
    for text, seeds in sorted(suspicious.items(), key=lambda item: -len(item[1])):
        lines.append(f"suspicious, {len(seeds)} times, e.g. in seed {seeds[0]}: {text}")
    return "\n".join(lines)


def by_cause(outcomes):
    """Seeds of findings by what they are about."""
    found = defaultdict(list)
    for seed, outcome in sorted(outcomes.items()):
        if outcome.kind == "other":
            found[outcome.about].append(seed)
    return found


def print_report(found, outcomes, draw, shrink):
    """Print a reproduction of each finding."""
    worker = Worker(run)
    for about, seeds in sorted(found.items(), key=lambda item: -len(item[1])):
        program = shrunk(draw(seeds[0]), worker.ask) if shrink and draw is drawn else draw(seeds[0])
        details = outcomes[seeds[0]].details or outcomes[seeds[0]].message
        print(f"\n--- {about}: {len(seeds)} times, seeds {seeds[:8]}\n{program.source()}\n{details}", flush=True)
    worker.close()


if __name__ == "__main__":
    sys.exit(main())
