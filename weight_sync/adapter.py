"""Low-rank adapters as versions (LoRA, arXiv:2106.09685): W' = W + scale · B · A.

An adapter is what `peft` saves: two matrices per module and a configuration. What changes the formula
(DoRA, biases, ranks that differ between modules, ...) is refused by name, also when it is unknown here.

Every server ends up with equal bits, whatever its processor and number of threads: B · A is summed rank
after rank, one IEEE float32 multiplication and one addition per element and step, each an operation of
its own, so that no library chooses an order and no compiler fuses the two; then one multiplication by
the scale, one addition to W, and one rounding to W's type, nearest even. Blocks of rows stay in a
core's cache: up to rank 16 this is faster than a matrix product, at rank 64 it takes twice as long. A GPU
takes a matrix whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from headway.contracts.errors import SyncError
from weight_sync.manifest import Adapter

PREFIX = "base_model.model."
"""Prefix that `peft` puts before the names of the model."""
LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"
CONFIG_NAME = "adapter_config.json"

BLOCK = 1 << 15
"""Elements worked on at once."""
GPU_BLOCK = 1 << 26
"""Elements of a block on a GPU, where every operation is a launch; two buffers of 256 MiB."""
NEUTRAL = {
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "target_modules",
    "task_type",
    "use_rslora",
}
"""Settings that leave the formula as it is, or whose value is looked at below."""
INITS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Ways to begin that leave the base as it was."""

Pair = tuple[torch.Tensor, torch.Tensor]


def make_adapter(config: Mapping[str, object]) -> Adapter:
    """Build an adapter from `LoraConfig.to_dict()`, or the content of `adapter_config.json`.

    Raises:
        SyncError: a variant that is not LoRA alone.
    """
    plain: dict[str, object] = json.loads(json.dumps(dict(config), default=_plain))
    rank, alpha = plain.get("r"), plain.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1 or alpha <= 0:
        raise SyncError(f"an adapter needs r >= 1 and lora_alpha > 0, not {rank!r} and {alpha!r}")
    adapter = Adapter(rank=rank, alpha=alpha, config=plain)
    check_adapter(adapter)
    return adapter


def check_adapter(adapter: Adapter) -> None:
    """Check that the adapter can be merged by the formula above.

    Raises:
        SyncError: it is a variant of LoRA that needs more, or it contradicts itself.
    """
    config = adapter.config
    refused = [name for name, value in config.items() if value and name not in NEUTRAL]
    refused += [name for name in ("alpha_pattern", "rank_pattern") if config.get(name)]
    if config.get("peft_type", "LORA") != "LORA":
        refused.append(f"peft_type={config['peft_type']}")
    if config.get("bias", "none") != "none":
        refused.append(f"bias={config['bias']}")
    if config.get("init_lora_weights") not in INITS:
        refused.append(f"init_lora_weights={config['init_lora_weights']}, which changes the base")
    if refused:
        raise SyncError(
            f"adapters with {', '.join(sorted(refused))} cannot be merged; publish the model whole"
        )
    configured = (config.get("r", adapter.rank), config.get("lora_alpha", adapter.alpha))
    if configured != (adapter.rank, adapter.alpha):
        raise SyncError(
            f"the adapter has rank {adapter.rank} and alpha {adapter.alpha}, its configuration has "
            f"r={configured[0]} and lora_alpha={configured[1]}"
        )


def scale_of(adapter: Adapter) -> float:
    """alpha / r, or alpha / sqrt(r) if rank-stabilized (arXiv:2312.03732)."""
    is_stabilized = bool(adapter.config.get("use_rslora"))
    return adapter.alpha / (math.sqrt(adapter.rank) if is_stabilized else adapter.rank)


def model_names(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapter's tensors, named as the model names its modules."""
    return ((name.removeprefix(PREFIX), tensor) for name, tensor in tensors)


def adapter_pairs(tensors: Mapping[str, torch.Tensor], adapter: Adapter) -> dict[str, Pair]:
    """Module -> (A [r, in], B [out, r]).

    Args:
        tensors: named as `peft` saves them, with or without its prefix.
    Raises:
        SyncError: a half without the other, one that is no LoRA matrix, or another rank.
    """
    named = dict(model_names(tensors.items()))
    modules = sorted({_module_of(name) for name in named})
    pairs = {}
    for module in modules:
        missing = [half for half in (LORA_A, LORA_B) if module + half not in named]
        if missing:
            raise SyncError(
                f"the adapter has one half of {module}: {module}{missing[0]} is missing"
            )
        a, b = named[module + LORA_A], named[module + LORA_B]
        if a.ndim != 2 or b.ndim != 2 or not a.shape[0] == b.shape[1] == adapter.rank:
            raise SyncError(
                f"the adapter of {module} is {tuple(a.shape)} and {tuple(b.shape)}; "
                f"its rank is declared as {adapter.rank}"
            )
        pairs[module] = (a, b)
    return pairs


def merge_adapter(
    tensors: Mapping[str, torch.Tensor],
    adapter: Adapter,
    read_base: Callable[[str], torch.Tensor],
    expected: Mapping[str, torch.Size],
) -> dict[str, torch.Tensor]:
    """The weights of the model with an adapter merged in.

    Args:
        tensors: `<module>.lora_A.weight` [r, in] and `<module>.lora_B.weight` [out, r].
        read_base: a tensor of the base by name.
        expected: the model's parameters; those without an adapter are the base's own tensors.
    Raises:
        SyncError: a module that the model has not, or as `adapter_pairs` and `check_adapter`.
    """
    check_adapter(adapter)
    pairs = {f"{module}.weight": pair for module, pair in adapter_pairs(tensors, adapter).items()}
    for name, (a, b) in pairs.items():
        _check_module(name, (b.shape[0], a.shape[1]), expected)
    scale = scale_of(adapter)
    merged = {}
    for name in expected:
        weight = read_base(name)
        merged[name] = merge_weight(weight, *pairs[name], scale) if name in pairs else weight
    return merged


def merge_weight(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
) -> torch.Tensor:
    """W + scale · B · A.

    Args:
        weight: [out, in]
        a: [r, in]
        b: [out, r]
    Returns:
        [out, in] of the type of `weight`; always the same bits.
    """
    merged = torch.empty_like(weight, memory_format=torch.contiguous_format)
    rows = a.float()
    columns = b.float().t().contiguous().unsqueeze(2)  # [r, out, 1]
    step = max(1, (GPU_BLOCK if weight.is_cuda else BLOCK) // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        block = slice(start, start + step)
        total = columns[0, block] * rows[0]
        product = torch.empty_like(total)
        for rank in range(1, len(rows)):
            torch.mul(columns[rank, block], rows[rank], out=product)
            total.add_(product)
        merged[block] = total.mul_(scale).add_(weight[block].float())
    return merged


def adapter_config(adapter: Adapter, modules: Iterable[str]) -> str:
    """`adapter_config.json`, with which `peft`, SGLang and vLLM load the directory."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "bias": "none",
        "lora_dropout": 0.0,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
    }
    return json.dumps({**config, **adapter.config}, indent=1)


def _check_module(name: str, shape: tuple[int, int], expected: Mapping[str, torch.Size]) -> None:
    if name not in expected:
        raise SyncError(f"the adapter changes {name}, which the model does not have")
    if tuple(expected[name]) != shape:
        raise SyncError(
            f"the adapter of {name} makes {shape}, the model has {tuple(expected[name])}"
        )


def _module_of(name: str) -> str:
    for half in (LORA_A, LORA_B):
        if name.endswith(half):
            return name.removesuffix(half)
    raise SyncError(
        f"{name} is no matrix of an adapter; publish what peft.get_peft_model_state_dict returns, "
        f"names that end in {LORA_A} and {LORA_B}"
    )


def _plain(value: object) -> object:
    if isinstance(value, set | frozenset | tuple):
        return sorted(value)
    raise SyncError(f"{value!r} in an adapter's configuration is no JSON")
