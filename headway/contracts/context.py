"""Bounds on the tokens of a sequence, and the errors for one that has more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headway.contracts.config.base import WorkflowRef
from headway.contracts.errors import RequestTooLong
from headway.contracts.http.servers import ServerReport

PROMPT_FIRST = frozenset({"best_of_n", "callback", "multi_turn", "single_turn", "tool_use"})
"""Workflows whose first request holds the prompt, and nothing of it is left out."""
TEMPLATE_TOKENS = 512
"""Maximum tokens that a chat template adds; with one that adds more, the longest prompts pass
unnoticed."""
RAISE_IT = "give the servers more (backend.max_context, or the engine's own limit)"


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """Tokens per sequence, prompt included, that the servers of a fleet can hold."""

    smallest: int | None = None
    """Smallest limit of the servers; None where no server reports its own."""
    largest: int | None = None
    """Largest limit of the servers; None where there is no server, or one that does not report its
    own."""

    @staticmethod
    def of(reports: Iterable[ServerReport]) -> ContextLimits:
        """Return the limits from the servers' reports; of two at one address the later one
        counts."""
        limits = {report.url: report.max_context_tokens for report in reports}.values()
        known = [limit for limit in limits if limit is not None]
        is_whole = len(known) == len(limits)
        return ContextLimits(
            min(known, default=None), max(known, default=None) if is_whole else None
        )


def check_context(
    prompt_tokens: int, max_new_tokens: int, limit: int | None, where: str = ""
) -> None:
    """Refuse a sequence that cannot end within the context.

    Args:
        limit: tokens per sequence; None is not known, and refuses nothing.
        where: what asks for it, in front of the message.
    Raises:
        RequestTooLong: prompt + max_new_tokens exceed it.
    """
    if limit is not None and prompt_tokens + max_new_tokens > limit:
        raise RequestTooLong(
            f"{where}{prompt_tokens} prompt tokens + max_new_tokens={max_new_tokens} exceed the "
            f"context of {limit}; shorten the prompt, lower max_new_tokens, or {RAISE_IT}"
        )


def begins_with_prompt(workflow: WorkflowRef) -> bool:
    """True if the first request of its rollouts is known before they are run.

    It is not for sessions, for workflows of the user's own, and for chats that are rendered in
    another way.
    """
    return workflow.name in PROMPT_FIRST and not workflow.args.get("template_args")


def first_new_tokens(workflow: WorkflowRef, prompt_tokens: int, max_new_tokens: int) -> int:
    """Return the number of tokens that the first request of such a rollout asks for after its
    prompt, which its row may bound."""
    row = workflow.args.get("max_tokens")
    return min(max_new_tokens, max(1, row - prompt_tokens)) if row else max_new_tokens


def most_tokens(texts: Iterable[str]) -> int:
    """Tokens that texts have at most, as a prompt: none is less than a byte."""
    return sum(len(text.encode(errors="replace")) for text in texts) + TEMPLATE_TOKENS
