"""Versions over HTTP: what a server gives, and what a receiver makes of one that misbehaves."""

import http.client
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

from headway.contracts.config.weight_sync import HttpSync, ReceiverConfig
from headway.contracts.errors import ConfigError, SyncError
from headway.contracts.types import WeightUpdateMeta
from tests.unit.weight_sync.range_server import Fault, RangeServer
from weight_sync.buffers import Buffers
from weight_sync.channel import StagedWeights
from weight_sync.deadline import Deadline
from weight_sync.manifest import MANIFEST_NAME
from weight_sync.publisher import StoredPublisher
from weight_sync.receiver import make_receiver
from weight_sync.transports import http as transport
from weight_sync.transports.base import make_publisher
from weight_sync.transports.disk import make_local_publisher
from weight_sync.transports.http import HttpReader

LIMIT_S = 60.0
TOKEN_ENV = "HEADWAY_TEST_WEIGHTS_TOKEN"
WEIGHTS = {f"w{index}": torch.full((1000 + index,), float(index)) for index in range(50)}
SHAPES = {name: tensor.shape for name, tensor in WEIGHTS.items()}


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Callable[..., StoredPublisher]]:
    with ExitStack() as stack:

        def make(**options: object) -> StoredPublisher:
            made = make_publisher(HttpSync(root=str(tmp_path / "weights"), **options))
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A version that lies on a disk."""
    made = make_local_publisher(str(tmp_path / "local"))
    made.publish(7, WEIGHTS.items())
    made.close()
    return tmp_path / "local" / "v00000007"


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., RangeServer]]:
    with ExitStack() as stack:
        yield lambda fault=None: stack.enter_context(RangeServer(folder, "/v00000007", fault))


def stage(
    path: str,
    deadline: Deadline | None = None,
    fallbacks: tuple[str, ...] = (),
    **options: object,
) -> StagedWeights:
    receiver = make_receiver(ReceiverConfig(allow=("http:", "/"), **options))
    meta = WeightUpdateMeta(7, path, None, fallbacks)
    return receiver.within(deadline or Deadline(LIMIT_S)).stage(meta, SHAPES)


def assert_whole(staged: StagedWeights) -> None:
    assert staged.tensors.keys() == WEIGHTS.keys()
    assert all(staged.tensors[name].equal(tensor) for name, tensor in WEIGHTS.items())


def get(
    url: str, path: str, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection(url.split("/")[2], timeout=LIMIT_S)) as connection:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_only_files_of_versions_are_served(publisher, tmp_path):
    meta = publisher().publish(7, WEIGHTS.items())
    root = tmp_path / "weights"
    (tmp_path / "secret.json").write_text("secret")
    (root / "secret.json").write_text("secret")
    (root / "v00000007" / ".hidden").write_text("secret")
    (root / "v00000007" / "below").mkdir()
    (root / "v00000007" / "below" / "secret.json").write_text("secret")
    (root / "v00000007" / "link.json").symlink_to(tmp_path / "secret.json")
    (root / "v00000008").symlink_to(tmp_path)
    assert get(meta.path, "/v00000007/manifest.json")[0] == 200
    for path in (
        "/",
        "/v00000007",
        "/v00000007/",
        "/secret.json",
        "/.publisher.lock",
        "/v00000007/.hidden",
        "/v00000007/%2ehidden",
        "/v00000007/below",
        "/v00000007/below/secret.json",
        "/v00000007/link.json",
        "/v00000008/secret.json",
        "/v00000007/../secret.json",
        "/v00000007/..%2fsecret.json",
        "/v00000007/%2e%2e/secret.json",
        "/%2e%2e/secret.json",
        "//etc/passwd",
        "/v00000007/manifest.json%00",
        "/v00000009/manifest.json",
    ):
        status, content = get(meta.path, path)
        assert (status in (400, 404), b"secret" in content) == (True, False), path
    for method in ("POST", "PUT", "DELETE"):
        assert get(meta.path, "/v00000007/manifest.json", method)[0] == 405


def test_ranges_are_answered(publisher, tmp_path):
    meta = publisher().publish(7, WEIGHTS.items())
    blob = (tmp_path / "weights" / "v00000007" / "shard-00000.safetensors").read_bytes()
    for wanted, status, content in (
        ("bytes=10-19", 206, blob[10:20]),
        (f"bytes={len(blob) - 3}-{len(blob) + 90}", 206, blob[-3:]),
        (f"bytes={len(blob)}-{len(blob) + 9}", 416, None),
    ):
        path = "/v00000007/shard-00000.safetensors"
        found = get(meta.path, path, headers={"range": wanted})
        assert found[0] == status
        assert content is None or found[1] == content


def test_a_port_that_is_taken_says_what_to_do_and_leaves_the_place_free(publisher, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=r"set weight_sync\.host to .* a free port"):
            publisher(port=port)
    assert publisher(port=port).publish(7, WEIGHTS.items()).path.endswith(f":{port}/v00000007")


def test_every_address_needs_a_url_that_servers_reach(publisher):
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match=r"set weight_sync\.advertise_url"):
            publisher(host=host)
    url = "http://trainer.example:8100"
    assert publisher(host="0.0.0.0", advertise_url=url).announce(7).path == f"{url}/v00000007"


def test_a_token_opens_and_nothing_else_does(publisher, monkeypatch):
    monkeypatch.setenv(TOKEN_ENV, "let-me-in")
    monkeypatch.setenv("HEADWAY_TEST_OTHER_TOKEN", "wrong")
    meta = publisher(token_env=TOKEN_ENV).publish(7, WEIGHTS.items())
    assert_whole(stage(meta.path, token_env=TOKEN_ENV))
    for other in ({}, {"token_env": "HEADWAY_TEST_OTHER_TOKEN"}):
        with pytest.raises(SyncError, match=r"status 401.*set weights\.token_env"):
            stage(meta.path, **other)
    assert get(meta.path, "/v00000007/manifest.json")[0] == 401
    assert get(meta.path, "/v00000009/manifest.json")[0] == 401  # nor is it said what is there


def test_a_token_that_is_not_set_is_refused_at_once(publisher, monkeypatch, serve):
    monkeypatch.delenv(TOKEN_ENV, raising=False)
    with pytest.raises(ConfigError, match=TOKEN_ENV):
        publisher(token_env=TOKEN_ENV)
    with pytest.raises(ConfigError, match=TOKEN_ENV):
        stage(serve().url, token_env=TOKEN_ENV)


def test_the_end_of_a_publisher_ends_its_thread(publisher):
    others = threading.enumerate()
    made = publisher()
    made.publish(7, WEIGHTS.items())
    made.close()
    assert "weights-http" not in {t.name for t in threading.enumerate() if t not in others}


def test_the_end_of_a_publisher_ends_an_answer_that_nobody_reads(publisher):
    others = threading.enumerate()
    made = publisher()
    meta = made.publish(7, [("w", torch.zeros(32 << 20, dtype=torch.uint8).view(torch.float32))])
    with closing(http.client.HTTPConnection(meta.path.split("/")[2], timeout=LIMIT_S)) as client:
        client.request("GET", "/v00000007/shard-00000.safetensors")
        answer = client.getresponse()
        made.close()
        with pytest.raises((http.client.IncompleteRead, OSError)):
            answer.read()
    assert not [t.name for t in threading.enumerate() if t not in others]


def test_a_publisher_that_comes_back_is_found(publisher, tmp_path):
    """A server that waits goes on when the trainer is there again."""
    first = publisher()
    path = first.announce(7).path
    port = int(path.split(":")[2].split("/")[0])
    config = ReceiverConfig(allow=("http:",))
    meta = WeightUpdateMeta(7, path)
    with closing(transport.CHANNEL.open_source(path, meta, config, Deadline(LIMIT_S))) as source:
        first.close()
        second = publisher(port=port)
        second.publish(7, WEIGHTS.items())
        assert {entry.name for entry in source.entries()} == WEIGHTS.keys()


def test_small_tensors_are_fetched_by_the_blob(serve):
    server = serve()
    assert_whole(stage(server.url))
    ranges = [wanted for _, wanted, _ in server.requests if wanted is not None]
    assert len(ranges) == 2  # the first tensor, and all others
    assert server.num_bytes < sum(file.stat().st_size for file in server.root.iterdir()) * 1.1


def test_large_blobs_are_fetched_in_ranges(serve, monkeypatch):
    monkeypatch.setattr(transport, "RANGE_BYTES", 10_000)
    server = serve()
    assert_whole(stage(server.url))
    size = sum(tensor.nbytes for tensor in WEIGHTS.values())
    assert len(server.requests) >= size // 10_000


def test_the_next_part_is_asked_for_while_a_blob_comes(serve, folder):
    manifest = (folder / MANIFEST_NAME).read_bytes()
    (folder / MANIFEST_NAME).unlink()
    asked, met = threading.Event(), []

    def fault(handler, content):
        if handler.path.endswith("part-00001.json"):
            (folder / MANIFEST_NAME).write_bytes(manifest)
            asked.set()
        elif handler.headers.get("range") is not None:
            met.append(asked.wait(LIMIT_S))
        return False

    assert_whole(stage(serve(fault).url))
    assert all(met)


def broken(times: int, act: Callable[..., None]) -> Fault:
    """Misbehave for the first ranges of every file."""
    lock, left = threading.Lock(), [times]

    def fault(handler, content):
        if handler.headers.get("range") is None:
            return False
        with lock:
            left[0] -= 1
            if left[0] < 0:
                return False
        act(handler, content)
        return True

    return fault


def hang_up(handler, content):
    handler.close_connection = True


def end_early(handler, content):
    headers = {"content-range": handler.content_range(content)}
    handler.answer(206, content, headers, cut=len(content) // 2)


def shut(handler, content):
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def busy(handler, content):
    handler.answer(503, b"later")


def short(handler, content):
    """Half of what was asked for, and says so."""
    half = content[: (len(content) + 1) // 2]
    handler.answer(206, half, {"content-range": handler.content_range(half)})


def forget_ranges(handler, content):
    handler.answer(200, (handler.server.root / Path(handler.path).name).read_bytes())


@pytest.mark.parametrize("act", [hang_up, end_early, shut, busy, short, forget_ranges])
@pytest.mark.parametrize("times", [1, 5])
def test_what_breaks_goes_on_where_it_stopped(serve, act, times):
    server = serve(broken(times, act))
    assert_whole(stage(server.url))
    if act is end_early:
        size = sum(file.stat().st_size for file in server.root.glob("*.safetensors"))
        assert server.num_bytes < size * 1.2 + (server.root / MANIFEST_NAME).stat().st_size


def test_manifests_that_break_are_asked_for_again(serve):
    left = [3]

    def fault(handler, content):
        left[0] -= 1
        if left[0] < 0:
            return False
        handler.answer(200, content, cut=len(content) - 10)
        return True

    assert_whole(stage(serve(fault).url))


def test_a_server_that_knows_no_ranges_corrupts_nothing(serve):
    assert_whole(stage(serve(broken(10**9, forget_ranges)).url))


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirects_are_refused(serve, status):
    elsewhere = serve()

    def fault(handler, content):
        handler.answer(status, b"", {"location": f"{elsewhere.url}/manifest.json"})
        return True

    with pytest.raises(SyncError, match=f"status {status}"):
        stage(serve(fault).url)
    assert elsewhere.requests == []


@pytest.mark.parametrize(
    "given", ["bytes 0-9/10", "bytes 5-4/1", "", "bytes */10", "items 0-9/10", "bytes x"]
)
def test_an_answer_to_another_question_is_refused(serve, given):
    def other(handler, content):
        handler.answer(206, content, {"content-range": given})

    with pytest.raises(SyncError, match="was answered with range"):
        stage(serve(broken(1, other)).url)


def test_a_blob_that_ends_early_is_torn_and_not_waited_for(serve, folder):
    blob = folder / "shard-00000.safetensors"
    content = blob.read_bytes()
    for length in (len(content) - 1, 5000, 0):
        blob.write_bytes(content[:length])
        with pytest.raises(SyncError, match="torn"):
            stage(serve().url, Deadline(1e6))


def test_more_than_was_asked_for_is_not_read_as_the_next_answer(serve):
    def more(handler, content):
        headers = {"content-range": handler.content_range(content)}
        handler.answer(206, content + b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad", headers)

    assert_whole(stage(serve(broken(3, more)).url))


def test_a_holder_takes_over_from_a_server_that_is_gone(serve, monkeypatch):
    monkeypatch.setattr(transport, "FALLBACK_AFTER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        gone = f"http://127.0.0.1:{free.getsockname()[1]}/v00000007"
    assert_whole(stage(gone, Deadline(1e6), fallbacks=(serve().url,)))


def test_who_is_gone_is_waited_for_until_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as free:
        gone = f"http://127.0.0.1:{free.getsockname()[1]}/v00000007"
    with pytest.raises(SyncError, match=r"no progress for 0\.3 s"):
        stage(gone, Deadline(0.3))


@pytest.mark.parametrize("at", ["manifest", "blob", "middle"])
def test_giving_up_ends_a_server_that_is_silent(serve, at):
    reached, deadline = threading.Event(), Deadline(1e6)

    def fault(handler, content):
        is_blob = handler.headers.get("range") is not None
        if is_blob == (at == "manifest"):
            return False
        if at == "middle":
            handler.send_response(206)
            handler.send_header("content-length", str(len(content)))
            handler.send_header("content-range", handler.content_range(content))
            handler.end_headers()
            handler.wfile.write(content[:100])
            handler.wfile.flush()
        reached.set()
        handler.connection.recv(1)  # until it hangs up
        handler.close_connection = True
        return True

    with ThreadPoolExecutor(1) as pool:
        staging = pool.submit(stage, serve(fault).url, deadline)
        assert reached.wait(LIMIT_S)
        deadline.cancel("another epoch came")
        with pytest.raises(SyncError, match="another epoch came"):
            staging.result(LIMIT_S)


def test_connections_are_kept(serve):
    server = serve()
    ports = set()
    server.fault = lambda handler, content: bool(ports.add(handler.client_address[1]))
    for _ in range(3):
        place = HttpReader(server.url, ReceiverConfig(num_connections=1), Deadline(9), Buffers())
        with closing(place):
            for name in (MANIFEST_NAME, "part-00007.json", "none", MANIFEST_NAME):
                place.text(name)
            place.read("shard-00000.safetensors", 0, 100)
    assert len(ports) == 3


def test_waiting_for_a_part_does_not_flood_a_server_that_answers_at_once(serve):
    server = serve()
    os.unlink(server.root / MANIFEST_NAME)
    with pytest.raises(SyncError, match="no progress"):
        stage(server.url, Deadline(0.5))
    assert len(server.requests) < 60


def test_memory_is_taken_again_when_its_tensors_are_gone():
    buffers = Buffers()
    first, second = buffers.take(1000), buffers.take(1000)
    address = first.data_ptr()
    row = first[10:20].view(torch.float16)
    del first
    third = buffers.take(1000)
    assert third.data_ptr() not in (address, second.data_ptr())
    del row
    assert buffers.take(1000).data_ptr() == address


def test_memory_of_other_sizes_is_kept_only_up_to_what_was_in_use():
    buffers = Buffers()
    held = [buffers.take(1 << 20) for _ in range(4)]
    held.clear()
    for size in range(1000, 2000):
        buffers.take(size)
    total = sum(memory.nbytes for memory in buffers._free)
    assert total <= 4 << 20
    held = [buffers.take(3 << 20)]
    assert sum(memory.nbytes for memory in buffers._free) <= 1 << 20


def test_memory_that_nobody_has_is_an_error():
    with pytest.raises(SyncError, match="no memory for"):
        Buffers().take(1 << 62)
