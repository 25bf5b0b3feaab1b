"""Pods of rendered manifests as containers of podman, each on a host of `hosts.py`.

What a cluster makes of them, on one machine: Services are names in each pod's /etc/hosts, claims folders.
"""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.integration.hosts import Hosts
from tests.integration.images import podman_run, run

Manifest = dict[str, Any]
COMPONENT = "app.kubernetes.io/component"
LIMIT_S = 60.0
KILLED = 137


class Pod:
    """One container, at an address."""

    def __init__(self, name: str, host: int, address: str, grace_s: int) -> None:
        self.name = name
        self.host = host
        self.address = address
        self._grace_s = grace_s

    def kill(self) -> None:
        """End it with -9."""
        run("podman", "kill", "--signal", "KILL", self.name, timeout_s=LIMIT_S)
        self.wait()

    def terminate(self) -> None:
        """Ask it to end, as a cluster that deletes a pod does."""
        run("podman", "kill", "--signal", "TERM", self.name, timeout_s=LIMIT_S)

    def wait(self, timeout_s: float | None = None) -> int:
        """Exit status once it has ended, within its grace period unless another limit is given."""
        words = ["podman", "wait", self.name]
        return int(run(*words, timeout_s=timeout_s or self._grace_s + 5.0))

    def log(self) -> str:
        told = subprocess.run(
            ["podman", "logs", self.name], capture_output=True, text=True, check=False
        )
        return told.stdout + told.stderr


class Pods:
    """Pods of a release."""

    def __init__(
        self,
        manifests: Sequence[Manifest],
        hosts: Hosts,
        folder: Path,
        claims: Mapping[str, Path],
        secrets: Mapping[str, str],
    ) -> None:
        """
        Args:
            claims: folder of each volume claim, which its pods may write to.
            secrets: value of each key of the one secret.
        """
        self._manifests = manifests
        self._hosts = hosts
        self._folder = folder
        self._claims = claims
        self._secrets = secrets
        self._numbers = itertools.count(10)
        self._names = folder / "names"
        self._names.write_text("127.0.0.1 localhost\n")
        self._pods: list[Pod] = []

    def start(self, component: str, index: int = 0) -> Pod:
        """Start a pod of a Deployment, a StatefulSet or a Job, once its init containers have ended well.

        Args:
            index: of a Job's pod.
        """
        template = self._template(component)
        spec = template["spec"]
        host = next(self._numbers)
        self._hosts.add(host)
        address = self._hosts.address(host)
        name = f"{self._hosts.namespace(host)}-{component}"
        pod = Pod(name, host, address, spec.get("terminationGracePeriodSeconds", 30))
        self._announce(template, pod, index)
        self._pods.append(pod)
        for container in spec.get("initContainers", ()):
            podman_run("--rm", *self._words(container, spec, pod, index, f"{name}-init"))
        (container,) = spec["containers"]
        podman_run("--detach", *self._words(container, spec, pod, index, name))
        return pod

    def close(self) -> None:
        """End all; their logs stay in the folder."""
        for pod in self._pods:
            (self._folder / f"{pod.name}.log").write_text(pod.log())
            run("podman", "rm", "--force", "--ignore", "--time", "0", pod.name, timeout_s=LIMIT_S)

    def _template(self, component: str) -> Manifest:
        (found,) = [
            template
            for manifest in self._manifests
            if (template := manifest.get("spec", {}).get("template"))
            and template["metadata"]["labels"][COMPONENT] == component
        ]
        return dict(found)

    def _announce(self, template: Manifest, pod: Pod, index: int) -> None:
        """Give the pod its name, and those of its Services, also one that lasts."""
        labels = template["metadata"]["labels"].items()
        services = [
            manifest["metadata"]["name"]
            for manifest in self._manifests
            if manifest["kind"] == "Service" and manifest["spec"]["selector"].items() <= labels
        ]
        lasting = [f"{name}-{index}.{name}" for name in services]
        with self._names.open("a") as file:
            file.write(f"{pod.address} {' '.join([pod.name, *services, *lasting])}\n")

    def _words(
        self, container: Manifest, spec: Manifest, pod: Pod, index: int, name: str
    ) -> list[str]:
        rights, user = container["securityContext"], spec["securityContext"]
        assert rights["readOnlyRootFilesystem"]
        assert not rights["allowPrivilegeEscalation"]
        assert user["runAsNonRoot"]
        network = f"ns:/run/netns/{self._hosts.namespace(pod.host)}"
        words = ["--name", name, "--hostname", pod.name, "--network", network]
        words += ["--read-only", "--read-only-tmpfs=false", "--no-healthcheck"]
        words += ["--user", f"{user['runAsUser']}:{user['runAsGroup']}"]
        words += ["--cap-drop", "all", "--security-opt", "no-new-privileges"]
        words += [f"--memory={container['resources']['limits']['memory'].lower().rstrip('i')}"]
        for variable in container.get("env", ()):
            words += ["--env", f"{variable['name']}={self._value(variable, pod, index)}"]
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        for mount in container["volumeMounts"]:
            words += self._mount(volumes.get(mount["name"], {}), mount, pod, user["runAsUser"])
        words += ["--volume", f"{self._names}:/etc/hosts:ro"]
        command = container.get("command", [])
        words += ["--entrypoint", command[0]] if command else []
        arguments = [word.replace("$(POD_IP)", pod.address) for word in container.get("args", ())]
        return [*words, container["image"], *command[1:], *arguments]

    def _value(self, variable: Manifest, pod: Pod, index: int) -> str:
        if "value" in variable:
            return str(variable["value"])
        source = variable["valueFrom"]
        if "secretKeyRef" in source:
            return self._secrets[source["secretKeyRef"]["key"]]
        path = source["fieldRef"]["fieldPath"]
        return pod.address if path == "status.podIP" else str(index)

    def _mount(self, volume: Manifest, mount: Manifest, pod: Pod, user: int) -> list[str]:
        place = mount["mountPath"]
        access = "ro" if mount.get("readOnly") else "rw"
        empty = volume.get("emptyDir")
        if empty is not None and empty.get("medium") == "Memory":
            size = empty.get("sizeLimit", "1Gi").lower().rstrip("i")
            return ["--mount", f"type=tmpfs,destination={place},tmpfs-size={size},tmpfs-mode=1777"]
        if "configMap" in volume:
            source = self._config(volume["configMap"]["name"])
        elif "persistentVolumeClaim" in volume:
            source = self._claims[volume["persistentVolumeClaim"]["claimName"]]
        else:  # empty, or a StatefulSet's own claim
            source = self._folder / f"{pod.name}-{mount['name']}"
            source.mkdir(exist_ok=True)
        if access == "rw":
            run("chown", str(user), source)
        return ["--volume", f"{source}:{place}:{access}"]

    def _config(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        (manifest,) = [
            manifest
            for manifest in self._manifests
            if (manifest["kind"], manifest["metadata"]["name"]) == ("ConfigMap", name)
        ]
        for file, text in manifest["data"].items():
            (folder / file).write_text(text)
        return folder
