"""Start command of an SGLang engine, and the features of a running one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import JsonValue

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import SGLangConfig
from headway.contracts.errors import ConfigError
from headway.contracts.types import PolicyVersion
from inference_server.backends.base import Limits
from inference_server.backends.engine_command_line import EngineCommand
from inference_server.backends.engine_experts import EngineExperts
from inference_server.backends.engine_process import EngineProcess
from inference_server.backends.sglang import wire
from inference_server.backends.sglang.adapters import TARGETS
from inference_server.backends.sglang.call import NO_EVENTS
from inference_server.backends.sglang.responses import read_page
from weight_sync.checkpoint import read_model_config

SPARE_ADAPTERS = 2
"""Places beside those of the adapters that serve: the base takes one, and one is for a version that is
replaced while its requests end."""


@dataclass(frozen=True, slots=True)
class Features:
    """Differences between engines, by version or by flag."""

    limits: Limits
    kv_capacity: int = 0
    max_running: int = 0
    can_thin_streams: bool = True
    """It sends several tokens per event when asked to."""
    has_spans: bool = True
    """It reports a version per token."""
    has_grammars: bool = True
    """It can bind outputs to a schema or an expression."""
    is_deterministic: bool = False
    """Seeds have an effect."""
    is_pipelined: bool = True
    """A step is launched before the last one is read."""
    is_speculative: bool = False
    num_ranks: int | None = 1
    """Processes that join a trainer's group; None if SGLang cannot have them all in one."""
    dtype: str = ""
    """Type of the weights; empty if it is not known."""
    experts: EngineExperts = field(default_factory=EngineExperts)


def sglang_command(
    config: SGLangConfig, model: ModelConfig, version: PolicyVersion, has_tokenizer: bool
) -> EngineCommand:
    """Return the command that starts an engine with this model.

    Raises:
        ConfigError: the model has a setting that SGLang cannot honour.
    """
    if model.init_from_scratch:
        raise ConfigError(
            "SGLang cannot draw our random weights; save the model and set model.path"
        )
    if model.attn_implementation != "sdpa":
        raise ConfigError(
            f"model.attn_implementation={model.attn_implementation} is a kernel of transformers; "
            'give SGLang\'s in backend.args: {"--attention-backend": ...}'
        )
    args: dict[str, JsonValue] = {
        "--model-path": model.path,
        "--dtype": model.dtype,
        "--weight-version": str(version),
        "--skip-tokenizer-init": not has_tokenizer,
    }
    if config.args.get("--device") == "cpu":
        args["--sleep-on-idle"] = True  # its loop keeps a core busy otherwise, which others want
    if config.max_adapters:
        args |= {
            "--enable-lora": True,
            "--max-lora-rank": config.max_adapter_rank,
            "--max-loras-per-batch": config.max_adapters + SPARE_ADAPTERS,
            "--max-loaded-loras": config.max_adapters + SPARE_ADAPTERS,
            "--lora-target-modules": list(TARGETS),
        }
    owned = {
        "--model-path": "model.path",
        "--model": "model.path",
        "--dtype": "model.dtype",
        "--weight-version": "initial_version",
        "--enable-lora": "backend.max_adapters",
        "--max-loras-per-batch": "backend.max_adapters",
        "--max-loaded-loras": "backend.max_adapters",
        "--max-lora-rank": "backend.max_adapter_rank",
    }
    return EngineCommand(
        name="SGLang",
        module="sglang.launch_server",
        args=args,
        ready_path="/ping",
        owned_flags=owned,
    )


async def learn_features(engine: EngineProcess, model_path: str) -> Features:
    """Ask a running engine, and let it generate a token: what its answer holds, later ones hold.

    Raises:
        ConfigError: it streams in a way that we cannot add up.
        BackendError: it does not generate.
    """
    config = read_model_config(model_path)
    info = await read_page(engine, "/server_info", "/get_server_info")
    if info.get("incremental_streaming_output"):
        raise ConfigError(
            "the SGLang engine runs with --incremental-streaming-output, whose parts do not add up "
            "after an abort; start it without"
        )
    can_thin_streams, output = await _try_out(engine)
    return Features(
        limits=Limits(int(config["vocab_size"]), _max_context(info, config)),
        kv_capacity=int(info.get("max_total_num_tokens") or 0),
        max_running=int(info.get("max_running_requests") or 0),
        can_thin_streams=can_thin_streams,
        has_spans="weight_versions" in output.meta,
        has_grammars=not info.get("skip_tokenizer_init"),
        is_deterministic=bool(info.get("enable_deterministic_inference")),
        is_pipelined=not info.get("disable_overlap_schedule", False),
        is_speculative=info.get("speculative_algorithm") is not None,
        num_ranks=_num_ranks(info),
        dtype=str(info.get("dtype") or ""),
        experts=EngineExperts.of_model(model_path, bool(info.get("enable_return_routed_experts"))),
    )


def _num_ranks(info: Mapping[str, Any]) -> int | None:
    if info.get("pp_size", 1) > 1 or info.get("dp_size", 1) > 1:
        return None
    return int(info.get("tp_size", 1))


async def _try_out(engine: EngineProcess) -> tuple[bool, wire.EngineOutput]:
    body = {"input_ids": [0], "return_logprob": True}
    params = {"max_new_tokens": 1}
    thin = {**params, "stream_interval": NO_EVENTS}
    answer = await engine.post("/generate", {**body, "sampling_params": thin})
    can_thin_streams = answer.is_ok
    if not can_thin_streams:
        answer = await engine.post("/generate", {**body, "sampling_params": params})
    return can_thin_streams, wire.parse_output(answer.content, answer.status)


def _max_context(info: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Return the tokens that the engine takes without truncating a request; it reserves some for
    itself.
    """
    limit = info.get("max_req_input_len") or info.get("context_length")
    return int(limit or config["max_position_embeddings"])
