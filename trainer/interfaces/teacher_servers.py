"""Teachers on generation servers: logprobs of the policy's samples, over HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from headway.contracts.config.rollout_experiments import PolicyLearner
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.teacher import TeacherServersConfig
from headway.contracts.errors import BackendError, ConfigError
from headway.contracts.http import paths
from headway.contracts.types import LLMRequest, LLMResponse
from headway.runtime.secret import read_token
from headway.runtime.service_calls import ServiceCalls
from trainer.batching.sequences import SequenceBatch
from trainer.batching.shares import infer_column
from trainer.interfaces.base import Columns, InterfaceContext
from trainer.topology import Topology

SCORE_ONLY = SamplingConfig(max_new_tokens=0)


class TeacherServers:
    """The weighted mean of several teachers' logprobs. Every rank asks for its share of a batch.

    With the policy's own taken off it is the advantage of minus the weighted sum of
    KL(policy || teacher) over the teachers. With `top_k` there is one teacher, which tells its
    likeliest tokens.
    """

    def __init__(self, config: TeacherServersConfig, topology: Topology, top_k: int = 0) -> None:
        token = read_token(config.token_env)
        limits = (config.connect_timeout_s, config.request_timeout_s, token)
        self._servers = [ServiceCalls([url], *limits) for url in config.urls]
        self._shares = config.shares
        self._topology = topology
        self._top_k = top_k
        self._pool = ThreadPoolExecutor(config.num_connections, thread_name_prefix="teacher")

    def infer(self, share: SequenceBatch) -> Tensor:
        """[T] logprobs of `labels`, 0 outside of the mask, of what this rank has of a batch; with `top_k`
        [T, 2, top_k], ids and logprobs of the likeliest tokens.

        Args:
            share: columns `input_ids`, `action_mask`.
        Raises:
            BackendError: a server is out of reach, or scored something else.
            ServiceError: whatever a server raised.
        """
        ids = torch.split(share["input_ids"], list(share.lengths))
        masks = torch.split(share["action_mask"], list(share.lengths))
        jobs = [
            self._pool.submit(_score, server, row.tolist(), mask, self._top_k)
            for server in self._servers
            for row, mask in zip(ids, masks, strict=True)
        ]
        columns = [job.result() for job in jobs]
        if self._top_k:
            return torch.cat(columns).float()
        size = len(share.lengths)
        total = torch.zeros(share.num_tokens, dtype=torch.float64)
        for number, weight in enumerate(self._shares):
            total += weight * torch.cat(columns[number * size : (number + 1) * size])
        return total.float()

    def close(self) -> None:
        """Close the connections, for good."""
        self._pool.shutdown()
        for server in self._servers:
            server.connections.close()

    def inference(self, batch: SequenceBatch) -> Columns:
        """`teacher_logprobs`, or `teacher_top`, of a whole batch: see `infer`; collective."""
        name = "teacher_top" if self._top_k else "teacher_logprobs"
        return {name: infer_column(batch, self._topology, self.infer)}


def _score(server: ServiceCalls, input_ids: Sequence[int], mask: Tensor, top_k: int) -> Tensor:
    """[T] float64 logprob under one teacher of the token at each action, or [T, 2, top_k] ids and
    logprobs of the likeliest ones there; 0 elsewhere."""
    shape = (len(input_ids), 2, top_k) if top_k else (len(input_ids),)
    scored = torch.zeros(shape, dtype=torch.float64)
    actions = mask.nonzero().flatten()
    if len(actions) == 0:
        return scored
    start = int(actions[0]) + 1
    request = LLMRequest(
        rid=f"teacher-{uuid.uuid4().hex}",
        input_ids=tuple(input_ids),
        gconfig=SCORE_ONLY,
        logprob_start=start,
        top_logprobs=top_k,
    )
    answer = server.call("POST", paths.GENERATE, request)
    response = LLMResponse.from_response(answer.content)
    found: list[Any] | None = response.prompt_logprobs
    if top_k:
        found = response.prompt_top_logprobs
        if found is not None:
            found = [each if each is not None and len(each) == top_k else None for each in found]
    wanted = len(input_ids) - start
    if found is None or len(found) != wanted or None in found:
        seen = "none" if found is None else f"{len(found)}, {found.count(None)} of them empty"
        raise BackendError(
            f"{server.url} gave {seen} logprobs of a prompt, and {wanted} were wanted"
            f"{f', {top_k} at each position' if top_k else ''}; a teacher needs a backend that reports "
            "the logprobs of prompts"
        )
    values = torch.tensor(found, dtype=torch.float64)  # [wanted] or [wanted, top_k, 2]
    scored[start - 1 : len(input_ids) - 1] = values.transpose(1, 2) if top_k else values
    scored[~mask] = 0.0
    return scored


def make(context: InterfaceContext[PolicyLearner]) -> TeacherServers:
    """Build it as the experiment is configured.

    Raises:
        ConfigError: it names no servers.
    """
    config = context.config.teacher_servers
    if config is None:
        raise ConfigError("the experiment has no section `teacher_servers`; set its urls")
    return TeacherServers(config, context.topology, context.config.algorithm.distillation_top_k)
