"""A package outside of ours, installed: its interface and its backends (files of `examples/`) train and
serve by a configuration alone, and its tests run the suites that every backend passes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from headway.launch.quickstart import task
from tests.numeric.models import save_model, write_char_tokenizer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DEADLINE_S = 500
FILES = (
    "custom_interface/focal_loss.py",
    "custom_backend/calm.py",
    "custom_backend/remembering.py",
)
# Importing a file also registers what it holds, under the name of the example.
ENTRY_POINTS = """
[headway.model_interfaces]
their_loss = their_parts.focal_loss:FocalLoss

[headway.train_backends]
their_engine = their_parts.calm:CalmEngine

[headway.generation_backends]
their_server = their_parts.remembering:RememberingBackend
"""
pytestmark = [pytest.mark.extended, pytest.mark.timeout(DEADLINE_S + 30)]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the installed package, and one with its tests."""
    site = tmp_path_factory.mktemp("site")
    package, info = site / "their_parts", site / "their_parts-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("")
    for file in FILES:
        shutil.copy(EXAMPLES / file, package)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-parts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return site


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "scratch"
    task.write_model(folder)
    return folder


def run(site: Path, folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv],
        env=os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_their_loss_and_their_engine_train_by_a_configuration(site, model_dir, tmp_path):
    for name, count, seed in (("train", 400, 0), ("held_out", 40, 1)):
        task.write_rows(tmp_path / f"{name}.jsonl", task.make_rows(count, seed))
    tree = yaml.safe_load((EXAMPLES / "custom_interface" / "sft.yaml").read_text())
    tree["model"]["path"] = str(model_dir)
    tree["data"]["path"], tree["held_out"] = "train.jsonl", {"path": "held_out.jsonl"}
    tree["run_dir"], tree["output_dir"] = "run", "out"
    tree["dataflow"]["calls"][0]["interface"]["name"] = "their_loss"
    tree["trainer"] |= {"modules": [], "backend": "their_engine", "total_steps": 30}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(tree))
    shown = run(site, tmp_path, "-m", "headway.launch.cli", "config", "graph", "sft.yaml")
    assert "sft_train: train_step of model (their_loss)" in shown.stdout, shown.stderr
    done = run(site, tmp_path, "-m", "trainer", "--config", "sft.yaml")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if "step" in step]
    assert [step["step"] for step in steps] == list(range(30))
    assert steps[-1]["loss"] < 0.75 * steps[0]["loss"]
    assert 0.0 < steps[-1]["surprise"] < steps[0]["surprise"]
    assert 0.0 < steps[-1]["eval_loss"] < 0.75 * steps[0]["loss"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)


SERVE = """
import asyncio, sys
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import ServerConfig
from headway.contracts.types import LLMRequest
from headway.runtime.config import load_config
from inference_server.engine import make_generator

async def main():
    generator = make_generator(load_config(ServerConfig, ["--config", sys.argv[1]]))
    await generator.backend.start()
    gconfig = SamplingConfig(max_new_tokens=5, temperature=0.0, ignore_eos=True)
    one, two = [
        await generator.agenerate(LLMRequest(rid=rid, input_ids=(2, 3), gconfig=gconfig))
        for rid in ("one", "two")
    ]
    print(type(generator.backend).__name__, one.output_tokens == two.output_tokens, two.latency_s)
    await generator.aclose()

asyncio.run(main())
"""


def test_their_server_generates_by_a_configuration(site, tmp_path):
    model_dir = save_model(tmp_path / "model", "llama")
    write_char_tokenizer(model_dir)
    tree = yaml.safe_load((EXAMPLES / "custom_backend" / "server.yaml").read_text())
    tree["model"]["path"], tree["modules"] = str(model_dir), []
    tree["backend"]["name"] = "their_server"
    (tmp_path / "server.yaml").write_text(yaml.safe_dump(tree))
    done = run(site, tmp_path, "-c", SERVE, "server.yaml")
    assert done.stdout == "RememberingBackend True 0.0\n", done.stderr[-3000:]


BROKEN_BACKENDS = '''

class Stepping(CalmEngine):
    """Learns from what it is asked to evaluate."""

    def eval_batch(self, input_, mb_spec, loss_fn, loss_weight_fn, scope="global"):
        loss = super().eval_batch(input_, mb_spec, loss_fn, loss_weight_fn, scope)
        if loss.ndim == 0:
            super().train_batch(input_, mb_spec, loss_fn, loss_weight_fn, scope)
        return loss


class TestStepping(TrainEngineContract):
    make_engine = Stepping


class Forgetful(RememberingBackend):
    """Stamps every token with the version that it began with."""

    async def generate(self, req, on_delta=None):
        response = await super().generate(req, on_delta)
        runs = [(3, 0, len(response.output_tokens))]
        return response.model_copy(update={"version_runs": runs})


class TestForgetful(GenerationBackendContract):
    def make_backend(self, model, version):
        args = Forgetful.Args(kv_cache_bytes=1 << 25, num_threads=1)
        return Forgetful(args, model, version, None)
'''
BROKEN = (
    "TestStepping::test_an_evaluation_changes_nothing_and_takes_a_vector",
    "TestForgetful::test_a_version_serves_once_it_is_swapped_in",
)


def test_the_suites_pass_their_backends_and_fail_broken_ones(site, tmp_path):
    tests = (EXAMPLES / "custom_backend" / "test_backends.py").read_text()
    for name in ("calm", "remembering"):
        tests = tests.replace(f"from {name}", f"from their_parts.{name}")
    (tmp_path / "test_theirs.py").write_text(tests + BROKEN_BACKENDS)
    flags = ("-q", "-rA", "-p", "no:asyncio", "-p", "no:cacheprovider", "-o", "addopts=")
    file = "test_theirs.py"
    wanted = [f"{file}::{name}" for name in ("TestCalm", "TestRemembering", *BROKEN)]
    done = run(site, tmp_path, "-m", "pytest", *flags, *wanted)
    results = re.findall(r"^(PASSED|FAILED|ERROR) test_theirs.py::(\w+)::(\w+)", done.stdout, re.M)
    passed = {(case, test) for result, case, test in results if result == "PASSED"}
    failed = {(case, test) for result, case, test in results if result != "PASSED"}
    assert {f"{case}::{test}" for case, test in failed} == {*BROKEN}, done.stdout[-5000:]
    assert sum(case == "TestCalm" for case, _ in passed) >= 18
    assert sum(case == "TestRemembering" for case, _ in passed) >= 18
