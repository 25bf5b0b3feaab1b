"""The tree of a session's histories, and the trajectories that its branches are.

A node is a turn: the messages that a client added, and the answer. A request whose messages begin with
those of a known node extends it: its prompt is the tokens that were prompted and sampled there, as they
are, and the bridge to the next turn. A request with another history forks at the last turn that
they share, or starts a tree. So does one whose history the chat template cannot simply extend.

Each path from a root to a leaf is one trajectory, numbered by `branch`, where a turn's first
continuation comes before its later ones. Shared turns are in the loss of the first branch only: in
later branches they are prompt, so that no token is trained on twice.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.sessions.chat import Message, TurnRequest
from gateway.trajectories.sample import Sample
from gateway.trajectories.transcript import Transcript
from headway.contracts.errors import DataError
from headway.contracts.types import LLMResponse, RewardResult, Trajectory
from headway.text.tokenizer import STAND_IN, TextTokenizer

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Node:
    """One turn."""

    parent: Node | None
    number: int
    """Turns are counted from 0 in the order in which they were answered."""
    seen: tuple[Message, ...]
    """Messages that a client sends of this turn: those that it added, and the answer; see
    `_plain`."""
    shown: list[int]
    """Tokens that the policy was shown since the parent's answer."""
    response: LLMResponse
    children: list[Node] = field(default_factory=list)

    def path(self) -> list[Node]:
        """Return the nodes from the root to this one."""
        nodes: list[Node] = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return nodes[::-1]

    def ids(self) -> list[int]:
        """Every token up to the end of the answer."""
        return [
            token for node in self.path() for token in (*node.shown, *node.response.output_tokens)
        ]


@dataclass(frozen=True, slots=True)
class TreePosition:
    """Position of a request in the tree, before it is answered."""

    parent: Node | None
    setting: str
    added: tuple[Message, ...]
    shown: list[int]
    prompt_ids: tuple[int, ...]


class HistoryTree:
    """Every turn of a session."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._roots: dict[str, list[Node]] = {}
        """Roots by setting: the tools and variables that a template writes in front of
        everything."""
        self.nodes: list[Node] = []
        """Nodes in the order in which they were answered."""

    def place(self, ask: TurnRequest) -> TreePosition:
        """Find the turn that a request extends, and the tokens of its prompt.

        Raises:
            DataError: the chat template fails on these messages.
        """
        setting = json.dumps([list(ask.tools), dict(ask.template_args)], sort_keys=True)
        plain = tuple(_plain(message) for message in ask.messages)
        parent, count = self._find(setting, plain)
        if parent is not None and (shown := self._bridge(parent, ask, count)) is not None:
            return TreePosition(parent, setting, plain[count:], shown, (*parent.ids(), *shown))
        shown = self._tokenizer.encode_chat(ask.messages, ask.tools, ask.template_args)
        return TreePosition(None, setting, plain, shown, tuple(shown))

    def add(self, place: TreePosition, answer: Message, response: LLMResponse) -> Node:
        """Record what came of a request."""
        node = Node(
            parent=place.parent,
            number=len(self.nodes),
            seen=(*place.added, _plain(answer)),
            shown=place.shown,
            response=response,
        )
        if place.parent is None:
            self._roots.setdefault(place.setting, []).append(node)
        else:
            place.parent.children.append(node)
        self.nodes.append(node)
        return node

    def trajectories(
        self, sample: Sample, result: RewardResult, turn_rewards: Mapping[int, float]
    ) -> list[Trajectory]:
        """One per branch.

        Args:
            result: of the whole session; every branch carries it.
            turn_rewards: by number of the turn.
        """
        rows: list[Trajectory] = []
        trained: set[int] = set()
        for leaf in self._leaves():
            row = Transcript()
            for node in leaf.path():
                row.observe(node.shown)
                if node.number in trained:
                    row.observe(node.response.output_tokens)
                    continue
                trained.add(node.number)
                turn = row.sample(node.response)
                reward = turn_rewards.get(node.number)
                row.annotate(turn, reward, number=node.number, messages=list(node.seen))
            stop_reason = leaf.response.stop_reason
            rows.append(row.trajectory(sample, result, len(rows), stop_reason))
        return rows

    def _find(self, setting: str, plain: Sequence[Message]) -> tuple[Node | None, int]:
        """The last turn that these messages go on from, and how many of them lead up to it.

        Return, of turns that a client cannot distinguish, the one that was not continued.
        """
        found: list[tuple[Node, int]] = []
        level = [(node, 0) for node in self._roots.get(setting, [])]
        while level:
            deeper = []
            for node, start in level:
                end = start + len(node.seen)
                if len(plain) > end and tuple(plain[start:end]) == node.seen:
                    deeper.append((node, end))
            found += deeper
            level = [(child, end) for node, end in deeper for child in node.children]
        if not found:
            return None, 0
        return max(found, key=lambda one: (one[1], not one[0].children))

    def _bridge(self, parent: Node, ask: TurnRequest, count: int) -> list[int] | None:
        """Tokens between an answer and the next one; None if the template does more than append."""
        *before, last = parent.path()
        sampled = {"role": "assistant", "content": STAND_IN}
        history = [message for node in before for message in (*node.seen[:-1], sampled)]
        try:
            return self._tokenizer.encode_bridge(
                last.response.output_tokens,
                [*history, *last.seen[:-1]],
                ask.messages[count:],
                ask.tools,
                ask.template_args,
            )
        except DataError as error:
            log.warning("a turn begins a row of its own", extra={"reason": error.message})
            return None

    def _leaves(self) -> Iterator[Node]:
        """A turn's first continuation before its later ones; roots in the order of their answers."""
        roots = (node for nodes in self._roots.values() for node in nodes)
        stack = sorted(roots, key=lambda node: node.number, reverse=True)
        while stack:
            node = stack.pop()
            if not node.children:
                yield node
            stack += reversed(node.children)


def _plain(message: Message) -> Message:
    """Return the part of a message that must be equal for two to be the same: absent, null and
    empty content are."""
    kept: dict[str, Any] = {
        "role": message["role"],
        "content": message.get("content") or "",
    }
    for name in ("name", "tool_call_id", "tool_calls", "reasoning_content"):
        if message.get(name):
            kept[name] = message[name]
    return kept
