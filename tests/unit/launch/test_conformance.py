"""What the referee makes of services that have little, or that score other tokens than it asked for."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headway.launch.conformance.referee import judge
from headway.launch.conformance.service import Broken, LeftOut
from headway.launch.conformance.sglang_updates import check_versions
from headway.runtime.command import CommandFailed

Answer = Callable[[str, dict[str, Any]], tuple[int, Any]]


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """URL of a service that answers a path and a body so."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, content = answer(self.path, json.loads(body or b"{}"))
            encoded = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            """Stay quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def verdicts_of(answer: Answer, folder: Path, *dialects: str) -> dict[str, tuple[str, str]]:
    """Promise -> mark and remark."""
    file = folder / "report.json"
    with serving(answer) as url, pytest.raises(CommandFailed):
        judge(url, dialects, (folder, folder), None, 0.03, 10.0, file)
    promises = json.loads(file.read_text())["promises"]
    return {each["promise"]: (each["mark"], each["remark"]) for each in promises}


def test_what_a_service_does_not_have_is_left_out(tmp_path: Path) -> None:
    verdicts = verdicts_of(lambda path, body: (404, {"detail": "Not Found"}), tmp_path)
    assert {mark for mark, _ in verdicts.values()} == {"left out"}
    assert all("is not there (404)" in remark for _, remark in verdicts.values())


@pytest.mark.parametrize("num_others", [1, 12])
def test_tokens_that_were_not_scored_are_not_compared(tmp_path: Path, num_others: int) -> None:
    tokens = list(range(30, 54))

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path != "/generate" or body["sampling_params"]["max_new_tokens"] not in (1, 24):
            return 404, {}
        scored = [0] * num_others + tokens[num_others:]
        meta = {
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
            "input_token_logprobs": [[None, 25, None]]
            + [[-9.0 if token == 0 else -1.0, token, None] for token in scored],
        }
        return 200, {"output_ids": tokens, "meta_info": meta}

    mark, remark = verdicts_of(answer, tmp_path, "sglang")[
        "logprobs are those of the weights that serve"
    ]
    if num_others == 1:
        assert (mark, remark) == ("ok", "mean error 0")
    else:
        assert mark == "FAILED"
        assert remark == "12 of 24 input_token_logprobs are of other tokens, or null"


def check_swap(first: float, named: float, other: float) -> str:
    """A sequence of five tokens of the old weights and five of the new ones, each off by so much."""
    rows = [[-1.0, token, None] for token in range(10)]
    spans = [
        {"version": "old", "start": 0, "end": 5},
        {"version": "new", "start": 5, "end": 10},
    ]
    meta = {"output_token_logprobs": rows, "weight_versions": spans}
    scores: dict[str, list[list[float | None]]] = {
        "old": [[-1.0 - first] * 5 + [-1.0 - other] * 5],
        "new": [[-3.0] * 5 + [-1.0 - named] * 5],
    }
    return check_versions([{"output_ids": list(range(10)), "meta_info": meta}], scores, 0.001)


def test_tokens_of_the_version_that_they_name_pass():
    assert check_swap(0.0, 0.0, 0.5) == "1 sequences met the swap, mean error 0"


def test_kept_keys_and_values_are_near_to_the_new_version():
    assert "kept their keys and values" in check_swap(0.0, 0.1, 0.5)


@pytest.mark.parametrize("other", [0.1, 0.15])
def test_directories_that_differ_too_much_decide_nothing(other: float):
    with pytest.raises(LeftOut, match="differ too much"):
        check_swap(0.0, 0.1, other)


@pytest.mark.parametrize(
    ("first", "named", "other"), [(0.01, 0.0, 0.5), (0.0, 0.5, 0.0), (0.0, 0.5, 0.2)]
)
def test_tokens_of_another_version_than_they_name_fail(first: float, named: float, other: float):
    with pytest.raises(Broken, match="off by"):
        check_swap(first, named, other)
