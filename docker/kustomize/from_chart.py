"""Write what the chart renders as a base for kustomize: from_chart.py [FOLDER]

Run by `make kustomize`, after a change of the chart. Config files become files of their own: kustomize
names a ConfigMap by what is in it, so a new file is a new pod.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import yaml

HERE = Path(__file__).parent
HEADING = "# Written from docker/chart by `make kustomize`.\n"
OF_HELM = re.compile(
    r"^ *(app\.kubernetes\.io/managed-by|helm\.sh/chart): .*\n"
    r"|^ *annotations:\n *headway/config: .*\n"
    r"|, namespace: default(?=})"
    r"|^ +\n",
    re.MULTILINE,
)
"""Labels that only Helm needs, checksums of config files, the namespace, and lines left empty."""
CONFIG_MAP = re.compile(r"(?<=configMap: {name: )([a-z-]+)")
"""Those of kustomize have a name of their own: it would take the Deployment in a Role for one."""


def files_of(chart: helm_python.Chart) -> dict[str, str]:
    """All files, by their paths below `docker/kustomize`."""
    files: dict[str, str] = {}
    manifests = []
    for text in documents(chart, {}):
        manifest = yaml.safe_load(text)
        if manifest["kind"] == "ConfigMap":
            files |= {f"base/config/{name}": file for name, file in manifest["data"].items()}
        else:
            manifests.append(plain(text))
    scaler = map(plain, documents(chart, {"scaling": {"by": "headway"}}, "scaling.yaml"))
    files["base/headway.yaml"] = HEADING + "---\n".join(manifests)
    files["components/scaler/scaler.yaml"] = HEADING + "---\n".join(scaler)
    return files


def documents(
    chart: helm_python.Chart, values: dict[str, Any], template: str = ".yaml"
) -> Iterator[str]:
    """The manifests of templates whose name ends so."""
    for name, text in chart.render(values, name="headway", namespace="default").items():
        if name.endswith(template):
            yield from filter(str.strip, re.split(r"^---\n", text, flags=re.MULTILINE))


def plain(document: str) -> str:
    """A manifest without what is Helm's."""
    return CONFIG_MAP.sub(r"\1-config", OF_HELM.sub("", document)).strip() + "\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else HERE
    with helm_python.Chart.load(str(HERE.parent / "chart")) as loaded:
        for path, text in files_of(loaded).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
