"""Versions over HTTP: from the trainer's own disk, or from a peer that holds them already.

Both look the same: files of a version directory below a URL, read by ranges. A reader that takes one
tensor after another gets the blobs read ahead, in parallel ranges, into memory that the tensors share.
"""

from __future__ import annotations

import ipaddress
import math
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import islice

import torch

from headway.contracts.config.weight_sync import HttpSync, ReceiverConfig
from headway.contracts.errors import ConfigError
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from headway.runtime.secret import read_token
from weight_sync.buffers import Buffers
from weight_sync.deadline import Deadline
from weight_sync.file_server import FileServer
from weight_sync.http_files import HttpFiles
from weight_sync.manifest import TensorEntry, bytes_of
from weight_sync.publisher import StoredPublisher
from weight_sync.store import StoredSource, version_name
from weight_sync.transports.blob_reuse import BlobReuseStore

RANGE_BYTES = 32 << 20
"""Bytes fetched by one request."""
AHEAD = 2
"""Number of blobs that are fetched ahead of the one that is read."""
GAP_BYTES = 1 << 16
"""Most bytes between two tensors of a blob that are fetched together."""
PART_WAIT_S = 5.0
FALLBACK_AFTER_S = 10.0
"""Seconds without progress after which another copy of the version is tried."""

_Key = tuple[str, int, int]


class HttpStore(BlobReuseStore):
    """`Store` in a directory that is served over HTTP."""

    def __init__(self, config: HttpSync) -> None:
        token = read_token(config.token_env)
        if config.advertise_url is None and _is_any(config.host):
            raise ConfigError(
                f"weight_sync.host={config.host} is every address of this machine; set "
                "weight_sync.advertise_url to the one under which servers reach it"
            )
        super().__init__(config.root)
        try:
            self._server = FileServer(self.root, config.host, config.port, token)
        except ConfigError:
            super().close()
            raise
        host = f"[{config.host}]" if ":" in config.host else config.host
        self._url = config.advertise_url or f"http://{host}:{self._server.port}"

    def path_of(self, version: PolicyVersion) -> str:
        return f"{self._url}/{version_name(version)}"

    def write_text(self, version: PolicyVersion, name: str, text: str) -> None:
        super().write_text(version, name, text)
        self._server.changed()

    def close(self) -> None:
        self._server.close()
        super().close()


class HttpReader:
    """`Place` at a URL.

    The first tensor is fetched alone, since a repair needs no more than one. From the second on,
    expected blobs are fetched whole.
    """

    def __init__(
        self,
        url: str,
        config: ReceiverConfig,
        deadline: Deadline,
        buffers: Buffers,
        retry_s: float = math.inf,
    ) -> None:
        token = read_token(config.token_env)
        self._files = HttpFiles(url.rstrip("/"), token, config.num_connections, deadline, retry_s)
        self._buffers = buffers
        self._lock = threading.Lock()
        """Guards the fields below: one thread reads while another one learns what comes next."""
        self._is_first = True
        self._extents: deque[_Extent] = deque()
        self._extent_of: dict[_Key, _Extent] = {}

    def text(self, name: str) -> bytes | None:
        wait_s = PART_WAIT_S if name.startswith("part-") else 0.0
        return self._files.result(self._files.text(name, wait_s))

    def expect(self, entries: Sequence[TensorEntry]) -> None:
        with self._lock:
            for entry in entries:
                if _key(entry) in self._extent_of:  # equal tensors may share their bytes
                    continue
                last = self._extents[-1] if self._extents else None
                if last is None or not last.add(entry):
                    last = _Extent(entry)
                    self._extents.append(last)
                self._extent_of[_key(entry)] = last
            if not self._is_first:
                self._fetch_ahead()

    def read(self, name: str, offset: int, size: int) -> torch.Tensor:
        with self._lock:
            coming = self._coming(name, offset, size)
        return torch.empty(0, dtype=torch.uint8) if coming is None else coming.read(offset, size)

    def _coming(self, name: str, offset: int, size: int) -> _Fetch | None:
        """Return the request that brings these bytes, if there are any."""
        extent = self._extent_of.pop((name, offset, size), None)
        if size == 0:
            return None
        if extent is None or self._is_first:
            self._is_first = False
            if extent is not None:
                extent.start = max(extent.start, offset + size)
            return self._fetch(name, offset, offset + size)
        while self._extents[0] is not extent:
            self._extents.popleft()
        self._fetch_ahead()
        return extent.fetch

    def _fetch_ahead(self) -> None:
        for ahead in islice(self._extents, 1 + AHEAD):
            if ahead.fetch is None and ahead.start < ahead.end:
                ahead.fetch = self._fetch(ahead.name, ahead.start, ahead.end)

    def close(self) -> None:
        self._files.close()

    def _fetch(self, name: str, start: int, end: int) -> _Fetch:
        return _Fetch(self._files, name, start, self._buffers.take(end - start))


class _Fetch:
    """A stretch of a blob on its way into memory."""

    def __init__(self, files: HttpFiles, name: str, start: int, target: torch.Tensor) -> None:
        self._files = files
        self._start = start
        self._bytes = target
        view = bytes_of(target)
        self._ranges: list[Future[None]] = [
            files.fetch(name, start + at, view[at : at + RANGE_BYTES])
            for at in range(0, len(view), RANGE_BYTES)
        ]

    def read(self, offset: int, size: int) -> torch.Tensor:
        """Wait for some of it; shares the memory."""
        begin = offset - self._start
        for coming in self._ranges[begin // RANGE_BYTES : math.ceil((begin + size) / RANGE_BYTES)]:
            self._files.result(coming)
        return self._bytes[begin : begin + size]


class _Extent:
    """Neighbouring tensors of a blob, to be fetched at once."""

    def __init__(self, entry: TensorEntry) -> None:
        self.name = entry.blob
        self.start = entry.offset
        self.end = entry.offset + entry.size
        self.fetch: _Fetch | None = None

    def add(self, entry: TensorEntry) -> bool:
        """Extend by an entry; false if it is not the next neighbour."""
        gap = entry.offset - self.end
        if self.fetch is not None or entry.blob != self.name or not 0 <= gap <= GAP_BYTES:
            return False
        self.end = entry.offset + entry.size
        return True


class HttpChannel:
    """`WeightChannel` over HTTP."""

    schemes = ("http", "https")

    def __init__(self) -> None:
        self._buffers = Buffers()

    def make_publisher(self, config: HttpSync) -> StoredPublisher:
        return StoredPublisher(HttpStore(config), config)

    def open_source(
        self, path: str, meta: WeightUpdateMeta, config: ReceiverConfig, deadline: Deadline
    ) -> StoredSource:
        retry_s = min(FALLBACK_AFTER_S, deadline.remaining_s / 2) if meta.fallbacks else math.inf
        reader = HttpReader(path, config, deadline, self._buffers, retry_s)
        try:
            return StoredSource(reader, path, deadline)
        except BaseException:
            reader.close()
            raise


CHANNEL = HttpChannel()


def _key(entry: TensorEntry) -> _Key:
    return entry.blob, entry.offset, entry.size


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
