"""Requests that cost much, or would: `test_standstill` sends them in turn, `attacker` at random."""

from __future__ import annotations

from typing import Any

SLOW_PATTERN = "(?i)" + "[\0-\U0010ffff]" * 800
DIGITS = "1234567890" * 100_000
OPENINGS = "\\( x " * 6_000
FIELDS = "assert f(1) == f'" + "{x}" * 90_000 + "'"


def asking(*rows: dict[str, Any]) -> dict[str, Any]:
    """A submission of an attacker's."""
    base = {
        "consumer": "attacker",
        "reward": {"name": "exact"},
        "gconfig": {"max_new_tokens": 2},
    }
    return {
        "rollouts": [
            {
                **base,
                "rollout_id": f"attack-{n}",
                **row,
                "prompt": {"group_id": f"g{n}", **row["prompt"]},
            }
            for n, row in enumerate(rows)
        ]
    }


def patterned(*patterns: str) -> dict[str, Any]:
    return asking(
        *(
            {"prompt": {"text": "1"}, "reward": {"name": "exact", "args": {"pattern": p}}}
            for p in patterns
        )
    )


def chatting(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def judging(reward: str, completion: str, data: dict[str, Any], **args: Any) -> dict[str, Any]:
    answer = {"prompt": "", "completion": completion, "data": data}
    return {"reward": {"name": reward, "args": args}, "answers": [answer]}


SUBMISSIONS = {
    "a text of 12 MB": (asking({"prompt": {"text": DIGITS * 12}}), 413, "max_prompt_bytes"),
    "a text just within the bytes": (asking({"prompt": {"text": DIGITS}}), 413, "context of 256"),
    "many long texts": (
        asking(*({"prompt": {"text": DIGITS[:60_000]}} for _ in range(32))),
        413,
        "context of 256",
    ),
    "a chat just within the bytes": (
        asking({"prompt": chatting(DIGITS[:900_000])}),
        413,
        "context of 256",
    ),
    "many messages": (
        asking({"prompt": {"messages": [{"role": "user", "content": "1"}] * 30_000}}),
        413,
        "context of 256",
    ),
    "a template without end": (asking({"prompt": chatting("LOOP")}), 400, "chat template took more than"),
    "a template without end, a long chat": (
        asking({"prompt": chatting("LOOP" + DIGITS[:100_000])}),
        400,
        "chat template took more than",
    ),
    "a pattern that is long to compile": (patterned(SLOW_PATTERN), 400, "longer than 1 s to check"),
    "many patterns": (patterned(*(f"{SLOW_PATTERN}{n}" for n in range(17))), 400, "more than 16 rewards"),
    "thousands of rows, the last one bad": (
        asking(*({"prompt": {"text": "1"}} for _ in range(4000)), {"prompt": {"input_ids": [2**31 - 1]}}),
        400,
        "'attack-4000': the prompt holds the token id 2147483647",
    ),
    "ids beyond every context": (asking({"prompt": {"input_ids": [1] * 100_000}}), 413, "context of 256"),
}  # fmt: skip

JUDGEMENTS = {
    "openings of formulas": judging("math", OPENINGS, {"answer": "1"}),
    "openings of formulas, in a line": judging("math", "\\(" * 12_000, {"answer": "1"}),
    "boxes in boxes": judging("math", "\\boxed{" * 7_000 + "}" * 7_000, {"answer": "1"}),
    "a box of blanks": judging("math", "\\boxed{a" + " " * 49_000 + "b}", {"answer": "1"}),
    "braces": judging("math", "\\boxed{" + "}" * 49_000, {"answer": "\\frac" * 9_000}),
    "digits and commas": judging("gsm8k", "1," * 25_000, {"answer": "#### 1"}),
    "signs of answers": judging("gsm8k", "#" * 25_000 + " " * 25_000, {"answer": "#### 1"}),
    "tags": judging("format", "<think>" * 100_000, {}),
    "a pattern that tries everything": judging("exact", "x" * 60 + "y", {"answer": ""}, pattern="(x+)+$"),
    "an f-string of 90,000 fields": judging("code", "def f(x): ...", {"test_list": [FIELDS]}),
    "calls of many values": judging(
        "code",
        "def f(x): ...",
        {"input_output": {"fn_name": "f", "inputs": [[list(range(100_000))]], "outputs": [1]}},
    ),
    "many fences": judging("code", "```\n" * 50_000, {"test_list": ["assert f(1) == 1"]}),
}  # fmt: skip

TO_THE_SERVER = {
    "tokenize 12 MB": ("/tokenize", {"prompt": DIGITS * 12}, 400),
    "tokenize a megabyte": ("/tokenize", {"prompt": DIGITS}, 200),
    "tokenize many": ("/tokenize", {"prompt": [DIGITS[:1000]] * 1000}, 200),
    "detokenize": ("/detokenize", {"tokens": [5] * 50_000}, 200),
    "generate from 12 MB": ("/generate", {"text": DIGITS * 12}, 400),
    "generate from a megabyte": ("/generate", {"text": DIGITS}, 400),
    "complete a megabyte": ("/v1/completions", {"model": "model", "prompt": DIGITS}, 400),
    "chat without end": ("/v1/chat/completions", {"model": "model", **chatting("LOOP")}, 400),
    "chat of a megabyte": ("/v1/chat/completions", {"model": "model", **chatting(DIGITS[:900_000])}, 400),
}  # fmt: skip
