"""One optimizer step on given rollouts, three ways; all compute the same loss, gradient and AdamW update.

The loss is PPO's clipped objective with one advantage per response, its mean over all sampled tokens of
the step (TRL's `dapo`, this project's `token_mean`), then a clipped gradient norm and a fused AdamW.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

LR = 1e-6
MAX_GRAD_NORM = 1.0
EPS_CLIP = 0.2
BETAS = (0.9, 0.95)
PAD, EOS = 0, 1


@dataclass(frozen=True)
class Lengths:
    """Lognormal tokens of prompts and responses."""

    prompt_median: float
    response_median: float
    sigma: float
    max_prompt: int
    max_response: int


@dataclass(frozen=True)
class Rollout:
    prompt: list[int]
    response: list[int]
    advantage: float
    behaviour: list[float]
    """Logprobs of the response's tokens when they were sampled."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class Setup:
    """Settings that every contestant shares."""

    folder: Path
    dtype: str
    micro_batch: int
    """Sequences of a padded micro-batch."""
    budget: int
    """Tokens of a packed one."""


class Way(Protocol):
    def step(self) -> tuple[float, float]:
        """Loss, and the gradient's norm before it is clipped."""

    def gradients(self) -> dict[str, Tensor]:
        """Return the clipped gradients of the last step."""


def draw_rollouts(
    seed: int, sequences: int, group: int, vocabulary: int, lengths: Lengths
) -> list[Rollout]:
    """Groups of responses to one prompt, in the order of their groups.

    The model is random, so its logprobs are about -log(vocabulary): some ratios are clipped.
    """
    rng = random.Random(seed)

    def size(median: float, most: int) -> int:
        return min(most, max(2, round(rng.lognormvariate(math.log(median), lengths.sigma))))

    def tokens(count: int) -> list[int]:
        return [rng.randrange(EOS + 1, vocabulary) for _ in range(count)]

    rollouts = []
    for _ in range(sequences // group):
        prompt = tokens(size(lengths.prompt_median, lengths.max_prompt))
        for _ in range(group):
            response = tokens(size(lengths.response_median, lengths.max_response))
            behaviour = [rng.gauss(-math.log(vocabulary), 0.2) for _ in response]
            rollouts.append(Rollout(prompt, response, rng.gauss(0.0, 1.0), behaviour))
    return rollouts


class EngineWay:
    """`FSDP2Engine.train_batch`, with all metrics of a real step."""

    def __init__(self, setup: Setup, rollouts: Sequence[Rollout]) -> None:
        from headway.contracts.config.algorithm import AlgorithmConfig
        from headway.contracts.config.model import TrainedModelConfig
        from headway.contracts.config.optimizer import OptimizerConfig
        from headway.contracts.config.policy_losses import ClipLossConfig
        from headway.contracts.config.trainer import TrainerConfig
        from trainer.api import MicroBatchSpec
        from trainer.backends.fsdp2 import FSDP2Engine
        from trainer.topology import Topology

        optimizer = OptimizerConfig(
            lr=LR, beta1=BETAS[0], beta2=BETAS[1], max_grad_norm=MAX_GRAD_NORM
        )
        self._engine = FSDP2Engine(
            TrainedModelConfig(path=str(setup.folder), dtype=setup.dtype),
            optimizer,
            TrainerConfig(),
            Topology(0, 1, torch.device("cpu")),
            None,
        )
        self._engine.initialize(None, None)
        self._config = AlgorithmConfig(
            policy_loss=ClipLossConfig(eps_clip=EPS_CLIP), decoupled=False
        )
        self._spec = MicroBatchSpec(setup.budget)
        self._batch = packed(rollouts)

    def step(self) -> tuple[float, float]:
        metrics = self._engine.train_batch(self._batch, self._spec, self._loss, self._weight)
        return metrics["loss"], metrics["grad_norm"]

    def gradients(self) -> dict[str, Tensor]:
        return named_gradients(self._engine._model.model)

    def _loss(self, output: Any, batch: Any) -> Any:
        from trainer.algorithms.losses import policy_loss
        from trainer.api import LossOutput

        logprobs = output.logprobs(batch["labels"], mask=batch["loss_mask"])
        return LossOutput(*policy_loss(self._config, batch, logprobs))

    def _weight(self, batch: Any) -> float:
        return float(batch["loss_mask"].sum())


class PaddedWay:
    """A plain loop: micro-batches in the given order, each padded to its own longest prompt and response,
    logits at the responses' positions only."""

    def __init__(self, setup: Setup, rollouts: Sequence[Rollout]) -> None:
        self._model = load_model(setup)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True
        )
        self._total = sum(len(rollout.response) for rollout in rollouts)
        self._micro_batches = [
            padded(rollouts[start : start + setup.micro_batch])
            for start in range(0, len(rollouts), setup.micro_batch)
        ]

    def step(self) -> tuple[float, float]:
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for micro_batch in self._micro_batches:
            loss = self._loss(**micro_batch) / self._total
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        return total, norm.item()

    def gradients(self) -> dict[str, Tensor]:
        return named_gradients(self._model)

    def _loss(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        old_per_token_logps: Tensor,
        advantages: Tensor,
    ) -> Tensor:
        width = completion_ids.shape[1]
        logits = self._model(
            input_ids=torch.cat([prompt_ids, completion_ids], dim=1),
            attention_mask=torch.cat([prompt_mask, completion_mask], dim=1),
            logits_to_keep=width + 1,
            use_cache=False,
        ).logits[:, :-1]
        table = torch.log_softmax(logits.float(), dim=-1)
        logprobs = table.gather(2, completion_ids[:, :, None])[:, :, 0]
        ratio = (logprobs - old_per_token_logps).exp()
        clipped = ratio.clamp(1 - EPS_CLIP, 1 + EPS_CLIP)
        objective = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
        return -(objective * completion_mask).sum()


class TRLWay:
    """The training step of TRL's `GRPOTrainer`: padding, loss, metrics and backward pass are its own.

    Without gradient checkpointing and bfloat16 autocast, which are on by default there.
    """

    def __init__(self, setup: Setup, rollouts: Sequence[Rollout]) -> None:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        class OnGivenRollouts(GRPOTrainer):  # type: ignore[misc]
            def _prepare_inputs(self, inputs: Any) -> Any:
                return inputs

        self._accumulation = len(rollouts) // setup.micro_batch
        config = GRPOConfig(
            output_dir=str(setup.folder / "trl"),
            per_device_train_batch_size=setup.micro_batch,
            gradient_accumulation_steps=self._accumulation,
            num_generations=setup.micro_batch,
            learning_rate=LR,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=0.0,
            max_grad_norm=MAX_GRAD_NORM,
            epsilon=EPS_CLIP,
            loss_type="dapo",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to=[],
        )
        self._trainer = OnGivenRollouts(
            load_model(setup),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["0"] * len(rollouts)}),
            processing_class=make_tokenizer(),
        )
        self._trainer.create_optimizer_and_scheduler(num_training_steps=1_000_000)
        self._model, self._optimizer = self._trainer.accelerator.prepare(
            self._trainer.model, self._trainer.optimizer
        )
        self._trainer.current_gradient_accumulation_steps = self._accumulation
        self._micro_batches = self._split(rollouts)

    def _split(self, rollouts: Sequence[Rollout]) -> list[dict[str, Tensor]]:
        """Split as `GRPOTrainer` does: padded together first."""
        from trl.trainer.utils import split_tensor_dict

        whole = padded(rollouts)
        whole["num_items_in_batch"] = whole["completion_mask"].sum()
        return list(split_tensor_dict(whole, self._accumulation))

    def step(self) -> tuple[float, float]:
        self._optimizer.zero_grad()
        accelerator, total = self._trainer.accelerator, torch.zeros(())
        for number, inputs in enumerate(self._micro_batches, 1):
            accelerator.gradient_state._set_sync_gradients(number == self._accumulation)
            total += self._trainer.training_step(self._model, inputs, None)
        norm = accelerator.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        return total.item(), norm.item()

    def gradients(self) -> dict[str, Tensor]:
        return named_gradients(self._model)


WAYS: dict[str, Callable[[Setup, Sequence[Rollout]], Way]] = {
    "engine": EngineWay,
    "padded": PaddedWay,
    "trl": TRLWay,
}


def packed(rollouts: Sequence[Rollout]) -> Any:
    """The columns of a policy loss, end to end."""
    from trainer.batching.sequences import SequenceBatch, shift_left

    lengths = tuple(rollout.num_tokens for rollout in rollouts)

    def column(
        dtype: torch.dtype, of_prompt: float, of_response: Callable[[Rollout], list[float]]
    ) -> Tensor:
        values = [value for r in rollouts for value in [of_prompt] * len(r.prompt) + of_response(r)]
        return shift_left(torch.tensor(values, dtype=dtype), lengths, 0)

    ids = torch.tensor([token for r in rollouts for token in r.prompt + r.response])
    behaviour = column(torch.float32, 0.0, lambda r: r.behaviour)
    return SequenceBatch(
        lengths,
        {
            "input_ids": ids,
            "labels": shift_left(ids, lengths, 0),
            "loss_mask": column(torch.bool, 0, lambda r: [1.0] * len(r.response)),
            "advantages": column(torch.float32, 0, lambda r: [r.advantage] * len(r.response)),
            "behaviour_logprobs": behaviour,
            "proximal_logprobs": behaviour,
        },
    )


def padded(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Prompts padded on the left, responses on the right; named as TRL names them."""
    prompts, responses = [r.prompt for r in rollouts], [r.response for r in rollouts]
    return {
        "prompt_ids": rows(prompts, PAD, is_left=True),
        "prompt_mask": rows([[1] * len(p) for p in prompts], 0, is_left=True),
        "completion_ids": rows(responses, PAD),
        "completion_mask": rows([[1] * len(r) for r in responses], 0),
        "old_per_token_logps": rows([r.behaviour for r in rollouts], 0.0),
        "advantages": torch.tensor([r.advantage for r in rollouts]),
    }


def rows(values: Sequence[Sequence[float]], fill: float, is_left: bool = False) -> Tensor:
    side = "left" if is_left else "right"
    tensors = [torch.tensor(row) for row in values]
    return torch.nn.utils.rnn.pad_sequence(tensors, True, fill, padding_side=side)


def load_model(setup: Setup) -> Any:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, setup.dtype)
    return AutoModelForCausalLM.from_pretrained(setup.folder, dtype=dtype, local_files_only=True)


def named_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def make_model(folder: Path, hidden: int, layers: int, vocabulary: int) -> None:
    """A random Llama with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(4, hidden // 64)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_tokenizer() -> Any:
    """One that TRL accepts; it is never asked."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({"<pad>": PAD, "<eos>": EOS}, unk_token="<eos>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<eos>"
    )
