"""Requests in OpenAI's words -> jobs: one `LLMRequest` per choice."""

from __future__ import annotations

import uuid

from pydantic import ValidationError

from headway.contracts.errors import NotFound
from headway.contracts.types import LLMRequest, PolicyVersion
from headway.dialects.error_shapes import InvalidField
from headway.dialects.openai.chat_choice import ChatChoice
from headway.dialects.openai.chat_request import ChatRequest
from headway.dialects.openai.completion_choice import CompletionChoice
from headway.dialects.openai.completion_request import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
)
from headway.dialects.openai.fields import GenerationFields
from headway.dialects.openai.job import CompletionJob
from headway.dialects.served_model import ServedModel, room_after
from headway.text.tokenizer import TextTokenizer

ANY_MODEL = ("default", "unknown")
"""Names that SGLang's routers write for a model that was not named."""


def plan_completion(
    body: CompletionRequest, model: ServedModel, session: str | None = None
) -> CompletionJob:
    """Tokenise the prompts.

    Args:
        session: requests of one session are best served by one server.
    Raises:
        InvalidField, NotFound: the request cannot be served.
    """
    adapter, version = _check(body, model)
    tokenizer = model.tokenizer
    job_id = f"cmpl-{uuid.uuid4().hex}"
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    choices: list[CompletionChoice] = []
    for prompt in body.prompt:
        ids = _ids_of(prompt, tokenizer)
        echo = _text_of(prompt, tokenizer) if body.echo else ""
        for sibling in range(body.num_choices):
            request = _request(
                body,
                rid=_rid(job_id, len(choices), len(body.prompt) * body.num_choices),
                input_ids=ids,
                gconfig=body.sampling(max_tokens, sibling),
                top_logprobs=body.logprobs or 0,
                adapter=adapter,
                logprob_start=0 if body.echo and body.logprobs is not None else None,
                metadata=_home(session, job_id, body.num_choices),
                version=version,
            )
            choices.append(CompletionChoice(len(choices), request, body, tokenizer, echo))
    kind = "text_completion"
    return CompletionJob(
        job_id, kind, kind, body.model, choices, body.num_choices, body.has_usage_chunk
    )


def plan_chat(body: ChatRequest, model: ServedModel, session: str | None = None) -> CompletionJob:
    """Render the messages and tokenise them.

    Args:
        session: as for completions.
    Raises:
        InvalidField, DataError, NotFound: the request cannot be served.
    """
    adapter, version = _check(body, model)
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InvalidField(
            "this server has no tokenizer; send token ids to /v1/completions", "messages"
        )
    ids = tuple(
        tokenizer.encode_chat(
            [message.rendered() for message in body.messages],
            [tool.rendered() for tool in body.offered_tools],
            body.template_args(),
        )
    )
    job_id = f"chatcmpl-{uuid.uuid4().hex}"
    # At least one: a prompt that fills the context is then refused for its length.
    max_new_tokens = body.max_new_tokens or max(1, room_after(model, len(ids)))
    choices = [
        ChatChoice(
            index,
            _request(
                body,
                rid=_rid(job_id, index, body.num_choices),
                input_ids=ids,
                gconfig=body.sampling(max_new_tokens, index),
                top_logprobs=body.top_logprobs or 0,
                adapter=adapter,
                metadata=body.notes | _home(session, job_id, body.num_choices),
                version=version,
            ),
            body,
            tokenizer,
        )
        for index in range(body.num_choices)
    ]
    kind = "chat.completion"
    return CompletionJob(
        job_id,
        kind,
        f"{kind}.chunk",
        body.model,
        choices,
        body.num_choices,
        body.has_usage_chunk,
        ids if body.has_token_ids else None,
    )


def adapter_of(name: str, model: ServedModel) -> str | None:
    """Return the adapter that a model's name means: its own name, or that behind the base's and a colon.

    Returns:
        None for the base.
    Raises:
        NotFound: it is another model.
    """
    bases = (model.model_name, *model.model_paths, *ANY_MODEL)
    if name in bases:
        return None
    base, _, last = name.rpartition(":")
    adapter = last if base in bases else name
    if adapter in model.adapter_versions:
        return adapter
    known = [model.model_name, *model.adapter_versions]
    verb = "is" if len(known) == 1 else "are"
    raise NotFound(f"model {name!r} is not served here; {', '.join(map(repr, known))} {verb}")


def _check(body: GenerationFields, model: ServedModel) -> tuple[str | None, PolicyVersion | None]:
    """Return the adapter and the version that are asked for."""
    adapter = adapter_of(body.model, model)
    body.check()
    if body.stops and model.tokenizer is None:
        raise InvalidField("this server has no tokenizer to look for strings", "stop")
    wanted = None if body.weight_version is None else body.weight_version.exact(model)
    return adapter, wanted


def _request(
    body: GenerationFields, metadata: dict[str, str] | None = None, **fields: object
) -> LLMRequest:
    user = {} if body.user is None else {"user": body.user}
    try:
        return LLMRequest.model_validate({**fields, "metadata": {**(metadata or {}), **user}})
    except ValidationError as error:
        raise InvalidField.of(error, {"input_ids": "prompt"}) from error


def _home(session: str | None, job_id: str, num_choices: int) -> dict[str, str]:
    """Fields by which a fleet keeps requests that share a prefix together."""
    home = {} if session is None else {"session_id": session}
    return home | ({"group_id": job_id} if num_choices > 1 else {})


def _rid(job_id: str, index: int, total: int) -> str:
    """A lone choice is aborted by the id of its answer; siblings have a place behind it."""
    return job_id if total == 1 else f"{job_id}-{index}"


def _ids_of(prompt: str | tuple[int, ...], tokenizer: TextTokenizer | None) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise InvalidField("this server has no tokenizer; send token ids", "prompt")
    return tuple(tokenizer.encode(prompt))


def _text_of(prompt: str | tuple[int, ...], tokenizer: TextTokenizer | None) -> str:
    if isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise InvalidField("this server has no tokenizer to write the prompt", "echo")
    return tokenizer.decode(list(prompt))
