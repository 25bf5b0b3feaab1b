"""The Grafana page and the Prometheus alerts ask for series that a live gateway has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from headway.contracts.http import paths
from tests.integration.dashboard_scene import staged

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "docker" / "grafana" / "dashboard.json").read_text())
RULES = yaml.safe_load((ROOT / "docker" / "prometheus" / "rules.yaml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}
SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds."""


def expressions() -> Iterator[tuple[str, str]]:
    """Where it stands, and the PromQL."""
    for title, panel in PANELS.items():
        for target in panel["targets"]:
            yield f"panel {title}", target["expr"]
    for note in DASHBOARD["annotations"]["list"]:
        yield f"annotation {note['name']}", note["expr"]
    for rule in ALERTS:
        yield f"alert {rule['alert']}", rule["expr"]


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Name of each sample of a live gateway -> its labels."""
    with staged(tmp_path_factory.mktemp("grafana")) as stage:
        stage.attach(max_staleness=1)
        stage.submit(8)
        stage.train()
        page = httpx.get(stage.url + paths.METRICS).raise_for_status().text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_expression_asks_for_a_series_that_is_there_by_labels_that_it_has(
    series: dict[str, set[str]],
):
    for place, expression in expressions():
        names = re.findall(r"\bheadway_\w+", expression)
        assert names, f"{place} asks for nothing of ours: {expression}"
        for name in names:
            assert name in series, f"{place} asks for {name}, which a gateway does not tell"
        known = set().union(*(series[name] for name in names)) | SCRAPED
        for selector in re.findall(r"\b(headway_\w+)\{([^}]*)\}", expression):
            asked = set(
                re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', selector[1]))
            )
            assert asked <= series[selector[0]] | SCRAPED, f"{place}: {selector}"
        for labels in re.findall(r"\bby \(([^)]*)\)", expression):
            assert set(re.split(r",\s*", labels)) <= known, f"{place}: by ({labels})"


def test_brackets_and_quotes_of_every_expression_match():
    for place, expression in expressions():
        bare = re.sub(r'"[^"]*"', "", expression)
        assert '"' not in bare, place
        for opened, closed in ("()", "{}", "[]"):
            assert bare.count(opened) == bare.count(closed), place


def test_legends_name_labels_that_the_expression_keeps():
    for title, panel in PANELS.items():
        for target in panel["targets"]:
            kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", target["expr"]))))
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert named <= kept, f"panel {title}: legend {target['legendFormat']}"


def test_panels_have_a_place_of_their_own():
    taken: set[tuple[int, int]] = set()
    for title, panel in PANELS.items():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24, title
        assert not cells & taken, f"{title} lies on another panel"
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) == len(PANELS)


def test_alerts_are_whole():
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)
    for rule in ALERTS:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
