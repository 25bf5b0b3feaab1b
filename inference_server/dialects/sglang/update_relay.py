"""What a trainer broadcasts to this server for the whole fleet: put together here, and offered.

See `headway.dialects.sglang.relay`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import torch
from fastapi import APIRouter, Request
from pydantic import ValidationError

from headway.contracts.errors import ConfigError, DataError, SyncError
from headway.contracts.http import paths
from headway.contracts.types import PolicyVersion
from headway.dialects.sglang.relay import (
    BODIES,
    KeptBack,
    OfferedVersion,
    RelayRequest,
    RelayResponse,
    Step,
)
from headway.dialects.sglang.types import (
    GroupUpdateBody,
    JoinGroupBody,
    LeaveGroupBody,
    RelabelBody,
    SGLangBody,
)
from headway.dialects.sglang.version_labels import next_version
from headway.runtime.json_route import JsonRoute
from inference_server.backends.base import GenerationBackend
from inference_server.dialects.sglang.group_updates import (
    GroupUpdates,
    UpdateOptions,
    address_of,
    options_of,
    specs_of,
    weights_source,
)
from inference_server.version_gate import VersionGate
from weight_sync.channel import StagedWeights
from weight_sync.manifest import make_manifest
from weight_sync.tensors import check_finite, check_fit, entry_in_memory
from weight_sync.transports.process_group import WeightsSource

router = APIRouter(route_class=JsonRoute)


class UpdateRelay:
    """The updates that this server receives for its gateway; used on one event loop."""

    def __init__(
        self, backend: GenerationBackend, gate: VersionGate, timeout_s: float, has_peers: bool
    ) -> None:
        self._backend = backend
        self._has_peers = has_peers
        self._gate = gate
        self.groups: GroupUpdates[RelayResponse] = GroupUpdates(
            backend, timeout_s, self._offer, self._rename
        )
        """What the trainers broadcast to this server."""
        self._version = self._head = 0

    async def take(self, order: RelayRequest) -> RelayResponse:
        """Take one step.

        Raises:
            DataError: its body is none of this step.
            ServiceError: as the methods of `GroupUpdates`; nothing changed.
        """
        try:
            body = BODIES[order.step].model_validate(order.body)
        except ValidationError as error:
            raise DataError(f"the body of step {order.step!r}: {error}") from error
        self._version, self._head = order.version, order.head
        answer = await self._step(order.step, body)
        if isinstance(answer, KeptBack):
            return RelayResponse(kept=answer)
        return answer or RelayResponse()

    async def _step(self, step: Step, body: SGLangBody) -> RelayResponse | KeptBack | None:
        groups = self.groups
        match step:
            case "join":
                if not self._has_peers:
                    raise ConfigError(
                        "weights.peers is false here, so the other servers could not read what is "
                        "received; set it to true"
                    )
                await groups.join(address_of(cast("JoinGroupBody", body)))
                return None
            case "leave":
                dropped = await groups.leave(cast("LeaveGroupBody", body).group_name)
                return RelayResponse(dropped=dropped)
            case "begin":
                await groups.begin()
                return None
            case "end":
                return await groups.end()
            case "complete":
                return await groups.complete()
            case "relabel":
                return await groups.relabel(cast("RelabelBody", body).new_version)
        bucket = cast("GroupUpdateBody", body)
        return await groups.receive(
            bucket.group_name, specs_of(bucket), bucket.is_flat, options_of(bucket)
        )

    async def _offer(
        self, tensors: Mapping[str, torch.Tensor], options: UpdateOptions
    ) -> RelayResponse:
        if self._gate.version != self._version:
            raise SyncError(
                f"this server has version {self._gate.version} and the fleet {self._version}; send the "
                "update again"
            )
        version = next_version(options.label, self._head)
        source = weights_source(self._backend)
        offered = await asyncio.to_thread(_whole, version, tensors, source)
        self._gate.receiver.offer(offered)
        shown = OfferedVersion(
            version=version, digest=offered.digest, label=options.label, aborts=options.aborts
        )
        return RelayResponse(offered=shown)

    async def _rename(self, label: str) -> RelayResponse:
        return RelayResponse(renamed=label)


def _whole(
    version: PolicyVersion, received: Mapping[str, torch.Tensor], source: WeightsSource
) -> StagedWeights:
    """A version of what was received; parameters that were not keep their value."""
    expected = source.parameters
    kept = {name: source.read_parameter(name) for name in expected if name not in received}
    tensors = {name: tensor.cpu() for name, tensor in (kept | dict(received)).items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_fit(shapes, expected, tensors.__getitem__, "what was received")
    check_finite(list(tensors.items()), "what was received")
    tensors = {name: tensors[name] for name in expected}
    manifest = make_manifest(version, [entry_in_memory(n, t) for n, t in tensors.items()])
    return StagedWeights(version, manifest.digest, tensors, manifest.tensors)


@router.post(paths.WEIGHTS_RELAY)
async def relay(body: RelayRequest, request: Request) -> RelayResponse:
    updates: UpdateRelay = request.app.state.update_relay
    return await updates.take(body)
