"""The example of docs/training/workers.md runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.pages import ROOT, examples_of
from tests.numeric.models import save_model

DEADLINE_S = 200


@pytest.mark.extended
def test_the_example_runs(tmp_path: Path):
    (example,) = [
        block.text for block in examples_of(ROOT / "docs" / "training" / "workers.md", "python")
    ]
    script = tmp_path / "train.py"
    script.write_text(example)
    model = save_model(tmp_path / "model", "llama")
    done = subprocess.run(
        [sys.executable, script, model, "2"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.fullmatch(r"6 rows, gradient norm \d+\.\d{3}\n", done.stdout)
