import sys

import pytest

from headway.contracts.errors import ConfigError, UnknownName
from headway.contracts.registry import Registry


def test_a_name_is_registered_once():
    registry: Registry[int] = Registry("colour")
    registry.register("red", 1)
    with pytest.raises(ConfigError, match=r"colour 'red' is registered already as 1"):
        registry.register("red", 2)
    assert registry.get("red") == 1


def test_unknown_name_lists_the_names_and_the_nearest():
    registry: Registry[int] = Registry("colour", {"crimson": "a:b", "azure": "c:d"})
    with pytest.raises(UnknownName) as caught:
        registry.get("crimsn")
    assert str(caught.value) == (
        "no colour named 'crimsn'; known: azure, crimson; did you mean 'crimson'?"
    )


def test_unknown_name_without_a_near_one_gives_no_hint():
    with pytest.raises(UnknownName) as caught:
        Registry("colour", {"azure": "c:d"}).get("zzz")
    assert "did you mean" not in str(caught.value)


def test_listing_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "heavy_part.py").write_text("PART = object()\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[object] = Registry("part", {"heavy": "heavy_part:PART", "b": "nowhere:B"})
    assert registry.names() == ["b", "heavy"]
    assert "heavy_part" not in sys.modules
    part = registry.get("heavy")
    assert part is sys.modules["heavy_part"].PART
    assert registry.get("heavy") is part


def test_names_of_installed_packages_join_through_their_entry_points(tmp_path, monkeypatch):
    package = tmp_path / "colours-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: colours\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[test.colours]\nteal = colours_mod:TEAL\n")
    (tmp_path / "colours_mod.py").write_text("TEAL = 'teal'\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[str] = Registry("colour", {"red": "x:y"}, entry_point_group="test.colours")
    assert registry.names() == ["red", "teal"]
    assert registry.get("teal") == "teal"


@pytest.mark.parametrize("target", ["nowhere.mod:PART", "json:nowhere"])
def test_a_target_that_does_not_exist_is_told(target: str):
    registry: Registry[object] = Registry("part", {"mine": target})
    with pytest.raises(ConfigError, match=f"part 'mine' is registered as {target}, which does not"):
        registry.get("mine")
