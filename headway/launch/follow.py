"""Follow a started run to its end, and sum it up from what its parts recorded themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.contracts.errors import ServiceError
from headway.contracts.http.status import StatusResponse
from headway.launch.launchers.run import Run
from headway.launch.plots import CURVES_NAME, import_plotting, plot_run
from headway.launch.progress import Progress
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.journal import METRICS_NAME, read_steps

POLL_S = 0.5
STATUS_TIMEOUT_S = 0.5
AVERAGE = 10


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a run."""

    seconds: float
    """Seconds from the command's start to its end, warm start included."""
    steps: int
    trajectories: int
    """Trained on, as counted by the trainer."""
    reward_first10: float
    reward_last10: float
    max_staleness: int
    """Largest one consumed, in versions."""
    eta: int
    versions: int
    """Committed since the gateway started."""
    updates_in_flight: int
    """Number of these that were committed while sequences were being generated."""
    lost: int
    """Trajectories lost by the ledger's audit, and where it counts more consumed than the trainer
    trained on."""
    duplicated: int
    """Trajectories duplicated by the ledger's audit, and where the trainer trained on more than it
    counts consumed."""
    run_dir: str

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON types."""
        return {
            key: round(value, 4) if isinstance(value, float) else value
            for key, value in asdict(self).items()
        }


def follow(run: Run, run_dir: Path, total_steps: int | None, progress: Progress) -> None:
    """Show the run until its trainer ends.

    Raises:
        ServiceError: the trainer failed, or a service died too often.
    """
    client = RemoteInferenceEngine(run.url, connect_timeout_s=STATUS_TIMEOUT_S, token=run.token)
    code = None
    preparation = threading.Thread(target=import_plotting, daemon=True)
    while code is None:
        code = run.watch()
        steps = read_steps(run_dir / METRICS_NAME)
        progress.show(steps, _status(client))
        if steps and preparation.ident is None:
            preparation.start()
        if code is None:
            run.process("trainer").wait(POLL_S)
    client.destroy()
    if code != 0:
        raise ServiceError(f"the trainer ended with status {code}")


def summarise(run: Run, run_dir: Path, eta: int, started: float) -> Summary:
    """Ask the ledger for its audit, draw the curves while everything ends, and sum up."""
    client = RemoteInferenceEngine(run.url, token=run.token)
    audit, status = client.audit(), client.status()
    client.destroy()
    run.terminate_servers()
    stopping = threading.Thread(target=run.stop, name="stop")
    stopping.start()
    steps = read_steps(run_dir / METRICS_NAME)
    plot_run(steps, run_dir / CURVES_NAME)
    stopping.join()
    trained = int(sum(step["trajectories"] for step in steps))
    consumed = audit.counts.consumed
    return Summary(
        seconds=time.monotonic() - started,
        steps=len(steps),
        trajectories=trained,
        reward_first10=_mean_reward(steps[:AVERAGE]),
        reward_last10=_mean_reward(steps[-AVERAGE:]),
        max_staleness=max(audit.max_staleness, int(max(step["staleness_max"] for step in steps))),
        eta=eta,
        versions=status.updates,
        updates_in_flight=status.updates_in_flight,
        lost=audit.lost + max(0, consumed - trained),
        duplicated=audit.duplicated + max(0, trained - consumed),
        run_dir=str(run_dir),
    )


def _status(client: RemoteInferenceEngine) -> StatusResponse | None:
    try:
        return client.status()
    except ServiceError:
        return None  # it is being restarted; the display says so


def _mean_reward(steps: Sequence[Mapping[str, Any]]) -> float:
    return sum(float(step["reward"]) for step in steps) / max(1, len(steps))
