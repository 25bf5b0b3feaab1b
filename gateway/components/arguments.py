"""The arguments of a registered part, read from its signature: checked, and described by a JSON
schema."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model

from headway.contracts.errors import ConfigError
from headway.runtime.config import validate_config

ComponentT = TypeVar("ComponentT")


def build_component(
    factory: Callable[..., ComponentT], kind: str, name: str, args: Mapping[str, Any]
) -> ComponentT:
    """Call a factory with arguments from outside; `kind` and `name` are for the message.

    Raises:
        ConfigError: the arguments do not fit the signature, or the factory refuses them.
    """
    try:
        given = validate_config(args_model(factory), args, has_flags=False)
    except ConfigError as error:
        raise ConfigError(f"{kind} {name!r}: {error.message}") from error
    try:
        # As validated, not as dumped: an argument that is a model stays one.
        return factory(**{field: getattr(given, field) for field in given.model_fields_set})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{kind} {name!r} does not take {dict(args)!r}: {error}") from error


@lru_cache(maxsize=256)
def args_model(factory: Callable[..., Any]) -> type[BaseModel]:
    """A model of the keyword arguments; `Annotated[..., Field(...)]` brings bounds and descriptions."""
    fields: dict[str, Any] = {}
    is_open = False
    for parameter in signature_of(factory).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            is_open = True
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            kind = _type_of(parameter)
            has_default = parameter.default is not parameter.empty
            fields[parameter.name] = (kind, parameter.default if has_default else Field())
    config = ConfigDict(extra="allow" if is_open else "forbid", frozen=True)
    return create_model("Args", __config__=config, **fields)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature with annotations as objects; as text where a name is missing that only
    type checkers import."""
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:
        return inspect.signature(function)


def _type_of(parameter: inspect.Parameter) -> Any:
    kind = parameter.annotation
    return Any if kind is parameter.empty or isinstance(kind, str) else kind
