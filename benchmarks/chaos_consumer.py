"""The trainer of `chaos.py`: it consumes, checkpoints and publishes as a real one does, without a model.

    python benchmarks/chaos_consumer.py --dir RUN --urls URL [URL ...] --batch 8 --group 4 --eta 2

It may be killed at any moment and started again: like a real trainer it resumes its checkpoint.
What it trained on is in `trained.jsonl`, a line per step; of lines with the same step the one with the
highest version counts, since a later incarnation goes on with a higher one, and lines of steps that the
checkpoint does not contain are ignored. `submitted` says up to where rollouts were acknowledged. It ends
when `stop` appears in its directory, after its step, or when its requests are refused because a later
incarnation has attached; and kills itself at the moment in `die-at`: see `_reach`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.weight_sync import DiskSync
from headway.contracts.errors import Fenced, NotEnoughWork, ServiceError
from headway.contracts.types import ConsumerSpec, Prompt, RolloutRequest
from headway.runtime.inference_client import RemoteInferenceEngine
from weight_sync.transports.base import make_publisher

OUTAGE_S = 120.0


@dataclass(frozen=True)
class State:
    """Content of a checkpoint."""

    step: int = 0
    version: int = 0
    cursor: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--urls", nargs="+", required=True)
    parser.add_argument("--weights", default="weights", help="below the directory")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--eta", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16)
    Consumer(parser.parse_args()).run()


class Consumer:
    """One incarnation."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._dir: Path = options.dir
        self._client = RemoteInferenceEngine(options.urls, connect_timeout_s=OUTAGE_S)
        root = str(self._dir / options.weights)
        self._publisher = make_publisher(DiskSync(root=root, keep=2))
        file = self._dir / "checkpoint.json"
        self._state = State(**json.loads(file.read_text())) if file.is_file() else State()
        self._ahead = self._options.batch * (self._options.eta + 2)
        """Groups that are submitted before they are waited for."""

    def run(self) -> None:
        state = self._state
        self._client.initialize()
        version = self._attach(state)
        if version != state.version:
            state = self._publish(State(state.step, version, state.cursor))
        state = self._replace_dropped(state)
        while not (self._dir / "stop").exists():
            state = self._step(state)
        self._client.destroy()

    def _attach(self, state: State) -> int:
        newest = max(self._client.status().head, self._publisher.latest() or 0, state.version)
        version = newest + 1 if newest else 0
        self._client.attach(
            ConsumerSpec(
                consumer="chaos",
                batch_size=self._options.batch * self._options.group,
                max_staleness=self._options.eta,
                step=state.step - 1,
                version=version,
            )
        )
        return version

    def _step(self, state: State) -> State:
        state = self._submit(state, self._options.batch if state.cursor else self._ahead)
        while True:
            try:
                batch = self._client.wait(self._options.batch, OUTAGE_S)
                break
            except NotEnoughWork:
                state = self._submit(state, self._options.batch)
        oldest = min(group.oldest_version for group in batch.groups)
        with (self._dir / "trained.jsonl").open("a") as file:
            line = {
                "step": state.step,
                "version": state.version,
                "ids": batch.rollout_ids,
                "rows": len(batch.trajectories),
                "staleness": state.version - oldest,
                "at": time.time(),
            }
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._reach("trained")
        self._client.consumed(batch.rollout_ids, state.step, state.step - 1)
        self._reach("consumed")
        state = State(state.step + 1, state.version, state.cursor)
        self._save(state)
        self._reach("saved")
        return self._publish(State(state.step, state.version + 1, state.cursor))

    def _replace_dropped(self, state: State) -> State:
        """Submit replacements for the rollouts that were too stale for the new version."""
        counts = self._client.status().counts
        waiting = (counts.queued + counts.leased + counts.ready) // self._options.group
        is_first = state.cursor == 0
        return state if is_first else self._submit(state, max(0, self._ahead - waiting))

    def _submit(self, state: State, count: int) -> State:
        target = state.cursor + count
        self._client.submit([self._request(at) for at in range(state.cursor, target)])
        with (self._dir / "submitted").open("a") as file:
            file.write(f"{target}\n")
        return State(state.step, state.version, target)

    def _request(self, at: int) -> RolloutRequest:
        return RolloutRequest(
            rollout_id=f"chaos.{at}",
            consumer="chaos",
            prompt=Prompt(
                group_id=f"chaos.{at}",
                group_size=self._options.group,
                input_ids=(1, 2, 3, at % 10),
                data={"answer": "1"},
            ),
            reward=ComponentConfig(name="exact", args={"pattern": "[0-9]"}),
            gconfig=SamplingConfig(max_new_tokens=self._options.tokens, ignore_eos=True),
        )

    def _publish(self, state: State) -> State:
        """Publish like a real trainer: a refused version number is not tried again."""
        while True:
            meta = self._publisher.announce(state.version)
            commit = self._client.update_weights(meta)
            self._reach("announced")
            weight = torch.full((64,), float(state.version))
            self._publisher.publish(state.version, [("weight", weight)])
            self._reach("published")
            try:
                commit.result(OUTAGE_S)
            except Fenced:
                raise
            except ServiceError as error:
                print(f"version {state.version} was refused: {error}", flush=True)
                state = State(state.step, state.version + 1, state.cursor)
                continue
            self._reach("committed")
            self._publisher.collect(state.version)
            self._save(state)
            return state

    def _reach(self, moment: str) -> None:
        """Die here, if that is wanted."""
        order = self._dir / "die-at"
        if order.is_file() and order.read_text() == moment:
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def _save(self, state: State) -> None:
        partial = self._dir / f"checkpoint.partial-{os.getpid()}"
        partial.write_text(json.dumps(asdict(state)))
        partial.replace(self._dir / "checkpoint.json")


if __name__ == "__main__":
    main()
