"""An agent that only uses Anthropic's API, without code for training: it guesses a number with a tool."""

import random
import sys

from anthropic import Anthropic
from session import open_session

GUESS = {
    "name": "guess",
    "description": "Guess the number; answers higher, lower or right.",
    "input_schema": {"type": "object", "properties": {"number": {"type": "integer"}}},
}
TASK = "I think of a number from 1 to 9. Find it in three guesses."


def play(client: Anthropic, secret: int) -> float:
    """Return 1 if the number was found, else 0."""
    messages = [{"role": "user", "content": TASK}]
    for _ in range(3):
        answer = client.messages.create(
            model="policy", max_tokens=256, messages=messages, tools=[GUESS]
        )
        messages.append({"role": "assistant", "content": answer.content})
        hints = []
        for call in answer.content:
            if call.type == "tool_use":
                number = call.input.get("number")
                if number == secret:
                    return 1.0
                hint = "higher" if isinstance(number, int) and number < secret else "lower"
                hints.append({"type": "tool_result", "tool_use_id": call.id, "content": hint})
        if not hints:
            break
        messages.append({"role": "user", "content": hints})
    return 0.0


if __name__ == "__main__":
    with open_session(gateway=sys.argv[1]) as session:
        client = Anthropic(base_url=session.anthropic_url, api_key=session.api_key)
        session.reward = play(client, secret=random.randint(1, 9))
