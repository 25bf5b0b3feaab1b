"""What does not fit is told with its path, what is wanted, what was seen, and the nearest name."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from headway.contracts.config.base import Config
from headway.contracts.config.experiment import GRPOExperiment, PPOExperiment
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.server import ServerConfig
from headway.contracts.errors import ConfigError
from headway.contracts.http.rollouts import SubmitRequest
from headway.runtime.http_service import create_service
from headway.runtime.model_settings import section_models
from headway.runtime.problems import explain_unknown, explain_values
from headway.runtime.service_calls import ServiceCalls


@asynccontextmanager
async def nothing(_app):
    yield


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"rollouts": [{"gconfig": {"max_tokens": 3}, "prompt": "hi", "rollout_id": "a"}]},
            "unknown key rollouts.0.gconfig.max_tokens; did you mean 'max_new_tokens'?; "
            "rollouts.0.prompt: a mapping {...} is wanted (got 'hi'); rollouts.0.reward: required",
        ),
        ({"rollouts": "x"}, "rollouts: a list [...] is wanted (got 'x')"),
        ([], "body: a mapping {...} is wanted"),
        ({"rollout": []}, "unknown key rollout; did you mean 'rollouts'?; rollouts: required"),
    ],
)
async def test_a_body_that_does_not_fit_is_told_in_words_of_json(body: Any, message: str):
    app = create_service("test", nothing, 1 << 20)

    @app.post("/rollouts")
    async def take(body: SubmitRequest) -> None: ...

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.post("/rollouts", json=body)
    assert (answer.status_code, answer.json()["message"]) == (422, message)


def unions(model: type[BaseModel], *above: str) -> list[tuple[Any, ...]]:
    """Every section of a model that has several types: its location, and the types."""
    found: list[tuple[Any, ...]] = []
    for name, field in model.model_fields.items():
        arms = section_models(field.annotation)
        tagged = [arm for arm in arms if "type" in arm.model_fields]
        if len(tagged) > 1:
            found.append(((*above, name), tagged))
        elif len(arms) == 1:
            found += unions(arms[0], *above, name)
    return found


@pytest.mark.parametrize(
    "model", [GRPOExperiment, PPOExperiment, ServerConfig, LaunchConfig, GatewayConfig]
)
def test_a_key_of_another_type_is_named_as_such_in_every_union(model: type[BaseModel]):
    for location, arms in unions(model):
        for arm in arms:
            tag = arm.model_fields["type"].default
            others = {name for other in arms for name in other.model_fields} - {*arm.model_fields}
            for name in others:
                owners = [o.model_fields["type"].default for o in arms if name in o.model_fields]
                line = explain_unknown(model, (*location, tag, name))
                path = ".".join((*location, name))
                told = f"it belongs to {' or '.join(owners)}, not to {tag}; known here: "
                assert line.startswith(f"unknown key {path}; {told}")


def test_a_long_value_is_shortened():
    class Sized(Config):
        size: int

    with pytest.raises(ValidationError) as caught:
        Sized.model_validate({"size": "x" * 10_000})
    (line,) = explain_values(Sized, caught.value.errors())
    assert line.startswith("size: a whole number is wanted (got 'xxx")
    assert len(line) < 120


def test_a_url_without_a_scheme_is_refused_and_not_tried_again():
    with pytest.raises(ConfigError, match=r"'h:80' is no URL .*; http://HOST:PORT is wanted"):
        ServiceCalls(["h:80"], 60.0, 60.0)
