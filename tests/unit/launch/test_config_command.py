"""`headway config`."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.contracts.errors import ConfigError
from headway.launch import cli


def main(argv: list[str]) -> None:
    cli.main(["config", *argv])


EXAMPLES = Path(__file__).parents[3] / "examples"
PPO = EXAMPLES / "gsm8k" / "ppo.yaml"


def test_it_shows_every_setting(capsys):
    main(["show", "ppo"])
    shown = capsys.readouterr().out
    assert "--critic.warmup-steps" in shown and "--dataflow.max-parallel" in shown
    main(["ppo"])
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["show", "grop"], "did you mean 'grpo'"),
        (["sho", "grpo"], "did you mean 'show'"),
        ([], "config wants a command; there are show, check, graph"),
        (["graph"], "missing argument 'FILE'"),
        (["graph", str(PPO), "--mermaid"], "requires an argument"),
    ],
)
def test_what_it_cannot_do_it_says(argv, message):
    with pytest.raises(ConfigError, match=message):
        main(argv)


def test_it_names_what_is_wrong_with_a_file_and_the_nearest_right_name(tmp_path, capsys):
    main(["check", str(PPO)])
    assert "right, as a configuration of `ppo`" in capsys.readouterr().out
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(PPO.read_text() + "\ntrainr: {total_steps: 3}\n")
    with pytest.raises(ConfigError, match="unknown key trainr; did you mean 'trainer'"):
        main(["check", str(wrong)])
    wrong.write_text("type: pppo\n")
    with pytest.raises(ConfigError, match=r"no experiment named 'pppo'; .*did you mean 'ppo'"):
        main(["check", str(wrong)])
    wrong.write_text("colour: red\n")
    with pytest.raises(ConfigError, match="none of the keys"):
        main(["check", str(wrong)])


def test_it_draws_the_calls_of_an_experiment(tmp_path, capsys):
    diagram = tmp_path / "flow.mmd"
    main(["graph", str(PPO), "--mermaid", str(diagram), "--algorithm.kl-coef", "0.1"])
    shown = capsys.readouterr().out
    for call in ("actor_gen", "ref_inf", "critic_inf", "critic_train", "actor_train"):
        assert f"  {call}: " in shown
    drawn = diagram.read_text()
    assert drawn.startswith("flowchart TD\n")
    assert '["critic_train<br/>train_step · critic"]:::train_step' in drawn
    assert '["ref_inf<br/>inference · reference"]:::inference' in drawn
    assert '-->|"reference_logprobs"| ' in drawn


def test_the_diagram_of_the_dataflow_page_is_what_the_command_writes(tmp_path, capsys):
    diagram = tmp_path / "flow.mmd"
    main(["graph", str(PPO), "--mermaid", str(diagram), "--algorithm.kl-coef", "0.05"])
    page = (EXAMPLES.parent / "docs" / "training" / "dataflow.md").read_text()
    assert f"```mermaid\n{diagram.read_text()}```\n" in page


def test_nothing_in_a_name_ends_a_label_of_the_diagram(tmp_path, capsys):
    extra = """
dataflow:
  calls:
    - {name: 'a"]<b>', interface: {name: mine}, input_keys: [input_ids], output_keys: ['"x"']}
"""
    file, diagram = tmp_path / "flow.yaml", tmp_path / "flow.mmd"
    file.write_text(PPO.read_text() + extra)
    main(["graph", str(file), "--mermaid", str(diagram)])
    assert '["a#quot;]#lt;b#gt;<br/>inference"]:::inference' in diagram.read_text()


@pytest.mark.parametrize(
    ("kind", "flags", "lines"),
    [
        ("sft", (), ["  sft_train: train_step of model (sft)"]),
        ("rw", ("--data.margin-key", "margin"), ["  rw_train: train_step of model (rw)"]),
        ("dpo", (), ["  ref_inf: inference of reference (dpo)", "      ref_inf -> reference_lo"]),
        ("dpo", ("--model.lora.rank", "2"), ["  ref_inf: inference of model (dpo)"]),
    ],
)
def test_it_draws_the_calls_of_an_experiment_on_rows(kind, flags, lines, tmp_path, capsys):
    diagram = tmp_path / "flow.mmd"
    file = str(EXAMPLES / "preferences" / f"{kind}.yaml")
    main(["graph", file, "--mermaid", str(diagram), *flags])
    shown = capsys.readouterr().out
    for line in (
        "level 0\n  rows: data (",
        f"  {kind}_train: train_step of model ({kind})",
        *lines,
    ):
        assert line in shown
    assert ("margin" in shown) == (kind == "rw")
    assert f"\n{1 + (kind == 'dpo')} model function call" in shown
    drawn = diagram.read_text()
    assert '["rows<br/>data"]:::data' in drawn
    assert f'["{kind}_train<br/>train_step · model"]:::train_step' in drawn


def test_a_graph_that_does_not_close_is_refused(tmp_path):
    extra = """
dataflow:
  calls:
    - {name: rew_inf, interface: {name: mine}, input_keys: [input_id], output_keys: [scores]}
"""
    file = tmp_path / "flow.yaml"
    file.write_text(PPO.read_text() + extra)
    with pytest.raises(ConfigError, match=r"'rew_inf' reads 'input_id'.*did you mean 'input_ids'"):
        main(["graph", str(file)])
