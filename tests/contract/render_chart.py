"""Render a chart, and check what comes out by the schemas of Kubernetes: render_chart.py CHART VERSION...

It imports nothing of ours. Run by the interpreter of `make helm`. Releases, each with a name and values,
come as JSON on the standard input. For each it prints the manifests, or why Helm refused the values, and
what the schemas of these versions say.
"""

from __future__ import annotations

import json
import sys
from functools import cache
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


def render(
    chart: helm_python.Chart, versions: list[str], name: str, values: dict[str, Any]
) -> dict[str, Any]:
    try:
        files = chart.render(values, name=name, namespace="rl")
    except helm_python.HelmError as error:
        return {"refused": str(error)}
    manifests = [
        manifest
        for file, text in files.items()
        if file.endswith(".yaml")
        for manifest in yaml.safe_load_all(text)
        if manifest
    ]
    told = [
        [version, manifest["apiVersion"], manifest["kind"], problem]
        for manifest in manifests
        for version in versions
        if (problem := problems(json.dumps(manifest), version)) is not None
    ]
    return {"manifests": manifests, "problems": told}


if __name__ == "__main__":
    path, *versions = sys.argv[1:]
    with helm_python.Chart.load(path) as chart:
        rendered = [render(chart, versions, *release) for release in json.load(sys.stdin)]
    json.dump({"lint": helm_python.lint(path), "rendered": rendered}, sys.stdout)
