"""What steps of the embedded engine cost a GPU, counted on the device that is not there.

    python -m tests.unit.inference_server.device_metrics 28     prints them, of a model of 28 layers

The double changes torch for its whole process, so tests run this in one of their own.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from headway.contracts.types import LLMRequest
from inference_server.backends.embedded.backend import EmbeddedTorchBackend
from inference_server.backends.embedded.device import Accelerator, Graph, VarlenAttention
from inference_server.backends.embedded.sequence import Caller, Sequence
from tests.numeric.backends import prompt_of, request, stage
from tests.numeric.models import save_model

SHORT = [20] * 8
"""Prompts of one length: on slabs, all in one."""
LONG = [20, 70, 100, 140, 200, 270, 400, 520]
"""Prompts for slabs of eight capacities, or blocks of three counts."""


@dataclass
class Figures:
    """Of one step."""

    launches: int = 0
    copies: int = 0
    """From the host to the device."""
    reads: int = 0
    """By which the host waits for the device."""
    mixed: list[str] = field(default_factory=list)
    """Operations on tensors of both."""
    shapes: int = 0
    """Distinct ones of attention."""


class DoubleDevice(Accelerator):
    """The device double as the engine knows devices."""

    def __init__(self, has_varlen: bool) -> None:
        from tests.device_double import DEVICE, DeviceDouble

        super().__init__(DEVICE)
        self.double = DeviceDouble()
        self._has_varlen = has_varlen

    @contextmanager
    def decoding(self) -> Iterator[None]:
        with self.double, torch.no_grad():
            yield

    @contextmanager
    def staging(self) -> Iterator[None]:
        with self.decoding():
            yield

    def place(self, module: torch.nn.Module) -> None:
        self.double.move(module)

    def free_bytes(self) -> int:
        return 1 << 28

    def varlen_attention(self, dtype: torch.dtype, head_dim: int) -> VarlenAttention | None:
        from tests.numeric.paged import varlen

        return varlen.varlen_attn if self._has_varlen else None

    def capture(self, work: Callable[[], Tensor], beside: Graph | None = None) -> Graph | None:
        from tests.numeric.paged import Tape

        double = self.double
        before = len(double.syncs), len(double.queued)
        tape = Tape()
        with tape:
            output = work()
        waited = [*double.syncs[before[0] :], *double.queued[before[1] :]]
        assert not waited, f"nothing may wait, or copy, while recording: {waited}"

        def replay() -> None:
            launches, syncs, queued = Counter(double.launches), [*double.syncs], [*double.queued]
            with double, torch.no_grad():
                tape.replay()
            double.launches, double.syncs, double.queued = launches, syncs, queued
            double.launches["graph"] += 1

        return Graph(replay, output)


class Loop(asyncio.AbstractEventLoop):
    """Nobody listens."""

    def call_soon_threadsafe(self, *_: object, **__: object) -> None:  # type: ignore[override]
        pass


class Engine:
    """A backend whose steps are taken one by one."""

    def __init__(
        self,
        folder: Path,
        has_varlen: bool = True,
        has_graphs: bool = False,
        is_ahead: bool = False,
    ) -> None:
        """
        Args:
            is_ahead: a step is launched before the last one is read.
        """
        self.device = DoubleDevice(has_varlen)
        self.backend = EmbeddedTorchBackend(
            EmbeddedTorchConfig(max_sequences=16, kv_cache_bytes=1 << 24, cuda_graphs=has_graphs),
            ModelConfig(path=str(folder)),
            0,
            device=self.device,
        )
        if not is_ahead:
            self.backend._decode_loop._launch_behind = lambda: None  # type: ignore[method-assign]

    def submit(self, *asked: LLMRequest) -> list[Sequence]:
        """Queue requests."""
        caller = Caller(Loop(), asyncio.Future(loop=asyncio.new_event_loop()), None)
        made = [self.backend._sequence(each, caller) for each in asked]
        self.backend._decode_loop.scheduler.waiting.extend(made)
        return made

    def crowd(self, lengths: list[int], **options: object) -> list[Sequence]:
        """Queue one request for each length."""
        return self.submit(
            *(
                request(f"r{i}", prompt_of(n, i), **{"max_new_tokens": 60, "seed": i} | options)
                for i, n in enumerate(lengths)
            )
        )

    def run(self, work: Callable[[], object]) -> Figures:
        """What `work` on the engine's thread costs."""
        double = self.device.double
        double.clear()
        shapes: set[object] = set()
        with watched_attention(shapes), self.device.decoding():
            work()
        kinds = Counter(each[0] for each in (*double.syncs, *double.queued))
        copies = kinds.pop("host to device", 0)
        return Figures(
            launches=double.launches.total(),
            copies=copies,
            reads=kinds.total(),
            mixed=[str(each) for each in double.mixed],
            shapes=len(shapes),
        )

    def step(self) -> Figures:
        """What one step costs."""
        return self.run(self.backend._decode_loop.step)

    def end_all(self) -> None:
        """Drop what runs and what is kept."""
        with self.device.decoding():
            self.backend._decode_loop.interrupt(None)
            self.backend._decode_loop.cache.drop_kept()


@contextmanager
def watched_attention(shapes: set[object]) -> Iterator[None]:
    """Collect the shapes that attention is called with, whichever it is."""
    from inference_server.backends.embedded import paged_attention, slab_attention

    inner, attend = slab_attention.scaled_dot_product_attention, paged_attention.PagedStep.attend

    def dense(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        shapes.add((q.shape, k.shape))
        return inner(q, k, v, **options)

    def paged(self: paged_attention.PagedStep, layer: int, q: Tensor, *rest: object) -> Tensor:
        shapes.add((q.shape, self._store.shape))
        return attend(self, layer, q, *rest)

    slab_attention.scaled_dot_product_attention = dense
    paged_attention.PagedStep.attend = paged  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        slab_attention.scaled_dot_product_attention = inner
        paged_attention.PagedStep.attend = attend  # type: ignore[method-assign]


def measure(folder: Path) -> dict[str, Figures]:
    """All kinds of steps: paged ones, then the same with graphs, then slabs."""
    metrics: dict[str, Figures] = {}
    for name, lengths in (("one length", SHORT), ("eight lengths", LONG)):
        engine = Engine(folder)
        engine.crowd(lengths)
        metrics[f"prefill, {name}"] = engine.step()
        engine.step()
        metrics[f"decode, {name}"] = engine.step()
    engine.end_all()
    engine.crowd([20, 30, 40], top_p=0.9, temperature=0.7, frequency_penalty=0.3, min_new_tokens=40)
    engine.crowd([50], top_k=5, min_p=0.1, logit_bias={3: 1.0})
    engine.crowd([60], top_logprobs=3)
    for _ in range(3):  # prompts that begin alike wait for one another
        engine.step()
    metrics["decode, all wishes"] = engine.step()
    sequence = engine.backend._decode_loop.scheduler.running[0]
    with engine.device.decoding():
        engine.backend._decode_loop.end(sequence, sequence.response("length", None, 0.0))
    metrics["decode, other rows"] = engine.step()
    engine.end_all()
    for top in (0, 3):
        score = {"logprob_start": 0, "top_logprobs": top, "max_new_tokens": 1}
        engine.submit(*(request(f"s{i}", prompt_of(100, i), **score) for i in range(2)))
        metrics[f"scores, top {top}"] = engine.step()
    engine.crowd(SHORT)
    engine.step()
    metrics["preemption"] = engine.run(engine.backend._decode_loop.scheduler.retract)
    metrics["prefill after it"] = engine.step()
    fitted = engine.backend.model.fit(stage(1, folder))
    metrics["swap"] = engine.run(lambda: engine.backend.model.exchange(fitted))
    for name, is_ahead in (("graph", False), ("graph ahead", True)):
        engine = Engine(folder, has_graphs=True, is_ahead=is_ahead)
        engine.crowd(LONG)
        for _ in range(3):
            engine.step()
        metrics[f"decode, {name}"] = engine.step()
    engine = Engine(folder, has_varlen=False)
    engine.crowd(LONG)
    metrics["prefill, slabs"] = engine.step()
    engine.step()
    metrics["decode, slabs"] = engine.step()
    return metrics


def report(folder: str, answers: Connection) -> None:
    """Send the figures, as dictionaries, or what went wrong."""
    torch.set_num_threads(1)
    try:
        answers.send({name: asdict(each) for name, each in measure(Path(folder)).items()})
    except Exception as error:
        answers.send(error)
        raise


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        layers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
        model = save_model(Path(scratch), "llama", num_layers=layers, context=1024)
        for name, each in measure(model).items():
            sys.stdout.write(f"{name:24}{each}\n")
