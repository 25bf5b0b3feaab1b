"""Tools by name: what a policy may call in the middle of an answer.

A tool is made per rollout with the arguments that it names, shown to the model as a JSON schema,
and called with what the model wrote. A mistake of the model is shown to the model (`ToolError`); an
outage is raised, and fails or repeats the rollout: it never becomes a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gateway.components.arguments import args_model, build_component
from gateway.components.shared_services import SharedServices
from headway.contracts.config.base import ComponentConfig
from headway.contracts.registry import Registry


class ToolError(Exception):
    """The model called a tool wrongly; the text explains how."""


class Tool(Protocol):
    """A function that the model may call; its three attributes are only read."""

    @property
    def name(self) -> str:
        """Name by which the model calls it."""

    @property
    def description(self) -> str:
        """Description of the tool, for the model."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of its arguments, an object."""

    async def call(self, arguments: Mapping[str, Any], services: SharedServices) -> str:
        """The result, as the model reads it.

        Args:
            arguments: what the model wrote: any JSON object, not checked against `parameters`.

        Raises:
            ToolError: these arguments are wrong.
            ServiceError: whatever else failed.
        """


TOOLS: Registry[Callable[..., Tool]] = Registry(
    "tool",
    {
        "calculator": "gateway.tools.calculator:Calculator",
        "http": "gateway.tools.http:HttpTool",
        "python": "gateway.tools.python:Python",
    },
    entry_point_group="headway.tools",
)


def register_tool(name: str, target: str | Callable[..., Tool]) -> None:
    """Add a tool: a class or factory, or `"module:attribute"` for a lazy one."""
    TOOLS.register(name, target)


def make_tool(config: ComponentConfig) -> Tool:
    """Build a tool.

    Raises:
        UnknownName: nobody registered the name.
        ConfigError: the arguments do not fit.
    """
    return build_component(TOOLS.get(config.name), "tool", config.name, config.args)


def tool_schema(name: str) -> dict[str, Any]:
    """JSON schema of what a tool is made with; what the model writes is another matter."""
    return args_model(TOOLS.get(name)).model_json_schema()


def schema_of(tool: Tool) -> dict[str, Any]:
    """A tool in the form that chat templates render."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}


def one_text(name: str, description: str) -> dict[str, Any]:
    """The schema of a tool that takes one text."""
    return {
        "type": "object",
        "properties": {name: {"type": "string", "description": description}},
        "required": [name],
    }


def read_text(arguments: Mapping[str, Any], name: str) -> str:
    """The one text that a tool takes.

    Raises:
        ToolError: it is missing, no text, or not alone.
    """
    text = arguments.get(name)
    if not isinstance(text, str) or len(arguments) != 1:
        raise ToolError(
            f"the arguments are {sorted(arguments)}; exactly one is wanted, {name!r}, a string"
        )
    return text
