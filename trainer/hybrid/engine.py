"""`HybridEngine`: a train engine that also generates, with the same parameters, by turns.

    training ── rollout_mode() ──► rollout ── trainer_mode() ──► training
                     │  an error in the weight transfer, on any rank
                     └──► torn ── rollout_mode() again, or trainer_mode()

While it is in rollout mode nothing writes to the parameters, so generation may use in place those that
this process holds whole. Every call is collective; one thread uses an engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from headway.contracts.config.hybrid import HybridConfig
from headway.contracts.errors import PartialWeightTransfer, StaleVersion, VersionMoved, WrongMode
from headway.contracts.types import (
    FinetuneSpec,
    LLMRequest,
    LLMResponse,
    PolicyVersion,
)
from headway.runtime.tasks import all_or_none
from trainer.hybrid.backend import RolloutBackend
from trainer.hybrid.parameter_source import ParameterSource, share_parameters
from trainer.hybrid.random_state import RandomState
from trainer.hybrid.shares import generate_shares, seeded
from trainer.hybrid.transfer_cost import TransferCost
from trainer.wrapper import EngineWrapper

log = logging.getLogger(__name__)

Mode = Literal["training", "rollout", "torn"]


class HybridEngine(EngineWrapper[ParameterSource]):
    """A `TrainEngine` in trainer mode, and the generation backend of the same model in rollout mode."""

    def __init__(
        self,
        train_engine: ParameterSource,
        backend: RolloutBackend,
        config: HybridConfig,
        version: PolicyVersion = 0,
    ) -> None:
        """
        Args:
            train_engine: not initialised, as `backend` is not started.
            version: of the weights that the engine begins with.
        """
        super().__init__(train_engine)
        self._backend = backend
        self._config = config
        self._version = version
        self._mode: Mode = "training"
        self._why_torn = ""
        self._has_changed = False
        """True if parameters may differ from those of `version`."""
        self._num_calls = 0
        """Number of calls of `generate` under this version."""
        self.last_transfer: TransferCost | None = None
        """Cost of the last weight transfer."""
        self._training_draws: RandomState | None = None
        self._runner = asyncio.Runner()

    @property
    def mode(self) -> Mode:
        """Current mode: training, rollout, or torn."""
        return self._mode

    @property
    def version(self) -> PolicyVersion:
        """Version of the last weight transfer; of the first weights before there was one."""
        return self._version

    def initialize(self, addr: str | None, ft_spec: FinetuneSpec | None) -> None:
        self.train_engine.initialize(addr, ft_spec)
        self.start()

    def start(self) -> None:
        """Make generation ready, beside a train engine that is initialised already."""
        self._runner.run(self._backend.start())

    def stop(self) -> None:
        """End generation; the train engine stays."""
        self._runner.run(self._backend.aclose())
        self._runner.close()

    # Generation.

    def rollout_mode(self, version: PolicyVersion | None = None) -> PolicyVersion:
        """Hand the parameters to generation; of no effect in rollout mode.

        Args:
            version: that every token is stamped with from now on; None counts on by one if the model was
                trained since the last weight transfer.
        Returns:
            The version.
        Raises:
            StaleVersion: the number is used up by other weights.
            WrongMode: another version generates; go back to trainer mode first.
            PartialWeightTransfer: it failed, on this rank or another: nothing generates.
            ConfigError: the model cannot generate.
        """
        if self._mode == "rollout":
            if version not in (None, self._version):
                raise WrongMode(
                    f"version {self._version} generates, and {version} is wanted; call trainer_mode() "
                    "before it is transferred"
                )
            return self._version
        wanted = self._next_version(version)
        if self._training_draws is None:
            self._training_draws = RandomState.capture()
        self._mode, self._why_torn = "torn", f"the weight transfer of version {wanted} was left"
        self._transfer_weights(wanted)
        if wanted != self._version:
            self._num_calls = 0
        self._version, self._has_changed, self._mode = wanted, False, "rollout"
        return wanted

    def trainer_mode(self) -> None:
        """End generation, and release all that it held, except for `keep`; what training draws goes
        on where it was. Of no effect in trainer mode."""
        if self._mode == "training":
            return
        self._backend.sleep(self._config.keep if self._mode == "rollout" else "nothing")
        if self._training_draws is not None:
            self._training_draws.restore()
            self._training_draws = None
        self._mode = "training"

    @contextmanager
    def rollouts(self, version: PolicyVersion | None = None) -> Iterator[PolicyVersion]:
        """Rollout mode within, trainer mode afterwards."""
        try:
            yield self.rollout_mode(version)
        finally:
            self.trainer_mode()

    def generate(self, requests: Sequence[LLMRequest]) -> list[LLMResponse]:
        """Generate one sequence for each request; each rank generates a share, and all learn the result.

        A request without a seed gets one from `backend.seed`, the version, how often this was called
        under it, and its place: what is sampled does not depend on the number of ranks.

        Args:
            requests: the same on every rank.
        Returns:
            In the order of `requests`.
        Raises:
            WrongMode: it is not in rollout mode.
            PartialWeightTransfer: the last weight transfer failed.
            VersionMoved: a request wants another version.
            RequestTooLong, DataError, BackendError: by the backend of any rank.
        """
        if self._mode == "torn":
            raise PartialWeightTransfer(f"{self._why_torn}; call rollout_mode() again")
        self._require("rollout", "generate")
        for request in requests:
            if request.version not in (None, self._version):
                raise VersionMoved(
                    f"version {self._version} generates, request {request.rid!r} wants "
                    f"{request.version}"
                )
        numbers = (self._config.backend.seed, abs(self._version), self._num_calls)
        self._num_calls += 1
        return generate_shares(
            seeded(requests, *numbers), self.train_engine.topology, self._generate_mine
        )

    # Training: as the engine does it, in trainer mode.

    def before(self, call: str) -> None:
        """
        Raises:
            WrongMode: it is not in trainer mode.
        """
        if call == "get_scheduling_config":  # the same in every mode
            return
        self._require("training", call)
        self._has_changed |= call == "train_batch"
        if call in ("load", "move_towards"):
            self._forget_frozen()

    def destroy(self) -> None:
        self.stop()
        self.train_engine.destroy()

    def _require(self, mode: Mode, call: str) -> None:
        if self._mode != mode:
            way = "trainer_mode" if mode == "training" else "rollout_mode"
            raise WrongMode(
                f"{call} belongs to {way}, and the engine is in mode {self._mode}; call {way}() first"
            )

    def _next_version(self, version: PolicyVersion | None) -> PolicyVersion:
        if version is None:
            return self._version + self._has_changed
        if version < self._version + self._has_changed:
            raise StaleVersion(
                f"version {version} is wanted, and {self._version} was the last"
                f"{', before training' if self._has_changed else ''}; give a higher number, or none"
            )
        return version

    def _transfer_weights(self, version: PolicyVersion) -> None:
        engine, begin = self.train_engine, time.perf_counter()
        failure: Exception | None = None
        parts = share_parameters(engine, self._config, self._backend.kept)
        try:
            self._backend.wake(version, parts, engine.adapter)
        except Exception as error:  # noqa: BLE001 - the other ranks need to know; raised below
            failure = error
        # Gathering is collective: what this rank did not take, it takes part in all the same.
        deque(parts, maxlen=0)
        if not engine.topology.max(int(failure is not None)):
            seconds = time.perf_counter() - begin
            model_bytes = sum(p.numel() * p.element_size() for _, p in engine.weights())
            self.last_transfer = TransferCost(seconds, model_bytes, self._backend.own_bytes)
            return
        what = "another rank failed; see its log" if failure is None else _described(failure)
        self._why_torn = f"version {version} was not transferred whole: {what}"
        log.error("a weight transfer failed", extra={"version": version, "reason": what})
        self._backend.sleep("nothing")
        raise PartialWeightTransfer(self._why_torn) from failure

    def _forget_frozen(self) -> None:
        """Release the generator's copies of frozen parameters, too: loading and averaging may change
        them.
        """
        self._has_changed = True
        self._backend.sleep("nothing")

    def _generate_mine(self, requests: list[LLMRequest]) -> list[LLMResponse]:
        return self._runner.run(all_or_none(map(self._backend.generate, requests)))


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
