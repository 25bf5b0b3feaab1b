"""Uploads: shards are cast before they are gathered, and a copy may go out behind the next step."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from headway.contracts.config.weight_sync import ReceiverConfig, StoredSync
from tests.numeric.engines import open_engine, random_batch, token_loss, tokens_in_loss
from tests.numeric.models import save_model
from tests.numeric.ranks import DEADLINE_S, run_ranks
from tests.numeric.upload_rows import upload
from trainer.api import MicroBatchSpec
from weight_sync.deadline import Deadline
from weight_sync.publisher import StoredPublisher
from weight_sync.receiver import make_receiver
from weight_sync.transports.disk import make_local_publisher


def test_ranks_gather_in_the_published_type_and_every_bit_is_that_of_a_later_cast(
    tmp_path: Path,
) -> None:
    model_dir = save_model(tmp_path / "model", "llama")
    main, other = run_ranks(2, tmp_path / "run", upload, model_dir, tmp_path / "w", "bfloat16")
    assert main["dtypes"] == other["dtypes"] == {torch.bfloat16}
    assert main["published"].keys() == main["wanted"].keys()
    for name, whole in main["wanted"].items():
        assert whole.dtype == torch.float32
        assert torch.equal(main["published"][name], whole.bfloat16()), name
    plain, _ = run_ranks(2, tmp_path / "plain", upload, model_dir, tmp_path / "p", None)
    assert plain["dtypes"] == {torch.float32}
    assert plain["nbytes"] == 2 * main["nbytes"]


class Slow:
    """A publisher that begins when it is told."""

    def __init__(self, publisher: StoredPublisher) -> None:
        self._publisher = publisher
        self.goes_on = threading.Event()
        self.dtype, self.sends_from_device = publisher.dtype, False

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
        assert self.goes_on.wait(DEADLINE_S)
        return self._publisher.publish(version, tensors)


def test_what_goes_out_behind_a_step_is_what_was_there_before_it(tmp_path: Path) -> None:
    root = str(tmp_path / "w")
    with closing(make_local_publisher(root, StoredSync(dtype="bfloat16"))) as publisher:
        slow: Any = Slow(publisher)
        engine = open_engine(save_model(tmp_path / "model", "llama"), publisher=slow)
        engine._upload._goes_behind = True  # as on a GPU
        before = {name: t.clone() for name, t in engine._upload.parameters()}
        meta = publisher.announce(7)
        sending = engine.upload_weights(meta)
        assert sending is not None and not sending.done()
        engine.train_batch(random_batch(0), MicroBatchSpec(25), token_loss, tokens_in_loss)
        after = {name: t.clone() for name, t in engine._upload.parameters()}
        assert any(not torch.equal(after[name], t) for name, t in before.items())
        slow.goes_on.set()
        sending.result(DEADLINE_S)
    with closing(make_receiver(ReceiverConfig(allow=(root,)))) as receiver:
        shapes = {name: tensor.shape for name, tensor in before.items()}
        staged = receiver.within(Deadline(DEADLINE_S)).stage(meta, shapes)
    for name, tensor in before.items():
        assert torch.equal(staged.tensors[name], tensor.bfloat16()), name
