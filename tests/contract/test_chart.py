"""The chart, rendered by Helm itself, and what kustomize makes of it; the manifests fit the schemas of
Kubernetes, and the files load."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.ledger.make import make_ledger
from gateway.ledger.redis import RedisLedger
from headway.contracts.config.experiment import GRPOExperiment
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.server import ServerConfig
from headway.contracts.http.servers import ScaleResponse
from headway.launch.cli import COMMANDS
from headway.runtime.command import EXIT_USAGE
from headway.runtime.config import load_config
from headway.runtime.listener import check_exposure
from inference_server.engine_node import is_later_node
from tests.contract.test_docker import CONFIG_OF_TARGET, DOCKERFILE, arguments, stages
from tests.integration.real_engines import engine_python, needs

pytestmark = needs("helm")
ROOT = Path(__file__).parents[2]
VERSIONS = ("1.29", "1.33", "1.37")
"""Of Kubernetes: the oldest that the chart takes, one between, the newest that has schemas."""
WITHOUT_SCHEMA = {
    (group, "no schema")
    for group in ("keda.sh/v1alpha1", "leaderworkerset.x-k8s.io/v1", "monitoring.coreos.com/v1")
}
"""Of operators, which bring their own."""
NODES = {"trainer": {"nodes": 2, "gpusPerNode": 8, "runs": {"accessMode": "ReadWriteMany"}}}
SGLANG = {"backend": {"type": "sglang", "python": "python3"}}
WIDE = {
    "image": "engine",
    "nodes": 2,
    "gpus": 8,
    "versions": {"claim": "versions"},
    "config": SGLANG,
}
"""A server on two nodes."""
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "gpus": {"server": {"gpus": 1}, "trainer": {"gpusPerNode": 4}},
    "nodes": NODES,
    "an engine": {"server": {"image": "engine", "config": SGLANG}},
    "an engine on nodes": {"server": WIDE},
    "an engine on nodes by keda": {"server": WIDE, "scaling": {"by": "keda"}},
    "another Redis": {"redis": {"enabled": False, "url": "redis://elsewhere:6379/1?prefix=a"}},
    "no trainer": {"trainer": {"enabled": False}},
    "volumes": {
        "redis": {"storageClass": "fast", "storage": "1Gi"},
        "trainer": {"runs": {"storageClass": "fast"}},
    },
    "own volume": {"trainer": {"runs": {"claim": "ours"}, "nodes": 4}},
    "keda": {"scaling": {"by": "keda"}},
    "a scaler": {"scaling": {"by": "headway"}},
    "scaler": {"scaling": {"by": "headway", "minServers": 2, "maxServers": 9}},
    "prometheus": {"prometheus": {"enabled": True, "labels": {"release": "prometheus"}}},
    "grafana": {"grafana": {"enabled": True}},
    "open network": {"networkPolicy": {"enabled": False}},
    "another registry": {
        "image": {
            "registry": "registry.example.com/",
            "tag": "1.2.3",
            "pullSecrets": [{"name": "k"}],
        }
    },
    "placed": {
        role: {
            "nodeSelector": {"pool": "a100"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        }
        for role in ("gateway", "server", "trainer")
    },
    "own files": {
        "gateway": {"config": {"fleet": {"server_wait_s": 10.0}}},
        "server": {"config": {"backend": {"max_context": 4096}}},
        "trainer": {"config": {"optimizer": {"lr": 2e-6}, "data": {"batch_size": 16}}},
    },
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt role": ({"sever": {}}, "sever"),
    "a misspelt value": ({"server": {"replica": 3}}, "replica"),
    "a number in words": ({"server": {"replicas": "two"}}, "replicas"),
    "a quantity": ({"gateway": {"resources": {"limits": {"memory": "8 GB"}}}}, "memory"),
    "no Redis": ({"redis": {"enabled": False}}, "redis.url is to name another one"),
    "a volume for one": ({"trainer": {"nodes": 2}}, "trainer.runs.accessMode"),
    "an image that is none": ({"server": {"image": "sglang"}}, "image"),
    "a scaler that is none": ({"scaling": {"by": "hpa"}}, "scaling"),
    "no node": ({"server": {"nodes": 0}}, "nodes"),
    "the embedded backend on nodes": ({"server": {"nodes": 2}}, "only SGLang spans nodes"),
    "vLLM on nodes": (
        {"server": {**WIDE, "config": {"backend": {"type": "vllm"}}}},
        "only SGLang spans nodes",
    ),
    "nodes without a volume": ({"server": {**WIDE, "versions": {}}}, "server.versions.claim"),
    "nodes by our scaler": ({"server": WIDE, "scaling": {"by": "headway"}}, "scaling.by to keda"),
    "a registry without a slash": ({"image": {"registry": "example.com"}}, "registry"),
}
TARGETS = {"gateway": "control", "server": "inference", "trainer": "trainer"}
"""Each component's image."""
GROUP = ("leaderTemplate", "workerTemplate")
"""Of a LeaderWorkerSet."""
KUBERNETES_SAYS = {
    "POD_IP": "10.1.2.3",
    "HEADWAY_LEDGER": "redis://elsewhere:6379/1?prefix=a",
    "LWS_LEADER_ADDRESS": "headway-server-1.headway-server.rl",
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "0",
}
"""What arguments of pods refer to."""
Manifests = list[dict[str, Any]]
KUSTOMIZE = ROOT / "docker" / "kustomize"
COMPONENTS = ("external-redis", "gpus", "scaler")
KUSTOMIZATIONS: dict[str, dict[str, Any]] = {
    name: {"namespace": "rl", "resources": ["base"], "components": [f"components/{name}"]}
    for name in COMPONENTS
} | {
    "base": {"resources": ["base"]},
    "example": {"resources": ["overlays/example"]},
    "all": {
        "namespace": "rl",
        "resources": ["base"],
        "components": [f"components/{name}" for name in COMPONENTS],
    },
    "own file": {
        "resources": ["base"],
        "configMapGenerator": [
            {"name": "headway-gateway-config", "behavior": "merge", "files": ["gateway.yaml"]}
        ],
    },
}
"""By name; folders are those of `docker/kustomize`."""
with_kubectl = pytest.mark.skipif(
    not engine_python("helm").with_name("kubectl").exists(),
    reason="no kubectl beside Helm; run `make helm`, on x86-64",
)


def helm(releases: list[tuple[str, dict[str, Any] | str]], *versions: str) -> dict[str, Any]:
    """What Helm makes of each release, a name with values, or kustomize of a folder in their place, and
    what the schemas of versions say of it."""
    script, chart = Path(__file__).with_name("render_chart.py"), ROOT / "docker" / "chart"
    ended = subprocess.run(
        [engine_python("helm"), script, chart, *versions],
        input=json.dumps(releases),
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return dict(json.loads(ended.stdout))


@pytest.fixture(scope="module")
def rendered() -> dict[str, Any]:
    """What Helm and the schemas say of every option, and of every refused one."""
    releases: list[tuple[str, dict[str, Any] | str]]
    releases = [("headway", values) for values in OPTIONS.values()]
    releases += [("headway", values) for values, _ in REFUSED.values()]
    releases += [("other", {})]
    told = helm(releases, *VERSIONS)
    return told | dict(zip([*OPTIONS, *REFUSED, "other"], told["rendered"], strict=True))


@pytest.fixture(scope="module")
def customized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What kustomize and the schemas say of each kustomization."""
    root = tmp_path_factory.mktemp("kustomize")
    file = yaml.safe_load((KUSTOMIZE / "base/config/gateway.yaml").read_text())
    own = yaml.safe_dump(file | {"sessions": {"idle_timeout_s": 60.0}})
    for name, kustomization in KUSTOMIZATIONS.items():
        folder = root / name
        folder.mkdir()
        (folder / "gateway.yaml").write_text(own)
        places = {
            kind: [os.path.relpath(KUSTOMIZE / place, folder) for place in kustomization[kind]]
            for kind in ("resources", "components")
            if kind in kustomization
        }
        (folder / "kustomization.yaml").write_text(json.dumps({**kustomization, **places}))
    told = helm([("headway", str(root / name)) for name in KUSTOMIZATIONS], *VERSIONS)
    return dict(zip(KUSTOMIZATIONS, told["rendered"], strict=True))


def find(manifests: Manifests, kind: str, name: str) -> dict[str, Any]:
    (found,) = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def pods(manifests: Manifests) -> Iterator[tuple[str, dict[str, Any]]]:
    """Component and template of all that makes pods."""
    for manifest in manifests:
        spec = manifest.get("spec", {})
        group = spec.get("leaderWorkerTemplate", {})
        for template in (spec.get("template"), *(group.get(name) for name in GROUP)):
            if template:
                yield template["metadata"]["labels"]["app.kubernetes.io/component"], template


def config_of(manifests: Manifests, role: str, folder: Path, **of_pod: str) -> Any:
    """A role's file, loaded as its process loads it.

    Args:
        of_pod: variables of its pod, if they matter.
    """
    said = KUBERNETES_SAYS | of_pod
    template = dict(pods(manifests))[role]
    (volume,) = [v for v in template["spec"]["volumes"] if v["name"] == "config"]
    ((name, text),) = find(manifests, "ConfigMap", volume["configMap"]["name"])["data"].items()
    (folder / name).write_text(text)
    words = template["spec"]["containers"][0]["args"]
    assert words[:2] == ["--config", f"/etc/headway/{name}"]
    words = [re.sub(r"\$\((\w+)\)", lambda m: said[m[1]], word) for word in words[2:]]
    return load_config(CONFIG_OF_TARGET[TARGETS[role]], ["--config", str(folder / name), *words])


def test_helm_has_nothing_to_say(rendered: dict[str, Any]) -> None:
    assert [message["error"] for message in rendered["lint"]["messages"]] == ["icon is recommended"]


def check(told: dict[str, Any], folder: Path) -> None:
    """What holds for all manifests: the schemas say nothing, pods may do little, files load."""
    problems = [p for p in told["problems"] if (p[1], p[3]) not in WITHOUT_SCHEMA]
    assert problems == []
    for role, template in pods(told["manifests"]):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] == (role == "scaler")
        assert spec["securityContext"]["runAsNonRoot"]
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= {
                volume["name"]
                for volume in [*spec.get("volumes", []), {"name": "data"}]  # Redis's own
            }
        if role in TARGETS:
            config_of(told["manifests"], role, folder)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_valid_and_its_files_load(
    rendered: dict[str, Any], option: str, tmp_path: Path
) -> None:
    check(rendered[option], tmp_path)


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_values_are_refused_by_name(rendered: dict[str, Any], case: str) -> None:
    assert REFUSED[case][1] in rendered[case]["refused"]


def test_options_change_what_they_name(rendered: dict[str, Any], tmp_path: Path) -> None:
    def template(option: str, role: str) -> dict[str, Any]:
        return dict(pods(rendered[option]["manifests"]))[role]["spec"]

    limits = template("gpus", "trainer")["containers"][0]["resources"]["limits"]
    assert limits == {"memory": "64Gi", "nvidia.com/gpu": 4}
    assert config_of(rendered["gpus"]["manifests"], "server", tmp_path).backend.device == "cuda"
    assert (
        config_of(rendered["an engine"]["manifests"], "server", tmp_path).backend.type == "sglang"
    )
    assert config_of(rendered["gpus"]["manifests"], "trainer", tmp_path).trainer.device == "cuda"
    ranks = {
        each["name"]: each.get("value")
        for each in template("nodes", "trainer")["containers"][0]["env"]
    }
    assert (ranks["PET_NNODES"], ranks["PET_NPROC_PER_NODE"]) == ("2", "8")
    job = find(rendered["nodes"]["manifests"], "Job", "headway-trainer")["spec"]
    assert job["completions"] == job["parallelism"] == 2
    elsewhere = config_of(rendered["another Redis"]["manifests"], "gateway", tmp_path)
    assert elsewhere.ledger == OPTIONS["another Redis"]["redis"]["url"]
    assert "headway-redis" not in json.dumps(rendered["another Redis"]["manifests"])
    assert "trainer" not in dict(pods(rendered["no trainer"]["manifests"]))
    assert config_of(rendered["no trainer"]["manifests"], "server", tmp_path).weights.allow == ()
    assert "headway-runs" not in json.dumps(rendered["own volume"]["manifests"])
    image = template("another registry", "server")["containers"][0]["image"]
    assert image == "registry.example.com/headway-inference:1.2.3"
    own = rendered["own files"]["manifests"]
    assert config_of(own, "gateway", tmp_path).fleet.server_wait_s == 10.0
    trainer = config_of(own, "trainer", tmp_path)
    assert (trainer.optimizer.lr, trainer.data.batch_size) == (2e-6, 16)
    assert trainer.data.prompt_template  # ours, beside theirs


def test_processes_find_one_another(rendered: dict[str, Any], tmp_path: Path) -> None:
    manifests = rendered["defaults"]["manifests"]
    gateway, server, trainer = (config_of(manifests, role, tmp_path) for role in TARGETS)
    assert isinstance(gateway, GatewayConfig)
    assert isinstance(server, ServerConfig)
    assert isinstance(trainer, GRPOExperiment)
    for config in (gateway, server):
        check_exposure(config.service)
    (port,) = find(manifests, "Service", "headway-gateway")["spec"]["ports"]
    assert trainer.rollout.url == server.gateway == f"http://headway-gateway:{port['port']}"
    assert server.weights.allow == (trainer.weight_sync.advertise_url,)
    # A pod of an indexed job is named by its number, below the job's Service.
    assert trainer.weight_sync.advertise_url == "http://headway-trainer-0.headway-trainer:29600"
    job = dict(pods(manifests))["trainer"]["spec"]
    assert job["subdomain"] == find(manifests, "Service", "headway-trainer")["metadata"]["name"]
    assert isinstance(make_ledger(gateway.ledger), RedisLedger)
    assert (
        f"redis://{find(manifests, 'Service', 'headway-redis')['metadata']['name']}:"
        in gateway.ledger
    )


def test_every_token_that_a_file_names_is_in_its_pod(rendered: dict[str, Any]) -> None:
    manifests = rendered["defaults"]["manifests"]
    for role, template in pods(manifests):
        if role not in TARGETS:
            continue
        text = json.dumps(find(manifests, "ConfigMap", f"headway-{role}")["data"])
        env = {each["name"] for each in template["spec"]["containers"][0]["env"]}
        assert set(re.findall(r"HEADWAY_\w+_TOKEN", text)) == {n for n in env if "TOKEN" in n}


def test_what_selects_pods_selects_those_of_this_release(rendered: dict[str, Any]) -> None:
    def selectors(manifests: Manifests) -> Iterator[tuple[str, dict[str, str]]]:
        for manifest in manifests:
            spec = manifest.get("spec", {})
            selector = spec.get("selector") or spec.get("podSelector")
            if selector and manifest["kind"] != "PodMonitor":
                yield manifest["metadata"]["name"], selector.get("matchLabels", selector)

    ours = [t["metadata"]["labels"] for _, t in pods(rendered["defaults"]["manifests"])]
    others = [t["metadata"]["labels"] for _, t in pods(rendered["other"]["manifests"])]
    for name, wanted in selectors(rendered["defaults"]["manifests"]):
        found = [labels for labels in ours if wanted.items() <= labels.items()]
        assert len(found) == (4 if name == "headway" else 1)
        assert not [labels for labels in others if wanted.items() <= labels.items()]


@pytest.mark.parametrize(("role", "path"), [("gateway", "/health"), ("server", "/ready")])
def test_probes_and_grace(rendered: dict[str, Any], role: str, path: str, tmp_path: Path) -> None:
    manifests = rendered["defaults"]["manifests"]
    spec = dict(pods(manifests))[role]["spec"]
    (container,) = spec["containers"]
    config = config_of(manifests, role, tmp_path)
    assert container["ports"] == [{"name": "http", "containerPort": config.service.port}]
    assert container["readinessProbe"]["httpGet"] == {"path": path, "port": "http"}
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    if isinstance(config, ServerConfig):
        assert spec["terminationGracePeriodSeconds"] > config.service.drain_timeout_s + 20


@pytest.mark.parametrize("role", TARGETS)
def test_pods_run_what_the_images_hold(rendered: dict[str, Any], role: str) -> None:
    spec = dict(pods(rendered["defaults"]["manifests"]))[role]["spec"]
    assert spec["containers"][0]["image"] == f"headway-{TARGETS[role]}:latest"
    assert arguments(TARGETS[role], "CMD")[0] == spec["containers"][0]["args"][0] == "--config"
    assert f"--uid {spec['securityContext']['runAsUser']} headway" in DOCKERFILE
    assert TARGETS[role] in stages()


def test_a_wrong_file_ends_the_job_and_an_eviction_does_not(rendered: dict[str, Any]) -> None:
    job = find(rendered["defaults"]["manifests"], "Job", "headway-trainer")["spec"]
    evicted, wrong = job["podFailurePolicy"]["rules"]
    assert (evicted["action"], wrong["action"]) == ("Ignore", "FailJob")
    (check,) = job["template"]["spec"]["initContainers"]
    assert wrong["onExitCodes"] == {
        "containerName": check["name"],
        "operator": "In",
        "values": [EXIT_USAGE],
    }
    assert check["command"] == ["headway", "config", "check", "/etc/headway/trainer.yaml"]


def test_keda_reads_what_the_gateway_says(rendered: dict[str, Any]) -> None:
    manifests = rendered["keda"]["manifests"]
    assert "replicas" not in find(manifests, "Deployment", "headway-server")["spec"]
    (trigger,) = find(manifests, "ScaledObject", "headway-server")["spec"]["triggers"]
    assert trigger["metadata"]["valueLocation"] in ScaleResponse.model_fields
    # KEDA is of another namespace.
    assert trigger["metadata"]["url"] == "http://headway-gateway.rl:8000/v1/scale"


def test_the_scaler_may_do_what_it_does_and_no_more(rendered: dict[str, Any]) -> None:
    manifests = rendered["scaler"]["manifests"]
    assert "replicas" not in find(manifests, "Deployment", "headway-server")["spec"]
    (rule,) = find(manifests, "Role", "headway-scaler")["rules"]
    assert rule == {
        "apiGroups": ["apps"],
        "resources": ["deployments/scale"],
        "resourceNames": ["headway-server"],
        "verbs": ["get", "patch"],
    }
    spec = dict(pods(manifests))["scaler"]["spec"]
    (account,) = find(manifests, "RoleBinding", "headway-scaler")["subjects"]
    assert spec["serviceAccountName"] == account["name"]
    (container,) = spec["containers"]
    program, name, *words = [*container["command"], *container["args"]]
    assert program == "headway"
    command = importlib.import_module(COMMANDS[name][0]).command
    given = command.make_context(name, words).params
    assert (given["deployment"], given["min_servers"], given["max_servers"]) == (
        "headway-server",
        2,
        9,
    )
    assert given["token_env"] == container["env"][0]["name"]


def test_a_group_of_pods_is_one_engine(rendered: dict[str, Any], tmp_path: Path) -> None:
    manifests = rendered["an engine on nodes"]["manifests"]
    group = find(manifests, "LeaderWorkerSet", "headway-server")["spec"]
    assert group["replicas"] == 2
    assert group["leaderWorkerTemplate"].keys() == {"size", "restartPolicy", *GROUP}
    assert group["leaderWorkerTemplate"]["size"] == 2
    assert group["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert "headway-server" not in {
        m["metadata"]["name"] for m in manifests if m["kind"] == "Deployment"
    }
    # Each pod becomes its node of the same engine, by what the group's controller tells it.
    first, later = (dict(pods(manifests))[role] for role in ("server", "engine"))
    (leader,), (worker,) = (template["spec"]["containers"] for template in (first, later))
    assert leader["args"] == worker["args"] and leader["image"] == worker["image"]
    assert leader["resources"] == worker["resources"]
    assert leader["resources"]["limits"]["nvidia.com/gpu"] == 8
    for rank in (0, 1):
        config = config_of(manifests, "server", tmp_path, LWS_WORKER_INDEX=str(rank))
        assert config.backend.args == {
            "--tp-size": 16,
            "--nnodes": 2,
            "--node-rank": rank,
            "--dist-init-addr": "headway-server-1.headway-server.rl:20000",
        }
        assert is_later_node(config.backend) == (rank > 0)
    # The others read the versions that the first one writes.
    mounts = [{m["name"]: m for m in pod["volumeMounts"]}["versions"] for pod in (leader, worker)]
    assert [mount["readOnly"] for mount in mounts] == [False, True]
    assert {mount["mountPath"] for mount in mounts} == {"/versions"}
    assert config.weights.cache_dir == "/versions/headway-server-1.headway-server.rl"
    # The server is with the first node alone.
    assert "readinessProbe" in leader and worker.keys().isdisjoint({*leader} - {*worker})
    assert {"startupProbe", "readinessProbe", "livenessProbe", "ports"} == {*leader} - {*worker}
    assert [each["name"] for each in worker["env"]] == ["POD_IP"]
    budget = find(manifests, "PodDisruptionBudget", "headway-server")["spec"]["selector"]
    assert budget == {"matchLabels": {"leaderworkerset.sigs.k8s.io/name": "headway-server"}}
    policy = find(manifests, "NetworkPolicy", "headway")["spec"]["podSelector"]["matchLabels"]
    assert policy.items() <= later["metadata"]["labels"].items()


def test_keda_scales_groups(rendered: dict[str, Any]) -> None:
    manifests = rendered["an engine on nodes by keda"]["manifests"]
    group = find(manifests, "LeaderWorkerSet", "headway-server")
    assert "replicas" not in group["spec"]
    assert find(manifests, "ScaledObject", "headway-server")["spec"]["scaleTargetRef"] == {
        "apiVersion": group["apiVersion"],
        "kind": group["kind"],
        "name": group["metadata"]["name"],
    }


def test_alerts_and_dashboard_are_ours(rendered: dict[str, Any]) -> None:
    rules = find(rendered["prometheus"]["manifests"], "PrometheusRule", "headway")
    assert rules["spec"] == yaml.safe_load((ROOT / "docker/prometheus/rules.yaml").read_text())
    assert rules["metadata"]["labels"]["release"] == "prometheus"
    policy = find(rendered["prometheus"]["manifests"], "NetworkPolicy", "headway")["spec"]
    assert "namespaceSelector" in json.dumps(policy)
    dashboard = find(rendered["grafana"]["manifests"], "ConfigMap", "headway-dashboard")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    shown = json.loads(dashboard["data"]["headway.json"])
    assert shown == json.loads((ROOT / "docker/grafana/dashboard.json").read_text())


def test_the_base_is_what_the_chart_renders(tmp_path: Path) -> None:
    script = KUSTOMIZE / "from_chart.py"
    subprocess.run([engine_python("helm"), script, tmp_path], capture_output=True, check=True)
    written = [file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()]
    assert len(written) == 5
    for file in written:
        assert (KUSTOMIZE / file).read_text() == (tmp_path / file).read_text(), (
            f"docker/kustomize/{file} is old; run `make kustomize`"
        )


@with_kubectl
@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_every_kustomization_is_valid_and_its_files_load(
    customized: dict[str, Any], name: str, tmp_path: Path
) -> None:
    check(customized[name], tmp_path)


def changes(before: Any, after: Any, place: str = "") -> dict[str, Any]:
    """What differs, by its place: what is there now, None where nothing is."""
    if isinstance(before, list) and isinstance(after, list):
        before, after = (dict(enumerate(each)) for each in (before, after))
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return {} if before == after else {place: after}
    found: dict[str, Any] = {}
    for key in [*before, *(key for key in after if key not in before)]:
        found |= changes(before.get(key), after.get(key), f"{place}/{key}")
    return found


def by_name(manifests: Manifests) -> dict[str, Any]:
    """Manifests by kind and name."""
    return {f"{m['kind']} {m['metadata']['name']}": m for m in manifests}


CONTAINER = "spec/template/spec/containers/0"


@with_kubectl
def test_the_base_has_all_that_the_chart_has(
    rendered: dict[str, Any], customized: dict[str, Any]
) -> None:
    def plain(manifests: Manifests) -> Any:
        text = re.sub(r"(headway-\w+)-config-\w{10}\b", r"\1", json.dumps(manifests))
        return by_name(json.loads(text))

    found = changes(
        plain(rendered["defaults"]["manifests"]), plain(customized["base"]["manifests"])
    )
    of_helm = ("app.kubernetes.io/managed-by", "helm.sh/chart", "metadata/annotations")
    assert found and all(place.endswith(of_helm) for place in found)
    assert not any(found.values())


@with_kubectl
def test_a_component_changes_what_it_says_and_no_more(customized: dict[str, Any]) -> None:
    def component(name: str) -> dict[str, Any]:
        before, after = (by_name(customized[each]["manifests"]) for each in ("base", name))
        found = changes(before, after)
        return {place: now for place, now in found.items() if now != "rl"}

    assert component("gpus") == {
        f"/Deployment headway-server/{CONTAINER}/args/4": "--backend.device=cuda",
        f"/Deployment headway-server/{CONTAINER}/resources/limits/nvidia.com/gpu": 1,
        f"/Job headway-trainer/{CONTAINER}/args/2": "--trainer.device=cuda",
        f"/Job headway-trainer/{CONTAINER}/resources/limits/nvidia.com/gpu": 1,
    }
    assert component("external-redis") == {
        "/StatefulSet headway-redis": None,
        "/Service headway-redis": None,
        f"/Deployment headway-gateway/{CONTAINER}/args/4": "--ledger=$(HEADWAY_LEDGER)",
        f"/Deployment headway-gateway/{CONTAINER}/env/5": {
            "name": "HEADWAY_LEDGER",
            "valueFrom": {"secretKeyRef": {"name": "headway-redis", "key": "url"}},
        },
    }
    scaler = component("scaler")
    kinds = ("Deployment", "Role", "RoleBinding", "ServiceAccount")
    added = {f"/{kind} headway-scaler" for kind in kinds}
    assert scaler.keys() == {"/Deployment headway-server/spec/replicas"} | added
    assert scaler["/Deployment headway-server/spec/replicas"] is None


@with_kubectl
def test_the_scaler_is_the_charts(rendered: dict[str, Any], customized: dict[str, Any]) -> None:
    ours, of_chart = (
        {name: m for name, m in by_name(told["manifests"]).items() if "scaler" in name}
        for told in (customized["scaler"], rendered["a scaler"])
    )
    found = changes(of_chart, ours)
    assert {place.rpartition("metadata/")[2] for place in found} == {
        "labels/app.kubernetes.io/managed-by",
        "labels/helm.sh/chart",
        "namespace",
    }
    (account,) = ours["RoleBinding headway-scaler"]["subjects"]
    assert account["namespace"] == "rl"


@with_kubectl
def test_the_example_is_an_overlay_of_ones_own(customized: dict[str, Any], tmp_path: Path) -> None:
    manifests = customized["example"]["manifests"]
    assert {m["metadata"]["namespace"] for m in manifests} == {"rl"}
    images = {
        container["image"]
        for role, template in pods(manifests)
        for container in [
            *template["spec"].get("initContainers", []),
            *template["spec"]["containers"],
        ]
        if role in TARGETS
    }
    assert images == {f"registry.example.com/team/headway-{i}:1.2.3" for i in TARGETS.values()}
    assert find(manifests, "Deployment", "headway-server")["spec"]["replicas"] == 8
    volume = find(manifests, "PersistentVolumeClaim", "headway-runs")["spec"]
    assert volume["storageClassName"] == "fast"
    trainer = config_of(manifests, "trainer", tmp_path)
    assert (trainer.trainer.total_steps, trainer.data.batch_size) == (500, 64)
    assert trainer.trainer.device == "cuda"
    assert config_of(manifests, "server", tmp_path).backend.device == "cuda"


@with_kubectl
def test_a_new_file_is_a_new_pod(customized: dict[str, Any]) -> None:
    def names(name: str) -> dict[str, str]:
        return {
            role: volume["configMap"]["name"]
            for role, template in pods(customized[name]["manifests"])
            for volume in template["spec"].get("volumes", [])
            if volume["name"] == "config"
        }

    before, after = names("base"), names("own file")
    assert {role for role in TARGETS if before[role] != after[role]} == {"gateway"}
    maps = {m["metadata"]["name"] for m in customized["own file"]["manifests"]}
    assert {*after.values()} <= maps and before["gateway"] not in maps


@with_kubectl
def test_a_ledger_comes_from_a_secret(customized: dict[str, Any], tmp_path: Path) -> None:
    gateway = config_of(customized["external-redis"]["manifests"], "gateway", tmp_path)
    assert gateway.ledger == KUBERNETES_SAYS["HEADWAY_LEDGER"]
    assert isinstance(make_ledger(gateway.ledger), RedisLedger)
