"""How much faster is the embedded engine with guessed tokens (`backend.speculative_tokens`)?

    python benchmarks/speculation.py --guesses 8 --rounds 5

The model writes a given text: it is a random GPT-2 (25 M parameters in 8 layers, and two tables of
32,000 tokens) whose embedding of each position points at the text's next token, so that it costs
what such a model costs. The texts are code (a module of Python's library, a token being a word, a
number, a run of blanks or a character) and random tokens, where no guess is right. Two engines,
with and without guesses, take turns in one process, one thread each; every request reads `--prompt`
tokens and writes `--output` more. `value` is the ratio of the tokens per second of the two, round
by round, on code with one request in flight; `ratio` has the medians of all texts and loads,
`tokens_per_step` how many tokens a sequence gains in a step.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import random
import re
import statistics
import tempfile
import time
from pathlib import Path

import torch
from measure import report
from transformers import GPT2Config, GPT2LMHeadModel

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from headway.contracts.types import LLMRequest
from inference_server.backends.embedded.backend import EmbeddedTorchBackend

VOCAB_SIZE = 32_000
HIDDEN = 512
CONTEXT = 1024
IN_FLIGHT = (1, 8)
PULL = 30.0
"""Length of the embedding of a position: the rest of the model does not turn it away."""


def code() -> list[int]:
    """The tokens of Python source text, numbered as they come."""
    words = re.findall(r"[A-Za-z_]+|\d+|\s+|.", inspect.getsource(argparse))
    numbers: dict[str, int] = {}
    return [numbers.setdefault(word, 2 + len(numbers)) for word in words][:CONTEXT]


def noise() -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(CONTEXT)]


def write_model(folder: Path, text: list[int]) -> None:
    """A model that writes this text from any position on."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=CONTEXT,
        n_embd=HIDDEN,
        n_layer=8,
        n_head=8,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        head = torch.nn.functional.normalize(torch.randn(VOCAB_SIZE, HIDDEN), dim=-1)
        model.lm_head.weight.copy_(head)
        model.transformer.wpe.weight[: len(text) - 1] = PULL * head[text[1:]]
    model.save_pretrained(folder)


class Engine:
    """A backend, and the turns that its sequences took."""

    def __init__(self, folder: Path, dtype: str, guesses: int) -> None:
        options = EmbeddedTorchConfig(
            max_sequences=max(IN_FLIGHT),
            kv_cache_bytes=1 << 28,
            num_threads=1,
            speculative_tokens=guesses,
        )
        model = ModelConfig(path=str(folder), dtype=dtype)
        self.backend = EmbeddedTorchBackend(options, model, 0)
        self.num_turns = 0
        decoder = self.backend._decode_loop.decoder
        launch = decoder.launch

        def counted(scheduled):  # noqa: ANN001, ANN202 - as the original
            self.num_turns += sum(bool(work.sequence.num_output) for work in scheduled)
            return launch(scheduled)

        decoder.launch = counted  # type: ignore[method-assign]

    async def rate(self, text: list[int], in_flight: int, prompt: int, output: int) -> float:
        """Tokens per second, prompts included."""
        wanted = text[prompt : prompt + output]
        gconfig = SamplingConfig(max_new_tokens=output, ignore_eos=True)
        asked = [
            # Of the first token nothing is read; it keeps requests from sharing a prefix.
            LLMRequest(rid=f"r{at}", input_ids=(at + 2, *text[1:prompt]), gconfig=gconfig)
            for at in range(in_flight)
        ]
        await self.backend.flush()
        started = time.monotonic()
        responses = await asyncio.gather(*map(self.backend.generate, asked))
        seconds = time.monotonic() - started
        if any(response.output_tokens != wanted for response in responses):
            raise SystemExit("the model did not write its text")
        return in_flight * output / seconds


async def compare(options: argparse.Namespace, root: Path) -> dict[str, dict[str, list[float]]]:
    """Return ratios, rates and tokens per step by text and load, a value per round."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, text in (("code", code()), ("random", noise())):
        write_model(root / name, text)
        engines = [Engine(root / name, options.dtype, guesses) for guesses in (0, options.guesses)]
        for engine in engines:
            await engine.backend.start()
            await engine.rate(text, max(IN_FLIGHT), options.prompt, 16)
        for in_flight in IN_FLIGHT:
            values = found[f"{name}, {in_flight} in flight"] = {"ratio": [], "rate": [], "gain": []}
            for round_ in range(options.rounds):
                rates = [0.0, 0.0]
                for side in (0, 1) if round_ % 2 == 0 else (1, 0):
                    before = engines[side].num_turns
                    size = (text, in_flight, options.prompt, options.output)
                    rates[side] = await engines[side].rate(*size)
                    turns = engines[side].num_turns - before
                    if side:
                        # The first token of a sequence comes with its prompt.
                        values["gain"].append(in_flight * (options.output - 1) / turns)
                values["ratio"].append(rates[1] / rates[0])
                values["rate"].append(rates[1])
        for engine in engines:
            await engine.backend.aclose()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--guesses", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=384)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    if options.prompt + options.output >= CONTEXT or options.prompt < 2:
        parser.error(f"--prompt is at least 2, and with --output below {CONTEXT}")
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        found = asyncio.run(compare(options, Path(folder)))

    def medians(name: str, digits: int) -> dict[str, float]:
        return {
            case: round(statistics.median(values[name]), digits) for case, values in found.items()
        }

    report(
        "speculation",
        "tokens / s with guesses over without",
        found["code, 1 in flight"]["ratio"],
        dtype=options.dtype,
        guesses=options.guesses,
        output=options.output,
        ratio=medians("ratio", 2),
        tokens_per_step=medians("gain", 2),
        tokens_per_s=medians("rate", 1),
    )


if __name__ == "__main__":
    main()
