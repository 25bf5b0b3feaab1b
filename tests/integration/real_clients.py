"""Other people's clients as their users start them: real_clients.py CLIENT URL [WORD...]

It imports nothing of ours. Run by the interpreter of `make clients`; prints a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

MODEL = "org/versions"
MESSAGES = [{"role": "user", "content": "1 + 2"}]
TOKENS = 12


def litellm_chats(url: str) -> dict[str, Any]:
    """A chat, whole and as a stream, and a completion; what was said in each."""
    import litellm

    common: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "max_tokens": TOKENS,
        "temperature": 0.0,
        "num_retries": 0,
    }
    ignoring = {"extra_body": {"ignore_eos": True}}
    whole = litellm.completion(messages=MESSAGES, logprobs=True, **common, **ignoring)
    stream = litellm.completion(messages=MESSAGES, stream=True, **common, **ignoring)
    plain = litellm.text_completion(
        **common | {"model": f"text-completion-openai/{MODEL}"}, prompt="1 + 2", **ignoring
    )
    (choice,) = whole.choices
    return {
        "whole": choice.message.content,
        "logprobs": [each.logprob for each in choice.logprobs.content],
        "usage": whole.usage.completion_tokens,
        "finish_reason": choice.finish_reason,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
        "plain": plain.choices[0].text,
    }


def verifiers_rollout(url: str, key: str, gateway: str, weights: str) -> dict[str, Any]:
    """An episode of three turns over a session; new weights come before the third."""
    import httpx
    import verifiers as vf
    from datasets import Dataset
    from verifiers.clients import resolve_client

    class Sums(vf.MultiTurnEnv):
        """Asks for one more number each turn."""

        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            if len(state["trajectory"]) == 2:
                async with httpx.AsyncClient(base_url=gateway, timeout=60.0) as http:
                    body = {"model_path": weights, "weight_version": "second"}
                    answer = await http.post("/update_weights_from_disk", json=body)
                    answer.raise_for_status()
            return [{"role": "user", "content": "and 3"}]

    def turns(state: Any) -> float:
        """The reward."""
        return len(state["trajectory"]) / 4

    async def play() -> dict[str, Any]:
        os.environ["SESSION_KEY"] = key
        dataset = Dataset.from_list([{"prompt": MESSAGES, "answer": "6", "example_id": 0}])
        environment = Sums(dataset=dataset, rubric=vf.Rubric(funcs=[turns]), max_turns=3)
        client = resolve_client(
            vf.ClientConfig(api_base_url=url, api_key_var="SESSION_KEY", max_retries=0)
        )
        outcome = await environment.run_group(
            [dict(dataset[0])],
            client,
            MODEL,
            {
                "max_tokens": TOKENS,
                "logprobs": True,
                "extra_body": {"return_token_ids": True},
            },
            state_columns=["trajectory"],
        )
        (episode,) = outcome
        assert episode.get("error") is None, episode["error"]
        return {
            "reward": episode["reward"],
            "turns": [step["tokens"] for step in episode["trajectory"]],
        }

    return asyncio.run(play())


CLIENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "litellm": litellm_chats,
    "verifiers": verifiers_rollout,
}

if __name__ == "__main__":
    said = CLIENTS[sys.argv[1]](*sys.argv[2:])
    sys.stdout.write(json.dumps(said) + "\n")
