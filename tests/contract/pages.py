"""The pages that people read, and the examples and tables in them.

An example is a fenced block of bash, Python, YAML, JSON or TOML. Each is checked against what there is
(`test_pages.py`) and run (`test_page_examples.py`), unless the line above its fence says why it is not:

    <!-- not run: trains for an hour -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
    ]
)
CHANGELOG = ROOT / "CHANGELOG.md"
_FENCE = re.compile(
    r"(?:^ *<!-- not run: (?P<why>[^\n]+?) -->\n\n?)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_TABLE = re.compile(r"^ *\|.*\n *\|[-:| ]+\n((?: *\|.*\n?)+)", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """One fenced block."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None = None
    """Why it is checked only."""

    @property
    def file(self) -> str | None:
        """Its name as a file, in its first line: `# judge.py`."""
        named = re.match(r"# (\S+\.(?:py|yaml))\n", self.text)
        return named.group(1) if named else None

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """Its path in the repository."""
    return page.relative_to(ROOT).as_posix()


def examples_of(page: Path, *languages: str) -> list[Example]:
    """The blocks of these languages, or all, in their order."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("indent")) + 1
        block = dedent(match["text"])
        if not languages or match["language"] in languages:
            found.append(Example(page, line, match["language"], block, match["why"]))
    return found


def prose_of(page: Path) -> str:
    """The text without its blocks."""
    return _FENCE.sub("", page.read_text())


def anchors_of(page: Path) -> set[str]:
    """How headings are linked to, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in headings}


Table = dict[str, list[str]]
"""What stands in backticks in a row's first cell -> the row's other cells."""


def tables() -> Iterator[Table]:
    """All tables of all pages but the generated reference."""
    for page in PAGES:
        if page.name != "reference.md":
            yield from tables_of(page)


def tables_of(page: Path) -> Iterator[Table]:
    """The tables of a page."""
    for rows in _TABLE.findall(prose_of(page)):
        table: Table = {}
        for line in rows.splitlines():
            first, *others = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
            table |= {name: others for name in re.findall(r"`([^`]+)`", first)}
        yield table


def table_of(names: set[str]) -> Table:
    """The table whose rows are these, on whatever page it stands."""
    nearest: Table = {}
    for table in tables():
        if table.keys() == names:
            return table
        if len(table.keys() & names) > len(nearest.keys() & names):
            nearest = table
    raise AssertionError(
        f"no table of the documentation has these rows: {sorted(names)}; the nearest lacks "
        f"{sorted(names - nearest.keys())} and has {sorted(nearest.keys() - names)} besides"
    )
