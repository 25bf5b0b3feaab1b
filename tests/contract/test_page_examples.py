"""Every example of every page runs, unless the page says above it why not (`page_runner`, `pages`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.page_runner import PageRunner
from tests.contract.pages import PAGES, Example, examples_of, name_of

RUN = ("bash", "json", "python", "yaml")
SHORT = {"docs/rollouts/workflows.md"}
"""Pages that `make test` runs; `make test-all` runs the others, too."""


def runnable(page: Path) -> list[Example]:
    """The blocks that are run."""
    return [example for example in examples_of(page, *RUN) if example.not_run is None]


def params() -> Iterator[object]:
    """Pages with something to run, beside configuration."""
    for page in PAGES:
        if any(example.language != "yaml" for example in runnable(page)):
            marks = [] if name_of(page) in SHORT else [pytest.mark.extended]
            yield pytest.param(page, id=name_of(page), marks=marks)


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[PageRunner]:
    runner = PageRunner(tmp_path)
    yield runner
    runner.close()


@pytest.mark.parametrize("page", list(params()))
def test_every_example_of_a_page_runs(runner: PageRunner, page: Path):
    runner.run_page(runnable(page))
