"""A number game for the workflow `callback`: find a number from 1 to 100 by hints, higher or lower.

It keeps nothing between calls, so it may run in any number of copies, and may get one turn twice.
"""

import re
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

app = FastAPI()


class Turn(BaseModel):
    """Fields of a call that this game reads."""

    turn: int
    is_last: bool
    completion: str | None
    data: dict[str, Any]


@app.post("/turn")
async def answer_turn(turn: Turn) -> dict[str, Any]:
    numbers = re.findall(r"\d+", turn.completion or "")
    guess = int(numbers[-1][:9]) if numbers else None
    secret = turn.data["secret"]
    details = {"secret": secret, "guesses": turn.turn + 1, "last": guess}
    if guess == secret:
        return {"action": "end", "reward": 1.0 - 0.1 * turn.turn, "details": details}
    if turn.is_last:
        return {"action": "end", "reward": 0.0, "details": details}
    if guess is None:
        return go_on("Write a number.")
    return go_on("Higher." if guess < secret else "Lower.")


def go_on(hint: str) -> dict[str, Any]:
    return {"action": "continue", "messages": [{"role": "user", "content": hint}]}
