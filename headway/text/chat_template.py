"""A model's chat template: a program that came with the model, bounded in what it does.

The steps of one rendering (turns of a loop, calls) and its characters are bounded by its input's size,
and no number that it counts with is large. So a template that never ends fails, by name, within
milliseconds on a small chat. Not covered: templates of megabytes that are written to eat memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from inspect import unwrap
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from headway.contracts.config.base import MAX_COUNT
from headway.contracts.errors import DataError
from headway.runtime.offload import size_of

STEPS = 10_000
STEPS_EACH = 2
"""Steps of one rendering: a fixed number, and a number for each character of its input."""
CHARS = 1 << 20
CHARS_EACH = 4
"""Characters of any text that it writes, likewise."""
MAX_NUMBER = 1 << 17
"""Largest number that may say how wide or how many something is."""
_COUNTED = "headway_counted"
_SIZED = "headway_sized"
_WIDE = re.compile(r"\d{5}|%[^a-zA-Z%]*\*")
"""Pattern of a format with fields of 10,000 characters and more, or of any width."""


class ChatTemplate:
    """Messages -> the text that a model was trained on."""

    def __init__(self, source: str) -> None:
        """Raises:
        TemplateError: it is no template.
        """
        self._template = _environment().from_string(source)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text.

        Raises:
            DataError: it takes more than a template may, or more text than it may write.
            Exception: whatever else a program can raise.
        """
        budget = _Budget.of(variables)
        token = _BUDGET.set(budget)
        try:
            pieces: list[str] = []
            for piece in self._template.generate(**variables):
                budget.write(len(piece))
                pieces.append(piece)
            return "".join(pieces)
        finally:
            _BUDGET.reset(token)


@dataclass(slots=True)
class _Budget:
    """Resources that one rendering may still use."""

    steps: int
    chars: int
    left: int
    unwritten: int

    @classmethod
    def of(cls, variables: Mapping[str, Any]) -> _Budget:
        size = size_of(dict(variables), MAX_COUNT)
        steps, chars = STEPS + STEPS_EACH * size, CHARS + CHARS_EACH * size
        return cls(steps, chars, steps, chars)

    def spend(self) -> None:
        """Take one step."""
        self.left -= 1
        if self.left < 0:
            raise DataError(
                f"the chat template took more than {self.steps} steps over these messages; mend its "
                "loops, or send fewer messages"
            )

    def write(self, count: int) -> None:
        """Count this many characters of output."""
        self.unwritten -= count
        if self.unwritten < 0:
            self.check(self.chars + 1)

    def check(self, length: int) -> None:
        """Refuse a text of this length."""
        if length > self.chars:
            raise DataError(
                f"the chat template writes more than {self.chars} characters over these messages; mend "
                "what it repeats"
            )


_BUDGET: ContextVar[_Budget] = ContextVar("budget of a rendering")


class _Environment(ImmutableSandboxedEnvironment):
    """Counts what templates do."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return tree

    def call(
        __self: _Environment, __context: Context, __obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(__obj, LoopContext):  # a recursive loop's next level
            args = (_counted(args[0]), *args[1:])
        call = super().call
        return _limited(__obj, lambda *a, **k: call(__context, __obj, *a, **k), args, kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
            _check_product(right, left)
        elif operator == "**":
            _check_numbers([left, right])
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return _sized(super().call_binop(context, operator, left, right))


class _Counting(NodeTransformer):
    """Puts the counting into a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _SIZED)


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote; for a prompt its body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.globals.pop("lipsum")
    environment.globals["raise_exception"] = _raise_template_error
    environment.filters["tojson"] = _to_json
    for name, call in environment.filters.items():
        environment.filters[name] = _limited_filter(call)
    environment.filters |= {_COUNTED: _counted, _SIZED: _sized}
    return environment


def _limited_filter(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)  # with the mark of those that want the context
    def limited(*args: Any, **kwargs: Any) -> Any:
        return _limited(call, call, args, kwargs)

    return limited


def _limited(
    named: Any, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """One call, if it is no large one."""
    _BUDGET.get().spend()
    name = getattr(named, "__name__", "")
    owner = getattr(unwrap(named), "__self__", None)
    texts = [owner, *args] if isinstance(owner, str) else args
    if isinstance(owner, str) or named is call:  # further arguments of a text's method or a filter
        _check_numbers([*texts[1:], *kwargs.values()])
    if name in ("replace", "do_replace"):
        _check_replacement(texts)
    elif name in ("join", "sync_do_join", "do_join"):
        _check_join(texts)
    elif name in ("format", "format_map", "do_format"):
        for text in texts:
            _check_format(text)
    return _sized(call(*args, **kwargs))


def _counted(items: Any) -> Iterator[Any]:
    budget = _BUDGET.get()
    for item in items:
        budget.spend()
        yield item


def _sized(made: Any) -> Any:
    if isinstance(made, str | list | tuple):
        _BUDGET.get().check(len(made))
    elif isinstance(made, int) and made.bit_length() > CHARS:
        _BUDGET.get().check(made.bit_length())
    return made


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int | float) and abs(value) > MAX_NUMBER:
            raise DataError(f"the chat template counts with {value}; {MAX_NUMBER} is the most")


def _check_product(text: Any, times: Any) -> None:
    if isinstance(text, str | list | tuple) and isinstance(times, int):
        _BUDGET.get().check(len(text) * times)


def _check_replacement(args: Sequence[Any]) -> None:
    texts = [arg for arg in args if isinstance(arg, str)]
    if len(texts) >= 3:
        text, old, new = texts[:3]
        _BUDGET.get().check(text.count(old) * len(new))


def _check_join(args: Sequence[Any]) -> None:
    text = next((arg for arg in args if isinstance(arg, str)), "")
    items = next((arg for arg in args if isinstance(arg, list | tuple)), ())
    lengths = sum(len(item) for item in items if isinstance(item, str))
    _BUDGET.get().check(len(text) * len(items) + lengths)


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _WIDE.search(text):
        raise DataError(
            f"the chat template formats with {text[:40]!r}, whose fields may be endless"
        )


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
