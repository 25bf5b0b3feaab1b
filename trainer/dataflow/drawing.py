"""A dataflow as text and as a picture."""

from __future__ import annotations

from xml.sax.saxutils import escape

from trainer.dataflow.call import Call
from trainer.dataflow.graph import Dataflow

BOX_WIDTH, LINE, GAP_X, GAP_Y, MARGIN = 250, 17, 36, 64, 24
COLOURS = {
    "data": "#f4f0e4",
    "generate": "#d7ecd9",
    "inference": "#d8e6f6",
    "train_step": "#fbe3cc",
    "compute": "#ececec",
}
STYLE = "font: 13px ui-sans-serif, system-ui, sans-serif"


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


def as_svg(flow: Dataflow) -> str:
    """Levels from top to bottom, a box per call, an arrow per edge; pointing at one shows its keys."""
    levels = flow.levels
    widest = max(len(level) for level in levels)
    width = 2 * MARGIN + widest * BOX_WIDTH + (widest - 1) * GAP_X
    corners: dict[str, tuple[float, float]] = {}
    heights: dict[str, int] = {}
    top = float(MARGIN)
    for level in levels:
        left = (width - len(level) * BOX_WIDTH - (len(level) - 1) * GAP_X) / 2
        for at, call in enumerate(level):
            corners[call.name] = (left + at * (BOX_WIDTH + GAP_X), top)
            heights[call.name] = LINE * len(_lines(call)) + 14
        top += max(heights[call.name] for call in level) + GAP_Y
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top - GAP_Y + MARGIN:.0f}" '
        f'style="{STYLE}">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#777"/></marker></defs>',
    ]
    depth = {call.name: number for number, level in enumerate(levels) for call in level}
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for (source, target), keys in flow.edges.items():
        is_near = depth[target] == depth[source] + 1
        start = (corners[source][0] + BOX_WIDTH / 2, corners[source][1] + heights[source])
        end = (corners[target][0] + BOX_WIDTH / 2, corners[target][1])
        parts.append(_arrow(start, end, keys, is_near))
    for call in flow.calls:
        parts += _box(call, *corners[call.name], heights[call.name])
    return "\n".join([*parts, "</svg>", ""])


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


def _lines(call: Call) -> list[str]:
    asked = f" · {call.model}" if call.model else ""
    return [call.name, f"{call.kind}{asked}", *([f"then {call.note}"] if call.note else [])]


def _box(call: Call, left: float, top: float, height: int) -> list[str]:
    title = f"reads {', '.join(call.input_keys) or '-'}; adds {', '.join(call.output_keys) or '-'}"
    parts = [
        f'<g><title>{escape(title)}</title><rect x="{left:.0f}" y="{top:.0f}" width="{BOX_WIDTH}" '
        f'height="{height}" rx="6" fill="{COLOURS[call.kind]}" stroke="#999"/>'
    ]
    for number, line in enumerate(_lines(call)):
        weight = ' font-weight="600"' if number == 0 else ' fill="#555"'
        y = top + LINE * (number + 1)
        parts.append(f'<text x="{left + 12:.0f}" y="{y:.0f}"{weight}>{escape(line)}</text>')
    return [*parts, "</g>"]


def _arrow(
    start: tuple[float, float], end: tuple[float, float], keys: tuple[str, ...], is_near: bool
) -> str:
    """One that passes by other levels is pale."""
    (x1, y1), (x2, y2) = start, end
    bend = (y2 - y1) / 2
    colour = "#777" if is_near else "#c8c8c8"
    return (
        f'<g><title>{escape(", ".join(keys))}</title><path d="M{x1:.0f} {y1:.0f} '
        f'C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}" fill="none" '
        f'stroke="{colour}" marker-end="url(#tip)"/></g>'
    )
