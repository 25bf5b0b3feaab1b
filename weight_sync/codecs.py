"""One tensor as stored bytes, and back.

    raw             the values as they are
    same            nothing: the base has the same values
    sparse          where elements changed (gaps), and by how much (differences)
    dense           the difference of every element
    int8,           one float32 scale per row, then one code per element;
    float8_e4m3fn   the only codecs that round

A difference is taken between bit patterns, read as unsigned integers and subtracted modulo 2^bits, so
whatever the bits are (NaN with payload, -0.0) they come back. A training step moves a weight by few
units in the last place: the difference is written zigzag (0, -1, 1, -2, ... as 0, 1, 2, 3, ...), which
leaves its upper bytes zero, and each byte of it goes into a stream of its own.

`sparse` and `dense` are streams as zstd frames, behind the frames' sizes (8 bytes each, little-endian).
`sparse` has the two bytes of the gaps first: a gap is the number of unchanged elements before a changed
one; `FAR` stands for `FAR` unchanged elements that no changed one follows.

Reading is bit-deterministic: differences are integers; a scale times a code is one IEEE float32
multiplication of exact operands, followed by one rounding to the type, nearest even. Scales below
`MIN_SCALE` are zero, so no operand and no product is subnormal, which some processors flush.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

from headway.contracts.config.weight_sync import Quantization
from headway.contracts.errors import SyncError
from weight_sync.manifest import Codec, TensorEntry, bytes_of, tensor_checksum, torch_dtype

FAR = 0xFFFF
SPARSE_SHARE = 0.3
"""Above this share of changed elements `dense` is faster and hardly larger."""
PART = 1 << 18
"""Elements worked on at once: their bits, and those of the base, fit a core's cache."""

CODES: dict[str, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "float8_e4m3fn": (torch.float8_e4m3fn, 448.0),
}
"""Type and largest value of a code."""
SCALE_BYTES = 4
MIN_SCALE = 2.0**-117
"""Times the smallest code (2^-9 in float8_e4m3fn) the smallest normal float32."""

Bits = NDArray[np.unsignedinteger[Any]]
Stream = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One tensor, ready to be stored."""

    codec: Codec
    payload: torch.Tensor
    """Bytes to store, on the CPU: [size] uint8, or for `raw` the tensor itself."""
    checksum: str
    """Checksum of the decoded values."""


def encode_raw(tensor: torch.Tensor) -> Encoded:
    """The values as they are; a contiguous CPU tensor is not copied."""
    return Encoded("raw", _bytes(tensor), tensor_checksum(tensor))


def encode_delta(tensor: torch.Tensor, base: torch.Tensor, level: int) -> Encoded:
    """Encode the changes since `base` in the smallest form that is fast to make; lossless.

    Args:
        tensor: on CPU.
        base: what receivers have; of another shape or type, the tensor goes whole.
        level: effort of zstd, 1 is fastest.
    """
    if (tensor.shape, tensor.dtype) != (base.shape, base.dtype):
        return encode_raw(tensor)
    new, old = _bits(tensor), _bits(base)
    codec: Codec = "sparse"
    streams = _sparse_streams(new, old)
    if streams is None:
        codec, streams = "dense", _dense_streams(new, old)
    if not streams:
        return Encoded("same", torch.empty(0, dtype=torch.uint8), tensor_checksum(tensor))
    payload = _pack(streams, level)
    if payload.nbytes >= tensor.nbytes:
        return encode_raw(tensor)
    return Encoded(codec, payload, tensor_checksum(tensor))


def encode_quantized(tensor: torch.Tensor, quantization: Quantization) -> Encoded:
    """A matrix in 8 bits per element with one scale per row; receivers get it back in its own type.

    Whatever has fewer than two dimensions, a value that is not finite, or nothing to gain goes whole.

    Args:
        tensor: floating, on CPU; more than two dimensions count as rows of the first.
    """
    if not tensor.is_floating_point() or tensor.ndim < 2:
        return encode_raw(tensor)
    if SCALE_BYTES * len(tensor) + tensor.numel() >= tensor.nbytes:
        return encode_raw(tensor)
    rows = tensor.detach().reshape(len(tensor), -1)
    scales, codes = _quantize(rows, quantization)
    largest = (scales * CODES[quantization][1]).to(tensor.dtype)
    if not largest.isfinite().all():
        return encode_raw(tensor)
    payload = torch.cat([_bytes(scales), _bytes(codes)])
    values = _dequantize(scales, codes, tensor.dtype)
    return Encoded(quantization, payload, tensor_checksum(values))


def decode(entry: TensorEntry, payload: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
    """Return the values of a tensor; compare them with `entry.checksum`.

    Args:
        payload: [entry.size] uint8 on CPU; the result of `raw` is this memory.
        base: the tensor that a difference was taken from, on CPU; never written to, and itself the
            result of `same`.
    Returns:
        [entry.shape] of entry.dtype on CPU.
    Raises:
        SyncError: the payload or the base does not fit the entry, or the payload is damaged.
    """
    dtype = torch_dtype(entry.dtype)
    num_bytes = math.prod(entry.shape) * dtype.itemsize
    if num_bytes >= 1 << 63 or (num_bytes == 0 and not _is_possible(entry.shape, dtype)):
        raise SyncError(f"{entry.name} has an impossible shape: {entry.shape}")
    if payload.dtype != torch.uint8 or payload.shape != (entry.size,):
        raise SyncError(
            f"{entry.name} came as {tuple(payload.shape)} {payload.dtype}, should be {entry.size} bytes"
        )
    if entry.codec == "raw":
        _check_size(entry, num_bytes)
        return _viewed(payload, dtype).view(entry.shape)
    if entry.codec in CODES:
        return _decode_quantized(entry, payload, dtype)
    return _decode_delta(entry, payload, _fitting(entry, base, dtype))


def check_stored_size(entry: TensorEntry) -> None:
    """Refuse an entry of more bytes than its values have: none is stored so.

    Raises:
        SyncError: it has more.
    """
    most = math.prod(entry.shape) * torch_dtype(entry.dtype).itemsize
    if entry.size > most:
        raise SyncError(
            f"{entry.name} of {entry.shape} {entry.dtype} takes at most {most} bytes, not {entry.size}"
        )


def _is_possible(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """True if a tensor without elements may have this shape."""
    return math.prod(max(1, dim) for dim in shape) * dtype.itemsize < 1 << 63


def _decode_quantized(
    entry: TensorEntry, payload: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    numel = math.prod(entry.shape)
    if len(entry.shape) < 2 or numel == 0:
        raise SyncError(f"{entry.name} of shape {entry.shape} cannot be stored as {entry.codec}")
    num_rows = entry.shape[0]
    _check_size(entry, SCALE_BYTES * num_rows + numel)
    scales = _viewed(payload[: SCALE_BYTES * num_rows], torch.float32)
    codes = payload[SCALE_BYTES * num_rows :].view(CODES[entry.codec][0]).reshape(num_rows, -1)
    return _dequantize(scales, codes, dtype).reshape(entry.shape)


def _decode_delta(entry: TensorEntry, payload: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    if entry.codec == "same":
        _check_size(entry, 0)
        return base
    change = _change_sparse if entry.codec == "sparse" else _change_dense
    try:
        values = change(_bits(base), bytes_of(payload))
    except (_Damaged, zstandard.ZstdError) as error:
        raise SyncError(f"{entry.name} in {entry.blob} is damaged: {error}") from error
    return _tensor(values, base.dtype).reshape(entry.shape)


def _fitting(entry: TensorEntry, base: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if base is None:
        raise SyncError(f"{entry.name} is stored as {entry.codec}, which needs a base")
    if (tuple(base.shape), base.dtype) != (entry.shape, dtype):
        raise SyncError(
            f"{entry.name} is a difference of {entry.shape} {entry.dtype}, "
            f"its base is {tuple(base.shape)} {base.dtype}"
        )
    return base


def _check_size(entry: TensorEntry, size: int) -> None:
    if entry.size != size:
        raise SyncError(
            f"{entry.name} of {entry.shape} {entry.dtype} as {entry.codec} takes {size} bytes, "
            f"not {entry.size}"
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return _viewed(tensor.detach().contiguous().reshape(-1), torch.uint8)


def _bits(tensor: torch.Tensor) -> Bits:
    return _bytes(tensor).numpy().view(f"u{tensor.itemsize}")


def _tensor(bits: Bits, dtype: torch.dtype) -> torch.Tensor:
    """Results live in numpy's memory: it asks for huge pages, which fill 3 times as fast as torch's."""
    return _viewed(torch.from_numpy(bits.view(np.uint8)), dtype)


def _viewed(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same bytes in another type, copied only if they do not begin where the type may."""
    if not flat.numel():
        return torch.empty(0, dtype=dtype, device=flat.device)
    is_aligned = (flat.storage_offset() | flat.data_ptr()) % dtype.itemsize == 0
    return (flat if is_aligned else flat.clone()).view(dtype)


def _parts(size: int, step: int = PART) -> Iterator[slice]:
    return (slice(start, start + step) for start in range(0, size, step))


class _Damaged(Exception):
    """Damage of a payload; the message says which."""


def _sparse_streams(new: Bits, old: Bits) -> list[Stream] | None:
    """No stream if nothing changed; None if too much did."""
    gaps: list[Bits] = []
    differences: list[Bits] = []
    budget, last = int(SPARSE_SHARE * new.size), -1
    for part in _parts(new.size):
        now, before = new[part], old[part]
        at = np.flatnonzero(now != before)
        if not at.size:
            continue
        budget -= at.size
        if budget < 0:
            return None
        differences.append(_difference(now[at], before[at]))
        at += part.start
        gaps.append(_gaps(at, last))
        last = int(at[-1])
    if not gaps:
        return []
    return _planes(np.concatenate(gaps)) + _planes(np.concatenate(differences))


def _gaps(at: NDArray[np.int64], last: int) -> NDArray[np.uint16]:
    """Unchanged elements before each of `at`, the first counted from behind `last`."""
    gaps = np.diff(at, prepend=last) - 1
    far = np.flatnonzero(gaps >= FAR)
    if far.size:
        times, gaps[far] = np.divmod(gaps[far], FAR)
        gaps = np.insert(gaps, np.repeat(far, times), FAR)
    return gaps.astype(np.uint16)


def _change_sparse(base: Bits, payload: memoryview) -> Bits:
    streams = _unpack(payload, 2 + base.itemsize, base.size + base.size // FAR)
    gaps, differences = _joined(streams[:2], np.dtype("u2")), _joined(streams[2:], base.dtype)
    if np.count_nonzero(gaps != FAR) != differences.size:
        raise _Damaged("as many gaps as differences are needed")
    values = np.empty_like(base)
    end = done = 0
    for part in _parts(gaps.size):
        is_change = gaps[part] != FAR
        at = np.cumsum(gaps[part] + is_change, dtype=np.int64) + (end - 1)
        start, end = end, int(at[-1]) + 1
        if end > base.size:
            raise _Damaged("a change is beyond the end")
        values[start:end] = base[start:end]
        at = at[is_change]
        values[at] += _signed(differences[done : done + at.size])
        done += at.size
    values[end:] = base[end:]
    return values


def _dense_streams(new: Bits, old: Bits) -> list[Stream]:
    planes = np.empty((new.itemsize, new.size), np.uint8)
    for part in _parts(new.size):
        planes[:, part] = _planes(_difference(new[part], old[part]))
    return list(planes)


def _change_dense(base: Bits, payload: memoryview) -> Bits:
    planes = _unpack(payload, base.itemsize, base.size)
    if any(plane.size != base.size for plane in planes):
        raise _Damaged(f"{base.size} differences are needed")
    values = np.empty_like(base)
    for part in _parts(base.size):
        differences = _joined([plane[part] for plane in planes], base.dtype)
        np.add(base[part], _signed(differences), out=values[part])
    return values


def _difference(new: Bits, old: Bits) -> Bits:
    """Zigzag of `new - old`, modulo 2^bits."""
    signed = (new - old).view(f"i{new.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * new.itemsize - 1))).view(new.dtype)


def _signed(difference: Bits) -> Bits:
    """The inverse of zigzag, modulo 2^bits."""
    return (difference >> 1) ^ np.negative(difference & 1)


def _planes(values: Bits) -> list[Stream]:
    """Each byte of the values, the lowest first."""
    return [(values >> (8 * byte)).astype(np.uint8) for byte in range(values.itemsize)]


def _joined(planes: Sequence[Stream], dtype: np.dtype[Any]) -> Bits:
    if len({plane.size for plane in planes}) != 1:
        raise _Damaged("its streams differ in length")
    values = planes[0].astype(dtype)
    for byte, plane in enumerate(planes[1:], 1):
        values |= plane.astype(dtype) << (8 * byte)
    return values


def _pack(streams: Sequence[Stream], level: int) -> torch.Tensor:
    compressor = zstandard.ZstdCompressor(level=level)
    frames = [compressor.compress(stream.data) for stream in streams]
    sizes = struct.pack(f"<{len(frames)}Q", *map(len, frames))
    return torch.frombuffer(bytearray().join([sizes, *frames]), dtype=torch.uint8)


def _unpack(payload: memoryview, count: int, limit: int) -> list[Stream]:
    """`count` streams of at most `limit` bytes each; none is inflated before its size is known."""
    start = 8 * count
    if len(payload) < start:
        raise _Damaged(f"{len(payload)} bytes hold no sizes of {count} streams")
    sizes = struct.unpack_from(f"<{count}Q", payload)
    if start + sum(sizes) != len(payload):
        raise _Damaged(f"its streams take {start + sum(sizes)} bytes, it has {len(payload)}")
    streams = []
    for size in sizes:
        frame = payload[start : start + size]
        start += size
        inflated = zstandard.frame_content_size(frame)
        if not 0 <= inflated <= limit:
            raise _Damaged(f"a stream inflates to {inflated} bytes, at most {limit} fit the tensor")
        content = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
        streams.append(np.frombuffer(content, np.uint8))
    return streams


def _quantize(rows: torch.Tensor, quantization: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [rows] float32 and codes [rows, columns]."""
    dtype, largest = CODES[quantization]
    scales = torch.empty(len(rows))
    codes = torch.empty(rows.shape, dtype=dtype)
    for part in _parts(len(rows), _rows_at_once(rows)):
        values = rows[part].float()
        scale = values.abs().amax(dim=1, keepdim=True) / largest
        scale[scale < MIN_SCALE] = 0.0
        scales[part] = scale[:, 0]
        values = (values / torch.where(scale > 0, scale, 1.0)).clamp_(-largest, largest)
        codes[part] = values.round_() if dtype == torch.int8 else values
    return scales, codes


def _dequantize(scales: torch.Tensor, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = _tensor(np.empty(codes.numel(), f"u{dtype.itemsize}"), dtype).reshape(codes.shape)
    for part in _parts(len(codes), _rows_at_once(codes)):
        values[part] = _numbers(codes[part]).mul_(scales[part, None])
    return values


def _numbers(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of codes in float32; from a table where torch has no fast conversion."""
    if codes.dtype == torch.int8:
        return codes.float()
    return torch.from_numpy(np.take(_FLOAT8, codes.view(torch.uint8).numpy()))


_FLOAT8: NDArray[np.float32] = (
    torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
)


def _rows_at_once(rows: torch.Tensor) -> int:
    return max(1, PART // rows.shape[1])
