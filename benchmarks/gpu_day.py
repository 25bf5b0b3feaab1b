"""Everything to find out on a machine with GPUs, in one go: `make gpu-day`, or

    python benchmarks/gpu_day.py --out runs/gpu-day
    python benchmarks/gpu_day.py --only versions,attention     # some steps; --list names them
    python benchmarks/gpu_day.py --brief                        # fewer rounds, for a GPU of minutes
    python benchmarks/gpu_day.py --dry                          # the same commands, small, on the CPU

The steps of `day/steps.py` run in their order (dry, two side by side), each in a process group of its
own that is killed when its time is over; none stops the others. After each of them `report.json` and
`report.md` are written again: with metrics, versions, and the ends of the logs of failed steps. With one
GPU, steps that need more are skipped and say so. HEADWAY_SGLANG_PYTHON names the interpreter of an
environment with SGLang. The exit status is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from day.models import SHARED_MODELS
from day.runner import Day
from day.steps import Step, make_steps

from headway.runtime.gpus import survey_gpus, visible_devices

ROOT = Path(__file__).parents[1]
AT_ONCE_DRY = 2
"""Steps side by side where no figure counts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps; the exit status."""
    options = parse(argv)
    survey = survey_gpus()
    num_gpus = 0 if options.dry else len(visible_devices(survey, os.environ))
    sglang = os.environ.get("HEADWAY_SGLANG_PYTHON")
    steps = make_steps(num_gpus, options.dry, sglang, options.brief)
    if options.list:
        print("\n".join(f"{step.name:24} {step.question}" for step in steps))
        return 0
    if num_gpus == 0 and not options.dry:
        print(f"{survey.describe()}: nothing to find out; --dry runs the steps on the CPU")
        return 2
    out = options.out.resolve()
    os.chdir(ROOT)
    mode = "dry" if options.dry else f"{num_gpus} GPUs"
    with tempfile.TemporaryDirectory() as models:
        day = Day(out, survey.describe(), mode, {SHARED_MODELS: models})
        day.run_all(chosen(steps, options.only), AT_ONCE_DRY if options.dry else 1)
    print(f"{day.out / 'report.md'}")
    return day.exit_status


def chosen(steps: Sequence[Step], only: str | None) -> list[Step]:
    """The steps that `--only` names, in their order."""
    if only is None:
        return list(steps)
    names = [name.strip() for name in only.split(",")]
    unknown = set(names) - {step.name for step in steps}
    if unknown:
        sys.exit(f"no step named {', '.join(sorted(unknown))}; --list names them")
    return [step for step in steps if step.name in names]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path("runs") / f"gpu-day-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    parser.add_argument("--out", type=Path, default=default, help="folder of report and logs")
    parser.add_argument("--only", help="steps, by comma")
    parser.add_argument("--dry", action="store_true", help="small, on the CPU")
    parser.add_argument("--brief", action="store_true", help="fewer rounds")
    parser.add_argument("--list", action="store_true", help="name the steps")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
