"""The exception tree, drawn by the boundary an error crosses.

ServiceError
├── ConfigError          a file, a flag or an argument is wrong           400
│   └── UnknownName      a name that is not registered                     404
├── DataError            a row of a data set is wrong                      400
├── RequestTooLong       prompt + new tokens exceed the context            413
├── RequestTimeout       a generation took longer than allowed             504  retryable
├── Unauthorized         no token, or a wrong one                          401
├── Forbidden            a token without the role, or a URL not allowed    403
├── NotFound             no such rollout, server or version                404
├── Conflict             the same id with other content, or a second owner 409
├── SessionEnded         this session takes no more requests               410
├── QueueFull            try again later                                   429  retryable
├── StaleVersion         a version behind the one that was asked for       409
│   └── VersionMoved     a pinned rollout met a swap, and is run again     409  retryable
├── WrongMode            parameters serve training now, or generation      409
├── NotEnoughWork        fewer rollouts are outstanding than waited for    409
├── RolloutsFailed       rollouts waited for by id ended without a result  409
├── BackendError         a generation server failed or went away           503  retryable
│   └── Draining         it is shutting down and takes nothing new         503  retryable
├── ServiceAway          a service of a user's was away for too long        503
├── LethalRequest        servers died while they worked on it              500
├── WorkflowError        a workflow raised                                 500
│   └── ErrorBudgetExceeded  too many rollouts failed; the run must stop   500
├── RewardError          a verifier raised, hung or returned no number     500
│   └── RewardOutage     it gave no score, and is asked again              503  retryable
├── SyncError            a weight version is torn, tampered or not staged  409
│   ├── Fenced           from a publisher or an epoch that was superseded  409
│   └── PartialWeightTransfer  weights reached a generator only in part    409
├── WorkerError          a method of a worker of a group raised            500
│   └── WorkerLost       it died, or did not answer; its group is ended    503  retryable
├── StateError           the state store failed                            503  retryable
│   └── StoreUnusable    it cannot be opened, and waiting does not help    503
└── WaitTimeout          fewer rollouts or scores than asked for in time   504  retryable

Every class carries `code`, `http_status` and `retryable`; a server writes an `ErrorBody`, the client
raises the same class again (`to_body`, `from_body`). A message says what was seen, what was wanted
and what to do.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel


class ErrorBody(BaseModel):
    """The JSON body of every failed request."""

    code: str
    message: str
    retryable: bool
    request_id: str | None = None


class ServiceError(Exception):
    """Root of the tree; raised itself only for an error that no subclass describes."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    retry_after_s: float = 1.0
    """Seconds to wait before a retryable request is sent again."""

    _by_code: ClassVar[dict[str, type[ServiceError]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.code in ServiceError._by_code:
            raise TypeError(
                f"error code {cls.code!r} is taken by {ServiceError._by_code[cls.code]}"
            )
        ServiceError._by_code[cls.code] = cls

    @property
    def message(self) -> str:
        """The text without the class name."""
        return str(self.args[0]) if self.args else self.code

    def to_body(self, request_id: str | None = None) -> ErrorBody:
        """The wire form of this error."""
        return ErrorBody(
            code=self.code, message=self.message, retryable=self.retryable, request_id=request_id
        )

    @staticmethod
    def from_body(body: ErrorBody) -> ServiceError:
        """The error of the same class; an unknown code becomes a plain `ServiceError`."""
        return ServiceError._by_code.get(body.code, ServiceError)(body.message)


class ConfigError(ServiceError):
    code = "config"
    http_status = 400


class UnknownName(ConfigError):
    code = "unknown_name"
    http_status = 404


class DataError(ServiceError):
    code = "data"
    http_status = 400


class RequestTooLong(ServiceError):
    code = "request_too_long"
    http_status = 413


class RequestTimeout(ServiceError):
    code = "request_timeout"
    http_status = 504
    retryable = True


class Unauthorized(ServiceError):
    code = "unauthorized"
    http_status = 401


class Forbidden(ServiceError):
    code = "forbidden"
    http_status = 403


class NotFound(ServiceError):
    code = "not_found"
    http_status = 404


class Conflict(ServiceError):
    code = "conflict"
    http_status = 409


class SessionEnded(ServiceError):
    code = "session_ended"
    http_status = 410


class QueueFull(ServiceError):
    code = "queue_full"
    http_status = 429
    retryable = True


class StaleVersion(ServiceError):
    code = "stale_version"
    http_status = 409


class VersionMoved(StaleVersion):
    """A pinned rollout met a swap, and is run again."""

    code = "version_moved"
    retryable = True


class WrongMode(ServiceError):
    """Asked of one that trains and generates by turns, out of turn."""

    code = "wrong_mode"
    http_status = 409


class NotEnoughWork(ServiceError):
    code = "not_enough_work"
    http_status = 409


class RolloutsFailed(ServiceError):
    """Rollouts that were waited for by id ended without a result."""

    code = "rollouts_failed"
    http_status = 409


class BackendError(ServiceError):
    code = "backend"
    http_status = 503
    retryable = True


class Draining(BackendError):
    code = "draining"


class LethalRequest(ServiceError):
    """Servers died while they worked on a request: no other gets it."""

    code = "lethal_request"
    http_status = 500


class ServiceAway(ServiceError):
    """A service that a workflow or reward calls was waited for in vain."""

    code = "service_away"
    http_status = 503


class WorkflowError(ServiceError):
    code = "workflow"
    http_status = 500


class ErrorBudgetExceeded(WorkflowError):
    code = "error_budget"


class RewardError(ServiceError):
    code = "reward"
    http_status = 500


class RewardOutage(RewardError):
    """The verifier itself failed: the answer was not scored, and is scored again."""

    code = "reward_outage"
    http_status = 503
    retryable = True


class SyncError(ServiceError):
    code = "sync"
    http_status = 409


class Fenced(SyncError):
    code = "fenced"


class PartialWeightTransfer(SyncError):
    """A generator in the trainer's process has only a part of a version, and serves nothing."""

    code = "partial_weight_transfer"


class WorkerError(ServiceError):
    """A method of a worker raised what is no `ServiceError`."""

    code = "worker"
    http_status = 500


class WorkerLost(WorkerError):
    """A worker died or did not answer in time; all of its group were ended."""

    code = "worker_lost"
    http_status = 503
    retryable = True


class StateError(ServiceError):
    code = "state"
    http_status = 503
    retryable = True


class StoreUnusable(StateError):
    """It is not what it should be, or will not have who asks."""

    code = "store_unusable"
    retryable = False


class WaitTimeout(ServiceError):
    code = "wait_timeout"
    http_status = 504
    retryable = True
