"""The suite that every train backend passes, for pytest: ours, and those of other packages.

    from trainer.testing import TrainEngineContract

    class TestMyEngine(TrainEngineContract):
        make_engine = MyEngine  # called as `trainer.backend` is

Engines run in this process, on the CPU unless `device` says otherwise, on a tiny Llama. Results are
compared with plain PyTorch, one sequence at a time. Several ranks and adapters are not covered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headway.contracts.config.model import Device, TrainedModelConfig
from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.config.trainer import TrainerConfig
from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.errors import ConfigError, DataError
from trainer.api import LossOutput, MicroBatchSpec, ModelOutput, SaveLoadMeta, TrainEngine
from trainer.batching.sequences import SequenceBatch, shift_left
from trainer.topology import Topology
from weight_sync.channel import WeightPublisher
from weight_sync.deadline import Deadline
from weight_sync.model_dir import MAKING_MODELS
from weight_sync.receiver import make_receiver
from weight_sync.testing import VOCAB_SIZE, save_tiny_model
from weight_sync.transports.disk import make_local_publisher

LENGTHS = (9, 3, 17, 5, 12, 2, 8, 6)
WHOLE, CUT = MicroBatchSpec(10_000), MicroBatchSpec(25)
TEMPERATURE = 0.7
LR = 1e-2


def batch_of(seed: int = 0, lengths: Sequence[int] = LENGTHS) -> SequenceBatch:
    """Packed random sequences; a random part of their tokens is in the loss."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)
    ids = torch.randint(VOCAB_SIZE, (size,), generator=generator)
    mask = torch.rand(size, generator=generator) < 0.7
    columns = {
        "input_ids": ids,
        "labels": shift_left(ids, lengths, 0),
        "loss_mask": shift_left(mask, lengths, False),
    }
    return SequenceBatch(tuple(lengths), columns)


def imitation(output: ModelOutput, batch: SequenceBatch) -> LossOutput:
    """Mean negative log-likelihood of the tokens in the loss, and metrics of them."""
    mask = batch["loss_mask"]
    nll = -output.logprobs(batch["labels"], TEMPERATURE, mask)
    mean = nll.sum() / mask.sum().clamp(min=1)
    return LossOutput(mean, {"nll": mean.detach(), "nll_max": nll.detach().max()})


def num_tokens(batch: SequenceBatch) -> float:
    """Weight of a micro-batch: its tokens in the loss."""
    return float(batch["loss_mask"].sum())


def label_logprobs(output: ModelOutput, batch: SequenceBatch) -> Tensor:
    """[T] hook."""
    return output.logprobs(batch["labels"], TEMPERATURE)


class TrainEngineContract:
    """Subclass it under a name that begins with `Test`, and set `make_engine`."""

    make_engine: ClassVar[Callable[..., TrainEngine]]
    """The backend, a class or function: called with the model's, the optimizer's and the trainer's
    configuration, topology and publisher."""
    args: ClassVar[dict[str, Any]] = {}
    """Further arguments of the backend, for example `{"args": MyArgs()}`."""
    device: ClassVar[Device] = "cpu"
    """Device of the engines."""
    bound: ClassVar[float] = 2e-4
    """Largest difference of logprobs to those of plain PyTorch in float32."""

    folder: ClassVar[Path]
    model_path: ClassVar[Path]
    _folders: ClassVar[TemporaryDirectory[str]]
    _engines: list[TrainEngine]

    @classmethod
    def setup_class(cls) -> None:
        """Write the model that the tests of a class share."""
        cls._folders = TemporaryDirectory()
        cls.folder = Path(cls._folders.name)
        cls.model_path = save_tiny_model(cls.folder / "model")

    @classmethod
    def teardown_class(cls) -> None:
        """Remove it, and what tests wrote."""
        cls._folders.cleanup()

    def setup_method(self) -> None:
        """Begin without engines."""
        self._engines = []

    def teardown_method(self) -> None:
        """Destroy the engines of a test."""
        for engine in self._engines:
            engine.destroy()

    def open(
        self, publisher: WeightPublisher | None = None, path: Path | None = None, **model: Any
    ) -> TrainEngine:
        """Return an engine that has loaded its model.

        Args:
            path: of the model; None takes the suite's.
            model: further settings of it.
        """
        topology = Topology.from_environment(self.device)
        engine: TrainEngine = type(self).make_engine(
            TrainedModelConfig(path=str(path or self.model_path), **model),
            OptimizerConfig(lr=LR, schedule="linear", weight_decay=0.0, max_grad_norm=0.5),
            TrainerConfig(total_steps=10, device=self.device),
            topology,
            publisher,
            **self.args,
        )
        engine.initialize(None, None)
        self._engines.append(engine)
        return engine

    def reference(self, path: Path | None = None) -> Any:
        """Return the same model as transformers loads it."""
        folder = path or self.model_path
        with MAKING_MODELS:
            return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)

    def slow_logprobs(self, model: Any, batch: SequenceBatch) -> Tensor:
        """[T] log-probability of the labels, one sequence at a time."""
        rows = zip(
            torch.split(batch["input_ids"], list(batch.lengths)),
            torch.split(batch["labels"], list(batch.lengths)),
            strict=True,
        )
        tables = [
            torch.log_softmax(model(ids[None]).logits[0].double() / TEMPERATURE, -1)[
                torch.arange(len(ids)), labels
            ]
            for ids, labels in rows
        ]
        return torch.cat(tables)

    def logprobs(self, engine: TrainEngine) -> Tensor:
        """[T] of the suite's batch."""
        result: Tensor = engine.forward(batch_of(), WHOLE, post_hook=label_logprobs)
        return result

    def assert_close(self, got: Tensor, expected: Tensor) -> None:
        """Compare logprobs."""
        torch.testing.assert_close(got.double(), expected.double(), atol=self.bound, rtol=0.0)

    def train(
        self, engine: TrainEngine, seed: int = 0, spec: MicroBatchSpec = WHOLE
    ) -> dict[str, float]:
        """One step."""
        return engine.train_batch(batch_of(seed), spec, imitation, num_tokens)

    @pytest.mark.parametrize("spec", [WHOLE, CUT], ids=["whole", "cut"])
    def test_forward_gives_the_models_logprobs_in_the_batchs_order(
        self, spec: MicroBatchSpec
    ) -> None:
        engine, batch = self.open(), batch_of()
        with torch.no_grad():
            expected = self.slow_logprobs(self.reference(), batch)
        each = engine.forward(batch, spec, post_hook=label_logprobs, aggregate_fn=list)
        assert [len(row) for row in each] == list(batch.lengths)
        self.assert_close(torch.cat(each), expected)
        first = engine.forward(
            batch, spec, [1] * len(batch.lengths), lambda _, part: part["input_ids"][_starts(part)]
        )
        assert first.tolist() == batch["input_ids"][_starts(batch)].tolist()

    def test_a_mask_leaves_out_what_is_not_asked_for(self) -> None:
        engine, batch = self.open(), batch_of()

        def both(output: ModelOutput, part: SequenceBatch) -> Tensor:
            asked = (part["labels"], TEMPERATURE, part["loss_mask"])
            logprobs, entropy = output.logprobs_and_entropy(*asked)
            return torch.stack((logprobs, output.logprobs(*asked), entropy), -1)

        got, again, entropy = engine.forward(batch, WHOLE, post_hook=both).unbind(-1)
        mask = batch["loss_mask"]
        self.assert_close(got, torch.where(mask, self.logprobs(engine), 0.0))
        self.assert_close(again, got)
        assert ((entropy > 0.0) == mask).all() and entropy.max() <= math.log(
            VOCAB_SIZE
        ) + self.bound

    def test_a_head_refuses_what_it_does_not_have(self) -> None:
        with pytest.raises(ConfigError):
            self.open().forward(batch_of(), WHOLE, post_hook=lambda output, _: output.values())
        judge = self.open(head="value")
        values = judge.forward(batch_of(), CUT)
        assert values.shape == (batch_of().num_tokens,) and values.isfinite().all()
        with pytest.raises(ConfigError):
            judge.forward(batch_of(), WHOLE, post_hook=label_logprobs)

    @pytest.mark.parametrize("spec", [WHOLE, CUT], ids=["whole", "cut"])
    def test_a_step_has_the_loss_and_the_gradient_of_plain_pytorch(
        self, spec: MicroBatchSpec
    ) -> None:
        engine, batch, model = self.open(), batch_of(), self.reference()
        mask = batch["loss_mask"]
        nll = -self.slow_logprobs(model, batch)[mask]
        nll.mean().backward()
        nll = nll.detach()
        squares = sum(float(p.grad.double().square().sum()) for p in model.parameters())
        evaluated = engine.eval_batch(batch, spec, imitation, num_tokens)
        assert evaluated is not None
        metrics = self.train(engine, spec=spec)
        expected = {
            "loss": float(nll.mean()),
            "nll": float(nll.mean()),
            "nll_max": float(nll.max()),
            "grad_norm": math.sqrt(squares),
            "lr": LR,
            "skipped_steps": 0.0,
        }
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-3, abs=self.bound), name
        assert float(evaluated) == pytest.approx(metrics["loss"], rel=1e-5)

    def test_a_step_is_the_same_however_the_batch_is_cut(self) -> None:
        engines = [self.open(), self.open()]
        for seed in range(2):
            for engine, spec in zip(engines, (WHOLE, CUT), strict=True):
                self.train(engine, seed, spec)
        one, two = map(self.logprobs, engines)
        torch.testing.assert_close(one, two, atol=50 * self.bound, rtol=0.0)

    def test_steps_lower_the_loss(self) -> None:
        engine = self.open()
        losses = [self.train(engine)["loss"] for _ in range(8)]
        assert losses[-1] < 0.7 * losses[0]

    def test_an_evaluation_changes_nothing_and_takes_a_vector(self) -> None:
        engine = self.open()
        before = self.logprobs(engine)

        def vector(output: ModelOutput, batch: SequenceBatch) -> LossOutput:
            loss = imitation(output, batch).loss
            return LossOutput(torch.stack((loss, 2.0 * loss, torch.ones_like(loss))))

        single = engine.eval_batch(batch_of(), CUT, imitation, num_tokens)
        three = engine.eval_batch(batch_of(), CUT, vector, num_tokens)
        assert single is not None and three is not None
        assert three.tolist() == pytest.approx([float(single), 2.0 * float(single), 1.0], rel=1e-5)
        assert torch.equal(self.logprobs(engine), before)

    def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(self) -> None:
        engine = self.open()
        before = self.logprobs(engine)

        def broken(output: ModelOutput, batch: SequenceBatch) -> LossOutput:
            return LossOutput(imitation(output, batch).loss * math.inf)

        assert engine.train_batch(batch_of(), WHOLE, broken, num_tokens)["skipped_steps"] == 1.0
        assert torch.equal(self.logprobs(engine), before)
        assert self.train(engine)["skipped_steps"] == 0.0

    def test_what_no_micro_batch_holds_is_refused(self) -> None:
        engine, pairs = self.open(), MicroBatchSpec(max(LENGTHS), granularity=2)
        for spec in (MicroBatchSpec(max(LENGTHS) - 1), pairs):
            for call in (engine.train_batch, engine.eval_batch):
                with pytest.raises(DataError):
                    call(batch_of(), spec, imitation, num_tokens)

    def test_neighbours_of_a_unit_stay_together(self) -> None:
        engine, counts = self.open(), list[int]()

        def count(output: ModelOutput, batch: SequenceBatch) -> LossOutput:
            counts.append(len(batch.lengths))
            return imitation(output, batch)

        engine.eval_batch(batch_of(), MicroBatchSpec(25, granularity=2), count, num_tokens)
        assert len(counts) > 1 and all(number % 2 == 0 for number in counts)

    def test_on_one_rank_both_scopes_of_normalization_are_one(self) -> None:
        engine, ask = self.open(), (batch_of(), CUT, imitation, num_tokens)
        both, each = engine.eval_batch(*ask, "global"), engine.eval_batch(*ask, "dp")
        assert both is not None and each is not None
        assert float(each) == pytest.approx(float(both), rel=1e-6)
        assert engine.train_batch(*ask, "dp")["loss"] == pytest.approx(float(both), rel=1e-5)

    def test_the_learning_rate_follows_its_schedule(self) -> None:
        engine = self.open()
        rates = []
        for _ in range(3):
            rates.append(self.train(engine)["lr"])
            engine.step_lr_scheduler()
        assert rates == pytest.approx([LR, 0.9 * LR, 0.8 * LR])

    def test_a_checkpoint_holds_model_optimizer_and_schedule(self, tmp_path: Path) -> None:
        engine, meta = self.open(), SaveLoadMeta(str(tmp_path / "checkpoint"))
        self.train(engine)
        engine.step_lr_scheduler()
        engine.save(meta).result(60)
        kept = self.logprobs(engine)
        expected = self.train(engine, 1)
        after = self.logprobs(engine)
        restored = self.open()
        restored.load(meta)
        assert torch.equal(self.logprobs(restored), kept)
        assert self.train(restored, 1) == pytest.approx(expected, rel=1e-5)
        self.assert_close(self.logprobs(restored), after)

    def test_an_export_is_a_hugging_face_directory(self, tmp_path: Path) -> None:
        engine = self.open()
        self.train(engine)
        engine.save(SaveLoadMeta(str(tmp_path / "out"), weight_format="hf")).result(60)
        with torch.no_grad():
            expected = self.slow_logprobs(self.reference(tmp_path / "out"), batch_of())
        self.assert_close(self.logprobs(engine), expected)

    def test_a_publication_holds_every_parameter_under_its_name(self, tmp_path: Path) -> None:
        publisher = make_local_publisher(str(tmp_path / "weights"))
        engine = self.open(publisher)
        self.train(engine)
        meta = publisher.announce(4)
        sent = engine.upload_weights(meta)
        if sent is not None:
            sent.result(60)
        model = self.reference()
        shapes = {name: p.shape for name, p in model.named_parameters()}
        reader = make_receiver(ReceiverConfig(allow=(str(tmp_path / "weights"),)))
        staged = reader.within(Deadline(60.0)).stage(meta, shapes)
        publisher.close()
        model.load_state_dict(dict(staged.tensors), strict=False)
        with torch.no_grad():
            self.assert_close(self.logprobs(engine), self.slow_logprobs(model, batch_of()))

    def test_a_model_moves_towards_another_by_its_share(self) -> None:
        learner, follower, copy = self.open(), self.open(), self.open()
        before = self.logprobs(follower)
        self.train(learner)
        follower.move_towards(learner, 0.0)
        assert torch.equal(self.logprobs(follower), before)
        follower.move_towards(learner, 0.5)
        assert not torch.equal(self.logprobs(follower), before)
        copy.move_towards(learner, 1.0)
        self.assert_close(self.logprobs(copy), self.logprobs(learner))

    def test_without_adapters_a_model_that_has_none_is_as_it_is(self) -> None:
        engine = self.open()
        before = self.logprobs(engine)
        with engine.without_adapters():
            assert torch.equal(self.logprobs(engine), before)

    def test_a_rank_says_what_it_needs(self) -> None:
        needs = self.open().get_scheduling_config()
        assert needs.cpu >= 1 and needs.gpu == int(self.device == "cuda")


def _starts(batch: SequenceBatch) -> Tensor:
    """[number of sequences] where each begins."""
    lengths = torch.tensor(batch.lengths, device=batch["input_ids"].device)
    return lengths.cumsum(0) - lengths
