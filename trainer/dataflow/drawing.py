"""A dataflow as text, and as a Mermaid diagram."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.dataflow.call import Call
from trainer.dataflow.graph import Dataflow

COLOURS = {
    "data": "#f4f0e4",
    "generate": "#d7ecd9",
    "inference": "#d8e6f6",
    "train_step": "#fbe3cc",
    "compute": "#ececec",
}


def as_text(flow: Dataflow) -> str:
    """One paragraph per level, with what each call reads, from whom, and what it adds."""
    lines: list[str] = []
    for number, level in enumerate(flow.levels):
        num_free = sum(call.kind != "train_step" for call in level)
        lines += [f"level {number}" + (", side by side" if num_free > 1 else "")]
        for call in level:
            lines += _paragraph(flow, call)
        lines.append("")
    counts = len(flow.model_calls)
    return "\n".join([*lines, f"{counts} model function calls, {len(flow.edges)} edges", ""])


def as_mermaid(flow: Dataflow) -> str:
    """A flowchart: a box per call, coloured by its kind, and an arrow per edge with its keys."""
    kinds = dict.fromkeys(call.kind for call in flow.calls)
    styles = [f"classDef {kind} fill:{COLOURS[kind]},stroke:#999,color:#222" for kind in kinds]
    nodes = {call.name: f"n{number}" for number, call in enumerate(flow.calls)}
    boxes = [f'{nodes[call.name]}["{_label(call)}"]:::{call.kind}' for call in flow.calls]
    arrows = [
        f'{nodes[source]} -->|"{_in_lines(keys)}"| {nodes[target]}'
        for (source, target), keys in flow.edges.items()
    ]
    return "\n".join(["flowchart TD", *(f"  {line}" for line in (*boxes, *arrows, *styles)), ""])


def _paragraph(flow: Dataflow, call: Call) -> list[str]:
    asked = f" of {call.model}" if call.model else ""
    lines = [f"  {call.name}: {call.kind}{asked} ({call.interface})"]
    sources: dict[str, list[str]] = {}
    for key in call.input_keys:
        sources.setdefault(flow.producers[key], []).append(key)
    lines += [f"      {name} -> {', '.join(keys)}" for name, keys in sources.items()]
    if call.output_keys:
        lines.append(f"      adds {', '.join(call.output_keys)}")
    return lines + ([f"      then {call.note}"] if call.note else [])


def _label(call: Call) -> str:
    asked = f" · {call.model}" if call.model else ""
    lines = [call.name, f"{call.kind}{asked}", *([f"then {call.note}"] if call.note else [])]
    return _in_lines(lines)


def _in_lines(texts: Iterable[str]) -> str:
    return "<br/>".join(map(_escaped, texts))


def _escaped(text: str) -> str:
    """Names come from configurations: nothing in them ends a label or becomes markup."""
    return (
        text.replace("&", "#amp;").replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")
    )
