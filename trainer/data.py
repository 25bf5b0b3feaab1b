"""Rows, in an order that a cursor can resume; and prompts of them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from headway.contracts.config.data import DataConfig, RowsConfig
from headway.contracts.errors import DataError
from headway.contracts.types import Message, Prompt


class Rows:
    """The rows of a data set; position `cursor` counts over all epochs and never wraps."""

    def __init__(self, config: RowsConfig) -> None:
        self._settings = config
        self.rows = read_rows(Path(config.path))
        for index in (0, len(self.rows) - 1):  # a template that fails, fails at the start
            self.text_of(index)

    def __len__(self) -> int:
        return len(self.rows)

    def row_index(self, cursor: int) -> int:
        """Return the index of the row at a position of the (shuffled) order."""
        epoch, position = divmod(cursor, len(self.rows))
        if not self._settings.shuffle:
            return position
        return self._order(epoch)[position]

    def text_of(self, index: int) -> str:
        """The prompt's text of a row."""
        return self.fill(self._settings.prompt_template, index)

    def messages_of(self, index: int) -> tuple[Message, ...]:
        """The prompt of a row as a chat."""
        system = self._settings.system_prompt
        user = Message(role="user", content=self.text_of(index))
        return (user,) if system is None else (Message(role="system", content=system), user)

    def fill(self, template: str, index: int) -> str:
        """A template with the fields of a row.

        Raises:
            DataError: a field is missing or null, or the template is none.
        """
        row = {name: value for name, value in self.rows[index].items() if value is not None}
        try:
            return template.format_map(row)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise DataError(
                f"{self.place(index)}: template {template!r} needs {error}; "
                f"the row has {sorted(row)}"
            ) from error

    def place(self, index: int) -> str:
        """Return the name of a row in messages."""
        return f"{self._settings.path} row {index + 1}"

    @lru_cache(maxsize=2)  # noqa: B019 - one instance per process
    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self.rows)))
        random.Random(f"{self._settings.seed}:{epoch}").shuffle(order)
        return order


class PromptData(Rows):
    """Rows as prompt groups."""

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        self._limit_key = config.max_new_tokens_key
        self._token_ids: Sequence[Sequence[int]] | None = None

    def send_token_ids(self, prompts: Sequence[Sequence[int]]) -> None:
        """Give prompts as token ids in place of their texts.

        Args:
            prompts: of every row.
        """
        self._token_ids = prompts

    def prompt(self, cursor: int, group_size: int) -> Prompt:
        """The prompt group at a position."""
        index = self.row_index(cursor)
        group = {
            "group_id": f"row-{index}.{cursor}",
            "group_size": group_size,
            "data": self.rows[index],
        }
        if self._token_ids is not None:
            return Prompt(input_ids=tuple(self._token_ids[index]), **group)
        if not self._settings.chat:
            return Prompt(text=self.text_of(index), **group)
        return Prompt(messages=self.messages_of(index), **group)

    def max_new_tokens(self, cursor: int) -> int | None:
        """The own limit of the row at a position, if the configuration names a field for it."""
        return self.max_new_tokens_of(self.row_index(cursor))

    def max_new_tokens_of(self, index: int) -> int | None:
        """The own limit of a row."""
        key = self._limit_key
        if key is None:
            return None
        row = self.rows[index]
        if not isinstance(row.get(key), int):
            raise DataError(
                f"{self._settings.path}: field {key!r} is {row.get(key)!r}; "
                "data.max_new_tokens_key wants the name of a field with whole numbers"
            )
        return int(row[key])


def read_rows(path: Path) -> list[Mapping[str, Any]]:
    """All rows of a JSON Lines file, or of every *.jsonl of a directory in name order.

    Raises:
        DataError: missing, empty, or a line that is no JSON object; with path and line.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    rows: list[Mapping[str, Any]] = []
    for file in files:
        try:
            # Not splitlines(): U+2028 and its like may stand unescaped within a JSON string.
            lines = file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read data {file}: {error}; set data.path") from error
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(_parse(line, file, number))
    if not rows:
        raise DataError(f"{path} holds no rows; data.path wants a JSON Lines file")
    return rows


def _parse(line: str, file: Path, number: int) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{file} line {number} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{file} line {number} is a {type(row).__name__}; a JSON object is wanted")
    return row
