"""What clients of OpenAI's API rely on, with the fields that engines add for trainers."""

from __future__ import annotations

from typing import Any

from headway.launch.conformance.service import (
    PROMPT,
    LeftOut,
    Service,
    check_logprobs,
    expect,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Say a word."}]


async def name_of(service: Service) -> str:
    """The first model's name."""
    models = await service.get("/v1/models")
    expect(models.get("data"), f"/v1/models: {models}")
    return str(models["data"][0]["id"])


async def complete(service: Service, tokens: int = 8, **fields: Any) -> Any:
    """One greedy completion of so many tokens, unless fields say otherwise."""
    body = {
        "model": await name_of(service),
        "prompt": list(PROMPT),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }
    return await service.post(COMPLETIONS, body)


async def chat(service: Service, **fields: Any) -> Any:
    """One greedy message.

    Raises:
        LeftOut: the model has no chat template, or no tokenizer.
    """
    body = {"model": await name_of(service), "messages": HELLO, "max_tokens": 8, "temperature": 0}
    answer = await service.status(CHAT, body)
    if answer.status_code in (400, 500) and (
        "template" in answer.text or "tokenizer" in answer.text
    ):
        raise LeftOut("the model has no chat template")
    return await service.post(CHAT, body | fields)


async def models_are_listed(service: Service) -> str:
    return await name_of(service)


async def a_completion_of_token_ids_counts_them(service: Service) -> None:
    answer = await complete(service)
    usage = answer["usage"]
    expect(
        (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 8), f"usage={usage}"
    )
    expect(answer["choices"][0]["finish_reason"] == "length", "finish_reason is not length")


async def tokens_and_logprobs_come_with_a_completion(service: Service) -> None:
    """As TRL and verifiers ask for them."""
    answer = await complete(
        service, logprobs=0, return_token_ids=True, return_tokens_as_token_ids=True
    )
    (choice,) = answer["choices"]
    columns = choice["logprobs"]
    check_logprobs(columns["token_logprobs"], 8)
    ids = choice.get("token_ids")
    if ids is None:
        raise LeftOut("choices have no token_ids")
    expect(columns["tokens"] == [f"token_id:{each}" for each in ids], "tokens are not token_id:N")
    expect(choice.get("prompt_token_ids") == list(PROMPT), "prompt_token_ids is not the prompt")


async def choices_are_as_many_as_asked_for(service: Service) -> None:
    answer = await complete(service, n=3, temperature=1)
    expect([c["index"] for c in answer["choices"]] == [0, 1, 2], "n=3 did not give three choices")


async def a_stream_ends_with_its_usage(service: Service) -> None:
    body = {
        "model": await name_of(service),
        "prompt": list(PROMPT),
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chunks = [chunk async for chunk in service.stream(COMPLETIONS, body)]
    usage = chunks[-1].get("usage") or {}
    expect(usage.get("completion_tokens") == 8, f"the last chunk has usage={usage}")
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    expect(reasons[-1] == "length", f"finish_reason={reasons[-1]}")


async def a_chat_says_what_its_prompt_was(service: Service) -> None:
    """Beside the choices, as vLLM has it."""
    answer = await chat(service, return_token_ids=True)
    expect(answer["choices"][0]["message"]["role"] == "assistant", "the message has another role")
    ids = answer.get("prompt_token_ids")
    if ids is None:
        raise LeftOut("prompt_token_ids is not beside the choices")
    expect(len(ids) == answer["usage"]["prompt_tokens"], "prompt_token_ids is not the prompt")


async def null_is_the_same_as_absent(service: Service) -> None:
    wanted = await chat(service)
    said = {"role": "assistant", "content": "A", "reasoning_content": None, "tool_calls": None}
    turns = [*HELLO, said, *HELLO]
    nulls = dict.fromkeys(("stop", "seed", "n", "tools", "logit_bias", "user", "top_p"))
    answer = await chat(service, **nulls)
    same = answer["choices"][0]["message"]["content"] == wanted["choices"][0]["message"]["content"]
    expect(same, "null for a field changed the answer")
    await chat(service, messages=turns)


async def engines_own_fields_at_their_defaults_are_taken(service: Service) -> None:
    """As sglang-router, slime and TRL send them."""
    await chat(
        service,
        no_stop_trim=False,
        skip_special_tokens=True,
        separate_reasoning=True,
        stream_reasoning=True,
        continue_final_message=False,
        return_hidden_states=False,
        ignore_eos=False,
    )


async def an_error_has_openais_shape(service: Service) -> None:
    body = {"model": await name_of(service), "prompt": list(PROMPT), "max_tokens": -5}
    answer = await service.status(COMPLETIONS, body)
    expect(400 <= answer.status_code < 500, f"max_tokens=-5 answered {answer.status_code}")
    error = answer.json()
    error = error.get("error", error)
    expect("message" in error and "type" in error, f"{answer.text[:200]}")


async def another_model_is_not_found(service: Service) -> None:
    await complete(service)  # else its route may be what is missing
    body = {"model": "no-such-model", "prompt": list(PROMPT)}
    answer = await service.status(COMPLETIONS, body, may_be_404=True)
    expect(answer.status_code == 404, f"answered {answer.status_code}")


CHECKS = (
    models_are_listed,
    a_completion_of_token_ids_counts_them,
    tokens_and_logprobs_come_with_a_completion,
    choices_are_as_many_as_asked_for,
    a_stream_ends_with_its_usage,
    a_chat_says_what_its_prompt_was,
    null_is_the_same_as_absent,
    engines_own_fields_at_their_defaults_are_taken,
    an_error_has_openais_shape,
    another_model_is_not_found,
)
