"""Make an agent trainable: it calls the model under a session's URL, and its reward is reported at the
end.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import httpx


@contextmanager
def open_session(gateway: str) -> Iterator[SimpleNamespace]:
    """Run the agent in the block and set `reward`; an exception in it is recorded as a failure."""
    token = os.environ.get("HEADWAY_TOKEN")  # of a gateway that asks for one
    headers = {"authorization": f"Bearer {token}"} if token else {}
    asked = {"rollout_id": f"game-{uuid.uuid4().hex}", "gconfig": {"max_new_tokens": 256}}
    answer = httpx.post(f"{gateway}/v1/sessions", json=asked, headers=headers, timeout=90.0)
    session = SimpleNamespace(**answer.raise_for_status().json(), reward=None)
    try:
        yield session
    except Exception as error:
        _end(session, {"failed": repr(error)})
        raise
    _end(session, {"reward": session.reward})


def _end(session: SimpleNamespace, body: dict) -> None:
    headers = {"authorization": f"Bearer {session.api_key}"}
    httpx.post(session.end_url, json=body, headers=headers, timeout=60.0).raise_for_status()
