"""TRL's GRPOTrainer against a gateway: each version goes to the servers as a directory, not over NCCL.

python examples/trl/grpo.py --url http://127.0.0.1:8000 --model MODEL --folder /shared/runs/a
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient


class DirectoryClient(VLLMClient):
    """Writes a version below `folder`, and has the gateway publish it on all servers."""

    model_path: Path
    folder: Path
    newest: Path | None = None

    def init_communicator(self, device: Any = None) -> None:
        """Do nothing: no process group is needed."""

    def update_named_params(
        self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        number = 0 if self.newest is None else int(self.newest.name) + 1
        old, self.newest = self.newest, self.folder / str(number)
        weights = shutil.ignore_patterns("*.safetensors*", "*.bin*")
        shutil.copytree(self.model_path, self.newest, ignore=weights)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in named_params}
        save_file(tensors, self.newest / "model.safetensors")
        arguments = {"weights_path": str(self.newest)}
        call = {"method": "reload_weights", "kwargs": arguments}
        self._post(f"{self.base_url}/collective_rpc", json=call)
        if old is not None:  # servers that join read the newest
            shutil.rmtree(old)


def share_of_even_digits(completions: list[str], **_: Any) -> list[float]:
    """The reward of each completion; put your own in its place."""
    return [sum(char in "02468" for char in text) / max(1, len(text)) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="of the gateway")
    parser.add_argument("--model", type=Path, required=True, help="directory, as the servers have")
    parser.add_argument("--folder", type=Path, required=True, help="that the servers may read")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    DirectoryClient.model_path, DirectoryClient.folder = options.model, options.folder.resolve()
    vllm_generation.VLLMClient = DirectoryClient
    is_gpu = torch.cuda.is_available()
    config = GRPOConfig(
        output_dir=str(options.folder / "trainer"),
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=options.url,
        max_steps=options.steps,
        learning_rate=1e-2,
        num_generations=8,
        per_device_train_batch_size=16,
        max_completion_length=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not is_gpu,
        bf16=is_gpu,
    )
    trainer = GRPOTrainer(
        model=str(options.model),
        reward_funcs=share_of_even_digits,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "12345"}] * 1000),
    )
    trainer.train()


if __name__ == "__main__":
    main()
