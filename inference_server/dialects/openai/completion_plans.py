"""Requests in OpenAI's words -> jobs: one `LLMRequest` per choice."""

from __future__ import annotations

import uuid

from pydantic import ValidationError

from headway.contracts.errors import NotFound
from headway.contracts.types import LLMRequest
from headway.dialects.error_shapes import InvalidField
from headway.dialects.openai.chat_request import ChatRequest
from headway.dialects.openai.fields import GenerationFields
from headway.text.tokenizer import TextTokenizer
from inference_server.dialects.openai.chat_choice import ChatChoice
from inference_server.dialects.openai.completion_choice import CompletionChoice
from inference_server.dialects.openai.completion_request import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
)
from inference_server.dialects.openai.job import CompletionJob
from inference_server.engine import LocalGenerator

ANY_MODEL = ("default", "unknown")
"""Names that SGLang's routers write for a model that was not named."""


def plan_completion(body: CompletionRequest, generator: LocalGenerator) -> CompletionJob:
    """Tokenise the prompts.

    Raises:
        InvalidField, NotFound: the request cannot be served.
    """
    adapter = _check(body, generator)
    tokenizer = generator.tokenizer
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
            )
            choices.append(CompletionChoice(len(choices), request, body, tokenizer, echo))
    kind = "text_completion"
    return CompletionJob(
        job_id, kind, kind, body.model, choices, body.num_choices, body.has_usage_chunk
    )


def plan_chat(body: ChatRequest, generator: LocalGenerator) -> CompletionJob:
    """Render the messages and tokenise them.

    Raises:
        InvalidField, DataError, NotFound: the request cannot be served.
    """
    adapter = _check(body, generator)
    tokenizer = generator.tokenizer
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
    left = max(1, generator.backend.limits.max_context - len(ids))
    choices = [
        ChatChoice(
            index,
            _request(
                body,
                rid=_rid(job_id, index, body.num_choices),
                input_ids=ids,
                gconfig=body.sampling(body.max_new_tokens or left, index),
                top_logprobs=body.top_logprobs or 0,
                adapter=adapter,
                metadata=body.notes,
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


def adapter_of(name: str, generator: LocalGenerator) -> str | None:
    """Return the adapter that a model's name means: its own name, or that behind the base's and a colon.

    Returns:
        None for the base.
    Raises:
        NotFound: it is another model.
    """
    bases = (generator.model_name, *generator.model_paths, *ANY_MODEL)
    if name in bases:
        return None
    base, _, last = name.rpartition(":")
    adapter = last if base in bases else name
    if adapter in generator.adapters.versions:
        return adapter
    known = [generator.model_name, *generator.adapters.versions]
    verb = "is" if len(known) == 1 else "are"
    raise NotFound(f"model {name!r} is not served here; {', '.join(map(repr, known))} {verb}")


def _check(body: GenerationFields, generator: LocalGenerator) -> str | None:
    """Return the adapter that is asked for."""
    adapter = adapter_of(body.model, generator)
    body.check()
    if body.stops and generator.tokenizer is None:
        raise InvalidField("this server has no tokenizer to look for strings", "stop")
    return adapter


def _request(
    body: GenerationFields, metadata: dict[str, str] | None = None, **fields: object
) -> LLMRequest:
    user = {} if body.user is None else {"user": body.user}
    try:
        return LLMRequest.model_validate({**fields, "metadata": {**(metadata or {}), **user}})
    except ValidationError as error:
        raise InvalidField.of(error, {"input_ids": "prompt"}) from error


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
