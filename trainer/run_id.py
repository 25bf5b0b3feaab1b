"""The name of a run, which all that resume it keep."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from trainer.topology import Topology

RUN_NAME = "run.json"


def kept_run_id(run_dir: Path, is_resumed: bool, topology: Topology) -> str:
    """A new one, kept in the run folder for a resume without checkpoint; `""` but on the first rank."""
    file = run_dir / RUN_NAME
    if not topology.is_main:
        return ""
    if is_resumed and file.is_file():
        return str(json.loads(file.read_text())["run_id"])
    name = uuid.uuid4().hex[:8]
    run_dir.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"run_id": name}))
    return name
