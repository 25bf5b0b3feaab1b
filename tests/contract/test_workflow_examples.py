"""What `examples/workflows` shows works: the game is played, the module loaded, the page true."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from gateway.components.shared_services import NoSandbox, SharedServices
from gateway.rewards.base import make_reward
from gateway.trajectories.sample import Sample
from gateway.workflows.base import WORKFLOWS, RolloutContext, make_workflow
from headway.contracts.config.base import WorkflowRef
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.http.rollouts import SubmitRequest, WaitRequest
from headway.contracts.types import RewardResult, RolloutRequest
from headway.runtime.config import load_config
from headway.runtime.outbound import HttpOutbound
from tests.unit.gateway.app_server import served
from tests.unit.gateway.games import (
    NOTHING,
    Judge,
    ScriptedPolicy,
    byte_tokenizer,
    chat_prompt,
    check_row,
    said,
)

FOLDER = Path(__file__).parents[2] / "examples" / "workflows"
HIGHER = "\n<|im_start|>user\nHigher.<|im_end|>\n<|im_start|>assistant\n"
LOWER = "\n<|im_start|>user\nLower.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def example(monkeypatch):
    """Imports a file of the example as the gateway would, and forgets it again."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(WORKFLOWS, "_targets", dict(WORKFLOWS._targets))
    names = {file.stem for file in FOLDER.glob("*.py")}
    yield importlib.import_module
    for name in names & sys.modules.keys():
        del sys.modules[name]


def config() -> GatewayConfig:
    return load_config(GatewayConfig, ["--config", str(FOLDER / "gateway.yaml")])


def submissions() -> list[RolloutRequest]:
    """The rollouts that the page submits."""
    bodies = re.findall(r"-d '(\{\"rollouts.*?\})'", (FOLDER / "README.md").read_text(), re.DOTALL)
    return [r for body in bodies for r in SubmitRequest.model_validate_json(body).rollouts]


async def test_the_number_game_is_played_to_its_end(example, tmp_path):
    app = example("number_game").app
    replies = [said("Is it 50?<|im_end|>", 1), said("7<|im_end|>", 2), said("42!<|im_end|>", 3)]
    request = submissions()[0]
    async with served(app) as port:
        url = f"http://127.0.0.1:{port}/turn"
        allowed = config().outbound.model_copy(update={"allow": (url,)})
        outbound = HttpOutbound(allowed)
        context = RolloutContext(
            ScriptedPolicy(replies), Judge(None), SharedServices(NoSandbox(), outbound)
        )
        ref = WorkflowRef(name="callback", args={**request.workflow.args, "url": url})
        workflow = make_workflow(ref, byte_tokenizer(tmp_path), SamplingConfig())
        (row,) = await workflow.run(Sample("game-1", request.prompt, 0), context)
        await outbound.aclose()
    asked = request.prompt.messages[0].content
    opening = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    check_row(row, opening, replies[0], LOWER, replies[1], HIGHER, replies[2])
    assert row.reward == pytest.approx(0.8)
    assert row.details == {"secret": 42, "guesses": 3, "last": 42}


async def test_a_game_that_is_not_won_ends_with_the_last_turn(example, tmp_path):
    app = example("number_game").app
    async with served(app) as port:
        url = f"http://127.0.0.1:{port}/turn"
        outbound = HttpOutbound(config().outbound.model_copy(update={"allow": (url,)}))
        policy = ScriptedPolicy([said("no idea<|im_end|>"), said("9" * 5000 + "<|im_end|>")])
        context = RolloutContext(policy, Judge(None), SharedServices(NoSandbox(), outbound))
        ref = WorkflowRef(name="callback", args={"url": url, "max_turns": 2})
        sampling = SamplingConfig(max_new_tokens=6000)
        workflow = make_workflow(ref, byte_tokenizer(tmp_path), sampling)
        prompt = chat_prompt("Guess.", data={"secret": 42})
        (row,) = await workflow.run(Sample("game-1", prompt, 0), context)
        await outbound.aclose()
    assert (row.reward, len(row.turns)) == (0.0, 2)
    assert row.turns[0].note["messages"] == [{"role": "user", "content": "Write a number."}]


async def test_the_registered_workflow_mends_an_answer(example, tmp_path):
    for module in config().modules:
        example(module)
    request = submissions()[1]
    first, second = said("5<|im_end|>", 4), said("4<|im_end|>", 5)
    workflow = make_workflow(request.workflow, byte_tokenizer(tmp_path), SamplingConfig())
    judge = Judge(lambda text: RewardResult(float(text == "4")))
    context = RolloutContext(ScriptedPolicy([first, second]), judge, NOTHING)
    (row,) = await workflow.run(Sample("sum-1", request.prompt, 0), context)
    ask = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    asked = "Check your answer, then write it again."
    again = f"\n<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    check_row(row, ask, first, again, second)
    assert (row.reward, row.details) == (1.5, {"first": 0.0})


def test_everything_that_the_page_submits_is_known(example, tmp_path):
    for module in config().modules:
        example(module)
    requests = submissions()
    assert [request.workflow.name for request in requests] == ["callback", "second_thought"]
    for request in requests:
        make_workflow(request.workflow, byte_tokenizer(tmp_path), request.gconfig)
        make_reward(request.reward.name, request.reward.args)
    assert requests[0].workflow.args["url"] in config().outbound.allow
    wait = re.search(r"-d '(\{\"delivery_id.*?\})'", (FOLDER / "README.md").read_text())
    WaitRequest.model_validate(json.loads(wait.group(1)))
