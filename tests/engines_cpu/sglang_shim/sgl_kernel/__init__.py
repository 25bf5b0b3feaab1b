"""The part of SGLang's kernel package that its CPU path calls, in plain PyTorch.

It declares no `convert_weight_packed`: so SGLang sees no AMX, and every layer computes by its own
`forward_native`.
"""

import torch

__version__ = "0.0.0"

_MASK = 0xFFFFFFFF


def assign_req_to_token_pool_cpu(rows, pool, starts, ends, locations, pool_length):
    """Write each request's cache locations into its row of the pool."""
    taken = 0
    spans = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    for row, start, end in spans:
        count = end - start
        pool[row, start:end] = locations[taken : taken + count].to(pool.dtype)
        taken += count


def _rotate(value, bits):
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _murmur_hash32(seed, positions, columns):
    """MurmurHash3 of (seed, position, column), [requests, columns] int64: seeded sampling."""
    shape = (seed.numel(), columns.numel())
    seeds = seed.to(torch.int64)[:, None].expand(shape)
    words = (
        seeds & _MASK,
        (seeds >> 32) & _MASK,
        (positions.to(torch.int64) & _MASK)[:, None].expand(shape),
        (columns.to(torch.int64) & _MASK)[None, :].expand(shape),
    )
    value = torch.zeros(shape, dtype=torch.int64)
    for word in words:
        mixed = (_rotate((word * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK
        value = (_rotate(value ^ mixed, 13) * 5 + 0xE6546B64) & _MASK
    value = value ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 16)


_library = torch.library.Library("sgl_kernel", "DEF")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in; see tests/engines_cpu")

    return missing
