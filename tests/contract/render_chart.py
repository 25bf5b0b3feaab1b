"""Render a chart, and check what comes out by the schemas of Kubernetes: render_chart.py CHART VERSION...

It imports nothing of ours. Run by the interpreter of `make helm`. Releases, each with a name and values
or the folder of a kustomization, come as JSON on the standard input. For each it prints the manifests, or
why Helm refused the values, and what the schemas of these versions say.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate as schemas
import yaml


@cache
def problems(manifest: str, version: str) -> str | None:
    """What the schemas of a version say of a manifest as JSON; most are the same in all releases."""
    try:
        schemas.validate(json.loads(manifest), version, strict=True)
    except schemas.SchemaNotFoundError:
        return "no schema"
    except schemas.ValidationError as error:
        return str(error.message)
    return None


def with_schema(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A manifest, and the templates of its pods where it has no schema itself."""
    yield manifest
    templates = manifest.get("spec", {}).get("leaderWorkerTemplate", {})
    for name in ("leaderTemplate", "workerTemplate"):
        if name in templates:
            metadata = {"name": name.lower()}
            yield {
                **{"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata},
                "template": templates[name],
            }


def render(
    chart: helm_python.Chart, versions: list[str], name: str, values: dict[str, Any] | str
) -> dict[str, Any]:
    if isinstance(values, str):
        command = [str(Path(sys.executable).with_name("kubectl")), "kustomize", values]
        texts = [subprocess.run(command, capture_output=True, text=True, check=True).stdout]
    else:
        try:
            files = chart.render(values, name=name, namespace="rl")
        except helm_python.HelmError as error:
            return {"refused": str(error)}
        texts = [text for file, text in files.items() if file.endswith(".yaml")]
    manifests = [m for text in texts for m in yaml.safe_load_all(text) if m]
    told = [
        [version, checked["apiVersion"], checked["kind"], problem]
        for manifest in manifests
        for checked in with_schema(manifest)
        for version in versions
        if (problem := problems(json.dumps(checked), version)) is not None
    ]
    return {"manifests": manifests, "problems": told}


if __name__ == "__main__":
    path, *versions = sys.argv[1:]
    with helm_python.Chart.load(path) as chart:
        rendered = [render(chart, versions, *release) for release in json.load(sys.stdin)]
    json.dump({"lint": helm_python.lint(path), "rendered": rendered}, sys.stdout)
