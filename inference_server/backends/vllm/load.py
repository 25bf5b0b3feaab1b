"""Load and busy time of vLLM, read from its `/metrics`."""

from __future__ import annotations

import re
import time

from inference_server.backends.base import Load

_SAMPLE = re.compile(r"(vllm:\w+)(?:\{(.*)\})? (\S+)")
_BLOCKS = re.compile(r'\b(num_gpu_blocks|block_size)="(\d+)"')


class Gauges:
    """The latest metrics, summed over the engines of one server."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._before: dict[str, float] | None = None
        self._sent_back = 0
        self.kv_capacity = 0
        """Tokens whose keys and values fit; 0 until it is known."""

    def read(self, text: str) -> None:
        """Take an answer of `/metrics`, in the text format of Prometheus."""
        values: dict[str, float] = {}
        capacity = 0
        for line in text.splitlines():
            sample = _SAMPLE.fullmatch(line)
            if sample is None:
                continue
            name, labels, value = sample.groups()
            values[name] = values.get(name, 0.0) + float(value)
            if name == "vllm:cache_config_info":
                blocks = {key: int(number) for key, number in _BLOCKS.findall(labels)}
                capacity += blocks.get("num_gpu_blocks", 0) * blocks.get("block_size", 0)
        self._values, self.kv_capacity = values, capacity
        if self._before is None:  # an engine that was attached to has a past
            self._before = values

    @property
    def waiting(self) -> int:
        """Requests in vLLM's own queue."""
        return int(self._values.get("vllm:num_requests_waiting", 0.0))

    @property
    def generated(self) -> int:
        """Tokens sampled since the first look."""
        return self._since("vllm:generation_tokens_total")

    @property
    def preemptions(self) -> int:
        """Requests that lost their cache for want of memory since the first look."""
        return max(0, self._since("vllm:num_preemptions_total") - self._sent_back)

    def send_back(self, count: int) -> None:
        """Do not count requests that lose their cache because a version came: vLLM does."""
        self._sent_back += count

    @property
    def prefilled(self) -> int:
        """Prompt tokens computed; those found in the prefix cache are not."""
        total = self._values.get("vllm:prompt_tokens_total", 0.0)
        return int(total - self._values.get("vllm:prompt_tokens_cached_total", 0.0))

    @property
    def kv_usage(self) -> float:
        """Share of the cache in use, mean over the engines."""
        engines = max(1.0, self._values.get("vllm:cache_config_info", 1.0))
        return min(1.0, self._values.get("vllm:kv_cache_usage_perc", 0.0) / engines)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values are held."""
        return round(self.kv_usage * self.kv_capacity)

    def load(
        self,
        asked: int,
        held_back: int,
        num_tokens: int,
        busy_s: float,
        uptime_s: float,
        max_running: int,
    ) -> Load:
        """Return the load of a server.

        Args:
            asked: requests that the engine has.
            held_back: requests that it was not given yet.
            num_tokens: tokens that arrived.
            max_running: requests decoded at once; 0 if only the engine knows.
        """
        queued = min(asked, self.waiting)
        return Load(
            running=asked - queued,
            queued=held_back + queued,
            generated_tokens=max(num_tokens, self.generated),
            busy_s=busy_s,
            uptime_s=uptime_s,
            prefill_tokens=self.prefilled,
            kv_tokens=self.kv_tokens,
            kv_capacity_tokens=self.kv_capacity,
            kv_usage=self.kv_usage,
            preemptions=self.preemptions,
            max_running=max_running,
        )

    def _since(self, counter: str) -> int:
        before = (self._before or {}).get(counter, 0.0)
        return int(self._values.get(counter, 0.0) - before)


class Stopwatch:
    """Adds up the time in which there was work."""

    def __init__(self) -> None:
        self._sum_s = 0.0
        self._since: float | None = None

    def run(self, has_work: bool) -> None:
        """Say whether there is work from now on."""
        now = time.monotonic()
        if self._since is not None:
            self._sum_s += now - self._since
        self._since = now if has_work else None

    def seconds(self) -> float:
        """Up to now."""
        running_s = 0.0 if self._since is None else time.monotonic() - self._since
        return self._sum_s + running_s
