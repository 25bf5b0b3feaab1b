"""A report as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

HEAD = ("mode", "gpus", "host", "machine", "python", "commit", "started", "seconds")
COMMON_KEYS = {"name", "unit", "value", "repeats", "spread", "commit", "machine"}


def render(report: Mapping[str, Any]) -> str:
    """Return the report: versions, a line per step, metrics, and the ends of the logs of what went
    wrong.
    """
    return "\n".join([*_head(report), *_steps(report), *_metrics(report), *_ends(report), ""])


def _head(report: Mapping[str, Any]) -> Iterator[str]:
    yield "# GPU day"
    yield ""
    for name in HEAD:
        yield f"- {name}: {report[name]}"
    for step in report["steps"]:
        if step["name"] == "versions":
            for metric in step["metrics"]:
                yield f"- {metric['name']}: {metric['value']}"
    yield ""


def _steps(report: Mapping[str, Any]) -> Iterator[str]:
    counts: dict[str, int] = {}
    for step in report["steps"]:
        counts[step["status"]] = counts.get(step["status"], 0) + 1
    yield "## Steps: " + ", ".join(f"{count} {status}" for status, count in counts.items())
    yield ""
    yield "| step | what is asked | status | seconds | last line |"
    yield "|---|---|---|---|---|"
    for step in report["steps"]:
        said = [line for line in step["said"].splitlines() if not line.startswith('{"name"')]
        last = (said or [f"{len(step['metrics'])} metrics"])[-1]
        yield (
            f"| {step['name']} | {step['question']} | {step['status']} | {step['seconds']:.0f} "
            f"| {_cell(last)} |"
        )
    yield ""


def _metrics(report: Mapping[str, Any]) -> Iterator[str]:
    yield "## Metrics"
    yield ""
    yield "| step | metric | value | spread | unit | of |"
    yield "|---|---|---|---|---|---|"
    for step in report["steps"]:
        for metric in step["metrics"]:
            spread = metric.get("spread") or []
            more = {k: v for k, v in metric.items() if k not in COMMON_KEYS}
            yield (
                f"| {step['name']} | {metric['name']} | {metric['value']} "
                f"| {_cell(' to '.join(map(str, spread)))} | {_cell(str(metric.get('unit', '')))} "
                f"| {_cell(', '.join(f'{k}={v}' for k, v in more.items()))} |"
            )
    yield ""


def _ends(report: Mapping[str, Any]) -> Iterator[str]:
    for step in report["steps"]:
        if step["status"] in ("failed", "timeout"):
            yield f"## {step['name']}: {step['status']}, return code {step['returncode']}"
            yield ""
            environment = "".join(f"{name}={value} " for name, value in step["env"].items())
            yield f"`{environment}{step['command']}`"
            yield ""
            yield from (f"    {line}" for line in step["said"].splitlines())
            yield ""


def _cell(text: str) -> str:
    """Within a table."""
    return text.replace("|", "\\|")[:160]
