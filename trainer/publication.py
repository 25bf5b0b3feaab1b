"""From this step's weights to a version that samples: upload, then commit on every server."""

from __future__ import annotations

from concurrent.futures import Future

from headway.contracts.engines import InferenceEngine
from headway.contracts.types import PolicyVersion
from trainer.api import TrainEngine
from weight_sync.channel import WeightPublisher


class Publication:
    """One version at a time: `begin` uploads and starts the commit, `finish` waits for it.

    Between the two the trainer may do what needs no new rollouts (save, report). On ranks other than
    the first there is no publisher and no service: they take part in the collective upload only.
    """

    def __init__(
        self,
        engine: TrainEngine,
        publisher: WeightPublisher | None,
        rollouts: InferenceEngine | None,
    ) -> None:
        self._engine = engine
        self._publisher = publisher
        self._rollouts = rollouts
        self._commit: Future[PolicyVersion] | None = None

    def begin(self, version: PolicyVersion) -> None:
        """Upload the current weights and tell the service; collective."""
        if self._publisher is None or self._rollouts is None:
            self._engine.upload_weights(None)
            return
        meta = self._publisher.locate(version)
        self._engine.upload_weights(meta)
        self._commit = self._rollouts.update_weights(meta)

    def finish(self) -> None:
        """Wait until the version is committed, then delete old ones.

        Raises:
            SyncError: every server refused it; the old version goes on serving.
        """
        if self._commit is not None and self._publisher is not None:
            self._publisher.collect(self._commit.result())
            self._commit = None
