"""What a configuration may name exists, and what exists can be named."""

import ast
import importlib
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from gateway.rewards.base import REWARDS
from gateway.workflows.base import WORKFLOWS
from headway.contracts.config import (
    advantages,
    base,
    experiment,
    gateway,
    optimizer,
    policy_losses,
    ppo_code,
    ppo_hybrid,
    server,
    weight_sync,
)
from headway.contracts.config.base import Config
from headway.contracts.config.rollout import RolloutConfig
from headway.contracts.config.trainer import TrainerConfig
from headway.contracts.registry import Registry
from headway.contracts.types import RolloutRequest
from inference_server.backends.base import BACKENDS as GENERATION_BACKENDS
from trainer.algorithms.advantage_registry import ADVANTAGE_ESTIMATORS
from trainer.algorithms.policy_loss_registry import POLICY_LOSSES
from trainer.backends.base import BACKENDS as TRAIN_BACKENDS
from trainer.experiments.base import EXPERIMENTS
from weight_sync.transports.base import SCHEMES, TRANSPORTS, scheme_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("headway", "gateway", "weight_sync", "inference_server", "trainer")
UNION_REGISTRIES: dict[type[Config], Registry | None] = {
    server.EmbeddedTorchConfig: GENERATION_BACKENDS,
    server.SGLangConfig: GENERATION_BACKENDS,
    server.VLLMConfig: GENERATION_BACKENDS,
    server.FakeBackendConfig: GENERATION_BACKENDS,
    experiment.GRPOExperiment: EXPERIMENTS,
    experiment.PPOExperiment: EXPERIMENTS,
    ppo_code.PPOCodeExperiment: EXPERIMENTS,
    ppo_code.PPOMathExperiment: EXPERIMENTS,
    ppo_hybrid.PPOHybridExperiment: EXPERIMENTS,
    experiment.SFTExperiment: EXPERIMENTS,
    experiment.RWExperiment: EXPERIMENTS,
    experiment.DPOExperiment: EXPERIMENTS,
    weight_sync.DiskSync: TRANSPORTS,
    weight_sync.SharedMemorySync: TRANSPORTS,
    weight_sync.HttpSync: TRANSPORTS,
    weight_sync.CollectiveSync: TRANSPORTS,
    weight_sync.CheckpointSync: TRANSPORTS,
    **dict.fromkeys(
        (
            policy_losses.ClipLossConfig,
            policy_losses.UnclippedLossConfig,
            policy_losses.ReinforceLossConfig,
            policy_losses.CISPOLossConfig,
            policy_losses.SAPOLossConfig,
            policy_losses.GMPOLossConfig,
            policy_losses.DPPOLossConfig,
            policy_losses.ClipCovLossConfig,
            policy_losses.KLCovLossConfig,
        ),
        POLICY_LOSSES,
    ),
    **dict.fromkeys(
        (
            advantages.GRPOAdvantageConfig,
            advantages.RewardAdvantageConfig,
            advantages.OPOAdvantageConfig,
            advantages.GPGAdvantageConfig,
            advantages.MaxRLAdvantageConfig,
            advantages.ReMaxAdvantageConfig,
            advantages.GAEAdvantageConfig,
        ),
        ADVANTAGE_ESTIMATORS,
    ),
}
"""The registry that holds the target of each tagged configuration."""
PLUGINS = (
    base.PluginConfig,
    advantages.PluginAdvantageConfig,
    policy_losses.PluginLossConfig,
    server.PluginBackendConfig,
    weight_sync.PluginSync,
)
"""Their `name` is that of an entry point: what installed packages add (`test_plugins.py`)."""
CHOICES = (gateway.SandboxConfig, optimizer.OptimizerConfig)
"""Their `type` is a setting like others: one section with a fixed set of ways, nothing to register."""


def own_targets(registry: Registry) -> dict[str, object]:
    """What this distribution registers; installed packages may add more."""
    return dict(registry._targets)


def tagged_configs() -> list[type[Config]]:
    found = []
    for file in sorted((ROOT / "headway/contracts/config").glob("*.py")):
        module = importlib.import_module(f"headway.contracts.config.{file.stem}")
        for value in vars(module).values():
            is_ours = isinstance(value, type) and issubclass(value, Config)
            if is_ours and value.__module__ == module.__name__ and "type" in value.model_fields:
                found.append(value)
    return found


def registries() -> list:
    found = []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            for node in ast.parse(file.read_text()).body:
                call = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
                if isinstance(call, ast.Call) and getattr(call.func, "id", None) == "Registry":
                    name = (node.targets[0] if isinstance(node, ast.Assign) else node.target).id
                    found.append(pytest.param(module, name, id=f"{module}.{name}"))
    return found


def test_every_tagged_configuration_is_known_here():
    names = {config.__name__ for config in tagged_configs()}
    assert names == {config.__name__ for config in (*UNION_REGISTRIES, *PLUGINS, *CHOICES)}, (
        "a configuration with `type` was added: name its registry in UNION_REGISTRIES"
    )


@pytest.mark.parametrize("config", CHOICES, ids=lambda c: c.__name__)
def test_a_choice_offers_several_ways(config):
    assert len(get_args(config.model_fields["type"].annotation)) > 1


@pytest.mark.parametrize("config", UNION_REGISTRIES, ids=lambda c: c.__name__)
def test_each_type_has_a_target(config):
    field = config.model_fields["type"]
    assert get_origin(field.annotation) is Literal
    assert get_args(field.annotation) == (field.default,)
    assert field.default in own_targets(UNION_REGISTRIES[config])


@pytest.mark.parametrize(
    "registry",
    [GENERATION_BACKENDS, EXPERIMENTS, TRANSPORTS, POLICY_LOSSES, ADVANTAGE_ESTIMATORS],
    ids=lambda registry: registry.kind,
)
def test_each_target_has_a_type(registry):
    types = {c.model_fields["type"].default for c, r in UNION_REGISTRIES.items() if r is registry}
    assert set(own_targets(registry)) == types


def types_of(union) -> set[str]:
    """Of the members of a tagged union, however it is annotated."""
    while not all(isinstance(member, type) for member in get_args(union)):
        union = get_args(union)[0]
    return {config.model_fields["type"].default for config in get_args(union)}


def test_the_backend_union_offers_exactly_the_backends_and_plug_ins():
    assert types_of(server.BackendConfig) == {*own_targets(GENERATION_BACKENDS), "plugin"}


def test_the_weight_sync_union_offers_exactly_the_transports_and_plug_ins():
    assert types_of(weight_sync.WeightSyncConfig) == {*own_targets(TRANSPORTS), "plugin"}


def test_the_unions_of_losses_and_estimators_offer_exactly_these_and_plug_ins():
    assert types_of(policy_losses.PolicyLossConfig) == {*own_targets(POLICY_LOSSES), "plugin"}
    estimators = {*own_targets(ADVANTAGE_ESTIMATORS), "plugin"}
    assert types_of(advantages.AdvantageConfig) == estimators
    assert types_of(advantages.CriticAdvantageConfig) == estimators


@pytest.mark.parametrize(
    ("registry", "config"),
    [(r, c) for c, r in UNION_REGISTRIES.items() if r in (POLICY_LOSSES, ADVANTAGE_ESTIMATORS)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_loss_or_an_estimator_says_its_settings(registry, config):
    assert registry.get(config.model_fields["type"].default).Args is config


def test_every_scheme_is_brought_by_the_transport_that_says_so():
    said = {
        scheme: name
        for name in own_targets(TRANSPORTS)
        for scheme in TRANSPORTS.get(name).schemes
        if scheme != "file"  # as every scheme that is not named: the transport of directories
    }
    assert said == SCHEMES


@pytest.mark.parametrize("name", own_targets(TRANSPORTS))
def test_the_origin_of_a_transport_has_one_of_its_schemes(name):
    config = next(
        config
        for config, registry in UNION_REGISTRIES.items()
        if registry is TRANSPORTS and config.model_fields["type"].default == name
    )
    root = {"root": "/dev/shm/run"} if "root" in config.model_fields else {}
    assert scheme_of(config(**root).origin) in TRANSPORTS.get(name).schemes


@pytest.mark.parametrize("name", own_targets(EXPERIMENTS))
def test_an_experiment_is_configured_by_its_own_type(name):
    assert EXPERIMENTS.get(name).config.model_fields["type"].default == name


def test_the_search_finds_the_registries():
    found = {param.values for param in registries()}
    assert {
        ("gateway.rewards.base", "REWARDS"),
        ("gateway.workflows.base", "WORKFLOWS"),
        ("inference_server.backends.base", "BACKENDS"),
        ("trainer.backends.base", "BACKENDS"),
        ("trainer.experiments.base", "EXPERIMENTS"),
        ("weight_sync.transports.base", "TRANSPORTS"),
    } <= found


@pytest.mark.parametrize(("module", "name"), registries())
def test_every_target_can_be_imported(module, name):
    registry = getattr(importlib.import_module(module), name)
    assert own_targets(registry)
    for target in own_targets(registry):
        assert registry.get(target) is not None


def test_defaults_name_registered_parts():
    assert RolloutConfig.model_fields["workflow"].default.name in own_targets(WORKFLOWS)
    assert RolloutRequest.model_fields["workflow"].default.name in own_targets(WORKFLOWS)
    assert TrainerConfig().backend in own_targets(TRAIN_BACKENDS)


@pytest.mark.parametrize("name", own_targets(WORKFLOWS))
def test_every_workflow_declares_its_arguments(name):
    assert issubclass(WORKFLOWS.get(name).Args, Config)


@pytest.mark.parametrize("name", own_targets(REWARDS))
def test_every_reward_is_documented(name):
    assert REWARDS.get(name).__doc__
