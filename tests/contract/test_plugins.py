"""Parts that an installed package adds through entry points are chosen by a configuration file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60

ENTRY_POINTS = """
[headway.generation_backends]
echo = echo_parts.backend:Echo
bare = echo_parts.backend:Bare

[headway.train_backends]
layered = echo_parts.train_backend:Layered

[headway.weight_transports]
mirror = echo_parts.transport:CHANNEL

[headway.policy_losses]
hinge = echo_parts.losses:HINGE
bare = echo_parts.losses:Bare

[headway.advantage_estimators]
sign = echo_parts.losses:SIGN

[headway.experiments]
echo-rl = echo_parts.experiment:ROLLOUTS
echo-rows = echo_parts.experiment:ROWS
"""
BACKEND = """
from headway.contracts.config.base import Config
from headway.contracts.config.server import FakeBackendConfig
from inference_server.backends.fake import FakeBackend


class Args(Config):
    vocabulary: int = 50


class Echo(FakeBackend):
    Args = Args

    def __init__(self, args, model, version, tokenizer):
        super().__init__(FakeBackendConfig(vocab_size=args.vocabulary), model, version, tokenizer)


def Bare(*args):
    raise AssertionError("it has no Args")
"""
TRANSPORT = '''
from headway.contracts.config.weight_sync import PublishConfig, SharedMemorySync
from weight_sync.transports.shared_memory import CHANNEL as SHARED


class Args(PublishConfig):
    folder: str


class Mirror:
    """Shared memory under another name."""

    schemes = ("mirror",)
    Args = Args

    def make_publisher(self, config):
        settings = config.model_dump(exclude={"folder"})
        return SHARED.make_publisher(SharedMemorySync(root=config.folder, **settings))

    def open_source(self, path, meta, config, deadline):
        return SHARED.open_source("shm" + path.removeprefix("mirror"), meta, config, deadline)


CHANNEL = Mirror()
'''
TRAIN_BACKEND = """
from headway.contracts.config.base import Config


class Args(Config):
    tensor_parallel_size: int = 1


class Layered:
    Args = Args

    def __init__(self, model, optimizer, trainer, topology, publisher, args):
        self.size = args.tensor_parallel_size
"""
LOSSES = """
from headway.contracts.config.base import Config
from trainer.algorithms.advantage_registry import AdvantageEstimator, Advantages
from trainer.algorithms.policy_loss_registry import PolicyLoss


class Args(Config):
    margin: float = 1.0


def hinge(args, tokens):
    gap = args.margin - tokens.log_ratios * tokens.advantages
    return gap.clamp(min=0.0), gap < 0


def sign(args, batch):
    return Advantages(batch.per_token(batch.rewards.sign()))


class Bare:
    Args = None


HINGE = PolicyLoss(hinge, Args)
SIGN = AdvantageEstimator(sign)
"""
EXPERIMENT = '''
from typing import Literal

from headway.contracts.config.experiment import GRPOExperiment, SFTExperiment
from trainer.experiments.base import Experiment


class EchoExperiment(GRPOExperiment):
    type: Literal["echo-rl"] = "echo-rl"
    loudness: float = 0.5
    """How loud the echo is."""


class RowsExperiment(SFTExperiment):
    type: Literal["echo-rows"] = "echo-rows"


def run(config):
    print("ran", type(config).__name__, config.loudness)


ROLLOUTS = Experiment(EchoExperiment, run)
ROWS = Experiment(RowsExperiment, run)
'''
Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_python(tmp_path: Path) -> Python:
    """Runs Python where the package is installed; every process reads its entry points itself."""
    site = tmp_path / "site"
    package, info = site / "echo_parts", site / "echo_parts-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-parts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (package / "__init__.py").write_text("")
    for name, text in (
        ("backend", BACKEND),
        ("transport", TRANSPORT),
        ("train_backend", TRAIN_BACKEND),
        ("losses", LOSSES),
        ("experiment", EXPERIMENT),
    ):
        (package / f"{name}.py").write_text(text)

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *argv],
            env=os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    return run


def write(file: Path, **sections: object) -> str:
    file.write_text(yaml.safe_dump(sections))
    return str(file)


def learner(**sections: object) -> dict[str, object]:
    """The settings that every experiment on rollouts has to be given."""
    return {
        "model": {"path": "model"},
        "data": {"path": "rows.jsonl"},
        "rollout": {"reward": {"name": "exact"}},
        "weight_sync": {"root": "weights"},
        **sections,
    }


GENERATE = """
import asyncio, sys
from headway.contracts.config.server import ServerConfig
from headway.contracts.types import LLMRequest
from headway.runtime.config import load_config
from inference_server.engine import make_generator

async def main():
    generator = make_generator(load_config(ServerConfig, ["--config", sys.argv[1]]))
    backend = generator.backend
    await backend.start()
    response = await backend.generate(LLMRequest(rid="a", input_ids=(1, 2)))
    print(type(backend).__name__, backend.limits.vocab_size, max(response.output_tokens) < 50)
    await generator.aclose()

asyncio.run(main())
"""


def test_a_server_generates_with_the_backend_of_an_installed_package(run_python, tmp_path):
    backend = {"type": "plugin", "name": "echo", "args": {"vocabulary": 50}, "num_gpus": 0}
    file = write(tmp_path / "server.yaml", model={"path": "model"}, backend=backend)
    checked = run_python("-m", "headway.launch.cli", "config", "check", file)
    assert "right, as a configuration of `server`" in checked.stdout, checked.stderr
    done = run_python("-c", GENERATE, file)
    assert done.stdout == "Echo 50 True\n", done.stderr


WRONG_BACKENDS = """
from headway.contracts.config.server import PluginBackendConfig
from headway.contracts.errors import ConfigError
from inference_server.backends.base import make_backend

for name, args in (("ecco", {}), ("echo", {"vocabulery": 1}), ("bare", {}), ("fake", {})):
    try:
        make_backend(PluginBackendConfig(name=name, args=args), None, 0, None)
    except ConfigError as error:
        print(error)
"""
PROBLEMS = (
    r"no generation backend named 'ecco'; known: .*did you mean 'echo'",
    r"unknown key vocabulery; did you mean 'vocabulary'",
    r"name=bare: .* has no `Args`, a subclass of Config",
    r"a part of Headway itself is chosen by type=fake",
)


def test_a_server_says_what_is_wrong_with_its_plug_in(run_python):
    done = run_python("-c", WRONG_BACKENDS)
    lines = done.stdout.splitlines()
    assert len(lines) == len(PROBLEMS), done.stderr
    for line, problem in zip(lines, PROBLEMS, strict=True):
        assert re.search(problem, line)


PUBLISH = """
import sys, tempfile
import torch
from pydantic import TypeAdapter
from headway.contracts.config.weight_sync import ReceiverConfig, WeightSyncConfig
from headway.contracts.types import WeightUpdateMeta
from weight_sync.deadline import Deadline
from weight_sync.receiver import make_receiver
from weight_sync.transports.base import make_publisher

folder = sys.argv[1]
section = {"type": "plugin", "name": "mirror", "origin": f"mirror://{folder}", "dtype": "bfloat16"}
config = TypeAdapter(WeightSyncConfig).validate_python(section | {"args": {"folder": folder}})
publisher = make_publisher(config)
meta = publisher.publish(3, [("a", torch.arange(4.0))])
path = "mirror" + meta.path.removeprefix("shm")
reader = make_receiver(ReceiverConfig(allow=(config.origin,))).within(Deadline(30.0))
staged = reader.stage(WeightUpdateMeta(3, path), {"a": torch.Size([4])})
print(staged.version, staged.tensors["a"].dtype, staged.tensors["a"].tolist())
publisher.close()
"""


def test_weights_travel_by_the_transport_of_an_installed_package(run_python, tmp_path):
    done = run_python("-c", PUBLISH, str(tmp_path / "weights"))
    assert done.stdout == "3 torch.bfloat16 [0.0, 1.0, 2.0, 3.0]\n", done.stderr


BUILD = """
import sys
from headway.contracts.config.experiment import GRPOExperiment
from headway.contracts.errors import ConfigError
from headway.runtime.config import load_config
from trainer.backends.base import make_engine

for flags in (["--trainer.backend", "layered"], []):
    try:
        config = load_config(GRPOExperiment, ["--config", sys.argv[1], *flags])
        print(make_engine(config, None, None).size)
    except ConfigError as error:
        print(error)
"""


@pytest.mark.extended
def test_a_train_backend_of_an_installed_package_has_settings_of_its_own(run_python, tmp_path):
    trainer = {"backend_args": {"tensor_parallel_size": 4}}
    file = write(tmp_path / "grpo.yaml", **learner(trainer=trainer))
    done = run_python("-c", BUILD, file)
    size, problem = done.stdout.splitlines()
    assert size == "4"
    assert problem.startswith(
        "trainer.backend_args holds tensor_parallel_size, and the backend 'fsdp2' has"
    )


def test_an_experiment_of_an_installed_package_is_shown_checked_and_run(run_python, tmp_path):
    shown = run_python("-m", "headway.launch.cli", "config", "show", "echo-rl")
    assert "--loudness" in shown.stdout and "How loud the echo is." in shown.stdout, shown.stderr
    file = write(tmp_path / "echo.yaml", **learner(type="echo-rl", loudness=2.0))
    checked = run_python("-m", "headway.launch.cli", "config", "check", file)
    assert "right, as a configuration of `echo-rl`" in checked.stdout, checked.stderr
    done = run_python("-m", "trainer", "--config", file)
    assert done.stdout == "ran EchoExperiment 2.0\n", done.stderr


LEARN = """
import sys, torch
from headway.contracts.config.experiment import GRPOExperiment
from headway.runtime.config import load_config
from trainer.algorithms.batch_advantages import compute_advantages
from trainer.algorithms.losses import policy_loss
from trainer.batching.sequences import SequenceBatch
from trainer.dataflow.policy import policy_flow

config = load_config(GRPOExperiment, ["--config", sys.argv[1]])
policy_flow(config)
flags = torch.ones(4, dtype=torch.bool)
columns = {"action_mask": flags, "truncated": ~flags, "is_sample": flags}
columns |= {"group": torch.zeros(4, dtype=torch.int64), "scores": torch.tensor([3.0, 3.0, -2.0, -2.0])}
columns |= {"behaviour_logprobs": torch.full((4,), -1.0)}
batch, _ = compute_advantages(config.algorithm, SequenceBatch((2, 2), columns), 0, 0.0)
logprobs = torch.tensor([-1.0, 0.5, -1.0, -3.5], requires_grad=True)
loss, stats = policy_loss(config.algorithm, batch, logprobs)
loss.backward()
print(batch["advantages"].tolist(), loss.item(), (logprobs.grad + 0.0).tolist())
print(stats["clip_fraction"].item())
"""
WRONG_LOSSES = """
from headway.contracts.config.experiment import GRPOExperiment
from headway.contracts.errors import ConfigError
from headway.runtime.config import validate_config
from trainer.dataflow.policy import policy_flow

def graph(section, name, args):
    tree = {"model": {"path": "model"}, "data": {"path": "rows.jsonl"}}
    tree |= {"rollout": {"reward": {"name": "exact"}}, "weight_sync": {"root": "weights"}}
    tree["algorithm"] = {section: {"type": "plugin", "name": name, "args": args}}
    policy_flow(validate_config(GRPOExperiment, tree))

for section, name, args in (
    ("policy_loss", "hinj", {}), ("policy_loss", "hinge", {"marjin": 1}), ("policy_loss", "bare", {}),
    ("advantage", "sgn", {}), ("advantage", "sign", {"margin": 1}),
):
    try:
        graph(section, name, args)
    except ConfigError as error:
        print(error)
"""
PROBLEMS_OF_LOSSES = (
    r"no policy loss named 'hinj'; .* did you mean 'hinge'",
    r"unknown key marjin; did you mean 'margin'",
    r"name=bare: .* has no `Args`",
    r"no advantage estimator named 'sgn'; .* did you mean 'sign'",
    r"unknown key margin",
)


def test_a_policy_learns_by_the_loss_and_the_estimator_of_an_installed_package(
    run_python, tmp_path
):
    algorithm = {
        "decoupled": False,
        "policy_loss": {"type": "plugin", "name": "hinge", "args": {"margin": 1.0}},
        "advantage": {"type": "plugin", "name": "sign"},
    }
    file = write(tmp_path / "grpo.yaml", **learner(algorithm=algorithm))
    done = run_python("-c", LEARN, file)
    # Signs are 1 and -1; gaps are 1, -0.5 and 1, -1.5: half of the tokens are beyond the margin.
    assert done.stdout == "[1.0, 1.0, -1.0, -1.0] 0.5 [-0.25, 0.0, 0.25, 0.0]\n0.5\n", done.stderr


def test_what_is_wrong_with_a_loss_or_an_estimator_is_said_before_a_model_is_loaded(run_python):
    done = run_python("-c", WRONG_LOSSES)
    lines = done.stdout.splitlines()
    assert len(lines) == len(PROBLEMS_OF_LOSSES), done.stderr
    for line, problem in zip(lines, PROBLEMS_OF_LOSSES, strict=True):
        assert re.search(problem, line)


LOAD_RUNS = """
import sys
from headway.contracts.errors import ConfigError
from headway.launch.config_check import check
from headway.launch.experiments import load_run

for file in sys.argv[1:]:
    try:
        config = load_run(["--config", file])
        print(type(config.trainer).__name__, config.trainer.loudness, check(file).split()[-1])
    except ConfigError as error:
        print(error)
"""


def test_a_run_takes_the_experiment_of_an_installed_package(run_python, tmp_path):
    def run_file(name: str, **trainer: object) -> str:
        sections = learner(**trainer)
        section = {key: sections[key] for key in ("data", "rollout", *trainer)}
        run = {"model": "model", "gateway": {}, "server": {}, "trainer": section}
        return write(tmp_path / name, **run)

    files = (
        run_file("right.yaml", type="echo-rl", loudness=3.0),
        run_file("unknown.yaml", type="echo-rl", loudnes=3.0),
        run_file("rows.yaml", type="echo-rows"),
    )
    done = run_python("-c", LOAD_RUNS, *files)
    right, unknown, rows = done.stdout.splitlines()
    assert right == "EchoExperiment 3.0 `run`"
    assert unknown == "unknown key trainer.loudnes; did you mean 'loudness'?"
    assert rows.startswith("trainer.type=echo-rows does not learn from rollouts")
