"""Publication of weights as a version: announce, upload, commit on every server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from headway.contracts.engines import InferenceEngine
from headway.contracts.errors import ServiceError
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from headway.runtime.inference_client import RemoteInferenceEngine
from weight_sync.channel import NamedTensors, WeightPublisher

log = logging.getLogger(__name__)


class Uploader(Protocol):
    """Whose weights are published; every `TrainEngine` is one."""

    def upload_weights(self, meta: WeightUpdateMeta | None) -> Future[None] | None:
        """Publish the weights as they are now; see `TrainEngine.upload_weights`."""


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
        engine: Uploader,
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
        try:
            commit = self._rollouts.update_weights(meta)
        except KeyboardInterrupt:  # the service may know of it by now
            self._rollouts.cancel_update(version, "its trainer was interrupted")
            raise
        self._publisher.follow(version, commit)
        try:
            upload = self._engine.upload_weights(meta)
        except BaseException as error:  # Ctrl-C, too: servers would wait for the rest
            self._rollouts.cancel_update(version, str(error) or repr(error))
            if isinstance(error, Exception):
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

    def _stop_staging(self, version: PolicyVersion, upload: Future[None]) -> None:
        """Servers would wait for the rest; on whatever thread the upload ended."""
        failure = upload.exception()
        if self._rollouts is None or failure is None:
            return
        try:
            self._rollouts.cancel_update(version, str(failure))
        except ServiceError as error:  # they give it up by themselves, later
            log.warning("a failed upload was not told", extra={"reason": str(error)})


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Uploads these tensors."""

    publisher: WeightPublisher
    tensors: NamedTensors

    def upload_weights(self, meta: WeightUpdateMeta | None) -> None:
        assert meta is not None
        self.publisher.publish(meta.version, self.tensors)


def next_version(
    publisher: WeightPublisher, rollouts: RemoteInferenceEngine, after: PolicyVersion = 0
) -> PolicyVersion:
    """Return the next free number: above all that the service or the publisher has seen.

    A version that the service refused stays in the publisher's store; its number is not free.

    Args:
        after: a number that the caller has used.
    """
    return max(rollouts.status().head, publisher.latest() or 0, after) + 1


def publish_next(
    publisher: WeightPublisher, rollouts: RemoteInferenceEngine, tensors: NamedTensors
) -> PolicyVersion:
    """Publish these weights under the next free number; return it once they serve.

    Raises:
        SyncError: they cannot be uploaded, or the service refused them; the old version goes on
            serving, and the next call takes another number.
    """
    version = next_version(publisher, rollouts)
    publication = Publication(_Tensors(publisher, tensors), publisher, rollouts)
    publication.begin(version)
    publication.finish()
    return version


def _raise_refusal(commit: Future[PolicyVersion], error: Exception) -> None:
    """Raise the service's error about a version, with the upload's: either may be the other's cause."""
    refusal = commit.exception() if commit.done() else None
    if isinstance(refusal, ServiceError) and str(error) not in str(refusal):
        refusal = type(refusal)(f"{refusal}; the upload ended: {error}")
    if refusal is not None:
        raise refusal from error
