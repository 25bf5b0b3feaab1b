"""Print the failed and the slowest tests of JUnit reports: `tests.py REPORT...`."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

SLOWEST = 20
MESSAGE_CHARACTERS = 160


def main(*reports: str) -> None:
    cases = [
        case
        for report in reports
        if Path(report).exists()
        for case in ElementTree.parse(report).iter("testcase")
    ]
    failed = [
        (case, outcome) for case in cases for outcome in case if outcome.tag in ("failure", "error")
    ]
    print(f"{len(failed)} of {len(cases)} tests failed")
    for case, outcome in failed:
        reason = " ".join(outcome.get("message", "").split())[:MESSAGE_CHARACTERS]
        print(f"  {name_of(case)}: {reason}")
    print(f"slowest {SLOWEST} tests, with their fixtures:")
    cases.sort(key=lambda case: float(case.get("time", 0)), reverse=True)
    for case in cases[:SLOWEST]:
        print(f"  {float(case.get('time', 0)):6.1f} s {name_of(case)}")


def name_of(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


if __name__ == "__main__":
    main(*sys.argv[1:])
