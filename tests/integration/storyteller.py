"""The real generation server with a backend that tells stories: `storyteller.py --config server.yaml`.

Its texts read like those of a policy that learns arithmetic with a calculator, get better with every
version, and repeat what they were asked. For people who look at the dashboard, and tests that look for
them; versions, pauses and swaps are those of the fake backend.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from headway.contracts.engines import OnDelta
from headway.contracts.types import LLMRequest, LLMResponse, Message, Prompt
from headway.text.tokenizer import TextTokenizer
from inference_server.backends.base import Load
from inference_server.backends.fake import FakeBackend

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nFunctions: {% for tool in tools %}{{ tool.function.name }}"
    "{% endfor %}<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENINGS = (
    "Let me think about what is given.",
    "First I find how often that happens.",
    "We need two steps here.",
    "I write down what I know.",
)
PLACES = 2048
"""Tokens that fit into the cache of one server."""


def problem(number: int) -> tuple[str, int]:
    """A word problem, and its answer."""
    draw = random.Random(number)
    every, people, hours = (
        draw.choice((4, 5, 6, 10, 12, 15)),
        draw.randrange(40, 400),
        draw.randrange(2, 12),
    )
    text = (
        f"A train leaves every {every} minutes, and each carries {people} people. "
        f"How many people travel in {hours} hours?"
    )
    return text, 60 // every * hours * people


def first_turn(question: str, is_right: bool, draw: random.Random) -> str:
    """Thoughts, then a call of the calculator if there is anything to reckon."""
    numbers = [int(number) for number in re.findall(r"\d+", question)[-3:]]
    if len(numbers) < 3 or numbers[0] == 0:
        return f"You asked: {question}\nI do not know.{END}"
    every, people, hours = numbers
    trains = 60 // every * (hours if is_right else 1)
    wrong = "" if is_right else " Per hour is what counts here."
    expression = f"{trains} * {people}"
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return (
        f"{draw.choice(OPENINGS)} A train every {every} minutes means 60 / {every} = "
        f"{60 // every} trains in an hour.{wrong} In {hours} hours, that makes {trains} trains. Each of "
        f"them carries {people} people, so I multiply the two numbers.\n"
        f"<tool_call>{call}</tool_call>{END}"
    )


def last_turn(result: str, draw: random.Random) -> str:
    """The answer from what the calculator said."""
    lead = draw.choice(("The calculator says", "So the product is", "That gives"))
    return f"{lead} {result}. All trains together carry {result} people.\n#### {result}{END}"


def write_model(folder: Path) -> Path:
    """A tokenizer that was trained on the stories, with a chat template."""
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=700,
        special_tokens=[START, END],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _corpus() -> Iterator[str]:
    for number in range(200):
        text, answer = problem(number)
        draw = random.Random(number)
        yield text + first_turn(text, True, draw) + last_turn(str(answer), draw)


class Storyteller(FakeBackend):
    """Samples a story, token by token, each with the version that serves at that moment."""

    def __init__(self, config: Any, model: Any, version: int, tokenizer: TextTokenizer) -> None:
        super().__init__(config, model, version, tokenizer)
        self._text = tokenizer
        self._busy_s = self._busy_from = 0.0

    async def generate(self, req: LLMRequest, on_delta: OnDelta | None = None) -> LLMResponse:
        asked = self._text.decode(list(req.input_ids), skip_special_tokens=False)
        draw = random.Random(crc32(req.rid.encode()))
        text = self._story(asked, draw)
        story = self._text.encode(text, add_special_tokens=False)[: req.gconfig.max_new_tokens]
        length = {"max_new_tokens": len(story), "stop_token_ids": ()}
        gconfig = req.gconfig.model_copy(update=length)
        if not self._running:
            self._busy_from = super().load().uptime_s
        response = await super().generate(req.model_copy(update={"gconfig": gconfig}), on_delta)
        if not self._running:
            self._busy_s += super().load().uptime_s - self._busy_from
        spoken = story[: len(response.output_tokens)]
        told = {"output_tokens": spoken, "output_logprobs": [self._logprob(draw) for _ in spoken]}
        if self._text.decode(spoken, skip_special_tokens=False).endswith(END):
            told |= {"stop_reason": "stop", "stop_match": spoken[-1]}
        return response.model_copy(update=told)

    def _story(self, told: str, draw: random.Random) -> str:
        asked = told.split(f"{START}user\n", 1)[-1].split(END)[0]
        result = re.findall(rf"{re.escape(START)}tool\n(.*?){re.escape(END)}", told, re.DOTALL)
        if result:
            return last_turn(result[-1].strip(), draw)
        return first_turn(asked, draw.random() < 0.3 + 0.012 * self.version, draw)

    def _logprob(self, draw: random.Random) -> float:
        """Sure of most tokens, surprised by a few; surer with every version."""
        kind = draw.random()
        if kind < 0.68:
            return -draw.uniform(0.0, 0.08)
        if kind < 0.9:
            return -draw.uniform(0.08, 0.8)
        return -draw.uniform(0.8, 4.5) / (1 + 0.04 * self.version)

    def load(self) -> Load:
        known = super().load()
        held = min(PLACES, known.running * 120)
        return Load(
            known.running,
            known.queued,
            known.generated_tokens,
            self._busy_s + (known.uptime_s - self._busy_from if known.running else 0.0),
            known.uptime_s,
            kv_tokens=held,
            kv_capacity_tokens=PLACES,
            kv_usage=held / PLACES,
            max_running=16,
        )


def chat(question: str, group_id: str, size: int, **data: Any) -> Prompt:
    """The prompt of a group."""
    said = (Message(role="user", content=question),)
    return Prompt(group_id=group_id, group_size=size, messages=said, data=data)


if __name__ == "__main__":
    from inference_server import engine
    from inference_server.main import main

    engine.make_backend = Storyteller
    main(sys.argv[1:])
