"""What can never be played is refused where it enters, by the row and the bound, and leaves nothing."""

from __future__ import annotations

import json

import pytest

from gateway.service.submission import MAX_REWARDS
from headway.contracts.config.base import ComponentConfig, WorkflowRef
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import ConfigError, DataError, RequestTooLong, ServiceError
from headway.contracts.types import Message, Prompt
from headway.text.tokenizer import TextTokenizer
from tests.unit.conftest import CHAT_TEMPLATE, WORDS
from tests.unit.gateway.rollout_builders import make_request

CHAT = (Message(role="user", content="hello"),)
MULTI_TURN = WorkflowRef(name="multi_turn")
TOOL_USE = WorkflowRef(name="tool_use", args={"tools": [{"name": "calculator"}]})


def prompt(**content) -> Prompt:
    return Prompt(group_id="g", data={"answer": "x"}, **content)


@pytest.fixture
def tokenizer_dir(tokenizer_dir):
    """One that puts nothing in front of a text."""
    file = tokenizer_dir / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
    (tokenizer_dir / "chat_template.jinja").write_text(
        CHAT_TEMPLATE
        + "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    return tokenizer_dir


@pytest.fixture
def plain_tokenizer(tokenizer_dir):
    return TextTokenizer(str(tokenizer_dir), max_bytes=1024)


@pytest.mark.parametrize(
    ("fields", "kind", "why"),
    [
        ({"prompt": prompt(text="")}, DataError, "group 'g' has no tokens"),
        ({"prompt": prompt(text=" \n")}, DataError, "group 'g' has no tokens"),
        ({"prompt": prompt(input_ids=())}, DataError, "group 'g' has no tokens"),
        (
            {"prompt": prompt(input_ids=(1, 2**31 - 1))},
            DataError,
            f"token id 2147483647; the model's vocabulary has {len(WORDS)}",
        ),
        (
            {"workflow": WorkflowRef(name="multi_turn", args={"feedback": "x" * 200_000})},
            ConfigError,
            "131072",
        ),
        (
            {"prompt": Prompt(group_id="g", text="x", data={"x": ["1" * 2**20] * 2})},
            RequestTooLong,
            "max_row_size=2097152",
        ),
        (
            {"gconfig": SamplingConfig(logit_bias={len(WORDS): 1.0})},
            DataError,
            f"logit_bias holds the token id {len(WORDS)};",
        ),
        ({"prompt": prompt(text="x" * 2000)}, RequestTooLong, "max_prompt_bytes=1024"),
        (
            {"prompt": prompt(messages=(Message(role="user", content="x" * 2000),))},
            RequestTooLong,
            "max_prompt_bytes=1024",
        ),
        (
            {"prompt": prompt(messages=(Message(role="system", content="x"),))},
            DataError,
            "no system",
        ),
        ({"prompt": prompt(text="\ud800")}, DataError, "surrogate"),
        ({"prompt": prompt(input_ids=(1,)), "workflow": MULTI_TURN}, DataError, "token ids"),
        (
            {"prompt": prompt(text="x"), "workflow": TOOL_USE},
            DataError,
            "is no chat",
        ),
        ({"workflow": WorkflowRef(name="multi_turn", args={"turns": 1})}, ConfigError, "turns"),
        ({"reward": ComponentConfig(name="exact", args={"key": 1})}, ConfigError, "key"),
        ({"reward": ComponentConfig(name="exact", args={"pattern": "("})}, ConfigError, "regular"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
async def test_a_row_that_can_never_be_played_is_refused(open_service, fields, kind, why):
    bench = await open_service()
    with pytest.raises(kind, match=f"rollout 'bad': .*{why}"):
        await bench.service.submit([make_request("good"), make_request("bad", **fields)])
    assert (await bench.ledger.counts()).submitted == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": prompt(messages=CHAT), "workflow": MULTI_TURN},
        {"prompt": prompt(text="x")},
        {"prompt": prompt(input_ids=(len(WORDS) - 1,))},
        {"prompt": prompt(text=""), "workflow": WorkflowRef(name="session")},
    ],
    ids=str,
)
async def test_a_row_that_can_be_played_is_taken(open_service, fields):
    bench = await open_service()
    await bench.service.submit([make_request("good", **fields)])
    assert (await bench.ledger.counts()).submitted == 1


async def test_a_request_names_no_more_rewards_than_can_be_made(open_service):
    bench = await open_service()
    rewards = [
        ComponentConfig(name="exact", args={"pattern": f"x{n}"}) for n in range(MAX_REWARDS + 1)
    ]
    with pytest.raises(ConfigError, match=f"name more than {MAX_REWARDS} rewards"):
        await bench.service.submit([make_request(f"r{n}", reward=r) for n, r in enumerate(rewards)])
    assert (await bench.ledger.counts()).submitted == 0


async def test_what_is_refused_spends_no_budget(open_service):
    bench = await open_service(error_budget=0)
    for n in range(3):
        with pytest.raises(ServiceError):
            await bench.submit(f"r{n}", prompt=prompt(text=""))
    assert not (await bench.service.status()).last_failures
