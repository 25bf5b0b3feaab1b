"""Check that two ranks compute what one process does: over NCCL on GPUs, over gloo on CPUs.

    python benchmarks/gpu_two_ranks.py

`tests/numeric/rank_program.py` trains a tiny Llama for three steps in one process and in two ranks, in
float32; losses, metrics and gradient norms must agree to `--tolerance`, relatively.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import report
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {
    "vocab_size": 61,  # of the program's batches
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
PROGRAM = "tests.numeric.rank_program"


def main() -> int:
    """Run both, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--dry", action="store_true", help="on the CPU; nothing else differs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = folder / "llama"
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(model)
        alone = run([sys.executable, "-m", PROGRAM], folder / "one", model)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
        ranks = run([sys.executable, *torchrun, PROGRAM], folder / "two", model)
    errors = [
        abs(one[name] - two[name]) / max(abs(one[name]), 1e-6)
        for one, two in zip(alone, ranks, strict=True)
        for name in one
    ]
    report("two_ranks_error", "relative, largest", [max(errors)], tolerance=options.tolerance)
    return int(max(errors) > options.tolerance)


def run(command: list[str], out: Path, model: Path) -> list[dict[str, float]]:
    """Return the metrics of each step."""
    subprocess.run([*command, str(out), str(model)], check=True)
    metrics: list[dict[str, float]] = json.loads((out / model.name / "figures.json").read_text())
    return metrics


if __name__ == "__main__":
    sys.exit(main())
