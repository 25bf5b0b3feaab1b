"""SGLang's contract against a real server process over a tiny Llama, with a client that knows no other.

One server for the module: tests name their weights themselves and leave none paused.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from headway.launch.launchers.preload import child_environment
from headway.runtime.command import EXIT_INTERRUPTED
from headway.runtime.process import Process, ProcessSpec
from tests.integration.sglang_client import InFlight, SGLangClient, Trainer
from tests.numeric.models import (
    EOS,
    VOCAB_SIZE,
    load_reference,
    reference_logprobs,
    write_char_tokenizer,
)
from tests.processes import start_process
from tests.unit.weight_sync.foreign_store import ForeignStore
from tests.waiting import eventually
from weight_sync.manifest import tensor_checksum
from weight_sync.transports.disk import make_local_publisher

LONG_RUN = (
    "test_a_long_stream_repeats_itself_no_more_than_asked",
    "test_a_trainer_that_goes_silent_is_waited_for_no_longer_than_the_limit",
    "test_a_pause_that_keeps_what_runs[in_place-0-400]",
    "test_a_trainer_that_dies_in_a_broadcast_leaves_the_old_weights[True]",
    "test_a_trainer_that_dies_in_a_broadcast_leaves_the_old_weights[False]",
    "test_a_group_that_nobody_else_joins_is_given_up",
    "test_a_name_given_in_the_middle_of_an_update_is_the_new_weights_name[session]",
    "test_an_update_from_a_group_shows_in_the_spans_of_what_runs",
)
GROUP_TIMEOUT_S = 3.0
LONG = 300
PROMPT = [3, 4, 5, 6, 7, 8]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
GREEDY = {"temperature": 0, "ignore_eos": True}


def save_llama(folder: Path, seed: int) -> Path:
    """A tiny Llama with room for sequences that last for seconds."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    write_char_tokenizer(folder)
    return folder


@dataclass
class Served:
    """A server, and the directories it knows."""

    client: SGLangClient
    root: Path
    a: Path
    b: Path
    process: Process
    names: int = 0

    def name(self, text: str) -> str:
        """A label, rid or group that no other test uses."""
        self.names += 1
        return f"{text}-{self.names}"

    def serve(self, folder: Path, label: str | None = None) -> None:
        """Make this directory the weights that serve."""
        named = {} if label is None else {"weight_version": label}
        assert self.client.update_from_disk(folder, **named).status_code == 200


def start(folder: Path, model: Path, *flags: str) -> tuple[Process, str]:
    """A server process and its URL."""
    ready = folder / "ready.json"
    command = [
        *(sys.executable, "-m", "inference_server", "--model.path", str(model)),
        *("--service.port", "0", "--service.ready-file", str(ready)),
        *("--group-timeout-s", str(GROUP_TIMEOUT_S), *flags),
    ]
    spec = ProcessSpec("server", command, folder / "server.log", child_environment(1), ready)
    process = start_process(spec)
    return process, process.wait_ready(60)


def stop(process: Process) -> None:
    process.stop(20)
    assert process.exit_code() == EXIT_INTERRUPTED, "it did not end by itself"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("sglang")
    root = folder / "weights"
    a, b = save_llama(root / "a", seed=1), save_llama(root / "b", seed=2)
    flags = ("--weights.allow", json.dumps([str(root)]), "--backend.max-sequences", "8")
    paced = ("--modules", json.dumps(["tests.integration.paced_decoding"]))
    process, url = start(folder, a, *flags, *paced)
    client = SGLangClient(url)
    yield Served(client, root, a, b, process)
    client.close()
    stop(process)


@pytest.fixture
def trainer(served: Served) -> Iterator[Callable[[], Trainer]]:
    """Trainers that have joined a group with the server; killed after the test."""
    trainers: list[Trainer] = []

    def joined(group_name: str | None = None) -> Trainer:
        one = Trainer(group_name or served.name("group"))
        trainers.append(one)
        answer = one.join(served.client)
        text = "Succeeded to initialize custom process group."
        assert answer.json() == {"success": True, "message": text}
        return one

    yield joined
    for one in trainers:
        one.kill()


def tensors_of(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Name -> type and shape, as a trainer describes its weights."""
    weights = load_file(folder / "model.safetensors")
    return {n: (str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in weights.items()}


def halves(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights of a directory in two buckets."""
    items = list(tensors_of(folder).items())
    return dict(items[: len(items) // 2]), dict(items[len(items) // 2 :])


def spans(answer: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(s["version"], s["start"], s["end"]) for s in answer["meta_info"]["weight_versions"]]


def greedy(client: SGLangClient, count: int = 12) -> list[int]:
    """What the weights that serve make of the prompt."""
    sampling = {**GREEDY, "max_new_tokens": count}
    return client.generate(input_ids=PROMPT, sampling_params=sampling)["output_ids"]


def refused(client: SGLangClient, path: str = "/generate", **body: Any) -> str:
    """The message of a 400."""
    answer = client.post(path, body)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert isinstance(message, str)
    return message


def failed(answer: Any) -> str:
    """The message of an update that changed nothing."""
    assert answer.status_code == 400, answer.text
    told = answer.json()
    assert told["success"] is False
    return told["message"]


# Generation


def test_one_prompt_has_the_shape_of_sglang(served: Served) -> None:
    rid = served.name("r")
    body = {"rid": rid, "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, **GREEDY}}
    answer = served.client.generate(**body, return_logprob=True)
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 4
    assert isinstance(answer["text"], str)
    assert meta["id"] == rid
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (6, 4)
    label = served.client.model_info()["weight_version"]
    assert meta["weight_version"] == label
    assert spans(answer) == [(label, 0, 4)]
    assert meta["input_token_logprobs"] == []
    assert [t[1:] for t in meta["output_token_logprobs"]] == [
        [i, None] for i in answer["output_ids"]
    ]
    assert meta["output_token_logprobs_length"] == 4
    assert (meta["num_retractions"], meta["reasoning_tokens"], meta["dp_rank"]) == (0, 0, None)
    assert meta["e2e_latency"] > 0
    assert served.client.request("PUT", "/generate", json={**body, "rid": None}).status_code == 200


def test_logprobs_are_those_of_the_model(served: Served) -> None:
    served.serve(served.a)
    answer = served.client.generate(
        input_ids=PROMPT,
        sampling_params={"max_new_tokens": 5, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = answer["meta_info"]
    model = load_reference(served.a)
    wanted = reference_logprobs(model, PROMPT, answer["output_ids"]).tolist()
    assert [t[0] for t in meta["output_token_logprobs"]] == pytest.approx(wanted, abs=1e-4)
    scored = reference_logprobs(model, PROMPT[:1], PROMPT[1:]).tolist()
    given = meta["input_token_logprobs"]
    assert given[0][:2] == [None, PROMPT[0]]
    assert [t[0] for t in given[1:]] == pytest.approx(scored, abs=1e-4)
    assert [t[1] for t in given] == PROMPT
    assert (
        "".join(t[2] for t in meta["output_token_logprobs"])
        == served.client.post(
            "/detokenize", {"tokens": answer["output_ids"], "skip_special_tokens": False}
        ).json()["text"]
    )
    assert meta["input_top_logprobs"][0] is None
    tops = [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]]
    assert all(len(top) == 2 and top[0][0] >= top[1][0] for top in tops)
    assert len(tops) == 5 + 5


def test_no_new_tokens_score_a_prompt(served: Served) -> None:
    answer = served.client.generate(
        input_ids=PROMPT,
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert len(answer["meta_info"]["input_token_logprobs"]) == len(PROMPT)


def test_a_batch_and_n_samples_come_as_a_list_in_order(served: Served) -> None:
    names = [served.name("b"), served.name("b")]
    answers = served.client.generate(
        input_ids=[PROMPT, PROMPT[:3]],
        rid=names,
        sampling_params=[{"max_new_tokens": 2, "n": 2}, {"max_new_tokens": 3}],
        return_logprob=[True, False],
    )
    metas = [answer["meta_info"] for answer in answers]
    assert [meta["id"] for meta in metas] == [f"{names[0]}_0", f"{names[0]}_1", names[1]]
    assert [meta["prompt_tokens"] for meta in metas] == [6, 6, 3]
    assert ["output_token_logprobs" in meta for meta in metas] == [True, True, False]
    one = served.client.generate(input_ids=[PROMPT], sampling_params={"max_new_tokens": 1})
    assert isinstance(one, list)
    seeded = {"max_new_tokens": 20, "n": 2, "sampling_seed": 5, "ignore_eos": True}
    twice = [
        [a["output_ids"] for a in served.client.generate(input_ids=PROMPT, sampling_params=seeded)]
        for _ in range(2)
    ]
    assert twice[0] == twice[1]
    assert twice[0][0] != twice[0][1]


def test_a_stream_is_cumulative(served: Served) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6, **GREEDY}}
    chunks = list(served.client.stream(**body, return_logprob=True))
    whole = served.client.generate(**body)
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths == sorted(lengths)
    for chunk in chunks:
        assert chunk["output_ids"] == whole["output_ids"][: len(chunk["output_ids"])]
        assert len(chunk["meta_info"]["output_token_logprobs"]) == len(chunk["output_ids"])
    assert chunks[0]["meta_info"]["finish_reason"] is None
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    assert (chunks[-1]["output_ids"], chunks[-1]["text"]) == (whole["output_ids"], whole["text"])


def test_a_long_stream_repeats_itself_no_more_than_asked(served: Served) -> None:
    def lengths(**sampling: Any) -> list[int]:
        sampling |= {"max_new_tokens": 700, "ignore_eos": True}
        chunks = served.client.stream(input_ids=PROMPT, sampling_params=sampling)
        return [len(chunk["output_ids"]) for chunk in chunks]

    steps = lengths()
    assert steps[:100] == list(range(1, 101))
    assert (len(steps) < 600, steps[-1]) == (True, 700)
    assert lengths(stream_interval=100) == [*range(100, 701, 100), 700]


def test_samples_of_one_stream_carry_their_index(served: Served) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 3, "n": 2, "ignore_eos": True},
    }
    last = {chunk["index"]: chunk for chunk in served.client.stream(**body)}
    assert sorted(last) == [0, 1]
    assert all(len(chunk["output_ids"]) == 3 for chunk in last.values())


def test_what_stopped_a_sequence_stays_in_its_ids_and_leaves_its_text(served: Served) -> None:
    client = served.client
    ids = greedy(client)
    stop_id = next(token for token in ids[1:] if token > EOS and token != ids[0])
    place = ids.index(stop_id)
    sampling = {**GREEDY, "max_new_tokens": 12}
    by_token = client.generate(
        input_ids=PROMPT, sampling_params={**sampling, "stop_token_ids": [stop_id]}
    )
    assert by_token["output_ids"] == ids[: place + 1]
    assert by_token["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_id}
    text = client.post("/detokenize", {"tokens": [stop_id]}).json()["text"]
    by_text = client.generate(input_ids=PROMPT, sampling_params={**sampling, "stop": text})
    assert by_text["output_ids"] == ids[: place + 1]
    assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": text}
    assert not by_token["text"].endswith(text)
    assert not by_text["text"].endswith(text)
    kept = client.generate(
        input_ids=PROMPT, sampling_params={**sampling, "stop": text, "no_stop_trim": True}
    )
    assert kept["text"] == by_text["text"] + text


def test_text_prompts_and_the_tokenizer(served: Served) -> None:
    client = served.client
    told = client.post("/tokenize", {"prompt": "123456"}).json()
    assert told["count"] == len(told["tokens"]) == 6
    assert told["max_model_len"] == 4096
    sampling = {**GREEDY, "max_new_tokens": 3}
    by_text = client.generate(text="123456", sampling_params=sampling)
    by_ids = client.generate(input_ids=told["tokens"], sampling_params=sampling)
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert client.post("/detokenize", {"tokens": told["tokens"]}).json()["text"] == "123456"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"sampling_params": {"bogus": 1}}, "bogus"),
        ({"sampling_params": {"regex": "a("}}, "regex"),
        ({"sampling_params": {"json_schema": "{"}}, "json_schema"),
        ({"sampling_params": {"ebnf": "x"}}, "ebnf"),
        ({"sampling_params": {"custom_params": {"top_p_mask": True}}}, "custom_params"),
        ({"sampling_params": {"top_k": 0}}, "top_k"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"max_new_tokens": 5000}}, "5000"),
        ({"image_data": ["x"]}, "image_data"),
        ({"lora_path": "x"}, "adapter 'x'"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": [VOCAB_SIZE]}, "vocabulary"),
        ({"text": "1"}, "exactly one"),
        ({"rid": "a b"}, "rid"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"input_ids": [[3], [4]], "rid": ["a", "a"]}, "Duplicate request ID detected"),
        ({"top_logprobs_num": 2}, "return_logprob"),
        ({"return_logprob": True, "logprob_start_len": 99}, "logprob_start"),
    ],
)
def test_what_cannot_be_served_is_a_400_that_names_it(
    served: Served, body: dict[str, Any], named: str
) -> None:
    whole = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}} | body
    assert named in refused(served.client, **whole)
    assert named in refused(served.client, **{**whole, "stream": True})


def test_keys_of_sglang_at_their_defaults_ask_for_nothing(served: Served) -> None:
    sampling = {
        **{"max_new_tokens": 1, "top_k": -1, "n": 1, "regex": None, "stop": None},
        "custom_params": None,
        **{"skip_special_tokens": False, "spaces_between_special_tokens": False},
    }
    served.client.generate(
        input_ids=PROMPT,
        sampling_params=sampling,
        **{"image_data": None, "lora_path": None, "return_hidden_states": False, "modalities": []},
        **{"stream": None, "log_metrics": None, "return_text_in_logprobs": None},
    )


# Aborts and pauses


def test_an_abort_is_a_200_with_the_tokens_so_far(served: Served) -> None:
    client, rid = served.client, served.name("a")
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True}}
    going = InFlight(client, rid=rid, **body, return_logprob=True)
    assert "Duplicate request ID detected" in refused(client, rid=rid, **body)
    assert client.post("/abort_request", {"rid": rid[:-1]}).status_code == 200
    answer = client.post("/abort_request", {"rid": rid})
    assert (answer.status_code, answer.content) == (200, b"")
    ended = going.result()
    count = len(ended["output_ids"])
    assert 0 < count < LONG
    assert ended["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(ended["meta_info"]["output_token_logprobs"]) == count
    assert client.generate(rid=rid, input_ids=PROMPT, sampling_params={"max_new_tokens": 1})


def test_an_abort_ends_every_sample_of_its_request(served: Served) -> None:
    client, rid = served.client, served.name("a")
    sampling = {"max_new_tokens": LONG, "ignore_eos": True, "n": 3}
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(client.generate, rid=rid, input_ids=PROMPT, sampling_params=sampling)
        eventually(lambda: running(client) == 3, 20, "three samples run")
        client.post("/abort_request", {"rid": rid})
        answers = asked.result(20)
    assert [a["meta_info"]["finish_reason"]["type"] for a in answers] == ["abort"] * 3


def test_a_client_that_goes_away_frees_what_it_asked_for(served: Served) -> None:
    sampling = {"max_new_tokens": 4000, "ignore_eos": True, "n": 2}
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    with pytest.raises(httpx.ReadTimeout):
        served.client.post("/generate", body, timeout=0.5)
    eventually(lambda: running(served.client) == 0, 20, "nothing runs")
    chunks = served.client.stream(**body)
    next(chunks)
    assert running(served.client) > 0
    chunks.close()
    eventually(lambda: running(served.client) == 0, 20, "nothing runs")


def long_request(client: SGLangClient) -> InFlight:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True}}
    return InFlight(client, **body)


def running(client: SGLangClient) -> int:
    return client.get("/v1/loads").json()["loads"][0]["num_running_reqs"]


def test_a_pause_that_aborts(served: Served) -> None:
    client = served.client
    going = long_request(client)
    client.pause("abort")
    assert going.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert client.post("/flush_cache").status_code == 200
    assert client.get("/ready").status_code == 503
    assert client.get("/health_generate").status_code == 503
    assert client.get("/health").status_code == 200
    assert client.get("/ping").status_code == 200
    with ThreadPoolExecutor() as pool:
        held = pool.submit(greedy, client)
        eventually(lambda: waiting(client) == 1, 20, "a request is held")
        assert not held.done()
        client.resume()
        assert len(held.result(20)) == 12
    assert client.get("/ready").status_code == 200
    assert client.get("/health_generate").status_code == 200


def waiting(client: SGLangClient) -> int:
    return client.get("/v1/loads").json()["loads"][0]["num_waiting_reqs"]


@pytest.mark.parametrize(
    ("mode", "retractions", "flush"), [("in_place", 0, 400), ("retract", 1, 200)]
)
def test_a_pause_that_keeps_what_runs(
    served: Served, mode: str, retractions: int, flush: int
) -> None:
    client = served.client
    served.serve(served.a)
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 300, **GREEDY}}
    alone = client.generate(**body)
    going = InFlight(client, **body)
    client.pause(mode)
    assert client.get("/flush_cache").status_code == flush
    assert not going.is_over
    client.resume()
    ended = going.result()
    assert ended["meta_info"]["num_retractions"] == retractions
    assert ended["meta_info"]["finish_reason"] == {"type": "length", "length": 300}
    assert ended["output_ids"][:100] == alone["output_ids"][:100]


def test_a_pause_needs_a_body_and_a_known_mode(served: Served) -> None:
    assert served.client.request("POST", "/pause_generation").status_code == 400
    assert served.client.request("POST", "/continue_generation").status_code == 400
    assert "mode" in refused(served.client, "/pause_generation", mode="sideways")
    assert served.client.get("/ready").status_code == 200


def test_a_flush_waits_for_a_moment_when_nothing_runs(served: Served) -> None:
    client = served.client
    going = InFlight(
        client, input_ids=PROMPT, sampling_params={"max_new_tokens": 300, "ignore_eos": True}
    )
    answer = client.post("/flush_cache", params={"timeout": 30})
    assert answer.status_code == 200
    assert len(going.result()["output_ids"]) == 300


# Updates from disk


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_update_while_paused_shows_in_the_spans(served: Served, mode: str) -> None:
    client, before, after = served.client, served.name("A"), served.name("B")
    served.serve(served.a, before)
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
    going = InFlight(client, **body)
    client.pause(mode)
    answer = client.update_from_disk(served.b, weight_version=after, flush_cache=mode != "in_place")
    text = f"Succeeded to update model weights. Weight version updated to {after}."
    assert answer.status_code == 200
    assert answer.json()["success"] is True
    assert answer.json()["message"] == text
    assert client.model_info()["weight_version"] == after
    assert client.model_info()["model_path"] == str(served.b)
    client.resume()
    ended = going.result()
    first, second = spans(ended)
    assert (first[:2], second[0], second[2]) == ((before, 0), after, 300)
    assert first[2] == second[1] > 0
    assert ended["meta_info"]["weight_version"] == after


def test_an_update_in_flight_needs_no_pause(served: Served) -> None:
    client, before, after = served.client, served.name("A"), served.name("B")
    served.serve(served.a, before)
    going = long_request(client)
    answer = client.update_from_disk(served.b, weight_version=after)
    assert answer.status_code == 200
    assert "not flushed" in answer.json()["message"]
    ended = going.result()
    assert [version for version, _, _ in spans(ended)] == [before, after]
    assert len(ended["output_ids"]) == LONG


def test_an_update_may_abort_what_runs(served: Served) -> None:
    client, before, after = served.client, served.name("A"), served.name("B")
    served.serve(served.a, before)
    going = long_request(client)
    answer = client.update_from_disk(served.b, weight_version=after, abort_all_requests=True)
    assert answer.status_code == 200
    ended = going.result()
    assert ended["meta_info"]["finish_reason"]["type"] == "abort"
    assert [version for version, _, _ in spans(ended)] == [before]


def test_labels_and_the_weights_they_name(served: Served) -> None:
    client = served.client
    served.serve(served.a, "step-8")
    sums = client.checksums()
    served.serve(served.b)
    unnamed = client.model_info()["weight_version"]
    assert unnamed != "step-8"
    assert client.checksums() != sums
    served.serve(served.a, "100")
    assert client.checksums() == sums
    told = client.post("/update_weight_version", {"new_version": "v2"}).json()
    assert (told["success"], told["new_version"]) == (True, "v2")
    assert client.model_info()["weight_version"] == "v2"
    assert client.checksums() == sums


def test_a_version_of_our_own_publisher_is_a_directory_too(served: Served) -> None:
    weights = load_file(served.b / "model.safetensors")
    with closing(make_local_publisher(str(served.root / "published"))) as publisher:
        meta = publisher.publish(7, weights.items())
    served.serve(served.a)
    served.serve(Path(meta.path), served.name("ours"))
    assert served.client.checksums() == disk_sums(served, served.b)


def disk_sums(served: Served, folder: Path) -> dict[str, str]:
    served.serve(folder)
    return served.client.checksums()


def broken(served: Served, name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A directory with other tensors."""
    folder = served.root / name
    folder.mkdir(exist_ok=True)
    weights = load_file(served.b / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def test_an_update_that_does_not_fit_leaves_the_old_weights(served: Served) -> None:
    client, label = served.client, served.name("good")
    served.serve(served.a, label)
    sums, tokens = client.checksums(), greedy(client)
    outside = served.root.parent / "outside"
    if not outside.exists():
        save_llama(outside, seed=3)
        (served.root / "link").symlink_to(outside)
    (served.root / "torn").mkdir(exist_ok=True)
    whole = (served.b / "model.safetensors").read_bytes()
    (served.root / "torn" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    cases = {
        "not a directory": served.root / "nowhere",
        "outside": outside,
        "outside of": served.root / "link",
        "torn": served.root / "torn",
        "shapes": broken(served, "shape", lambda w: w.update({Q_PROJ: torch.zeros(2, 2)})),
        "missing": broken(served, "missing", lambda w: w.pop(Q_PROJ)),
        "extra": broken(served, "extra", lambda w: w.update(more=torch.zeros(3))),
    }
    for named, folder in cases.items():
        answer = client.update_from_disk(folder, weight_version="bad")
        assert named in failed(answer)
        assert answer.json()["num_paused_requests"] == 0
    assert client.checksums() == sums
    assert greedy(client) == tokens
    assert client.model_info()["weight_version"] == label
    assert client.model_info()["model_path"] == str(served.a)


def test_two_updates_at_once_end_one_after_the_other(served: Served) -> None:
    client = served.client
    known = {"a": disk_sums(served, served.a), "b": disk_sums(served, served.b)}
    folders = [served.a, served.b] * 4
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(client.update_from_disk, folders))
    assert [answer.status_code for answer in answers] == [200] * 8
    labels = {answer.json()["message"] for answer in answers}
    assert len(labels) == 8
    assert client.checksums() in known.values()


def test_our_own_publications_go_through_the_same_gate(served: Served) -> None:
    client = served.client
    served.serve(served.a, served.name("theirs"))
    version = client.get("/v1/status").json()["version"]
    weights = load_file(served.b / "model.safetensors")
    with closing(make_local_publisher(str(served.root / "ours"))) as publisher:
        metas = [publisher.publish(version + step, weights.items()) for step in (1, 2)]
    first, second = ({"version": meta.version, "path": meta.path} for meta in metas)
    assert client.post("/v1/weights/prepare", {"epoch": 1, **first}).status_code == 200
    label = served.name("theirs")
    served.serve(served.a, label)  # takes the number that was prepared
    assert client.model_info()["weight_version"] == label
    sums = client.checksums()
    assert client.post("/v1/weights", second).json()["version"] == version + 2
    assert client.model_info()["weight_version"] == str(version + 2)
    assert client.checksums() != sums


# Updates over a process group


def test_buckets_without_a_session_become_visible_with_the_label(
    served: Served, trainer: Callable[..., Trainer]
) -> None:
    client, label = served.client, served.name("D")
    new = disk_sums(served, served.b)
    old = disk_sums(served, served.a)
    sender = trainer()
    first, second = halves(served.b)
    assert sender.send(client, served.b, first).json()["success"] is True
    assert client.checksums() == old
    answer = sender.send(client, served.b, second, weight_version=label)
    assert answer.status_code == 200
    text = f"Succeeded to update parameter online. Weight version updated to {label}."
    assert answer.json()["message"].startswith(text)
    assert client.checksums() == new
    assert client.model_info()["weight_version"] == label
    left = client.post("/destroy_weights_update_group", {"group_name": sender.group_name})
    assert left.json()["success"] is True
    left = client.post("/destroy_weights_update_group", {"group_name": sender.group_name})
    assert failed(left) == "The group to be destroyed does not exist."


def test_a_complete_set_needs_no_label(served: Served, trainer: Callable[..., Trainer]) -> None:
    client = served.client
    new = disk_sums(served, served.b)
    served.serve(served.a)
    sender = trainer()
    for bucket in halves(served.b):
        assert sender.send(client, served.b, bucket).status_code == 200
    assert client.checksums() == new


def test_a_session_of_flattened_buckets_becomes_visible_at_its_end(
    served: Served, trainer: Callable[..., Trainer]
) -> None:
    client, before, label = served.client, served.name("A"), served.name("D")
    new = disk_sums(served, served.b)
    served.serve(served.a, before)
    old = client.checksums()
    sender = trainer()
    every = {"selector": "all"}  # miles says so of each step
    begun = client.post("/begin_weight_update", every)
    assert begun.json() == {"success": True, "message": "Success"}
    assert "open" in failed(client.post("/begin_weight_update"))
    for bucket in halves(served.b):
        flat = {"load_format": "flattened_bucket", "weight_version": label, **every}
        assert sender.send(client, served.b, bucket, **flat).status_code == 200
        assert client.checksums() == old
        assert client.model_info()["weight_version"] == before
    assert client.post("/end_weight_update").json() == {"success": True, "message": "Success"}
    assert client.checksums() == new
    assert client.model_info()["weight_version"] == label
    assert "no weight update session" in failed(client.post("/end_weight_update"))


def test_an_update_from_a_group_shows_in_the_spans_of_what_runs(
    served: Served, trainer: Callable[..., Trainer]
) -> None:
    client, before, label = served.client, served.name("A"), served.name("D")
    served.serve(served.a, before)
    sender = trainer()
    going = long_request(client)
    client.pause("in_place")
    answer = sender.send(client, served.b, tensors_of(served.b), weight_version=label)
    assert answer.status_code == 200
    client.resume()
    assert [version for version, _, _ in spans(going.result())] == [before, label]


def test_a_part_of_the_weights_leaves_the_others(
    served: Served, trainer: Callable[..., Trainer]
) -> None:
    client = served.client
    new = disk_sums(served, served.b)
    old = disk_sums(served, served.a)
    sender = trainer()
    part = {Q_PROJ: tensors_of(served.b)[Q_PROJ]}
    assert sender.send(client, served.b, part, weight_version=served.name("D")).status_code == 200
    assert client.checksums() == old | {Q_PROJ: new[Q_PROJ]}


@pytest.mark.parametrize("label", [None, "step-1"], ids=["unnamed", "every-bucket-named"])
def test_a_paused_server_serves_a_part_when_it_continues(
    served: Served, trainer: Callable[..., Trainer], label: str | None
) -> None:
    client = served.client
    new = disk_sums(served, served.b)
    served.serve(served.a, before := served.name("A"))
    old = client.checksums()
    sender = trainer()
    first, second = halves(served.b)
    frozen = second.popitem()[0]
    named = {} if label is None else {"weight_version": label}
    client.pause("in_place")
    for bucket in (first, second):
        text = sender.send(client, served.b, bucket, **named).json()["message"]
        assert "kept back" in text
        assert frozen in text or "parameters are missing" in text
        assert (client.checksums(), client.model_info()["weight_version"]) == (old, before)
    client.resume()
    assert client.checksums() == new | {frozen: old[frozen]}
    assert client.model_info()["weight_version"] not in (before, "default")
    if label is not None:
        assert client.model_info()["weight_version"] == label


def test_an_update_that_never_ended_is_served_before_the_next_one(
    served: Served, trainer: Callable[..., Trainer]
) -> None:
    client = served.client
    new = disk_sums(served, served.b)
    old = disk_sums(served, served.a)
    sender = trainer()
    part = {Q_PROJ: tensors_of(served.b)[Q_PROJ]}
    assert "kept back" in sender.send(client, served.b, part).json()["message"]
    assert client.checksums() == old
    assert "kept back" in sender.send(client, served.a, part).json()["message"]
    assert client.checksums() == old | {Q_PROJ: new[Q_PROJ]}
    left = client.post("/destroy_weights_update_group", {"group_name": sender.group_name})
    assert (
        "1 parameters that were received and not yet served were dropped" in left.json()["message"]
    )


def test_a_version_of_a_store_is_pulled_and_loaded(served: Served) -> None:
    start = load_file(served.a / "model.safetensors")
    store = ForeignStore(served.root / "store", start, encoding="overwrite")
    early = {"local_checkpoint_dir": "/nowhere", "source_dir": str(store.root), "target_version": 1}
    refused = served.client.post("/pull_weights", early)
    assert refused.status_code == 400 and "not complete" in refused.json()["error"]["message"]
    for version, wanted in ((1, served.b), (2, served.a)):
        store.publish(load_file(wanted / "model.safetensors"))
        pull = {"local_checkpoint_dir": "/nowhere", "source_dir": str(store.root)}
        answer = served.client.post("/pull_weights", pull | {"target_version": version})
        assert answer.json()["success"] is True
        loaded = served.client.update_from_disk("/nowhere", weight_version=served.name("pulled"))
        assert loaded.json()["success"] is True, loaded.text
        sums = served.client.checksums()
        tensors = load_file(wanted / "model.safetensors")
        assert {n: sums[n] for n in tensors} == {n: tensor_checksum(t) for n, t in tensors.items()}


@pytest.mark.parametrize("in_session", [True, False], ids=["session", "no-session"])
def test_a_name_given_in_the_middle_of_an_update_is_the_new_weights_name(
    served: Served, trainer: Callable[..., Trainer], in_session: bool
) -> None:
    client, before, label = served.client, served.name("A"), served.name("D")
    served.serve(served.a, before)
    sender = trainer()
    going = long_request(client)
    client.pause("in_place")
    if in_session:
        assert client.post("/begin_weight_update").status_code == 200
    tensors = tensors_of(served.b)
    tensors.popitem()
    assert sender.send(client, served.b, tensors).status_code == 200
    renamed = {"new_version": label, "abort_all_requests": False}
    assert client.post("/update_weight_version", renamed).json()["success"] is True
    if in_session:
        assert client.model_info()["weight_version"] == before
        assert client.post("/end_weight_update").json()["success"] is True
    assert client.model_info()["weight_version"] == label
    client.resume()
    assert [version for version, _, _ in spans(going.result())] == [before, label]


def test_a_session_that_only_names_renames_what_serves(served: Served) -> None:
    client, label = served.client, served.name("D")
    assert client.post("/begin_weight_update").status_code == 200
    assert client.post("/update_weight_version", {"new_version": label}).status_code == 200
    assert client.post("/end_weight_update").json()["success"] is True
    assert client.model_info()["weight_version"] == label


@pytest.mark.parametrize("in_session", [False, True])
def test_a_trainer_that_dies_in_a_broadcast_leaves_the_old_weights(
    served: Served, trainer: Callable[..., Trainer], in_session: bool
) -> None:
    client = served.client
    new = disk_sums(served, served.b)
    old = disk_sums(served, served.a)
    tokens, label = greedy(client), client.model_info()["weight_version"]
    sender = trainer()
    if in_session:
        client.post("/begin_weight_update")
    first, second = halves(served.b)
    assert sender.send(client, served.b, first).status_code == 200
    sender.tell(folder=str(served.b), names=list(second), mode="half")
    began = time.monotonic()
    assert sender.group_name in failed(sender.update(client, second, weight_version="torn"))
    assert time.monotonic() - began < GROUP_TIMEOUT_S + 5
    if in_session:
        assert "nothing changed" in failed(client.post("/end_weight_update"))
        assert "no weight update session" in failed(client.post("/end_weight_update"))
    assert (client.checksums(), greedy(client)) == (old, tokens)
    assert client.model_info()["weight_version"] == label
    another = trainer(sender.group_name)
    answer = another.send(client, served.b, tensors_of(served.b))
    assert answer.status_code == 200
    assert client.checksums() == new


def test_a_trainer_that_goes_silent_is_waited_for_no_longer_than_the_limit(
    served: Served, trainer: Callable[..., Trainer]
) -> None:
    client = served.client
    old = disk_sums(served, served.a)
    sender = trainer()
    with ThreadPoolExecutor() as pool:
        began = time.monotonic()
        stuck = pool.submit(sender.update, client, tensors_of(served.b), weight_version="torn")
        assert len(greedy(client)) == 12
        served.serve(served.a)  # another update does not wait for it
        assert time.monotonic() - began < GROUP_TIMEOUT_S
        failed(stuck.result(30))
    assert time.monotonic() - began < GROUP_TIMEOUT_S + 5
    assert client.checksums() == old


def test_a_group_that_nobody_else_joins_is_given_up(served: Served) -> None:
    lonely = {
        **{"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2},
        **{"group_name": served.name("lonely"), "backend": "gloo"},
    }
    began = time.monotonic()
    assert lonely["group_name"] in failed(served.client.post("/init_weights_update_group", lonely))
    assert time.monotonic() - began < GROUP_TIMEOUT_S + 5
    zero = lonely | {"rank_offset": 0}
    assert "rank 0" in failed(served.client.post("/init_weights_update_group", zero))
    if not torch.cuda.is_available():
        nccl = lonely | {"backend": "nccl"}
        assert "nccl" in failed(served.client.post("/init_weights_update_group", nccl))


def test_a_bucket_of_another_model_is_refused_after_it_was_received(
    served: Served, trainer: Callable[..., Trainer]
) -> None:
    client = served.client
    old = disk_sums(served, served.a)
    sender = trainer()
    strange = broken(
        served, "strange", lambda w: w.update({Q_PROJ: torch.zeros(2, 2), "x": w[Q_PROJ]})
    )
    for name, named in ((Q_PROJ, "shape"), ("x", "no parameter")):
        bucket = {name: tensors_of(strange)[name]}
        assert named in failed(sender.send(client, strange, bucket, weight_version="bad"))
        assert sender.heard() == "done"  # the trainer does not hang
    assert client.checksums() == old
    lost = {"names": ["x"], "dtypes": [], "shapes": [[2]], "group_name": sender.group_name}
    assert "0 dtypes" in refused(client, "/update_weights_from_distributed", **lost)
    unknown = {"names": ["x"], "dtypes": ["float32"], "shapes": [[2]], "group_name": "nobody"}
    assert "nobody" in failed(client.post("/update_weights_from_distributed", unknown))


def test_a_session_of_a_dead_trainer_is_taken_over(served: Served) -> None:
    client = served.client
    assert client.post("/begin_weight_update").status_code == 200
    eventually(
        lambda: client.post("/begin_weight_update").status_code == 200,
        GROUP_TIMEOUT_S + 10,
        "a session that nothing happens in gives way",
    )
    assert client.post("/end_weight_update").status_code == 200


# What a server tells of itself


def test_parameters_can_be_read(served: Served) -> None:
    client = served.client
    served.serve(served.b)
    wanted = load_file(served.b / "model.safetensors")[Q_PROJ][:2].tolist()
    body = {"name": Q_PROJ, "truncate_size": 2}
    assert client.post("/get_weights_by_name", body).json() == wanted
    assert client.request("GET", "/get_weights_by_name", json=body).json() == wanted
    assert "nothing.weight" in refused(client, "/get_weights_by_name", name="nothing.weight")
    assert "action" in refused(client, "/weights_checker", action="reset_tensors")
    asked = {"action": "checksum", "selector": "all"}
    told = client.post("/weights_checker", asked).json()
    assert told["ranks"][0]["checksums"] == client.checksums()


def test_a_selector_of_other_weights_than_all_is_refused(served: Served) -> None:
    bucket = {"names": ["x"], "dtypes": ["float32"], "shapes": [[2]]}
    for path, body in (
        ("/begin_weight_update", {}),
        ("/update_weights_from_distributed", bucket),
        ("/weights_checker", {"action": "checksum"}),
    ):
        assert "selector: a server has one model" in refused(
            served.client, path, **body, selector="draft"
        )


def test_a_server_describes_itself(served: Served) -> None:
    client = served.client
    info = client.get("/model_info").json()
    assert client.get("/get_model_info").json() == info
    assert info["is_generation"] is True
    assert info["model_type"] == "llama"
    assert info["architectures"] == ["LlamaForCausalLM"]
    told = client.get("/server_info").json()
    assert told["weight_version"] == info["weight_version"]
    assert told["max_total_num_tokens"] > 0
    assert client.get("/get_server_info").json()["internal_states"]
    url = client.url
    compared = {
        **{"host": url.host, "port": url.port, "enable_memory_saver": False},
        **{"nnodes": 1, "node_rank": 0, "gpu_id_step": 1, "base_gpu_id": 0},
        **{"tp_size": 1, "dp_size": 1, "pp_size": 1, "ep_size": 1},
    }
    assert compared.items() <= told.items()
    load = client.get("/v1/loads").json()["loads"][0]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)
    assert set(load["queues"]) == {"waiting", "paused", "retracted"}


def test_older_clients_find_what_they_ask_for(served: Served) -> None:
    client = served.client
    label = client.model_info()["weight_version"]
    assert client.get("/get_weight_version").json() == {"weight_version": label}
    (load,) = client.get("/get_load").json()
    assert (load["dp_rank"], load["num_reqs"], load["num_waiting_reqs"]) == (0, 0, 0)
    assert load["num_tokens"] >= 0
    steps = ("restore_weights_before_load", "post_process_quantization", "post_load_weights")
    told = client.post("/post_process_weights", dict.fromkeys(steps, False)).json()
    assert told == {"success": True, "message": "Success"}
    for step in steps:
        assert f"{step}: weights serve" in refused(client, "/post_process_weights", **{step: True})
    for verb in ("release", "resume"):
        told = refused(client, f"/{verb}_memory_occupation", tags=["weights"])
        assert "leave the call out" in told


def test_the_model_is_found_by_the_path_that_it_is_told_by(served: Served) -> None:
    client = served.client
    served.serve(served.b)
    body = {"prompt": [3, 4], "max_tokens": 1}
    for path in (client.model_info()["model_path"], str(served.a)):
        assert client.post("/v1/completions", {"model": path, **body}).status_code == 200
    other = {"model": str(served.root), **body}
    assert client.post("/v1/completions", other).status_code == 404


def test_a_server_without_model_or_tokenizer(tmp_path: Path) -> None:
    process, url = start(
        tmp_path, tmp_path, "--backend.type", "fake", "--weights.allow", json.dumps([str(tmp_path)])
    )
    client = SGLangClient(url)
    try:
        assert client.model_info()["weight_version"] == "default"
        answer = client.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 3})
        assert "text" not in answer
        assert spans(answer) == [("default", 0, 3)]
        assert "tokenizer" in refused(client, text="hello")
        assert "tokenizer" in refused(client, "/tokenize", prompt="hello")
        group = {
            **{"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1},
            **{"world_size": 2, "backend": "gloo"},
        }
        unsupported = failed(client.post("/init_weights_update_group", group))
        assert "not supported by this backend" in unsupported
        assert "not supported" in refused(client, "/get_weights_by_name", name=Q_PROJ)
    finally:
        client.close()
        stop(process)


def is_receiving(client: SGLangClient) -> bool:
    """Whether a bucket is under way; a session that was ended before it came is begun again."""
    answer = client.post("/end_weight_update")
    if answer.status_code == 200:
        client.post("/begin_weight_update")
        return False
    return "still being received" in failed(answer)


def test_a_server_that_waits_for_a_trainer_ends_when_it_is_told_to(
    served: Served, tmp_path: Path
) -> None:
    process, url = start(tmp_path, served.a, "--group-timeout-s", "60")
    client, sender = SGLangClient(url), Trainer("wg")
    try:
        assert sender.join(client).status_code == 200
        with ThreadPoolExecutor() as pool:
            client.post("/begin_weight_update")
            stuck = pool.submit(sender.update, client, tensors_of(served.b))
            eventually(
                partial(is_receiving, client),
                20,
                "the server waits for the trainer",
            )
            process.signal(signal.SIGTERM)
            assert process.wait(20) == EXIT_INTERRUPTED
            assert stuck.exception(20) is not None or stuck.result().status_code >= 400
    finally:
        sender.kill()
        client.close()
        process.stop(0.0)


def test_vllms_clients_are_served_alike(served: Served) -> None:
    """Tokens with their versions, a version from a directory, and what is refused."""
    served.serve(served.a)
    settings = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "logprobs": 2}
    body = {"token_ids": PROMPT, "sampling_params": {**settings, "prompt_logprobs": 1}}
    first = served.client.post("/inference/v1/generate", body).json()
    (choice,) = first["choices"]
    (span,) = choice["weight_versions"]
    model = load_reference(served.a)
    reference = reference_logprobs(model, PROMPT, choice["token_ids"]).tolist()
    got = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert got == pytest.approx(reference, abs=1e-4)
    scores = [row[str(token)]["logprob"] for row, token in zip(
        first["prompt_logprobs"][1:], PROMPT[1:], strict=True)]  # fmt: skip
    reference = reference_logprobs(model, PROMPT[:1], PROMPT[1:]).tolist()
    assert scores == pytest.approx(reference, abs=1e-4)
    assert first["prompt_logprobs"][0] is None
    assert all(len(entry["top_logprobs"]) == 2 for entry in choice["logprobs"]["content"])

    call = {"method": "reload_weights", "kwargs": {"weights_path": str(served.b)}}
    assert served.client.post("/collective_rpc", call).json() == {"results": [None]}
    folder = {"weight_dir": str(served.b)}
    assert served.client.post("/update_weights", folder).json() == {"status": "ok"}
    (after,) = served.client.post("/inference/v1/generate", body).json()["choices"]
    assert after["weight_versions"][0]["version"] == str(int(span["version"]) + 2)
    reference = reference_logprobs(load_reference(served.b), PROMPT, after["token_ids"]).tolist()
    got = [entry["logprob"] for entry in after["logprobs"]["content"]]
    assert got == pytest.approx(reference, abs=1e-4)

    for path, bad in [
        ("/pause?mode=wait", {}),
        ("/init_weight_transfer_engine", {}),
        ("/update_weights", {"update_info": {"names": []}}),
        ("/inference/v1/generate", body | {"priority": 3}),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": -1}}),
        ("/v1/load_lora_adapter", {"lora_name": "mine"}),
    ]:
        answer = served.client.post(path, bad)
        assert answer.status_code == 400 and answer.json()["error"]["message"], path
