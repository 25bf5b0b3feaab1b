"""Publication of a step's weights as a version: announce, upload, commit on every server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass

from headway.contracts.engines import InferenceEngine
from headway.contracts.errors import ServiceError
from headway.contracts.types import PolicyVersion
from trainer.api import TrainEngine
from weight_sync.channel import WeightPublisher

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A version on its way."""

    commit: Future[PolicyVersion]
    upload: Future[None] | None
    """None: all of it is there."""


class Publication:
    """One version at a time: `begin` announces and uploads it, `finish` waits for the commit.

    The service knows of a version before it is uploaded, so that servers stage what is there while
    the rest is on its way. Between `begin` and `finish` the trainer may do what needs no new rollouts
    (save, report), and where it `may_lag` even train the next step. On ranks other than the first
    there is no publisher and no service: they take part in the collective upload only.
    """

    def __init__(
        self,
        engine: TrainEngine,
        publisher: WeightPublisher | None,
        rollouts: InferenceEngine | None,
        pinned: Callable[[], Collection[PolicyVersion]] = tuple,
        may_lag: bool = False,
    ) -> None:
        """Args:
        pinned: versions that are needed still, however old.
        may_lag: the next step learns from rollouts that need not be of this version.
        """
        self.may_lag = may_lag
        """True if `finish` may be left to the next `begin`."""
        self._pinned = pinned
        self._engine = engine
        self._publisher = publisher
        self._rollouts = rollouts
        self._begun: _Begun | None = None

    def begin(self, version: PolicyVersion) -> None:
        """Announce the current weights as a version and upload them; collective.

        Finishes the version before first.

        Raises:
            SyncError: they cannot be uploaded, or the service refused them; the old version goes on
                serving.
        """
        self.finish()
        if self._publisher is None or self._rollouts is None:
            self._engine.upload_weights(None)
            return
        meta = self._publisher.announce(version)
        commit = self._rollouts.update_weights(meta)
        # Servers that take it no more must not be waited for.
        commit.add_done_callback(lambda done: self._stop_uploading(version, done))
        try:
            upload = self._engine.upload_weights(meta)
        except Exception as error:
            self._rollouts.cancel_update(version, str(error))
            _raise_refusal(commit, error)
            raise
        if upload is not None:
            upload.add_done_callback(lambda done: self._stop_staging(version, done))
        self._begun = _Begun(commit, upload)

    def finish(self) -> None:
        """Wait until the version is uploaded and committed, then delete old ones.

        Raises:
            SyncError: it could not be uploaded, or too few servers took it; the old version goes on
                serving.
        """
        begun = self._begun
        if begun is None or self._publisher is None:
            return
        if begun.upload is not None:
            try:
                begun.upload.result()
            except Exception as error:
                _raise_refusal(begun.commit, error)
                raise
        self._publisher.collect(begun.commit.result(), self._pinned())
        self._begun = None

    def _stop_uploading(self, version: PolicyVersion, commit: Future[PolicyVersion]) -> None:
        failure = None if commit.cancelled() else commit.exception()
        if self._publisher is not None and failure is not None:
            self._publisher.cancel(version, str(failure))

    def _stop_staging(self, version: PolicyVersion, upload: Future[None]) -> None:
        """Servers would wait for the rest; on whatever thread the upload ended."""
        failure = upload.exception()
        if self._rollouts is None or failure is None:
            return
        try:
            self._rollouts.cancel_update(version, str(failure))
        except ServiceError as error:  # they give it up by themselves, later
            log.warning("a failed upload was not told", extra={"reason": str(error)})


def _raise_refusal(commit: Future[PolicyVersion], error: Exception) -> None:
    """Raise the service's error about a version, if that is why its upload failed."""
    refusal = commit.exception() if commit.done() else None
    if refusal is not None:
        raise refusal from error
