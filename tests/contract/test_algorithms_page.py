"""The recipes of docs/training/algorithms.md load, and differ from one another."""

from __future__ import annotations

import re

import yaml
from pydantic import TypeAdapter

from headway.contracts.config.rollout_experiments import RolloutExperimentConfig
from tests.contract.pages import ROOT, examples_of

PAGE = ROOT / "docs" / "training" / "algorithms.md"
RECIPES = [yaml.safe_load(example.text) for example in examples_of(PAGE, "yaml")]


REQUIRED = {
    "model": {"path": "m"},
    "data": {"path": "d"},
    "rollout": {"reward": {"name": "exact"}},
    "weight_sync": {"root": "w"},
}


def experiment_of(recipe):
    """A recipe is a whole experiment but for what every one needs, or its section `algorithm`."""
    tree = recipe if "type" in recipe else {"algorithm": recipe}
    return TypeAdapter(RolloutExperimentConfig).validate_python(REQUIRED | tree)


def test_every_recipe_loads_and_is_a_change_to_the_default():
    configs = [experiment_of({}), *map(experiment_of, RECIPES)]
    assert len({config.model_dump_json() for config in configs}) == len(RECIPES) + 1


def test_the_page_names_files_that_exist():
    folder = ROOT / "trainer" / "algorithms"
    files = set(re.findall(r"`(\w+\.py)`", PAGE.read_text()))
    assert files and files <= {file.name for file in folder.glob("*.py")}
