"""Runs one untrusted program and reports how it ended. Stands alone: its text also travels.

Nothing that this file reports can be trusted, since the program shares the process with it.
"""

from __future__ import annotations

import atexit
import builtins
import json
import math
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

MAX_ITEMS = 100_000
MAX_TEXT_CHARS = 2_000
MAX_INT_BITS = 10_000
"""Longer ones are written in hexadecimal: Python refuses to write them in decimal."""
MAX_TRACEBACK_FRAMES = 20


def encode(value: Any) -> dict[str, Any]:
    """`{"value": in JSON's types}`, and `"exact"` beside it where JSON has no word for the value.

    `exact` writes all but plain scalars as `[kind, content]`; see `gateway.sandbox.values`.
    """
    plain, exact, lossy = _encode(value)
    return {"value": plain, "exact": exact} if lossy else {"value": plain}


def _encode(value: Any) -> tuple[Any, Any, bool]:
    """Return the value in JSON's types, the exact form, and whether the first one lost something."""
    if value is None or isinstance(value, bool):
        return value, value, False
    if isinstance(value, str):
        return str(value), str(value), False
    if isinstance(value, int):
        number = int(value)
        is_huge = number.bit_length() > MAX_INT_BITS
        return (hex(number), ["int", hex(number)], True) if is_huge else (number, number, False)
    if isinstance(value, float):
        real = float(value)
        text = repr(real)
        return (real, real, False) if math.isfinite(real) else (text, ["float", text], True)
    if isinstance(value, dict):
        return _encode_dict(value)
    for container in (list, tuple, set, frozenset):
        if isinstance(value, container):
            return _encode_items(container.__name__, value)
    if isinstance(value, complex):
        return repr(value), ["complex", [value.real, value.imag]], True
    if isinstance(value, (bytes, bytearray)):
        return repr(value), ["bytes", value.decode("latin-1")], True
    if isinstance(value, Iterable):
        return _encode_items("iterator", value)
    text = repr(value)[:MAX_TEXT_CHARS]
    return text, ["object", text], True


def _encode_items(kind: str, values: Iterable[Any]) -> tuple[Any, Any, bool]:
    parts: list[tuple[Any, Any, bool]] = []
    for value in values:
        if len(parts) == MAX_ITEMS:
            raise ValueError(f"returned more than {MAX_ITEMS} items")
        parts.append(_encode(value))
    exact = [kind, [part[1] for part in parts]]
    return [part[0] for part in parts], exact, kind != "list" or any(part[2] for part in parts)


def _encode_dict(value: dict[Any, Any]) -> tuple[Any, Any, bool]:
    keys, values = [], []
    for key, content in value.items():
        keys.append(_encode(key))
        values.append(_encode(content))
    names = [key[0] if isinstance(key[0], str) else repr(key[0]) for key in keys]
    plain = {name: content[0] for name, content in zip(names, values, strict=True)}
    exact = [[key[1], content[1]] for key, content in zip(keys, values, strict=True)]
    only_names = all(isinstance(key, str) for key in value)
    return plain, ["dict", exact], not only_names or any(content[2] for content in values)


Emit = Callable[[dict[str, Any]], None]


def execute(source: str, calls: Sequence[str], emit: Emit) -> int:
    """Run `source`, then evaluate each call; the exit status.

    `emit` gets `{"result": ...}` for each call as it is done, then `{"ended": status}`, where status
    is one of `ProgramStatus`. With calls, `__name__` is "program", so that what stands under
    `if __name__ == "__main__"` does not run.
    """
    module = types.ModuleType("program" if calls else "__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules[module.__name__] = module
    sys.argv = ["program.py"]
    try:
        code = compile(source, "program.py", "exec", dont_inherit=True)
    except BaseException as error:  # noqa: BLE001 - whatever the compiler finds is the program's fault
        return _end(emit, error, "compile_error")
    try:
        exec(code, module.__dict__)
        for call in calls:
            emit({"result": _evaluate(call, module)})
        _finish()
    except SystemExit as error:
        _finish()
        if error.code not in (None, 0):
            return _end(emit, error, "runtime_error")
    except BaseException as error:  # noqa: BLE001 - whatever it raises is the program's fault
        return _end(emit, error, "runtime_error")
    emit({"ended": "ok"})
    return 0


def _evaluate(call: str, module: types.ModuleType) -> dict[str, Any]:
    try:
        result = encode(eval(call, module.__dict__))
        json.dumps(result)
        return result
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it raises is the program's fault
        return {"error": f"{type(error).__name__}: {error}"[:MAX_TEXT_CHARS]}


def _finish() -> None:
    """End as an interpreter does: wait for threads, then call `atexit` handlers."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _end(emit: Emit, error: BaseException, status: str) -> int:
    if not isinstance(error, SystemExit):
        own = error.__traceback__.tb_next if error.__traceback__ else None  # without our frame
        traceback.print_exception(type(error), error, own, limit=MAX_TRACEBACK_FRAMES)
    sys.stdout.flush()
    sys.stderr.flush()
    emit({"ended": "memory" if isinstance(error, MemoryError) else status})
    return 1
