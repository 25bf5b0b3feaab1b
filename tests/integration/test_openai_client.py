"""OpenAI's own client, unmodified, against real servers on loopback.

Three servers: a tiny random llama (`llama`), a backend that repeats what the user said and so can be
made to say anything (`parrot`), and the fake backend without a tokenizer (`bare`).
"""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn
from openai import AsyncOpenAI, OpenAI
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from headway.contracts.config.server import ServerConfig
from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.engines import OnDelta
from headway.contracts.types import LLMDelta, LLMRequest, LLMResponse
from headway.runtime.access import Access
from headway.text.tokenizer import TextTokenizer
from inference_server.app import make_app
from inference_server.backends.fake import FakeBackend
from inference_server.engine import LocalGenerator, make_generator
from inference_server.version_gate import VersionGate
from tests.numeric.models import save_model, write_char_tokenizer
from tests.waiting import eventually
from weight_sync.receiver import make_receiver

DEADLINE_S = 30.0
VERSION = 3
TEMPLATE = """
{%- if tools %}{{ '<|system|>Tools: ' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}
{%- endfor %}
{{- '<|assistant|>' }}{% if loud %}{{ 'LOUD' }}{% endif %}"""
ROLES = [f"<|{role}|>" for role in ("system", "user", "assistant", "tool", "end")]
SAY = [{"role": "user", "content": "HELLO THERE"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


class Server:
    """An app under uvicorn in a thread of its own."""

    def __init__(self, url: str, generator: LocalGenerator) -> None:
        self.url = url
        self.generator = generator
        self.options: dict[str, Any] = {
            "base_url": f"{url}/v1",
            "api_key": "secret",
            "max_retries": 0,
            "timeout": DEADLINE_S,
        }
        self.client = OpenAI(**self.options)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return json.loads(answer.read() or b"null")

    def running(self) -> int:
        with urllib.request.urlopen(self.url + "/v1/status", timeout=DEADLINE_S) as answer:
            (status,) = json.load(answer)["servers"]
        return status["running"] + status["queued"]

    def until(self, condition: Callable[[], bool]) -> None:
        eventually(condition, DEADLINE_S)


@contextmanager
def serving(
    config: ServerConfig, generator: LocalGenerator, token: str | None = None
) -> Iterator[Server]:
    listener = socket.create_server(("127.0.0.1", 0))
    app = make_app(config, generator, Access.of(token))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([listener],), name="server")
    thread.start()
    try:
        one = Server(f"http://127.0.0.1:{listener.getsockname()[1]}", generator)
        one.until(lambda: server.started or not thread.is_alive())
        assert thread.is_alive(), "the server did not start"
        with one.client:
            yield one
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        listener.close()


def config_of(folder: Path, **fields: Any) -> ServerConfig:
    return ServerConfig.model_validate(
        {"model": {"path": str(folder)}, "initial_version": VERSION, **fields}
    )


class Parrot(FakeBackend):
    """Repeats the last user's words, token by token, and ends with `<|end|>`."""

    def __init__(self, config: ServerConfig, tokenizer: TextTokenizer) -> None:
        super().__init__(config.backend, config.model, config.initial_version, tokenizer)
        self._tokenizer = tokenizer
        self._user, self._end = (tokenizer.encode(name)[0] for name in ("<|user|>", "<|end|>"))
        self._role_ids = {tokenizer.encode(name)[0] for name in ROLES}

    async def generate(self, req: LLMRequest, on_delta: OnDelta | None = None) -> LLMResponse:
        tokens: list[int] = []
        reason, match = "length", None
        for token in self._words(req)[: req.gconfig.max_new_tokens]:
            tokens.append(token)
            if on_delta is not None:
                on_delta(
                    LLMDelta(output_tokens=[token], output_logprobs=[-1.0], version=self.version)
                )
            text = self._tokenizer.decode(tokens)
            found = next((stop for stop in req.gconfig.stop if stop in text), None)
            if found or token in (self._end, *req.gconfig.stop_token_ids):
                reason, match = "stop", found or token
                break
        return LLMResponse(
            rid=req.rid,
            output_tokens=tokens,
            output_logprobs=[-1.0] * len(tokens),
            version_runs=[(self.version, 0, len(tokens))],
            stop_reason=reason,
            stop_match=match,
            latency_s=0.0,
            ttft_s=0.0,
        )

    def _words(self, req: LLMRequest) -> list[int]:
        ids = list(req.input_ids)
        start = len(ids) - ids[::-1].index(self._user)
        end = next(i for i in range(start, len(ids)) if ids[i] in self._role_ids)
        return [*ids[start:end], self._end]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = save_model(tmp_path_factory.mktemp("llama"), "llama")
    write_char_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role | upper }}:{{ m.content }} {% endfor %}A:"
    )
    backend = {"type": "embedded_torch", "num_threads": 1, "kv_cache_bytes": 1 << 24}
    config = config_of(folder, backend=backend, served_model_name="org/tiny", max_in_flight=8)
    with serving(config, make_generator(config)) as server:
        yield server


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("parrot")
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    model = Tokenizer(BPE(alphabet, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(name) for name in ROLES])
    model.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = config_of(folder, backend={"type": "fake", "vocab_size": 256 + len(ROLES)})
    tokenizer = TextTokenizer(str(folder))
    backend = Parrot(config, tokenizer)
    gate = VersionGate(backend, make_receiver(ReceiverConfig()))
    generator = LocalGenerator(backend, gate, "local", tokenizer, model_name="parrot")
    with serving(config, generator) as server:
        yield server


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("bare")
    backend = {"type": "fake", "token_latency_s": 0.001, "max_context": 100_000}
    config = config_of(folder, backend=backend, served_model_name="bare", max_in_flight=4)
    with serving(config, make_generator(config)) as server:
        yield server


def chat(server: Server, **fields: Any) -> Any:
    body = {"model": server.generator.model_name, "messages": SAY} | fields
    return server.client.chat.completions.create(**body)


def complete(server: Server, **fields: Any) -> Any:
    body = {"model": server.generator.model_name, "prompt": "HELLO"} | fields
    return server.client.completions.create(**body)


def joined(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """What the chunks of a stream say of each choice, put together."""
    said: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            one = said.setdefault(
                choice.index, {"text": "", "ids": [], "logprobs": [], "calls": []}
            )
            delta = getattr(choice, "delta", None)
            one["text"] += (delta.content or "") if delta else choice.text
            one["calls"] += (delta.tool_calls or []) if delta else []
            one["ids"] += choice.token_ids
            if choice.logprobs is not None:
                logprobs = choice.logprobs
                one["logprobs"] += (
                    [each.logprob for each in logprobs.content]
                    if delta
                    else logprobs.token_logprobs
                )
            one["finish"] = choice.finish_reason
            one["last"] = choice
    return said


def test_the_served_model_is_listed_and_found_by_name(llama):
    client = llama.client
    assert [model.id for model in client.models.list()] == ["org/tiny"]
    card = client.models.retrieve("org/tiny")
    assert (card.object, card.max_model_len) == (
        "model",
        llama.generator.backend.limits.max_context,
    )
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here; 'org/tiny' is"):
        client.models.retrieve("gpt")


def test_the_model_is_called_by_its_path_too_and_by_the_names_that_routers_write(llama):
    (path,) = llama.generator.model_paths
    for name in (path, "default", "unknown"):
        assert chat(llama, model=name, max_tokens=1).model == name
        assert complete(llama, model=name, max_tokens=1).model == name
    assert llama.client.models.retrieve(path).id == "org/tiny"


def test_a_completion_carries_text_tokens_versions_and_usage(llama):
    answer = complete(llama, max_tokens=9, seed=1, extra_body={"ignore_eos": True})
    (choice,) = answer.choices
    tokenizer = llama.generator.tokenizer
    assert choice.prompt_token_ids == tokenizer.encode("HELLO")
    assert len(choice.token_ids) == 9
    assert choice.text == tokenizer.decode(choice.token_ids)
    assert choice.version_runs == [[VERSION, 0, 9]]
    assert choice.finish_reason == "length"
    assert answer.metadata == {"weight_version": str(VERSION)}
    assert answer.object == "text_completion"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 9, 14)
    assert usage.prompt_tokens_details.cached_tokens >= 0


def test_token_ids_can_be_left_out(llama):
    answer = complete(llama, max_tokens=2, extra_body={"return_token_ids": False})
    assert not answer.choices[0].model_extra


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_completion_is_the_whole_one(llama, n):
    fields = {"max_tokens": 12, "seed": 7, "logprobs": 2, "n": n, "stop": ["Q"]}
    whole = complete(llama, **fields)
    chunks = list(complete(llama, stream=True, stream_options={"include_usage": True}, **fields))
    said = joined(chunks)
    for choice in whole.choices:
        one = said[choice.index]
        assert one["text"] == choice.text
        assert one["ids"] == choice.token_ids
        assert one["logprobs"] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
        assert one["finish"] == choice.finish_reason
        assert one["last"].version_runs == choice.version_runs
    assert len({choice.text for choice in whole.choices}) == n
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_chat_is_the_whole_one(llama, n):
    fields = {"max_tokens": 12, "seed": 7, "logprobs": True, "top_logprobs": 2, "n": n}
    whole = chat(llama, **fields)
    chunks = list(chat(llama, stream=True, **fields))
    said = joined(chunks)
    for choice in whole.choices:
        one = said[choice.index]
        assert one["text"] == choice.message.content
        assert one["ids"] == choice.token_ids
        assert one["logprobs"] == pytest.approx(
            [e.logprob for e in choice.logprobs.content], abs=1e-4
        )
        assert one["finish"] == choice.finish_reason
    assert [chunk.choices[0].delta.role for chunk in chunks[: n + 1]] == ["assistant"] * n + [None]
    assert chunks[0].choices[0].prompt_token_ids == whole.choices[0].prompt_token_ids
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_the_prompt_of_a_chat_stands_beside_its_choices_too(llama):
    whole = chat(llama, max_tokens=2, n=2)
    assert whole.prompt_token_ids == whole.choices[1].prompt_token_ids
    first, *others = chat(llama, max_tokens=2, stream=True)
    assert first.prompt_token_ids == first.choices[0].prompt_token_ids == whole.prompt_token_ids
    assert not any("prompt_token_ids" in chunk.model_extra for chunk in others)
    without = chat(llama, max_tokens=2, extra_body={"return_token_ids": False})
    assert "prompt_token_ids" not in without.model_extra


@pytest.mark.parametrize("count", [0, 2])
def test_a_trainer_of_vllm_reads_ids_and_logprobs(llama, count):
    sampling = {
        **{"n": 2, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0},
        **{"min_p": 0.0, "max_tokens": 3, "logprobs": count},
    }
    asked = {"model": "org/tiny", "return_token_ids": True, "return_tokens_as_token_ids": True}
    answer = llama.post("/v1/completions", {**asked, "prompt": [[3, 4], [5]], **sampling})
    assert [choice["prompt_token_ids"] for choice in answer["choices"][::2]] == [[3, 4], [5]]
    for choice in answer["choices"]:
        columns = choice["logprobs"]
        names = [f"token_id:{token}" for token in choice["token_ids"]]
        assert columns["tokens"] == names
        rows = zip(names, columns["token_logprobs"], columns["top_logprobs"], strict=True)
        assert all(top[name] == logprob and len(top) >= count for name, logprob, top in rows)
    told = {"messages": SAY, "logprobs": True, "top_logprobs": count}
    answer = llama.post("/v1/chat/completions", {**asked, **sampling, **told})
    for choice in answer["choices"]:
        records = choice["logprobs"]["content"]
        assert [record["token"] for record in records] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]
        assert all(len(record["top_logprobs"]) == count for record in records)
        assert all(top["token"][:9] == "token_id:" for r in records for top in r["top_logprobs"])


def test_siblings_are_what_their_seeds_sample_alone(llama):
    many = chat(llama, max_tokens=8, seed=5, n=3)
    alone = [chat(llama, max_tokens=8, seed=5 + place) for place in range(3)]
    assert [c.token_ids for c in many.choices] == [a.choices[0].token_ids for a in alone]
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert many.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert many.usage.completion_tokens == sum(len(c.token_ids) for c in many.choices)


def test_logprobs_are_those_of_our_own_contract(llama):
    answer = chat(llama, max_tokens=6, seed=3, logprobs=True, top_logprobs=3, temperature=0.7)
    (choice,) = answer.choices
    gconfig = {"max_new_tokens": 6, "seed": 3, "temperature": 0.7}
    ours = llama.post(
        "/v1/generate",
        {
            "rid": "ours",
            "input_ids": choice.prompt_token_ids,
            "gconfig": gconfig,
            "top_logprobs": 3,
        },
    )
    assert choice.token_ids == ours["output_tokens"]
    records = choice.logprobs.content
    assert [record.logprob for record in records] == pytest.approx(
        ours["output_logprobs"], abs=1e-4
    )
    tokenizer = llama.generator.tokenizer
    for record, token, best in zip(records, choice.token_ids, ours["top_logprobs"], strict=True):
        assert bytes(record.bytes) == tokenizer.token_bytes(token)
        assert [each.token for each in record.top_logprobs] == [
            tokenizer.token_bytes(each).decode() for each, _ in best
        ]
        assert [each.logprob for each in record.top_logprobs] == pytest.approx(
            [logprob for _, logprob in best], abs=1e-4
        )


def test_columns_of_a_completion_fit_its_text(llama):
    answer = complete(llama, max_tokens=6, seed=3, logprobs=2, extra_body={"ignore_eos": True})
    columns = answer.choices[0].logprobs
    assert len(columns.tokens) == len(columns.token_logprobs) == len(columns.top_logprobs) == 6
    assert columns.text_offset[0] == 0
    for token, logprob, best in zip(
        columns.tokens, columns.token_logprobs, columns.top_logprobs, strict=True
    ):
        assert best[token] == logprob
        assert 2 <= len(best) <= 3


def test_an_echo_scores_the_prompt(llama):
    answer = complete(llama, max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer.choices
    assert choice.text == "HELLO"
    assert choice.token_ids == []
    assert choice.logprobs.tokens == list("HELLO")
    assert choice.logprobs.token_logprobs[0] is None
    assert all(logprob < 0 for logprob in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    longer = complete(llama, max_tokens=3, echo=True, seed=1)
    assert longer.choices[0].text.startswith("HELLO")
    streamed = joined(list(complete(llama, max_tokens=3, echo=True, seed=1, stream=True)))
    assert streamed[0]["text"] == longer.choices[0].text


def test_every_form_of_a_prompt(llama):
    tokenizer = llama.generator.tokenizer
    ids = tokenizer.encode("HELLO")
    fields = {"max_tokens": 4, "temperature": 0}
    expected = complete(llama, prompt="HELLO", **fields).choices[0].text
    for prompt in (ids, [ids], ["HELLO"]):
        assert [c.text for c in complete(llama, prompt=prompt, **fields).choices] == [expected]
    both = complete(llama, prompt=["HELLO", "BYE"], n=2, **fields)
    texts = [choice.text for choice in both.choices]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert texts[0] == texts[1] == expected
    assert texts[2] == texts[3] != expected
    assert both.usage.prompt_tokens == 8


def test_a_bias_and_sampling_extensions_are_honoured(llama):
    token = llama.generator.tokenizer.encode("Z")[0]
    answer = complete(llama, max_tokens=3, logit_bias={str(token): 100}, best_of=1)
    assert answer.choices[0].text == "ZZZ"
    stopped = complete(
        llama,
        max_tokens=8,
        logit_bias={str(token): 100},
        extra_body={"stop_token_ids": [token], "top_k": -1, "min_p": 0.0},
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == ""
    assert stopped.choices[0].token_ids == [token]


@pytest.mark.parametrize("stop", ["STOP", ["nope", "STOP"]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_cut_and_its_tokens_stay(parrot, stop, stream):
    messages = [{"role": "user", "content": "ST one STO two STOP three"}]
    answer = chat(parrot, messages=messages, stop=stop, stream=stream)
    if stream:
        said = joined(list(answer))[0]
        text, ids, finish = said["text"], said["ids"], said["finish"]
    else:
        (choice,) = answer.choices
        text, ids, finish = choice.message.content, choice.token_ids, choice.finish_reason
    assert text == "ST one STO two "
    assert parrot.generator.tokenizer.decode(ids) == "ST one STO two STOP"
    assert finish == "stop"


def test_no_chunk_ends_inside_a_character(parrot):
    text = "naïve 😀 漢字"
    messages = [{"role": "user", "content": text}]
    chunks = list(chat(parrot, messages=messages, stream=True, logprobs=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    records = [r for c in chunks if c.choices[0].logprobs for r in c.choices[0].logprobs.content]
    assert b"".join(bytes(record.bytes) for record in records) == text.encode() + b"<|end|>"


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_make_a_round_trip(parrot, stream):
    messages: list[Any] = [{"role": "user", "content": f"Let me see.\n{CALL}\n{CALL}"}]
    answer = chat(parrot, messages=messages, tools=[WEATHER], stream=stream)
    if stream:
        said = joined(list(answer))[0]
        content, calls, finish = said["text"], said["calls"], said["finish"]
        assert [call.index for call in calls] == [0, 1]
    else:
        (choice,) = answer.choices
        content, calls = choice.message.content, choice.message.tool_calls
        finish = choice.finish_reason
    assert content == "Let me see."
    assert finish == "tool_calls"
    assert [call.function.name for call in calls] == ["weather", "weather"]
    assert json.loads(calls[0].function.arguments) == {"city": "Zürich"}
    assert len({call.id for call in calls}) == 2
    if not stream:
        messages += [
            answer.choices[0].message,
            {"role": "tool", "tool_call_id": calls[0].id, "content": "rain"},
            {"role": "user", "content": "thanks"},
        ]
        after = chat(parrot, messages=messages, tools=[WEATHER])
        assert after.choices[0].message.content == "thanks"
        prompt = parrot.generator.tokenizer.decode(after.choices[0].prompt_token_ids, False)
        assert json.dumps(WEATHER) in prompt
        assert f"<|assistant|>Let me see.\n{CALL}\n{CALL}<|tool|>rain<|user|>thanks" in prompt


def test_a_call_alone_has_no_content_and_one_call_may_be_kept(parrot):
    messages = [{"role": "user", "content": CALL + CALL}]
    answer = chat(parrot, messages=messages, tools=[WEATHER], parallel_tool_calls=False)
    message = answer.choices[0].message
    assert message.content is None
    assert len(message.tool_calls) == 1


def test_tools_that_must_not_be_called_are_hidden(parrot):
    messages = [{"role": "user", "content": CALL}]
    answer = chat(parrot, messages=messages, tools=[WEATHER], tool_choice="none")
    (choice,) = answer.choices
    assert choice.message.content == CALL
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    prompt = parrot.generator.tokenizer.decode(choice.prompt_token_ids, False)
    assert "Tools" not in prompt


def test_messages_and_template_arguments_reach_the_template(parrot):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    answer = chat(parrot, messages=messages, extra_body={"chat_template_kwargs": {"loud": True}})
    prompt = parrot.generator.tokenizer.decode(answer.choices[0].prompt_token_ids, False)
    assert prompt == "<|system|>be brief<|user|>ab<|assistant|>LOUD"


def test_null_is_absent_in_messages_too_and_reasoning_reaches_the_template(parrot):
    nothing = {"refusal": None, "audio": None, "tool_calls": None, "reasoning": None}
    answers = [
        {"role": "assistant", "content": "one", "reasoning_content": None, **nothing},
        {"role": "assistant", "content": "two", "reasoning_content": "hm", **nothing},
    ]
    messages = [{"role": "system", "content": "s", "name": None}, *answers, *SAY]
    prompt = parrot.generator.tokenizer.decode(
        chat(parrot, messages=messages).prompt_token_ids, False
    )
    assert "<|assistant|>one<|assistant|><think>hm</think>two<|user|>" in prompt


ROUTER_FIELDS = {
    **{"no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True},
    **{"return_hidden_states": False, "stream": False, "regex": None, "never_heard_of": None},
}
"""What SGLang's router writes into every request."""
ROUTER_CHAT_FIELDS = {
    **{"continue_final_message": False, "separate_reasoning": True, "stream_reasoning": True},
    **{"logprobs": False},
}
VLLM_FIELDS = {
    **{"spaces_between_special_tokens": True, "include_stop_str_in_output": False},
    **{"use_beam_search": False, "length_penalty": 1.0, "bad_words": [], "priority": 0},
}
VLLM_CHAT_FIELDS = {
    **{"add_generation_prompt": True, "add_special_tokens": False, "include_reasoning": True},
    **{"echo": False, "return_meta_info": False},
}


def test_fields_of_sglang_and_vllm_at_their_defaults_ask_for_nothing(parrot):
    shared = {"model": "parrot", **ROUTER_FIELDS, **VLLM_FIELDS}
    body = {"messages": SAY, **shared, **ROUTER_CHAT_FIELDS, **VLLM_CHAT_FIELDS}
    answer = parrot.post("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"] == "HELLO THERE"
    body = {"prompt": "<|user|>HI<|end|>", **shared, "echo": False, "add_special_tokens": True}
    assert parrot.post("/v1/completions", body)["choices"][0]["text"] == "HI"


ENGINE_REFUSALS = {
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "return_hidden_states": True,
    "ebnf": 'root ::= "a"',
    "lora_path": "x",
    "custom_params": {"a": 1},
    "sampling_seed": 7,
    "prompt_logprobs": 1,
    "stream_reasoning": False,
    "continue_final_message": True,
    "add_generation_prompt": False,
    "chat_template": "{{ messages }}",
    "input_ids": [1],
    "return_meta_info": True,
}


@pytest.mark.parametrize("name", ENGINE_REFUSALS)
def test_a_field_that_would_change_an_answer_is_refused_with_a_reason(parrot, name):
    with pytest.raises(openai.BadRequestError, match=f"{name}: ") as raised:
        chat(parrot, extra_body={name: ENGINE_REFUSALS[name]})
    assert raised.value.param == name
    assert "not a field of this server" not in raised.value.message


AGE = {"type": "integer", "minimum": 10, "maximum": 99}
REFUSED_CHATS = {
    "response_format": {"response_format": {"type": "json_schema"}},
    "tool_choice": {"tools": [WEATHER], "tool_choice": "required"},
    "store": {"store": True},
    "functions": {"functions": [{"name": "f"}]},
    "reasoning_effort": {"reasoning_effort": "high"},
    "n": {"n": 0},
    "temperature": {"temperature": -1},
    "top_p": {"top_p": 0},
    "seed": {"seed": -1},
    "max_completion_tokens": {"max_completion_tokens": 0},
    "max_tokens": {"max_tokens": 3, "max_completion_tokens": 4},
    "top_logprobs": {"top_logprobs": 2},
    "stop": {"stop": [""]},
    "guided_json": {"extra_body": {"guided_json": {}}},
    "chat_template_kwargs": {"extra_body": {"chat_template_kwargs": {"messages": []}}},
    "messages": {
        "messages": [
            {"role": "user", "content": "look"},
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}],
            },
        ]
    },
}


@pytest.mark.parametrize("param", REFUSED_CHATS)
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_chat_cannot_honour_is_refused_by_name(parrot, param, stream):
    with pytest.raises(openai.BadRequestError) as raised:
        chat(parrot, stream=stream, **REFUSED_CHATS[param])
    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"
    assert raised.value.code == "invalid_request"
    assert param in raised.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": AGE}}},
        {"extra_body": {"json_schema": AGE}},
        {"extra_body": {"structured_outputs": {"regex": "[1-9][0-9]"}}},
    ],
    ids=["response_format", "json_schema", "structured_outputs"],
)
def test_an_answer_is_what_it_is_bound_to(llama, fields):
    answer = chat(llama, max_tokens=8, n=4, seed=1, **fields)
    for choice in answer.choices:
        assert 10 <= json.loads(choice.message.content) <= 99
        assert choice.finish_reason == "stop"


def test_stream_options_without_a_stream_are_refused(parrot):
    with pytest.raises(openai.BadRequestError, match="stream_options without stream"):
        chat(parrot, stream_options={"include_usage": True})


@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": "end"},
        {"best_of": 2},
        {"logprobs": 65},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": ""},
        {"prompt": [-1]},
        {"extra_body": {"prompt": {"text": "x"}}},
    ],
    ids=str,
)
def test_what_a_completion_cannot_honour_is_refused_by_name(parrot, fields):
    with pytest.raises(openai.BadRequestError) as raised:
        complete(parrot, **fields)
    assert raised.value.param in (*fields, "prompt")
    assert raised.value.code == "invalid_request"


def test_neutral_values_of_fields_without_effect_are_taken(parrot):
    answer = chat(
        parrot,
        store=False,
        response_format={"type": "text"},
        service_tier="auto",
        modalities=["text"],
        metadata={"run": "7"},
        user="me",
        seed=None,
        tools=[WEATHER],
        tool_choice="auto",
        temperature=None,
    )
    assert answer.choices[0].message.content == "HELLO THERE"


def test_errors_come_out_as_the_clients_own_classes(llama, bare):
    with pytest.raises(openai.NotFoundError) as missing:
        chat(llama, model="gpt")
    assert missing.value.code == "not_found"
    with pytest.raises(openai.BadRequestError) as long:
        complete(llama, max_tokens=100_000)
    assert long.value.code == "request_too_long"
    with pytest.raises(openai.BadRequestError, match="no tokenizer") as textless:
        complete(bare)
    assert textless.value.param == "prompt"
    with pytest.raises(openai.BadRequestError, match="no tokenizer"):
        chat(bare)
    with pytest.raises(openai.BadRequestError, match="no tokenizer"):
        complete(bare, prompt=[1, 2], stop="x")
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        complete(bare, prompt=[1_000_000])
    with pytest.raises(openai.RateLimitError) as full:
        complete(bare, prompt=[1, 2], n=5)
    assert full.value.code == "queue_full"
    assert int(full.value.response.headers["retry-after"]) >= 1
    bare.until(lambda: bare.running() == 0)


def test_a_body_that_is_no_json_is_refused_in_their_shape(bare):
    request = urllib.request.Request(
        bare.url + "/v1/chat/completions", b"{", {"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=DEADLINE_S)
    with raised.value as answer:
        assert answer.status == 400
        assert json.load(answer)["error"]["type"] == "invalid_request_error"


def test_half_a_surrogate_pair_is_a_bad_request(parrot):
    chat_body = {"messages": [{"role": "user", "content": "\ud800"}]}
    for path, body in (("completions", {"prompt": "\ud800"}), ("chat/completions", chat_body)):
        with pytest.raises(urllib.error.HTTPError) as raised:
            parrot.post(f"/v1/{path}", {"model": "parrot", **body})
        with raised.value as answer:
            assert answer.status == 400
            assert json.load(answer)["error"]["param"] in (None, "prompt")


def test_a_wrong_token_is_an_authentication_error(tmp_path):
    config = config_of(tmp_path, backend={"type": "fake"}, served_model_name="safe")
    with serving(config, make_generator(config), token="secret") as server:
        with pytest.raises(openai.AuthenticationError):
            server.client.with_options(api_key="wrong").models.list()
        assert server.client.models.list().data[0].id == "safe"


def test_tokens_without_a_tokenizer(bare):
    answer = complete(bare, prompt=[5, 6], max_tokens=4, seed=1, logprobs=0)
    (choice,) = answer.choices
    assert choice.text == ""
    assert choice.prompt_token_ids == [5, 6]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    streamed = joined(
        list(complete(bare, prompt=[5, 6], max_tokens=4, seed=1, stream=True, logprobs=0))
    )
    assert streamed[0]["ids"] == choice.token_ids


async def test_an_asynchronous_client_streams_many_at_once(bare):
    async with AsyncOpenAI(**bare.options) as client:

        async def one(seed: int) -> list[int]:
            stream = await client.completions.create(
                model="bare", prompt=[seed], max_tokens=6, stream=True
            )
            return [token async for chunk in stream for token in chunk.choices[0].token_ids]

        results = [await one(seed) for seed in range(3)]
        assert [len(tokens) for tokens in results] == [6, 6, 6]
        whole = await client.completions.create(model="bare", prompt=[2], max_tokens=6)
        assert whole.choices[0].token_ids == results[2]


def test_an_aborted_request_ends_with_what_it_has(bare):
    stream = complete(bare, prompt=[1], max_tokens=90_000, stream=True)
    first = next(stream)
    bare.post("/v1/generation/abort", {"rid": first.id})
    chunks = [first, *stream]
    said = joined(chunks)[0]
    assert said["finish"] == "abort"
    assert 0 < len(said["ids"]) < 90_000
    assert said["last"].version_runs == [[VERSION, 0, len(said["ids"])]]


def test_a_client_that_leaves_a_stream_frees_its_slots(bare):
    stream = complete(bare, prompt=[1], n=3, max_tokens=90_000, stream=True)
    next(stream)
    assert bare.running() == 3
    stream.close()
    bare.until(lambda: bare.running() == 0)


def test_a_client_that_gives_up_waiting_frees_its_slots(bare):
    with pytest.raises(openai.APITimeoutError):
        bare.client.with_options(timeout=0.3).completions.create(
            model="bare", prompt=[1], n=3, max_tokens=90_000
        )
    bare.until(lambda: bare.running() == 0)


def test_a_llama_stream_that_is_left_frees_its_row(llama):
    stream = complete(
        llama, max_tokens=200, stream=True, extra_body={"ignore_eos": True, "min_tokens": 200}
    )
    next(stream)
    stream.close()
    llama.until(lambda: llama.running() == 0)
