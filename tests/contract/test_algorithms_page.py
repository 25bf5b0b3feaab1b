"""The recipes of docs/algorithms.md load, and differ from one another."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.rollout_experiments import RolloutExperimentConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()
RECIPES = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


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


def test_the_page_names_functions_files_and_fields_that_exist():
    folder = ROOT / "trainer" / "algorithms"
    files = set(re.findall(r"`(\w+\.py)`", PAGE))
    assert files and files <= {file.name for file in folder.glob("*.py")}
    chain = PAGE.split("## From scores")[1].split("## Recipes")[0]
    named = set(re.findall(r"`([a-z_]+)`", chain))
    assert named <= set(AlgorithmConfig.model_fields)
