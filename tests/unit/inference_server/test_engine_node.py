"""Later nodes of an engine that spans several run its process with the flags of the first one."""

from __future__ import annotations

import os

import pytest

from headway.contracts.config.server import EmbeddedTorchConfig, ServerConfig, SGLangConfig
from headway.contracts.errors import ConfigError
from headway.runtime.config import load_config
from inference_server import main
from inference_server.backends.engine_command_line import command_flags
from inference_server.backends.sglang.features import sglang_command
from inference_server.engine_node import is_later_node, run_node


class ReplacedError(Exception):
    """This process would be another one now."""


@pytest.mark.parametrize(
    ("backend", "is_later"),
    [
        (EmbeddedTorchConfig(), False),
        (SGLangConfig(), False),
        (SGLangConfig(args={"--nnodes": 2, "--node-rank": 0}), False),
        (SGLangConfig(args={"--nnodes": 2, "--node-rank": 1}), True),
    ],
)
def test_nodes_above_the_first_are_later_ones(backend, is_later):
    assert is_later_node(backend) == is_later


def test_a_rank_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match=r"--node-rank is \'one\', needs a number"):
        is_later_node(SGLangConfig(args={"--node-rank": "one"}))


def test_a_later_node_becomes_the_engine(tmp_path, monkeypatch):
    replaced = []

    def replace(file, argv, env):
        replaced.append((file, argv, env))
        raise ReplacedError

    monkeypatch.setattr(os, "execvpe", replace)
    file = tmp_path / "server.yaml"
    file.write_text(
        "{model: {path: MODEL, dtype: bfloat16}, initial_version: 3, gateway: 'http://gateway:8000',"
        " service: {host: 0.0.0.0},"  # without advertise_url: it has no service
        " backend: {type: sglang, python: /opt/python, args: {--tp-size: 16}, env: {NCCL_DEBUG: INFO}}}"
    )
    argv = [
        "--config",
        str(file),
        '--backend.args={"--nnodes": 2, "--node-rank": 1, "--port": 7000}',
    ]
    with pytest.raises(ReplacedError):
        main.main(argv)
    config = load_config(ServerConfig, argv)
    flags = sglang_command(config.backend, config.model, 3, has_tokenizer=False).args
    ((program, words, env),) = replaced
    assert program == "/opt/python"
    assert words[:3] == ["/opt/python", "-m", "sglang.launch_server"]
    given = {"--host": "127.0.0.1", "--port": 7000, **flags, "--tp-size": 16}
    assert words[3:] == command_flags({**given, "--nnodes": 2, "--node-rank": 1})
    assert (env["NCCL_DEBUG"], env["PYTHONSAFEPATH"]) == ("INFO", "1")


def test_an_interpreter_that_is_missing_is_told():
    backend = SGLangConfig(python="/no/python", args={"--node-rank": 1})
    config = ServerConfig.model_validate(
        {"model": {"path": "MODEL", "dtype": "float32"}, "backend": backend.model_dump()}
    )
    with pytest.raises(ConfigError, match="cannot start /no/python: No such file"):
        run_node(config, backend)
