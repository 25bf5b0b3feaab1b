"""Teachers on real generation servers give the logprobs that they would give on the trainer's ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import torch

from headway.contracts.config.gateway import ServiceConfig
from headway.contracts.config.server import ServerConfig
from headway.contracts.config.teacher import TeacherServersConfig
from headway.contracts.errors import DataError
from headway.runtime.access import Access
from inference_server.app import make_app
from inference_server.engine import make_generator
from tests.numeric.engines import open_engine
from tests.numeric.models import save_model, write_char_tokenizer
from tests.numeric.policies import ALONE, batch_of, experiment
from tests.unit.runtime.served import served
from trainer.api import MicroBatchSpec
from trainer.batching.sequences import batch_of_trajectories
from trainer.dataflow.policy import policy_flow
from trainer.interfaces.frozen_model import FrozenModel
from trainer.interfaces.teacher_servers import TeacherServers

EMBEDDED = {"type": "embedded_torch", "num_threads": 1, "kv_cache_bytes": 1 << 22}
EXACT = {"rtol": 1e-4, "atol": 5e-5}
"""Both compute in float32: a server one sequence in blocks, the ranks several packed ones."""
BATCH = batch_of_trajectories(batch_of(0))
TOP_K = 5


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> Iterator[list[tuple[str, torch.Tensor, torch.Tensor]]]:
    """The URL of each of two servers, and what its model says of the batch on the ranks: logprobs, and
    ids and logprobs of the likeliest tokens."""
    found = []
    with ExitStack() as stack:
        for seed in (1, 2):
            folder = save_model(tmp_path_factory.mktemp(f"teacher{seed}"), "llama", seed=seed)
            write_char_tokenizer(folder)
            engine = open_engine(folder)
            frozen = FrozenModel(engine, ALONE, MicroBatchSpec(100), 1.0, "teacher_logprobs")
            expected = frozen.inference(BATCH)["teacher_logprobs"]
            top = FrozenModel(engine, ALONE, MicroBatchSpec(100), 1.0, "teacher_top", top_k=TOP_K)
            tree = {"model": {"path": str(folder)}, "backend": EMBEDDED}
            config = ServerConfig.model_validate(tree)
            app = make_app(config, make_generator(config), Access.of(None))
            port = stack.enter_context(served(ServiceConfig(), app))
            expected_top = top.inference(BATCH)["teacher_top"]
            found.append((f"http://127.0.0.1:{port}", expected, expected_top))
        yield found


def asked(*urls: str, **fields) -> torch.Tensor:
    config = TeacherServersConfig(urls=urls, num_connections=4, **fields)
    with closing(TeacherServers(config, ALONE)) as teachers:
        return teachers.inference(BATCH)["teacher_logprobs"]


def test_a_server_gives_the_logprobs_of_the_actions(teachers):
    ((url, expected, _), _) = teachers
    got = asked(url)
    assert not got[~BATCH["action_mask"]].any()
    torch.testing.assert_close(got, expected, **EXACT)


def test_a_server_gives_the_likeliest_tokens_at_the_actions(teachers):
    ((url, _, expected), _) = teachers
    with closing(TeacherServers(TeacherServersConfig(urls=(url,)), ALONE, TOP_K)) as server:
        got = server.inference(BATCH)["teacher_top"]
    assert got.shape == (BATCH.num_tokens, 2, TOP_K)
    assert not got[~BATCH["action_mask"]].any()
    torch.testing.assert_close(got[:, 1], expected[:, 1], **EXACT)
    # Two that are equally likely may change places.
    assert (got[:, 0] == expected[:, 0]).float().mean() > 0.99


def test_several_teachers_are_averaged_by_weight(teachers):
    (first, one, _), (second, other, _) = teachers
    torch.testing.assert_close(asked(first, second), (one + other) / 2, **EXACT)
    got = asked(first, second, weights=(3.0, 1.0))
    torch.testing.assert_close(got, 0.75 * one + 0.25 * other, **EXACT)


def test_a_server_whose_backend_scores_no_prompts_ends_the_run():
    tree = {"model": {"path": "none"}, "backend": {"type": "fake", "vocab_size": 61}}
    config = ServerConfig.model_validate(tree)
    app = make_app(config, make_generator(config), Access.of(None))
    with served(ServiceConfig(), app) as port, pytest.raises(DataError, match="no distribution"):
        asked(f"http://127.0.0.1:{port}")


def test_servers_stand_in_for_a_teacher_on_the_ranks(tmp_path):
    algorithm = {"distillation_coef": 1.0}
    servers = {"urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"]}
    sections = {"teacher_servers": servers, "sampling": {"temperature": 1.0}}
    config = experiment(tmp_path, "grpo", algorithm=algorithm, **sections)
    (call,) = [call for call in policy_flow(config).calls if call.name == "teacher_inf"]
    assert (call.interface, call.model) == ("teacher_servers", None)
