"""Texts and numbers of versions."""

from __future__ import annotations

import pytest

from headway.dialects.sglang.version_labels import MAX_VERSION, VersionLabels, next_version


def test_the_first_weights_are_called_default_unless_they_have_a_number() -> None:
    assert VersionLabels(0).label(0) == "default"
    assert VersionLabels(40).label(40) == "40"


@pytest.mark.parametrize(
    ("label", "version"),
    [
        ("9", 9),
        ("6", 6),
        ("5", 6),
        ("2", 6),
        ("step-8", 6),
        ("07", 6),
        ("+7", 6),
        ("7.0", 6),
        ("\N{ARABIC-INDIC DIGIT SEVEN}", 6),
        (str(MAX_VERSION), 6),
        ("9" * 5000, 6),
        (None, 6),
    ],
)
def test_a_newer_number_becomes_the_version_and_all_else_the_next(
    label: str | None, version: int
) -> None:
    assert next_version(label, 5) == version


def test_every_version_keeps_the_text_it_was_published_under() -> None:
    labels = VersionLabels(0)
    labels.name(1, "step-8")
    labels.name(2, None)
    labels.name(3, "step-8")
    assert [labels.label(version) for version in range(4)] == ["default", "step-8", "2", "step-8"]
    labels.name(1, None)
    assert labels.label(1) == "1"
