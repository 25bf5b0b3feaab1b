"""What was encoded comes back bit by bit, and no payload does worse than raise SyncError."""

import struct
import threading
import tracemalloc

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from headway.contracts.errors import SyncError
from weight_sync import codecs
from weight_sync.codecs import decode, encode_delta, encode_quantized, encode_raw
from weight_sync.manifest import TensorEntry, bytes_of, dtype_name, tensor_checksum

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUANTIZATIONS = ("int8", "float8_e4m3fn")


def entry_of(encoded, tensor) -> TensorEntry:
    return TensorEntry(
        name="w",
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        checksum=encoded.checksum,
        blob="blob",
        size=encoded.payload.numel(),
        codec=encoded.codec,
    )


def with_payload(entry, payload: bytes, **changed) -> tuple[TensorEntry, torch.Tensor]:
    content = torch.tensor(list(payload), dtype=torch.uint8)
    return entry.model_copy(update={"size": len(payload), **changed}), content


def random_bits(rng, shape, dtype) -> torch.Tensor:
    """Any bit pattern: NaN with payload, infinity, -0.0, subnormal."""
    bits = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(bits.reshape(-1)).clone().view(dtype).reshape(shape)


def changed_bits(rng, base, share, is_small=False) -> torch.Tensor:
    """A copy in which this share of the elements has other bits."""
    bits = base.clone().reshape(-1).view(torch.uint8).numpy().view(f"u{base.itemsize}")
    at = np.flatnonzero(rng.random(bits.size) < share)
    width = 1 if is_small else 8 * bits.itemsize
    moves = rng.integers(1, 1 << width, at.size, dtype=np.uint64).astype(bits.dtype)
    bits[at] += np.negative(moves) if rng.random() < 0.5 else moves
    return torch.from_numpy(bits.view(np.uint8)).view(base.dtype).reshape(base.shape)


def assert_comes_back(encoded, tensor, base) -> None:
    before = None if base is None else bytes(bytes_of(base))
    found = decode(entry_of(encoded, tensor), encoded.payload.clone(), base)
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert bytes(bytes_of(found)) == bytes(bytes_of(tensor))
    assert encoded.checksum == tensor_checksum(tensor)
    assert base is None or bytes(bytes_of(base)) == before


shapes = st.sampled_from([(), (0,), (1,), (3,), (5, 0), (7, 11), (3, 5, 64), (4099,)])
densities = st.one_of(st.sampled_from([0.0, 0.01, 1.0]), st.floats(0.0, 1.0))


@given(
    st.integers(0, 2**32),
    shapes,
    st.sampled_from(DTYPES),
    densities,
    st.booleans(),
    st.integers(1, 19),
)
def test_any_change_of_any_bits_comes_back(seed, shape, dtype, share, is_small, level):
    rng = np.random.default_rng(seed)
    base = random_bits(rng, shape, dtype)
    tensor = changed_bits(rng, base, share, is_small)
    encoded = encode_delta(tensor, base, min(level, 3) if tensor.numel() > 1000 else level)
    assert encoded.payload.numel() <= tensor.nbytes
    assert_comes_back(encoded, tensor, base)


@given(st.integers(0, 2**32), shapes, st.sampled_from(DTYPES))
def test_raw_keeps_any_bits(seed, shape, dtype):
    tensor = random_bits(np.random.default_rng(seed), shape, dtype)
    assert_comes_back(encode_raw(tensor), tensor, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("share", "codec"),
    [
        (0.0, "same"),
        (1e-5, "sparse"),
        (0.01, "sparse"),
        (0.25, "sparse"),
        (0.5, "dense"),
        (1.0, "dense"),
    ],
)
def test_the_codec_follows_the_share_of_changes(dtype, share, codec):
    """Several parts long, and with gaps beyond what one symbol says."""
    rng = np.random.default_rng(1)
    base = torch.from_numpy(rng.normal(0, 0.02, 2 * codecs.PART + 12_345)).to(dtype)
    tensor = changed_bits(rng, base, share, is_small=True)
    encoded = encode_delta(tensor, base, 1)
    assert encoded.codec == codec
    assert encoded.payload.numel() <= (0.02 + share / 2) * tensor.nbytes
    assert_comes_back(encoded, tensor, base)


@pytest.mark.parametrize("gap", [0, 1, codecs.FAR - 1, codecs.FAR, codecs.FAR + 1, 2 * codecs.FAR])
@pytest.mark.parametrize("start", [0, codecs.FAR - 1, codecs.FAR, codecs.PART - 1])
def test_gaps_of_every_width_come_back(gap, start):
    base = torch.zeros(codecs.PART + 3 * codecs.FAR, dtype=torch.bfloat16)
    for last in (start + gap + 1, len(base) - 1):
        tensor = base.clone()
        tensor[[start, last]] = -0.0
        encoded = encode_delta(tensor, base, 1)
        assert encoded.codec == "sparse"
        assert_comes_back(encoded, tensor, base)


def test_unrelated_tensors_go_whole():
    rng = np.random.default_rng(2)
    tensor, base = (random_bits(rng, (64, 64), torch.bfloat16) for _ in range(2))
    assert encode_delta(tensor, base, 1).codec == "raw"
    for other in (base[:32], base.reshape(-1), base.float()):
        assert encode_delta(tensor, other, 1).codec == "raw"


def test_raw_shares_the_memory_of_what_it_encodes_and_decodes():
    tensor = torch.randn(4, 5)
    encoded = encode_raw(tensor)
    assert encoded.payload.data_ptr() == tensor.data_ptr()
    assert decode(entry_of(encoded, tensor), encoded.payload, None).data_ptr() == tensor.data_ptr()


def test_same_is_the_base_itself():
    base = torch.randn(4, 5)
    encoded = encode_delta(base.clone(), base, 1)
    assert decode(entry_of(encoded, base), encoded.payload, base) is base


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_bytes_may_begin_anywhere(shift):
    tensor = torch.randn(6, 50)

    def moved(payload):
        return torch.cat([torch.zeros(shift, dtype=torch.uint8), payload])[shift:]

    for encoded in (encode_raw(tensor), encode_quantized(tensor, "int8")):
        found = decode(entry_of(encoded, tensor), moved(encoded.payload), None)
        assert tensor_checksum(found) == encoded.checksum
    buffer = bytearray(shift) + bytes_of(tensor)
    base = torch.frombuffer(buffer, dtype=torch.float32, offset=shift).reshape(6, 50)
    changed = tensor.clone()
    changed[3, 7] += 1
    assert_comes_back(encode_delta(changed, base, 1), changed, base)


def test_views_that_skip_memory_are_encoded_by_value():
    base = torch.randn(40, 60)
    tensor = base.t()
    assert_comes_back(encode_raw(tensor), tensor.contiguous(), None)
    changed = tensor.clone()
    changed[1, 2] += 1
    assert_comes_back(encode_delta(changed, tensor, 1), changed, tensor)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_matrices_come_back_close_and_with_their_checksum(quantization, dtype):
    torch.manual_seed(3)
    tensor = (torch.randn(50, 8, 40) * torch.logspace(-6, 3, 50)[:, None, None]).to(dtype)
    tensor[7] = 0
    encoded = encode_quantized(tensor, quantization)
    assert encoded.codec == quantization
    assert encoded.payload.numel() == 4 * 50 + tensor.numel()
    found = decode(entry_of(encoded, tensor), encoded.payload, None)
    assert tensor_checksum(found) == encoded.checksum
    assert (found.shape, found.dtype) == (tensor.shape, dtype)
    largest = tensor.float().abs().amax(dim=(1, 2))
    error = (found.float() - tensor.float()).abs().amax(dim=(1, 2))
    rounding = 0.5 / 127 if quantization == "int8" else 16 / 448
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert (error <= largest * (rounding + torch.finfo(dtype).eps) + smallest).all()


@given(st.integers(0, 2**32), st.sampled_from(DTYPES), st.sampled_from(QUANTIZATIONS))
def test_quantization_of_any_bits_keeps_its_word(seed, dtype, quantization):
    tensor = random_bits(np.random.default_rng(seed), (3, 8), dtype)
    encoded = encode_quantized(tensor, quantization)
    found = decode(entry_of(encoded, tensor), encoded.payload, None)
    assert tensor_checksum(found) == encoded.checksum
    assert encoded.codec == "raw" or found.isfinite().all()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_what_cannot_be_quantized_goes_whole(quantization):
    matrix = torch.randn(4, 64)
    for at, value in enumerate([float("nan"), float("inf"), -float("inf")]):
        matrix[at, 3] = value
        assert encode_quantized(matrix[at : at + 1], quantization).codec == "raw"
    for tensor in (
        torch.randn(64),
        torch.tensor(1.0),
        torch.empty(0, 5),
        torch.empty(5, 0),
        torch.randn(64, 1),
        torch.arange(64).reshape(4, 16),
    ):
        assert encode_quantized(tensor, quantization).codec == "raw"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values_of_a_type_stay_finite(dtype):
    tensor = torch.full((2, 64), torch.finfo(dtype).max, dtype=dtype)
    for quantization in QUANTIZATIONS:
        encoded = encode_quantized(tensor, quantization)
        assert decode(entry_of(encoded, tensor), encoded.payload, None).isfinite().all()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_processors_that_flush_subnormals_read_the_same(quantization):
    exponents = torch.linspace(-149, 10, 400)
    tensor = (torch.randn(400, 64) * 2.0 ** exponents[:, None]).to(torch.float32)
    for values in (tensor, tensor.bfloat16(), tensor.half()):
        encoded = encode_quantized(values, quantization)
        entry = entry_of(encoded, values)
        assert tensor_checksum(decode(entry, encoded.payload, None)) == encoded.checksum
        is_flushing = torch.set_flush_denormal(True)
        try:
            assert tensor_checksum(decode(entry, encoded.payload, None)) == encoded.checksum
        finally:
            torch.set_flush_denormal(False)
        assert is_flushing


def test_float8_codes_mean_what_the_format_says():
    def value(code: int) -> float:
        sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
        if exponent == 15 and mantissa == 7:
            return float("nan")
        return sign * (
            2**-9 * mantissa if exponent == 0 else 2.0 ** (exponent - 10) * (8 + mantissa)
        )

    payload = struct.pack("<f", 0.5) + bytes(range(256))
    entry, content = with_payload(
        entry_of(encode_raw(torch.zeros(1, 256)), torch.zeros(1, 256)),
        payload,
        codec="float8_e4m3fn",
    )
    found = decode(entry, content, None)
    wanted = torch.tensor([[0.5 * value(code) for code in range(256)]])
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


# Damage.


@pytest.fixture(params=["sparse", "dense", "int8", "float8_e4m3fn", "raw"])
def stored(request):
    """A tensor, its base, its entry and its payload."""
    rng = np.random.default_rng(4)
    base = torch.from_numpy(rng.normal(0, 0.02, (64, 96))).bfloat16()
    tensor = changed_bits(rng, base, {"dense": 0.8}.get(request.param, 0.02), is_small=True)
    if request.param == "raw":
        encoded = encode_raw(tensor)
    elif request.param in QUANTIZATIONS:
        encoded = encode_quantized(tensor, request.param)
    else:
        encoded = encode_delta(tensor, base, 1)
    assert encoded.codec == request.param
    return tensor, base, entry_of(encoded, tensor), bytes(encoded.payload.numpy())


def test_damaged_payloads_raise_or_fail_their_checksum(stored):
    _, base, entry, payload = stored
    intact = bytes_of(decode(*with_payload(entry, payload), base))

    @given(st.data())
    def check(data):
        start = data.draw(st.integers(0, len(payload)))
        end = data.draw(st.integers(start, min(len(payload), start + 40)))
        damaged = payload[:start] + data.draw(st.binary(max_size=40)) + payload[end:]
        try:
            found = decode(*with_payload(entry, damaged), base)
        except SyncError:
            return
        assert (bytes_of(found) == intact) == (tensor_checksum(found) == entry.checksum)

    before = bytes(bytes_of(base))
    check()
    assert bytes(bytes_of(base)) == before


def test_truncated_and_prolonged_payloads_are_refused(stored):
    _, base, entry, payload = stored
    for length in [*range(0, len(payload), 7), len(payload) - 1]:
        with pytest.raises(SyncError):
            decode(*with_payload(entry, payload[:length]), base)
    with pytest.raises(SyncError):
        decode(*with_payload(entry, payload + b"\0"), base)


def test_garbage_is_refused_or_fails_its_checksum(stored):
    _, base, entry, _ = stored

    @given(st.binary(max_size=200))
    def check(payload):
        with pytest.raises(SyncError):
            decode(*with_payload(entry, payload), base)

    check()


def test_a_payload_that_is_not_what_the_entry_says_is_refused(stored):
    _, base, entry, payload = stored
    content = torch.tensor(list(payload), dtype=torch.uint8)
    for wrong in (content[:-1], content.reshape(1, -1), content.char(), content.float()):
        with pytest.raises(SyncError, match="should be"):
            decode(entry, wrong, base)
    for codec in ("same", "raw", "sparse", "dense", "int8", "float8_e4m3fn"):
        other = entry.model_copy(update={"codec": codec})
        if codec != entry.codec and {codec, entry.codec} != set(QUANTIZATIONS):
            with pytest.raises(SyncError):
                decode(other, content, base)


def test_tensors_without_elements_are_held_to_the_rules_too():
    empty = torch.empty(3, 0, dtype=torch.bfloat16)
    entry = entry_of(encode_raw(empty), empty)
    assert decode(entry, torch.from_numpy(np.empty(0, np.uint8)), None).shape == (3, 0)
    for codec in ("sparse", "dense", *QUANTIZATIONS):
        for payload in (b"", packed(*SPARSE), packed(*DENSE)):
            with pytest.raises(SyncError):
                decode(*with_payload(entry, payload, codec=codec), empty)


@pytest.mark.parametrize("codec", ["same", "sparse", "dense"])
def test_differences_need_their_base(codec):
    base = torch.randn(8, 8)
    entry, payload = with_payload(entry_of(encode_raw(base), base), b"", codec=codec)
    for wrong in (None, base[:4], base.reshape(4, 16), base.bfloat16(), base.double()):
        with pytest.raises(SyncError, match="base"):
            decode(entry, payload, wrong)


@pytest.mark.parametrize("codec", ["raw", "same", "sparse", "dense", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    "shape", [(1 << 40,), (1 << 70, 0), (1 << 62, 1 << 62, 0), (1 << 31, 1 << 31), (), (3, 0), (0,)]
)
def test_impossible_shapes_are_refused_without_memory(codec, shape):
    base = torch.zeros(1)
    entry = entry_of(encode_raw(base), base).model_copy(update={"shape": shape, "codec": codec})
    tracemalloc.start()
    with pytest.raises(SyncError):
        decode(*with_payload(entry, b"\1" * 3), base)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_types_that_versions_cannot_hold_are_refused():
    base = torch.zeros(1)
    for dtype in ("float64", "int8", "nonsense"):
        with pytest.raises(SyncError, match="known"):
            decode(*with_payload(entry_of(encode_raw(base), base), b"1234", dtype=dtype), base)


def packed(*streams: bytes) -> bytes:
    return struct.pack(f"<{len(streams)}Q", *map(len, streams)) + b"".join(streams)


def frame(content: bytes, **options) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(content)


SPARSE = [frame(b"\2"), frame(b"\0"), frame(b"\1"), frame(b"\0")]
DENSE = [frame(b"\1" * 10), frame(b"\0" * 10)]


def changed_to(streams, at, stream) -> bytes:
    return packed(*[stream if index == at else old for index, old in enumerate(streams)])


def ten_elements(codec) -> tuple[TensorEntry, torch.Tensor]:
    base = torch.zeros(10, dtype=torch.bfloat16)
    return entry_of(encode_raw(base), base).model_copy(update={"codec": codec}), base


def test_a_payload_made_by_hand_is_read():
    entry, base = ten_elements("sparse")
    found = decode(*with_payload(entry, packed(*SPARSE)), base)
    assert found.view(torch.int16).tolist() == [0, 0, -1, 0, 0, 0, 0, 0, 0, 0]
    entry, base = ten_elements("dense")
    found = decode(*with_payload(entry, packed(*DENSE)), base)
    assert found.view(torch.int16).tolist() == [-1] * 10


@pytest.mark.parametrize(("codec", "streams"), [("sparse", SPARSE), ("dense", DENSE)])
def test_streams_that_inflate_beyond_the_tensor_are_refused_before_they_do(codec, streams):
    entry, base = ten_elements(codec)
    unsaid = frame(bytes(1 << 28), write_content_size=False)
    liar = bytearray(frame(bytes(300)))
    assert zstandard.frame_content_size(bytes(liar)) == 300
    liar[5:7] = (10 - 256 & 0xFFFF).to_bytes(2, "little")
    bombs = [frame(bytes(1 << 28)), unsaid, bytes(liar), frame(bytes(11)), b""]
    for at in range(len(streams)):
        for bomb in bombs:
            tracemalloc.start()
            with pytest.raises(SyncError, match="damaged"):
                decode(*with_payload(entry, changed_to(streams, at, bomb)), base)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
            tracemalloc.stop()


@pytest.mark.parametrize(
    "payload",
    [
        packed(frame(b"\x0a"), *SPARSE[1:]),  # behind the last element
        packed(frame(b"\xfe"), frame(b"\xff"), *SPARSE[2:]),
        packed(frame(b"\xff"), frame(b"\xff"), *SPARSE[2:]),  # no element, but one difference
        packed(frame(b"\2\2"), frame(b"\0\0"), *SPARSE[2:]),  # two elements, one difference
        packed(frame(b"\2\2"), *SPARSE[1:]),  # planes of two lengths
        packed(*SPARSE[:3]),
        packed(*SPARSE, frame(b"")),
        struct.pack("<4Q", 1 << 63, 1 << 63, 0, 0) + b"".join(SPARSE),
        b"",
    ],
)
def test_inconsistent_streams_are_refused(payload):
    entry, base = ten_elements("sparse")
    with pytest.raises(SyncError, match="damaged"):
        decode(*with_payload(entry, payload), base)
    assert not base.any()


def test_threads_encode_and_decode_at_once():
    rng = np.random.default_rng(5)
    base = random_bits(rng, (300, 1000), torch.bfloat16)
    tensors = [changed_bits(rng, base, share) for share in (0.001, 0.01, 0.1, 0.2)]
    failures = []

    def work(tensor):
        try:
            for _ in range(5):
                assert_comes_back(encode_delta(tensor, base, 1), tensor, base)
        except Exception as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(tensor,)) for tensor in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
