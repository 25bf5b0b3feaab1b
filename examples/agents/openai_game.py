"""An agent that only uses OpenAI's API, without code for training: it guesses a number with a tool."""

import json
import random
import sys

from openai import OpenAI
from session import open_session

GUESS = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number; answers higher, lower or right.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
    },
}
TASK = "I think of a number from 1 to 9. Find it in three guesses."


def play(client: OpenAI, secret: int) -> float:
    """Return 1 if the number was found, else 0."""
    messages = [{"role": "user", "content": TASK}]
    for _ in range(3):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[GUESS])
        message = answer.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            number = json.loads(call.function.arguments).get("number")
            if number == secret:
                return 1.0
            hint = "higher" if isinstance(number, int) and number < secret else "lower"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": hint})
    return 0.0


if __name__ == "__main__":
    with open_session(gateway=sys.argv[1]) as session:
        client = OpenAI(base_url=session.openai_url, api_key=session.api_key)
        session.reward = play(client, secret=random.randint(1, 9))
