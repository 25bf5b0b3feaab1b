import re

import pytest

from headway.contracts import errors
from headway.contracts.errors import ErrorBody, ServiceError


def all_classes() -> list[type[ServiceError]]:
    found, rest = [], [ServiceError]
    while rest:
        found.append(rest.pop())
        # Only the tree of the module itself: a test elsewhere may derive classes of its own.
        rest += [c for c in found[-1].__subclasses__() if c.__module__ == errors.__name__]
    return found


def documented() -> dict[str, tuple[int, bool]]:
    rows = re.findall(
        r"^[│ ]*[├└]── (\w+) .*?(\d{3})( +retryable)?$", errors.__doc__ or "", re.MULTILINE
    )
    return {name: (int(status), bool(retryable)) for name, status, retryable in rows}


@pytest.mark.parametrize("error_class", all_classes(), ids=lambda c: c.__name__)
def test_every_class_survives_the_wire(error_class):
    body = error_class("seen 1, wanted 2; set three").to_body(request_id="req-1")
    back = ServiceError.from_body(ErrorBody.model_validate_json(body.model_dump_json()))
    assert type(back) is error_class
    assert back.message == "seen 1, wanted 2; set three"
    assert body.request_id == "req-1"
    assert body.retryable is error_class.retryable


def test_codes_are_unique_and_statuses_are_errors():
    classes = all_classes()
    assert len(classes) > 10
    assert len({c.code for c in classes}) == len(classes)
    assert all(400 <= c.http_status < 600 for c in classes)


def test_unknown_code_becomes_the_root():
    body = ErrorBody(code="of-a-newer-release", message="text", retryable=True)
    back = ServiceError.from_body(body)
    assert type(back) is ServiceError
    assert back.message == "text"


def test_a_taken_code_cannot_be_declared_again():
    with pytest.raises(TypeError, match="'conflict' is taken"):
        type("Second", (ServiceError,), {"code": "conflict"})


def test_error_without_text_says_its_code():
    assert errors.QueueFull().message == "queue_full"


def test_docstring_draws_the_whole_tree_with_the_right_statuses():
    actual = {
        c.__name__: (c.http_status, c.retryable) for c in all_classes() if c is not ServiceError
    }
    assert documented() == actual


def test_docstring_nests_each_class_below_its_parent():
    parents: dict[int, str] = {0: "ServiceError"}
    for line in (errors.__doc__ or "").splitlines():
        drawn = re.match(r"^([│ ]*[├└]── )(\w+)", line)
        if drawn:
            depth = len(drawn.group(1)) // 4
            parents[depth] = drawn.group(2)
            parent = getattr(errors, parents[depth - 1])
            assert getattr(errors, drawn.group(2)).__bases__ == (parent,)
