"""What an unmodified agent played is what the trainer trains on, token by token; real processes.

Three samples of one prompt are played by an agent that the gateway calls: it speaks with the policy (the
embedded backend, a random model) through an `openai` client. One of them takes back its second turn, so
that its history forks. The delivered batch goes through the actor's step with the FSDP2 engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from openai import OpenAI
from torch import Tensor

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.base import ComponentConfig, WorkflowRef
from headway.contracts.config.gateway import OutboundConfig
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import Prompt, RolloutRequest, Trajectory
from headway.launch.launchers.local import LocalRun
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.text.tokenizer import TextTokenizer
from tests.integration.conftest import run_config
from tests.numeric.engines import open_engine
from tests.numeric.models import save_model, write_char_tokenizer
from tests.numeric.policies import learner_with
from trainer.api import LossOutput, MicroBatchSpec
from trainer.backends.heads import LanguageOutput
from trainer.batching.sequences import SequenceBatch
from trainer.interfaces.advantages import AdvantagesCall
from trainer.interfaces.ppo_actor import PPOActor
from trainer.topology import Topology

CHATML = """{%- for message in messages %}
{{- '<' + message.role | upper + '>' + message.content + ';' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<ASSISTANT>' }}{% endif %}"""
TASK = "1 + 2"
TOKENS = 6
TURNS = 3
REWARDS = (1.0, 0.0, 0.5)
TEMPERATURE = 0.8
TOLERANCE = 1e-4
"""As between the embedded backend and full forwards."""


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with peaked distributions, a token per character and a chat template."""
    folder = save_model(tmp_path_factory.mktemp("policy"), "llama")
    write_char_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def play(call: dict[str, Any]) -> dict[str, Any]:
    """One sample; the first one takes back its second turn."""
    told, messages = call["session"], [{"role": "user", "content": call["text"]}]

    def ask(client: OpenAI, history: list[Any]) -> list[Any]:
        answer = client.chat.completions.create(model="policy", messages=history)
        return [*history, answer.choices[0].message]

    with OpenAI(base_url=told["openai_url"], api_key=told["api_key"], max_retries=0) as client:
        first = history = ask(client, messages)
        for turn in range(1, TURNS):
            history = ask(client, [*history, {"role": "user", "content": f"AND {turn}"}])
        if call["sample_index"] == 0:
            ask(client, [*first, {"role": "user", "content": "NO, LESS"}])
    return {"reward": REWARDS[call["sample_index"]]}


class Agent(BaseHTTPRequestHandler):
    """`play` behind HTTP."""

    def do_POST(self) -> None:
        call = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = json.dumps(play(call)).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: Any) -> None:
        """Nobody reads it."""


@contextmanager
def agent_service() -> Iterator[str]:
    """Its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Agent)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/play"
    server.shutdown()
    thread.join()
    server.server_close()


class Watched:
    """An engine that notes what the actor has it do, and what reaches the hidden states of its loss."""

    def __init__(self, folder: Path) -> None:
        self._engine = open_engine(folder)
        self.forward = self._engine.forward
        self.losses: list[tuple[SequenceBatch, Tensor]] = []

    def train_batch(
        self, batch: SequenceBatch, spec: MicroBatchSpec, loss: Any, weight: Any, *scope: Any
    ) -> Any:
        def watched(output: LanguageOutput, micro_batch: SequenceBatch) -> LossOutput:
            output.hidden.retain_grad()
            self.losses.append((micro_batch, output.hidden))
            return loss(output, micro_batch)

        return self._engine.train_batch(batch, spec, watched, weight, *scope)


def test_the_trainer_trains_on_what_an_agent_played(
    tmp_path: Path,
    policy_dir: Path,
    start: Callable[[LaunchConfig], LocalRun],
    connect: Callable[[str], RemoteInferenceEngine],
) -> None:
    with agent_service() as agent_url:
        rows = played(start, connect, agent_config(tmp_path, policy_dir, agent_url), agent_url)
    check_rows(rows, TextTokenizer(str(policy_dir)))
    engine = Watched(policy_dir)
    config = AlgorithmConfig(decoupled=True)
    topology, spec = Topology(0, 1, torch.device("cpu")), MicroBatchSpec(10_000)
    actor = PPOActor(engine, topology, config, spec, TEMPERATURE)
    interfaces = {"actor_inf": actor, "advantages": AdvantagesCall(config), "actor_train": actor}
    learner = learner_with(config, interfaces)
    metrics = learner.train_step(rows, 0)
    assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0.0
    assert metrics["behaviour_kl"] < TOLERANCE and metrics["capped_fraction"] == 0.0
    ((batch, hidden),) = engine.losses
    check_logprobs(batch, metrics)
    check_gradient(batch, hidden)
    check_advantages(batch, rows)


def agent_config(folder: Path, policy_dir: Path, agent_url: str) -> LaunchConfig:
    """A gateway that may call the agent, and one server."""
    config = run_config(folder, policy_dir)
    outbound = OutboundConfig(allow=(agent_url,), allow_private=True)
    gateway = config.gateway.model_copy(update={"outbound": outbound})
    return config.model_copy(update={"gateway": gateway})


def played(
    start: Callable[[LaunchConfig], LocalRun],
    connect: Callable[[str], RemoteInferenceEngine],
    config: LaunchConfig,
    agent_url: str,
) -> list[Trajectory]:
    """One group, as the trainer gets it."""
    request = RolloutRequest(
        rollout_id="game",
        prompt=Prompt(group_id="game", group_size=len(REWARDS), text=TASK),
        workflow=WorkflowRef(name="session", args={"agent_url": agent_url}),
        reward=ComponentConfig(name="given"),
        gconfig=SamplingConfig(
            max_new_tokens=TOKENS, ignore_eos=True, temperature=TEMPERATURE, seed=1
        ),
    )
    return connect(start(config).url).rollout([request], 60.0).trajectories


def check_rows(rows: list[Trajectory], tokenizer: TextTokenizer) -> None:
    """Three samples in four rows, each a conversation as the chat template writes it."""
    names = [(row.sample_index, row.branch, row.reward) for row in rows]
    assert names == [(0, 0, 1.0), (0, 1, 1.0), (1, 0, 0.0), (2, 0, 0.5)]
    for row in rows:
        num_sampled = TOKENS if row.branch else TURNS * TOKENS
        assert row.loss_mask.sum() == num_sampled
        assert (row.versions[row.loss_mask] == 0).all()
        assert np.isfinite(row.logprobs).all()
        text = tokenizer.decode(row.input_ids.tolist(), skip_special_tokens=False)
        assert text.startswith(f"<USER>{TASK};<ASSISTANT>")
        assert text.count("<USER>") >= (2 if row.branch else TURNS)
    main, fork = rows[0], rows[1]
    shared = main.turns[0].end
    assert (main.input_ids[:shared] == fork.input_ids[:shared]).all()
    assert not fork.loss_mask[:shared].any()


def check_logprobs(batch: SequenceBatch, metrics: Mapping[str, float]) -> None:
    """The trainer computes for each token what the server sampled it with."""
    sampled = batch["loss_mask"]
    assert metrics["logprob_diff_max"] < TOLERANCE
    assert metrics["logprob_diff_mean"] < TOLERANCE / 10
    assert batch["behaviour_logprobs"][sampled].std() > 0.1  # agreement is no accident


def check_gradient(batch: SequenceBatch, hidden: Tensor) -> None:
    """Sampled tokens with an advantage move the policy, and nothing else does."""
    assert hidden.grad is not None
    moved = hidden.grad.reshape(len(batch["loss_mask"]), -1).abs().sum(-1) > 0.0
    assert torch.equal(moved, batch["loss_mask"] & (batch["advantages"] != 0.0))


def check_advantages(batch: SequenceBatch, rows: Sequence[Trajectory]) -> None:
    """Rewards 1, 0, 0.5: mean 0.5, variance 1/4; the fork weighs nothing in them."""
    known = [row.input_ids.tolist() for row in rows]
    of_sequence = {
        known.index(ids.tolist()): float(piece[0])
        for ids, piece in zip(
            torch.split(batch["input_ids"], list(batch.lengths)),
            torch.split(batch["advantages"], list(batch.lengths)),
            strict=True,
        )
    }
    expected = {0: 1.0, 1: 1.0, 2: -1.0, 3: 0.0}
    assert of_sequence == pytest.approx(expected, rel=1e-4, abs=1e-6)
