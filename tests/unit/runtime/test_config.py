from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from headway.contracts.config.base import Config
from headway.contracts.config.experiment import (
    DPOExperiment,
    GRPOExperiment,
    RWExperiment,
    SFTExperiment,
)
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.server import FakeBackendConfig, ServerConfig
from headway.contracts.errors import ConfigError
from headway.runtime.config import (
    RESOLVED_NAME,
    deep_merge,
    dump_yaml,
    load_config,
    write_resolved,
)
from headway.runtime.model_settings import describe

MINIMAL = [
    *("--model.path", "m", "--data.path", "d", "--weight-sync.root", "w"),
    *("--rollout.reward.name", "exact"),
]


def grpo(*flags: str) -> GRPOExperiment:
    return load_config(GRPOExperiment, [*MINIMAL, *flags])


def server(*flags: str) -> ServerConfig:
    return load_config(ServerConfig, ["--model.path", "m", *flags])


def refusal(model, argv) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(model, argv)
    return str(caught.value)


@pytest.fixture
def write(tmp_path):
    def write_yaml(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write_yaml


def test_an_unknown_flag_is_named_with_the_nearest_key():
    message = refusal(GRPOExperiment, [*MINIMAL, "--rollout.max-stalenes", "1"])
    assert message == "unknown key rollout.max_stalenes; did you mean 'max_staleness'?"


def test_an_unknown_key_of_a_file_is_named_with_the_nearest_key(write):
    file = write("a.yaml", "optimizer: {learning_rat: 1, warmup_step: 2}\n")
    message = refusal(GRPOExperiment, [*MINIMAL, "--config", file])
    assert "unknown key optimizer.learning_rat; known here: beta1, beta2, " in message
    assert "unknown key optimizer.warmup_step; did you mean 'warmup_steps'?" in message


def test_an_unknown_section_is_named():
    message = refusal(GRPOExperiment, [*MINIMAL, "--optimiser.lr", "1"])
    assert message == "unknown key optimiser; did you mean 'optimizer'?"


@pytest.mark.parametrize(
    ("kind", "key", "nearest"),
    [("fake", "vocab_sise", "vocab_size"), ("embedded_torch", "max_sequence", "max_sequences")],
)
def test_an_unknown_key_inside_a_union_is_named_as_it_was_written(write, kind, key, nearest):
    file = write("a.yaml", f"model: {{path: m}}\nbackend: {{type: {kind}, {key}: 3}}\n")
    message = refusal(ServerConfig, ["--config", file])
    assert message == f"unknown key backend.{key}; did you mean '{nearest}'?"


def test_a_key_of_another_type_is_named_as_such(write):
    file = write("a.yaml", "model: {path: m}\nbackend: {type: sglang, max_sequences: 3}\n")
    message = refusal(ServerConfig, ["--config", file])
    assert message.startswith(
        "unknown key backend.max_sequences; it belongs to embedded_torch, not to sglang; known here: "
    )


@pytest.mark.parametrize(
    ("flag", "value", "wanted"),
    [
        (
            "rollout.url",
            "h:80",
            "http://HOST:PORT is wanted or a list [...] is wanted (got 'h:80')",
        ),
        ("optimizer", "adam", "a mapping {...} is wanted (got 'adam')"),
        ("rollout.max_staleness", "x", "a whole number is wanted (got 'x')"),
    ],
)
def test_a_wrong_value_is_told_in_words_of_yaml(flag, value, wanted):
    assert refusal(GRPOExperiment, [*MINIMAL, f"--{flag}", value]) == f"{flag}: {wanted}"


def test_a_wrong_value_inside_a_union_is_named_as_it_was_written():
    message = refusal(
        ServerConfig, ["--model.path", "m", "--backend.type", "fake", "--backend.vocab-size", "1"]
    )
    assert message.startswith("backend.vocab_size: ")
    assert "(got 1)" in message


def test_an_unknown_variant_lists_the_variants():
    message = refusal(ServerConfig, ["--model.path", "m", "--backend.type", "fak"])
    assert message.startswith("backend: ")
    assert "'embedded_torch', 'sglang', 'vllm', 'fake'" in message


def test_every_problem_is_listed():
    message = refusal(GatewayConfig, ["--service.port", "70000", "--executor.max-queued", "0"])
    assert sorted(line.split(":")[0] for line in message.splitlines()) == [
        "executor.max_queued",
        "service.port",
        "tokenizer",
    ]


def test_sources_merge_left_to_right_and_flags_win(write):
    first = write("a.yaml", "optimizer: {lr: 0.1, beta1: 0.5}\ndata: {batch_size: 1}\n")
    second = write("b.yaml", "optimizer: {lr: 0.2}\n")
    config = grpo("--data.batch-size", "7", "--config", first, "--config", second)
    assert (config.optimizer.lr, config.optimizer.beta1, config.data.batch_size) == (0.2, 0.5, 7)
    config = grpo("--config", second, "--config", first)
    assert config.optimizer.lr == 0.1


def test_lists_are_replaced_not_merged():
    assert deep_merge({"a": [1, 2], "b": {"c": 1}}, {"a": [3], "b": {"d": 2}}) == {
        "a": [3],
        "b": {"c": 1, "d": 2},
    }


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "0.000001"])
def test_small_numbers_are_numbers(write, text):
    assert grpo("--optimizer.lr", text).optimizer.lr == 1e-6
    assert grpo("--config", write("a.yaml", f"optimizer: {{lr: {text}}}")).optimizer.lr == 1e-6


@pytest.mark.parametrize(
    "text",
    [
        *(":memory:", "/a b/c: d", "#1", "*x", "!tag", "a: b", "@", "2024-01-01", "2024-99-99", ""),
        *("yes", "12", "1e-6", "{question}", "[1", "{a: 1}"),
    ],
)
def test_text_that_yaml_reads_otherwise_stays_text(text):
    config = load_config(GatewayConfig, ["--tokenizer", "t", "--ledger", text])
    assert config.ledger == text


def test_flag_values_are_yaml_scalars_lists_and_mappings():
    config = grpo(
        *("--trainer.num-threads=3", "--algorithm.decoupled", "false"),
        *("--algorithm.behaviour_weight_cap", "null", "--sampling.stop-token-ids", "[1, 2]"),
        *("--rollout.reward.args", "{answer_key: target, pattern: '=(.*)'}"),
    )
    assert config.trainer.num_threads == 3
    assert config.algorithm.decoupled is False
    assert config.algorithm.behaviour_weight_cap is None
    assert config.sampling.stop_token_ids == (1, 2)
    assert config.rollout.reward.args == {"answer_key": "target", "pattern": "=(.*)"}


@given(st.text(max_size=12))
@example("00")  # YAML reads it as the number 0, which the message shows
@example("{}")
@example("{a: 1}")
def test_any_flag_value_is_read_or_refused(text):
    try:
        grpo("--trainer.num-threads", text)
    except ConfigError as error:
        told = str(error)
        assert text in told or repr(text) in told or f"(got {yaml.safe_load(text)!r})" in told


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["run-dir", "x"], "unexpected argument 'run-dir'"),
        (["--run-dir"], "--run-dir has no value"),
        (["--config", "/nowhere/a.yaml"], "cannot read config file /nowhere/a.yaml: No such file"),
        (["--rollout.group-size", "[1"], "group_size: '[1' is not a YAML value"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_read_say_so(argv, wanted):
    assert wanted in refusal(GRPOExperiment, argv)


@pytest.mark.parametrize(
    "text",
    [
        "a: [1",
        "- 1\n- 2\n",
        "just text",
        "a: !!python/object:os.system x",
        "a: 2024-99-99",
        "a: \0",
    ],
)
def test_files_that_are_no_settings_are_refused_by_name(write, text):
    file = write("a.yaml", text)
    assert file in refusal(GRPOExperiment, ["--config", file])


def test_a_file_that_is_not_text_is_refused_by_name(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\xfa\x80")
    assert "is not YAML" in refusal(GRPOExperiment, ["--config", str(tmp_path / "a.yaml")])
    assert "cannot read" in refusal(GRPOExperiment, ["--config", str(tmp_path)])


def test_keys_that_are_no_text_are_refused(write):
    assert "1" in refusal(GRPOExperiment, [*MINIMAL, "--config", write("a.yaml", "1: 2")])


def test_an_empty_file_changes_nothing(write):
    assert grpo("--config", write("a.yaml", "# nothing\n")) == grpo()


def test_the_environment_is_no_source(monkeypatch):
    monkeypatch.setenv("OPTIMIZER__LR", "5")
    monkeypatch.setenv("RUN_DIR", "elsewhere")
    assert grpo().run_dir == "runs/default"


FULL = [
    grpo(
        "--optimizer.lr",
        "1e-6",
        "--weight-sync.delta.level",
        "3",
        "--rollout.reward.args",
        "{pattern: 'x: #é', list: [1, null]}",
    ),
    SFTExperiment(model={"path": "m"}, data={"path": "1e3"}, output_dir="yes"),
    RWExperiment(
        model={"path": "m", "head": "value"},
        data={"path": "d", "margin_key": "by"},
        output_dir="o",
        held_out={"path": "h"},
    ),
    DPOExperiment(model={"path": "m"}, data={"path": "d"}, output_dir="o", reference={"path": "r"}),
    load_config(GatewayConfig, ["--tokenizer", "t", "--ledger", ":memory:"]),
    server("--backend", "{type: fake, token_latency_s: 1e-3}"),
    server(),
]


@pytest.mark.parametrize("config", FULL, ids=lambda c: type(c).__name__)
def test_what_was_resolved_loads_to_an_equal_value(tmp_path, config: Config):
    path = write_resolved(config, tmp_path / "run")
    assert path.name == RESOLVED_NAME
    assert load_config(type(config), ["--config", str(path)]) == config


plain_text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(plain_text, st.floats(1e-12, 1e12), plain_text)
def test_any_value_survives_dump_and_load(path, lr, answer):
    config = GRPOExperiment.model_validate(
        {
            "run_dir": path,
            "model": {"path": "m"},
            "data": {"path": "d", "prompt_template": answer},
            "optimizer": {"lr": lr},
            "rollout": {"reward": {"name": "exact", "args": {answer: path}}},
            "weight_sync": {"root": "w", "delta": {}},
        }
    )
    assert GRPOExperiment.model_validate(yaml.safe_load(dump_yaml(config))) == config


def leaves(tree: dict, prefix: str = "") -> list[str]:
    """Dotted keys of a dumped configuration; free-form arguments are one leaf."""
    found = []
    for key, value in tree.items():
        if isinstance(value, dict) and key != "args":
            found += leaves(value, f"{prefix}{key}.")
        else:
            found.append(prefix + key)
    return found


@pytest.mark.parametrize("config", FULL, ids=lambda c: type(c).__name__)
def test_help_describes_every_setting(config: Config):
    lines = describe(type(config))
    flags = {line.split()[0] for line in lines}
    wanted = {f"--{leaf}".replace("_", "-") for leaf in leaves(config.model_dump())}
    sections = {flag[:at] for flag in flags for at, char in enumerate(flag) if char == "."}
    assert wanted <= flags | sections  # one that is left out is one leaf
    bare = [line.split()[0] for line in lines if "\n" not in line]
    assert all(flag.endswith(("--type", ".type")) for flag in bare), "a setting has no description"


def test_help_describes_all_arms_of_a_union_and_required_settings():
    lines = "\n".join(describe(ServerConfig))
    assert "--backend.max-sequences  (default 128)" in lines
    assert "--backend.vocab-size  (default None)" in lines
    assert "--model.path  (required)" in lines


def test_a_variant_is_chosen_by_its_type():
    config = server("--backend.type", "fake", "--backend.vocab-size", "7")
    assert config.backend == FakeBackendConfig(vocab_size=7)
    assert Path(config.model.path) == Path("m")
