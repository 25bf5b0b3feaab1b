"""Which server a request goes to: the least loaded, with the siblings of a group kept together.

Siblings share their prompt, which one server computes once. They follow the first of them unless its
server has fallen behind the least loaded one by more than `SLACK` such requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from headway.contracts.types import LLMRequest

SLACK = 8
MAX_GROUPS = 8192
"""Groups remembered; the one that was of no use for longest is forgotten."""


def load_of(req: LLMRequest) -> int:
    """Tokens that a request may keep in a server's cache."""
    return len(req.input_ids) + req.gconfig.max_new_tokens


class Router:
    """Remembers where the siblings of a group went."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, str] = OrderedDict()

    def choose(self, req: LLMRequest, outstanding: Mapping[str, int]) -> str:
        """One of the servers.

        Args:
            req: siblings share `metadata["group_id"]`.
            outstanding: tokens that each server has still to hold or sample; not empty.
        """
        least = min(outstanding, key=lambda server: outstanding[server])
        group = req.metadata.get("group_id")
        if group is None:
            return least
        home = self._homes.get(group, least)
        bound = outstanding[least] + SLACK * load_of(req)
        chosen = home if outstanding.get(home, bound + 1) <= bound else least
        self._homes[group] = chosen
        self._homes.move_to_end(group)
        if len(self._homes) > MAX_GROUPS:
            self._homes.popitem(last=False)
        return chosen
