"""Tables of the documentation name what rollouts have: fields, routes, parts, arguments, verdicts.

On which page a table stands, and below which heading, is no matter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args

import pytest
import yaml

from gateway.components.arguments import args_model
from gateway.filters.base import FILTERS, filter_schema
from gateway.ledger.transitions import STATES
from gateway.rewards.base import REWARDS, reward_schema
from gateway.tools.base import TOOLS
from gateway.workflows.base import WORKFLOWS, get_workflow
from headway.contracts.config.gateway import SandboxConfig
from headway.contracts.http import paths
from headway.contracts.registry import Registry
from headway.contracts.types import (
    RolloutRequest,
    Trajectory,
    TrajectoryBatch,
    TrajectoryGroup,
    Turn,
    Verdict,
)
from tests.contract.pages import PAGES, Table, examples_of, table_of, tables

NO_DEFAULT = "\u2013"
REGISTRIES: Mapping[str, Registry[Any]] = {
    "workflows": WORKFLOWS,
    "rewards": REWARDS,
    "filters": FILTERS,
    "tools": TOOLS,
}


def test_the_table_of_a_request_names_its_fields():
    assert table_of(set(RolloutRequest.model_fields))


@pytest.mark.parametrize("record", [Trajectory, Turn, TrajectoryGroup, TrajectoryBatch])
def test_the_fields_of_a_record_are_in_a_table_with_their_types(record: type):
    types = {field.name: field.type for field in fields(record)}
    types |= {
        name: value.fget.__annotations__["return"]
        for name, value in vars(record).items()
        if isinstance(value, property)
    }
    rows = table_of(set(types))
    for name, (shown, *_) in rows.items():
        assert _type_of(types[name]) == shown.replace("`", ""), name


def _type_of(annotation: str) -> str:
    """As the tables write it."""
    if array := re.fullmatch(r"NDArray\[np\.(\w+?)_?\]", annotation):
        return f"{array[1]} [T]"
    plain = {
        "StopReason": "str",
        "Verdict": "str",
        "PolicyVersion": "int",
        "dict[str, Any]": "dict",
    }
    annotation = plain.get(annotation, annotation).replace(" | ", " or ")
    return re.sub(r"(tuple|list)\[(\w+)(, \.\.\.)?\]", r"\1 of \2", annotation)


def test_the_routes_are_in_tables_with_the_roles_that_they_ask_for():
    rows = {route: role for table in tables() for route, role in _roles_of(table).items()}
    assert rows.items() <= paths.ACCESS.items()
    prefixes = (
        paths.ROLLOUTS,
        paths.SESSIONS,
        paths.WORKFLOWS,
        paths.REWARDS,
        paths.FILTERS,
        paths.TOOLS,
    )
    wanted = {route for route in paths.ACCESS if route.partition(" ")[2].startswith(prefixes)}
    assert wanted <= rows.keys()


def _roles_of(table: Table) -> dict[str, str]:
    """Second cells of routes, if any of them is a role."""
    rows = {name: cells[0].strip("`") for name, cells in table.items() if " /v1/" in name}
    return rows if set(paths.ACCESS.values()) & set(rows.values()) else {}


def test_the_states_of_a_rollout_are_drawn():
    states = set(STATES)
    drawings = [block.text for page in PAGES for block in examples_of(page, "", "mermaid")]
    assert any(states - {"cancelled"} <= set(re.findall(r"\w+", drawing)) for drawing in drawings)


@pytest.mark.parametrize("kind", REGISTRIES)
def test_every_part_is_in_a_table(kind: str):
    assert table_of(set(REGISTRIES[kind]._targets))


@pytest.mark.parametrize("name", ["multi_turn", "tool_use", "callback", "session"])
def test_the_arguments_of_a_workflow_are_listed_with_their_defaults(name: str):
    fields = get_workflow(name).Args.model_fields
    rows = table_of(set(fields))
    for argument, (default, *_) in rows.items():
        shown = fields[argument]
        if shown.is_required():
            assert default == NO_DEFAULT
        elif default != "none":
            assert _is_said(shown.default, default), (argument, default)
        else:
            assert shown.default is None


def _is_said(value: Any, cell: str) -> bool:
    said = [part.strip("`") for part in cell.split(", ")]
    if isinstance(value, str):
        return any(value.startswith(part.rstrip("…")) for part in said)
    return yaml.safe_load(said[0]) == value


PARTS = [
    *(("rewards", name, reward_schema(name)) for name in sorted(REWARDS._targets)),
    *(("filters", name, filter_schema(name)) for name in sorted(FILTERS._targets)),
    *(
        ("tools", name, args_model(TOOLS.get(name)).model_json_schema())
        for name in sorted(TOOLS._targets)
    ),
]


@pytest.mark.parametrize(("kind", "name", "schema"), PARTS, ids=[part[1] for part in PARTS])
def test_every_argument_of_a_part_is_in_its_row(kind: str, name: str, schema: dict[str, Any]):
    row = " ".join(table_of(set(REGISTRIES[kind]._targets))[name])
    assert [argument for argument in schema["properties"] if f"`{argument}`" not in row] == []


def test_every_verdict_is_explained():
    assert table_of(set(get_args(Verdict)))


def test_every_type_of_sandbox_is_explained():
    types = get_args(SandboxConfig.model_fields["type"].annotation)
    assert table_of(set(types))
