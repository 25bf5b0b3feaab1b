"""The hybrid engine as a worker's rollout engine: it generates with the policy that the worker trains."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

from pydantic import TypeAdapter

from headway.contracts.config.hybrid import HybridConfig
from headway.contracts.config.model import Device
from headway.contracts.config.workers import WorkersConfig
from headway.contracts.types import LLMRequest, LLMResponse
from headway.runtime.config import validate_config
from trainer.api import TrainEngine
from trainer.hybrid.backend import make_backend
from trainer.hybrid.engine import HybridEngine
from trainer.hybrid.parameter_source import ParameterSource
from trainer.hybrid.transfer_cost import TransferCost
from trainer.topology import Topology

_REQUESTS = TypeAdapter(list[LLMRequest])


class HybridRollout:
    """Hybrid engine that is in rollout mode while it generates. Every call counts as a version of its
    own: whether a worker trains or loads in between is not visible here.
    """

    def __init__(
        self, config: WorkersConfig, policy: TrainEngine, topology: Topology, **args: Any
    ) -> None:
        """
        Args:
            policy: initialised, of a backend that lends its parameters (FSDP2).
            args: of `HybridConfig`.
        """
        hybrid = validate_config(HybridConfig, {"keep": "nothing", **args})
        backend = make_backend(hybrid, config.model, cast("Device", topology.device.type))
        self._engine = HybridEngine(cast("ParameterSource", policy), backend, hybrid)
        self._engine.start()
        self._topology = topology

    def generate(self, requests: Sequence[LLMRequest]) -> list[LLMResponse]:
        """The responses to this rank's requests, in their order; collective."""
        payload = _REQUESTS.dump_json(list(requests))
        each = [
            _REQUESTS.validate_json(payload) for payload in self._topology.gather_bytes(payload)
        ]
        with self._engine.rollouts(self._engine.version + 1):
            responses = self._engine.generate([request for mine in each for request in mine])
        ends = list(accumulate(len(mine) for mine in each))
        end = ends[self._topology.rank]
        return responses[end - len(requests) : end]

    @property
    def last_transfer(self) -> TransferCost | None:
        return self._engine.last_transfer

    def close(self) -> None:
        self._engine.stop()
