"""What it costs to refuse a record."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from headway.contracts.config.base import MAX_VALUES, Config, JsonObject


class Inner(Config):
    names: tuple[str, ...] = ()


class Outer(Config):
    inner: tuple[Inner, ...] = ()
    plain: str | list[str] | None = None


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"inner": [{"names": [0] * 1000}] * 1000}, ("inner", 0, "names", 0)),
        ({"plain": [0] * 1000}, ("plain", "list[str]", 0)),
    ],
)
def test_the_first_wrong_item_of_a_sequence_is_told(tree, place):
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(tree)
    assert place in [error["loc"] for error in caught.value.errors()]
    assert caught.value.error_count() <= 2


def test_an_object_of_somebody_else_holds_so_many_values():
    check = TypeAdapter(JsonObject).validate_python
    check({"x": [0] * (MAX_VALUES - 2)})
    with pytest.raises(ValidationError, match=f"holds more than {MAX_VALUES} values"):
        check({"x": [0] * MAX_VALUES})
