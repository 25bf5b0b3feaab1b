"""Fields that SGLang and vLLM add to OpenAI's requests, which their routers and trainers send at the
defaults too."""

from __future__ import annotations

from typing import Annotated

from pydantic import JsonValue

from headway.dialects.structured_output import ONE_OF_TWO, JsonSchema, StructuredOutputs
from headway.dialects.unsupported import RequestPart, unsupported

AT_THE_END = "what ended a choice is in its token_ids, never in its text"
INSIDE_THE_MODEL = "answers hold tokens and logprobs, nothing else of the model"
REASONING = "reasoning is not distinguished from text"
OPENS = "a chat always opens a new message; send token ids to completions"


class EngineFields(RequestPart):
    """Fields of completions and chats."""

    return_tokens_as_token_ids: bool | None = None
    """Extension: logprobs call a token `token_id:N`."""
    spaces_between_special_tokens: bool | None = None
    """Not used: no text has special tokens."""
    regex: str | None = None
    """Extension: the whole answer matches it."""
    json_schema: JsonSchema | None = None
    """Extension: the answer is JSON of this schema."""
    structured_outputs: StructuredOutputs | None = None
    """Extension: either of the two, in vLLM's form."""

    skip_special_tokens: Annotated[
        JsonValue, unsupported("special tokens are in token_ids, never in text", True)
    ] = None
    no_stop_trim: Annotated[JsonValue, unsupported(AT_THE_END, False)] = None
    include_stop_str_in_output: Annotated[JsonValue, unsupported(AT_THE_END, False)] = None
    return_hidden_states: Annotated[JsonValue, unsupported(INSIDE_THE_MODEL, False)] = None
    return_routed_experts: Annotated[JsonValue, unsupported(INSIDE_THE_MODEL, False)] = None
    routed_experts_start_len: Annotated[JsonValue, unsupported(INSIDE_THE_MODEL, 0)] = None
    return_cached_tokens_details: Annotated[
        JsonValue, unsupported("usage has the number of cached tokens", False)
    ] = None
    ebnf: Annotated[JsonValue, unsupported(ONE_OF_TWO)] = None
    stop_regex: Annotated[JsonValue, unsupported("send stop strings", [])] = None
    bad_words: Annotated[JsonValue, unsupported("send logit_bias", [])] = None
    use_beam_search: Annotated[JsonValue, unsupported("tokens are sampled", False)] = None
    length_penalty: Annotated[JsonValue, unsupported("it is for beam search", 1)] = None
    priority: Annotated[JsonValue, unsupported("requests are served as they come", 0)] = None
    sampling_seed: Annotated[JsonValue, unsupported("send seed")] = None
    prompt_logprobs: Annotated[JsonValue, unsupported("send echo and logprobs to completions")] = (
        None
    )
    lora_path: Annotated[JsonValue, unsupported("no adapters are served by name")] = None
    session_params: Annotated[JsonValue, unsupported("prefixes are shared without it")] = None
    custom_params: Annotated[JsonValue, unsupported("logits are not changed by clients")] = None
    custom_logit_processor: Annotated[
        JsonValue, unsupported("logits are not changed by clients")
    ] = None
    rid: Annotated[JsonValue, unsupported("the id of the answer aborts it")] = None


class ChatEngineFields(RequestPart):
    """Fields of chats only."""

    separate_reasoning: bool | None = None
    """Not used: reasoning is not distinguished from text."""

    stream_reasoning: Annotated[JsonValue, unsupported(REASONING, True)] = None
    include_reasoning: Annotated[JsonValue, unsupported(REASONING, True)] = None
    continue_final_message: Annotated[JsonValue, unsupported(OPENS, False)] = None
    add_generation_prompt: Annotated[JsonValue, unsupported(OPENS, True)] = None
    add_special_tokens: Annotated[
        JsonValue, unsupported("the chat template writes all special tokens", False)
    ] = None
    echo: Annotated[JsonValue, unsupported("an answer holds new text only", False)] = None
    chat_template: Annotated[
        JsonValue, unsupported("the model's is used; send chat_template_kwargs")
    ] = None
    input_ids: Annotated[JsonValue, unsupported("send them to completions, as prompt")] = None
    return_prompt_token_ids: Annotated[JsonValue, unsupported("send return_token_ids", False)] = (
        None
    )
    return_meta_info: Annotated[
        JsonValue, unsupported("answers have metadata, usage and version_runs instead", False)
    ] = None
