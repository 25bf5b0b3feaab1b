"""From this step's weights to a version that samples: announce, upload, commit on every server."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future

from headway.contracts.engines import InferenceEngine
from headway.contracts.types import PolicyVersion
from trainer.api import TrainEngine
from weight_sync.channel import WeightPublisher


class Publication:
    """One version at a time: `begin` announces and uploads it, `finish` waits for the commit.

    The service hears of a version before it is uploaded, so that servers stage what is there while
    the rest is on its way. Between `begin` and `finish` the trainer may do what needs no new rollouts
    (save, report). On ranks other than the first there is no publisher and no service: they take part
    in the collective upload only.
    """

    def __init__(
        self,
        engine: TrainEngine,
        publisher: WeightPublisher | None,
        rollouts: InferenceEngine | None,
        pinned: Callable[[], Collection[PolicyVersion]] = tuple,
    ) -> None:
        """Args:
        pinned: versions that are needed still, however old.
        """
        self._pinned = pinned
        self._engine = engine
        self._publisher = publisher
        self._rollouts = rollouts
        self._commit: Future[PolicyVersion] | None = None

    def begin(self, version: PolicyVersion) -> None:
        """Announce the current weights as a version and upload them; collective.

        Raises:
            SyncError: they cannot be uploaded, or the service refused them; the old version goes on
                serving.
        """
        if self._publisher is None or self._rollouts is None:
            self._engine.upload_weights(None)
            return
        meta = self._publisher.announce(version)
        commit = self._rollouts.update_weights(meta)
        # Servers that take it no more must not be waited for.
        commit.add_done_callback(lambda done: self._stop_uploading(version, done))
        try:
            self._engine.upload_weights(meta)
        except Exception as error:
            self._rollouts.cancel_update(version, str(error))
            if commit.done() and commit.exception() is not None:
                raise commit.exception() from error  # type: ignore[misc] # the cause of it all
            raise
        self._commit = commit

    def finish(self) -> None:
        """Wait until the version is committed, then delete old ones.

        Raises:
            SyncError: too few servers took it; the old version goes on serving.
        """
        if self._commit is not None and self._publisher is not None:
            self._publisher.collect(self._commit.result(), self._pinned())
            self._commit = None

    def _stop_uploading(self, version: PolicyVersion, commit: Future[PolicyVersion]) -> None:
        failure = None if commit.cancelled() else commit.exception()
        if self._publisher is not None and failure is not None:
            self._publisher.cancel(version, str(failure))
