"""A fleet behind one URL, for clients that know SGLang's and OpenAI's API and nothing of ours.

What is claimed of every token is compared with the token (`version_fleet`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headway.launch.cli import main
from tests.integration.sglang_client import InFlight
from tests.integration.version_fleet import (
    LIMIT_S,
    PROMPT,
    Clients,
    Fleet,
    check,
    sampling,
)
from tests.integration.version_model import logprob_of, token_of
from tests.waiting import eventually

SHORT_RUN = (
    "test_one_request_a_batch_and_samples_of_one_prompt",
    "test_openais_client_completes_and_chats",
    "test_vllms_clients_send_and_get_token_ids",
    "test_versions_are_true_while_servers_die_and_join",
)
"""What `make test` runs of these."""
LONG = 400
"""Tokens of a sequence that goes on for seconds."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with closing(Fleet(tmp_path_factory.mktemp("fleet"))) as opened:
        yield opened


def test_one_request_a_batch_and_samples_of_one_prompt(fleet: Fleet) -> None:
    one = fleet.sglang.generate(
        input_ids=PROMPT, sampling_params=sampling(5), return_logprob=True, rid=fleet.name()
    )
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    assert check(fleet, one, 5) == {fleet.version}
    batch = fleet.sglang.generate(
        input_ids=[PROMPT, PROMPT[:2]], sampling_params=sampling(3, n=2), return_logprob=True
    )
    assert [len(check(fleet, each, 3)) for each in batch] == [1] * 4
    text = fleet.sglang.generate(text="123", sampling_params=sampling(2))
    assert text["meta_info"]["prompt_tokens"] == 4 and "text" in text  # the first one begins a text


def test_a_stream_says_at_the_end_what_one_answer_says(fleet: Fleet) -> None:
    body = {"input_ids": PROMPT, "sampling_params": sampling(20), "return_logprob": True}
    *chunks, last = fleet.sglang.stream(**body)
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths == sorted(set(lengths)) and len(lengths) > 10, "token by token"
    whole = fleet.sglang.generate(**body)
    assert last["output_ids"] == whole["output_ids"]
    check(fleet, last, 20)


def test_openais_client_completes_and_chats(fleet: Fleet) -> None:
    assert [model.id for model in fleet.openai.models.list()] == ["org/versions"]
    completion = fleet.openai.completions.create(
        model="org/versions", prompt=PROMPT, max_tokens=4, logprobs=0, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    (choice,) = completion.choices
    assert choice.model_extra is not None
    assert choice.model_extra["version_runs"] == [[fleet.version, 0, 4]]
    assert choice.model_extra["token_ids"] == [token_of(fleet.version)] * 4
    stream = fleet.openai.completions.create(
        model="default", prompt=PROMPT, max_tokens=6, temperature=0, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    *chunks, usage = list(stream)
    ids = [i for c in chunks for i in (c.choices[0].model_extra or {}).get("token_ids", ())]
    assert ids == [token_of(fleet.version)] * 6
    assert usage.usage is not None and usage.usage.completion_tokens == 6


def read_tokens(fleet: Fleet, choice: dict[str, Any]) -> list[int]:
    """The tokens of one of vLLM's choices, each of the version that it is said to be."""
    versions = [
        int(span["version"])
        for span in choice["weight_versions"]
        for _ in range(span["start"], span["end"])
    ]
    assert choice["token_ids"] == [token_of(version) for version in versions]
    return versions


def test_vllms_clients_send_and_get_token_ids(fleet: Fleet) -> None:
    settings = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True, "logprobs": 1, "n": 2}
    body = {"request_id": fleet.name(), "token_ids": PROMPT, "sampling_params": settings}
    answer = fleet.sglang.post("/inference/v1/generate", body).json()
    assert answer["request_id"] == body["request_id"]
    for choice in answer["choices"]:
        assert read_tokens(fleet, choice) == [fleet.version] * 5
        assert choice["finish_reason"] == "length"
        for entry, token in zip(choice["logprobs"]["content"], choice["token_ids"], strict=True):
            assert (entry["token"], entry["token_id"]) == (f"token_id:{token}", token)
            assert entry["logprob"] == pytest.approx(logprob_of(fleet.version), abs=1e-4)
            assert len(entry["top_logprobs"]) == 1
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 10)


def test_vllms_streams_bring_what_is_new(fleet: Fleet) -> None:
    settings = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    body = {"request_id": fleet.name(), "token_ids": PROMPT, "sampling_params": settings}
    more = {"stream": True, "stream_options": {"include_usage": True}}
    lines = fleet.sglang.post("/inference/v1/generate", body | more).text.split("\n\n")
    *events, done, rest = [line.removeprefix("data: ") for line in lines]
    assert (done, rest) == ("[DONE]", "")
    *chunks, usage = [json.loads(event) for event in events]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [token for choice in choices for token in choice["token_ids"]]
    assert ids == [token_of(fleet.version)] * 12 and len(choices) > 6
    assert [choice["finish_reason"] for choice in choices][-2:] == [None, "length"]
    assert choices[-1]["weight_versions"] == [
        {"version": str(fleet.version), "start": 0, "end": 12}
    ]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 12


def test_vllms_verbs_pause_abort_and_publish(fleet: Fleet) -> None:
    assert fleet.sglang.post("/pause?mode=keep&clear_cache=false").status_code == 200
    assert fleet.sglang.get("/is_paused").json() == {"is_paused": True}
    call = {
        "method": "reload_weights",
        "kwargs": {"weights_path": str(fleet.save(fleet.version + 1))},
    }
    assert fleet.sglang.post("/collective_rpc", call).json() == {"results": [None]}
    fleet.version += 1
    label = {"new_version": str(fleet.version), "abort_all_requests": False}
    assert fleet.sglang.post("/update_weight_version", label).status_code == 200
    assert fleet.sglang.post("/resume").status_code == 200
    assert fleet.sglang.get("/is_paused").json() == {"is_paused": False}
    assert fleet.sglang.get("/weight_info").json() == {"weight_version": str(fleet.version)}
    folder = {"weight_dir": str(fleet.save(fleet.version + 1))}  # prime-rl's way
    assert fleet.sglang.post("/update_weights", folder).json() == {"status": "ok"}
    fleet.version += 1
    assert fleet.sglang.get("/weight_info").json() == {"weight_version": str(fleet.version)}
    settings = {"max_tokens": LONG, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    body = {"request_id": fleet.name(), "token_ids": PROMPT, "sampling_params": settings}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(fleet.sglang.post, "/inference/v1/generate", body)
        eventually(lambda: sum(one.running for one in fleet.ready()) > 0, LIMIT_S, "it runs")
        ids = {"request_ids": [f"generate-tokens-{body['request_id']}"]}
        assert fleet.sglang.post("/abort_requests", ids).status_code == 200
        (choice,) = running.result(LIMIT_S).json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert len(read_tokens(fleet, choice)) < LONG
    config = fleet.sglang.get("/server_info", params={"config_format": "json"}).json()
    assert config["vllm_config"]["model_config"]["max_model_len"] == 512
    refused = fleet.sglang.post("/collective_rpc", {"method": "sleep"})
    assert refused.status_code == 400 and "reload_weights" in refused.json()["error"]["message"]


def test_a_request_may_say_which_version_has_to_serve(fleet: Fleet) -> None:
    body = {"input_ids": PROMPT, "sampling_params": sampling(2), "return_logprob": True}
    completion = {"model": "default", "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    for wanted in ({"min_version": fleet.version}, {"exact_version": fleet.version}):
        meta = fleet.sglang.generate(**body, weight_version=wanted)["meta_info"]
        assert meta["weight_version_start"] == meta["weight_version_end"]
        answer = fleet.sglang.post("/v1/completions", completion | {"weight_version": wanted})
        assert answer.json()["weight_version_end"] == fleet.version
    for wanted in ({"min_version": 1000}, {"exact_version": 1000}):
        for path, asked in (("/generate", body), ("/v1/completions", completion)):
            refused = fleet.sglang.post(path, asked | {"weight_version": wanted})
            assert refused.status_code == 409 and int(refused.headers["retry-after"]) >= 1
            assert "1000" in refused.json()["error"]["message"]


def test_what_the_fleet_is_asked_about_itself(fleet: Fleet) -> None:
    info = fleet.sglang.model_info()
    assert info["served_model_name"] == "org/versions"
    assert info["model_type"] == "llama"
    server = fleet.sglang.get("/server_info").json()
    assert (server["tp_size"], server["context_length"]) == (1, 512)
    assert fleet.sglang.get("/health_generate").status_code == 200
    (load,) = fleet.sglang.get("/v1/loads").json()["loads"]
    assert load["num_running_reqs"] >= 0
    tokens = fleet.sglang.post("/tokenize", {"prompt": "123"}).json()
    assert (tokens["count"], tokens["max_model_len"]) == (4, 512)
    assert fleet.sglang.post("/detokenize", {"tokens": tokens["tokens"]}).json()["text"] == "123"


def test_what_cannot_be_served_is_refused_by_name(fleet: Fleet) -> None:
    long = fleet.sglang.post("/generate", {"input_ids": PROMPT, "sampling_params": sampling(5000)})
    assert long.status_code == 400 and "512" in long.json()["error"]["message"]
    adapter = {"input_ids": PROMPT, "lora_path": "mine", "sampling_params": sampling(2)}
    assert "adapter" in fleet.sglang.post("/generate", adapter).json()["error"]["message"]
    other = fleet.sglang.post("/v1/completions", {"model": "other", "prompt": PROMPT})
    assert other.status_code == 404 and "org/versions" in other.json()["error"]["message"]
    group = fleet.sglang.post("/end_weight_update")
    assert group.status_code == 400 and "init_weights_update_group" in group.json()["message"]


def test_a_request_is_aborted_by_its_id_with_its_tokens(fleet: Fleet) -> None:
    rid = fleet.name()
    body = {"input_ids": PROMPT, "sampling_params": sampling(LONG), "return_logprob": True}
    running = InFlight(fleet.sglang, rid=rid, **body)
    again = fleet.sglang.post("/generate", body | {"rid": rid})
    assert again.status_code == 400 and rid in again.json()["error"]["message"]
    assert fleet.sglang.post("/abort_request", {"rid": rid}).status_code == 200
    ended = running.result()
    assert ended["meta_info"]["finish_reason"]["type"] == "abort"
    check(fleet, ended, len(ended["output_ids"]))
    assert 0 < len(ended["output_ids"]) < LONG
    eventually(lambda: sum(one.running for one in fleet.ready()) == 0, LIMIT_S, "nothing runs")


def test_a_pause_holds_all_servers_and_those_that_join_in_it(fleet: Fleet) -> None:
    body = {"input_ids": PROMPT, "sampling_params": sampling(LONG), "return_logprob": True}
    running = [InFlight(fleet.sglang, **body) for _ in range(4)]
    fleet.sglang.pause("in_place")
    try:
        assert fleet.sglang.get("/health_generate").status_code == 503
        fleet.join()
        held = [len(one.chunks) for one in running]
        with ThreadPoolExecutor(8) as pool:
            new = [pool.submit(fleet.sglang.generate, **body | {"sampling_params": sampling(3)})
                   for _ in range(8)]  # fmt: skip
            eventually(
                lambda: all(len(one.chunks) >= n for one, n in zip(running, held, strict=True)),
                LIMIT_S, "nothing is lost",
            )  # fmt: skip
            assert not any(one.done() for one in new)
            fleet.sglang.resume()
            for answer in new:
                check(fleet, answer.result(LIMIT_S), 3)
    finally:
        fleet.sglang.resume()
    for one in running:
        check(fleet, one.result(), LONG)


def test_a_trainer_publishes_directories_with_labels_and_without(fleet: Fleet) -> None:
    answer = fleet.publish(weight_version=f"step-{fleet.version + 1}").json()
    assert answer["success"] is True and f"step-{fleet.version}" in answer["message"]
    assert fleet.sglang.model_info()["weight_version"] == f"step-{fleet.version}"
    one = fleet.sglang.generate(input_ids=PROMPT, sampling_params=sampling(4), return_logprob=True)
    assert one["meta_info"]["weight_version"] == f"step-{fleet.version}"
    assert check(fleet, one, 4) == {fleet.version}
    assert fleet.publish().json()["success"] is True
    assert fleet.sglang.get("/get_weight_version").json() == {"weight_version": str(fleet.version)}
    renamed = {"new_version": f"renamed-{fleet.version}", "abort_all_requests": False}
    assert fleet.sglang.post("/update_weight_version", renamed).json()["success"] is True
    assert fleet.sglang.model_info()["weight_version"] == f"renamed-{fleet.version}"


def test_a_torn_directory_changes_nothing_anywhere(fleet: Fleet) -> None:
    before = fleet.sglang.model_info()["weight_version"]
    folder = fleet.save(fleet.version + 1)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for path in (folder, fleet.weights / "nowhere", "/etc"):
        answer = fleet.sglang.update_from_disk(path)
        assert answer.status_code == 400 and answer.json()["success"] is False
        assert answer.json()["message"]
    assert fleet.sglang.model_info()["weight_version"] == before
    one = fleet.sglang.generate(input_ids=PROMPT, sampling_params=sampling(4), return_logprob=True)
    assert check(fleet, one, 4) == {fleet.version}


def test_versions_are_true_while_servers_die_and_join(fleet: Fleet) -> None:
    """Nothing fails, no token is lost or of another version than it says."""
    clients, first = Clients(fleet), fleet.version
    with clients.flowing():
        for number in range(6):
            if number == 2:
                fleet.kill(0, 0)
            if number == 3:
                fleet.join()
            answer = fleet.publish(weight_version=f"step-{fleet.version + 1}")
            assert answer.json()["success"] is True, answer.json()
            eventually(
                lambda: {one.version for one in fleet.ready()} == {fleet.version},
                LIMIT_S, "all that are ready serve it",
            )  # fmt: skip
            sampled = clients.answered
            eventually(lambda n=sampled: clients.answered > n + 8, LIMIT_S, "it goes on")
    assert clients.seen >= {first + 2, first + 6}


def test_a_referee_finds_nothing_to_complain_of(fleet: Fleet, tmp_path: Path) -> None:
    """At the gateway with what is left of its servers, and at one of these."""
    told = tmp_path / "told.json"
    weights = [str(fleet.save(fleet.version + n)) for n in (1, 2)]
    words = ["conformance", fleet.url, "--tolerance", "0.001", "--json", str(told)]
    main([*words, "--weights", *weights])
    fleet.version = fleet.engine.status().version
    verdicts = json.loads(told.read_text())
    marks = {each["promise"]: each["mark"] for each in verdicts["promises"]}
    assert "FAILED" not in marks.values()
    assert marks["versions are true at a swap under load"] == "ok"
    assert marks["an update serves the new weights alone"] == "ok"
    assert verdicts["clients"]["AReaL"] == verdicts["clients"]["verl"] == "served"
    words[1] = fleet.ready()[0].url
    main([*words, "--dialect", "sglang", "--dialect", "vllm"])
