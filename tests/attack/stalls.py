"""The bound on the stand-still of event loops under attack, and how a test holds a process to it.

```python
answer = without_stall(attack, gateway_url, headers=headers)
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import httpx

from headway.contracts.http.paths import STATUS
from headway.contracts.http.status import StatusResponse
from headway.runtime.stalls import LONG_S

T = TypeVar("T")

ANSWER_S = 60.0
"""For a status, also of a process that stands still."""
ATTEMPTS = 3


def status_of(url: str, headers: Mapping[str, str] | None = None) -> StatusResponse:
    """What a gateway or a server says of itself; `headers` carry its token."""
    answer = httpx.get(url + STATUS, headers=headers, timeout=ANSWER_S, trust_env=False)
    return StatusResponse.model_validate_json(answer.raise_for_status().content)


def without_stall(
    attack: Callable[[], T], *urls: str, headers: Mapping[str, str] | None = None
) -> T:
    """Assert that no event loop of these processes stands still for 0.1 s or longer under an attack.

    A busy machine stops a loop at random: the disk is slow, the thread that holds the interpreter's
    lock has no CPU. What an attack costs comes each time, so only a stand-still in every attempt fails.
    """
    seen = []
    for _ in range(ATTEMPTS):
        before = {url: status_of(url, headers).stalls for url in urls}
        result = attack()
        after = {url: status_of(url, headers) for url in urls}
        stalls = {url: status.stalls - before[url] for url, status in after.items()}
        if not any(stalls.values()):
            return result
        seen.append({url: (stalls[url], round(after[url].longest_stall_s, 3)) for url in urls})
    raise AssertionError(
        f"loops stood still for {LONG_S} s or longer (how often, and seconds of the longest since the "
        f"start): {seen}"
    )
