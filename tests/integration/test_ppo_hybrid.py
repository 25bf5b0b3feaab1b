"""Whole runs of `ppo-hybrid`: they learn on any number of workers and resume as if never interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from headway.contracts.errors import ConfigError
from headway.runtime.config import validate_config
from headway.runtime.journal import METRICS_NAME, read_steps
from tests.integration import test_sglang_real as sglang
from tests.integration.real_engines import needs
from tests.numeric.models import save_model, write_char_tokenizer
from tests.ray_cluster import shut_down
from trainer.experiments.base import EXPERIMENTS
from trainer.workers.served import PREFIX

STEPS = 20
GOAL = 0.85
TWO = {"pools": {"global_pool": {"num_workers": 2}}}
SPLIT = {
    "pools": {"policy": {"num_workers": 2}, "others": {}},
    "placement": {"critic": "others", "reward": "others", "ref": "others"},
}
PPO: dict[str, Any] = {
    "critic": {"optimizer": {"lr": 1e-2}},
    "algorithm": {
        "advantage": {"type": "gae"},
        "advantage_norm": "batch",
        "num_minibatches": 2,
        "kl_coef": 1e-3,
        "kl_in": "reward",
        "kl_target": 1.0,
    },
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, and rows that all want the letter A first."""
    root = tmp_path_factory.mktemp("start")
    write_char_tokenizer(save_model(root / "model", "llama"))
    rows = [{"prompt": f"{number % 7}:", "answer": "A"} for number in range(64)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def steps_of(start: Path, out: Path, steps: int, **changes: Any) -> list[dict[str, Any]]:
    """Run it in this process, whose workers are others; its metrics."""
    tree: dict[str, Any] = {
        "type": "ppo-hybrid",
        "run_dir": str(out),
        "model": {"path": str(start / "model")},
        "data": {"path": str(start / "rows.jsonl"), "batch_size": 4},
        "sampling": {"max_new_tokens": 3},
        "reward": {"rule": {"name": "exact", "args": {"pattern": "^(.)"}}},
        "generation": {"args": {"backend": {"max_context": 64, "num_threads": 1}}},
        "optimizer": {"lr": 1e-2},
        "trainer": {"device": "cpu", "total_steps": steps, "num_threads": 1},
        "recovery": {"every_steps": steps},
    }
    experiment = EXPERIMENTS.get("ppo-hybrid")
    experiment.run(validate_config(experiment.config, tree | changes))
    return read_steps(out / METRICS_NAME)


def rewards_of(steps: list[dict[str, Any]]) -> list[float]:
    return [step["reward"] for step in steps]


def assert_learned(steps: list[dict[str, Any]]) -> None:
    rewards = rewards_of(steps)
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-5:]) / 5 >= GOAL
    # What generated is what learned: both sides say the same of every token.
    assert max(step["logprob_diff_max"] for step in steps) < 1e-4
    assert all(step["staleness_max"] == 0 for step in steps)


@pytest.mark.extended
def test_it_resumes_as_if_it_had_never_stopped(start: Path, tmp_path: Path):
    """With a critic, an adaptive penalty, evaluation, profiles and offload."""
    options = {
        **PPO,
        "offload": {"parameters": True, "optimizer": True},
        "evaluation": {"data": {"path": str(start / "rows.jsonl")}, "limit": 5, "every_steps": 2},
        "profiler": {"steps": [1]},
    }
    whole = steps_of(start, tmp_path / "whole", 4, **options)
    steps_of(start, tmp_path / "cut", 2, **options)
    with pytest.raises(ConfigError, match=r"recovery\.mode=resume"):
        steps_of(start, tmp_path / "cut", 4, **options)
    resumed = steps_of(start, tmp_path / "cut", 4, recovery={"mode": "resume"}, **options)
    for name in ("reward", "loss", "value_loss", "kl_coef", "reference_kl", "response_tokens"):
        expected = [step[name] for step in whole]
        assert [step[name] for step in resumed] == pytest.approx(expected, abs=1e-6), name
    assert [step.get("evaluation_num_prompts") for step in resumed] == [None, 5.0, None, 5.0]
    profile = json.loads((tmp_path / "whole/profiles/step-1/global_pool/rank-0.json").read_text())
    names = {event.get("name") for event in profile["traceEvents"]}
    assert {"actor_rollout.update_actor", "critic.update_critic"} <= names
    AutoModelForCausalLM.from_pretrained(tmp_path / "cut" / "actor")


@pytest.mark.extended
def test_it_learns_in_one_process(start: Path, tmp_path: Path):
    assert_learned(steps_of(start, tmp_path, STEPS))


@pytest.mark.extended
def test_pools_and_numbers_of_workers_change_no_result(start: Path, tmp_path: Path):
    one = steps_of(start, tmp_path / "one", 3, **PPO)
    split = steps_of(start, tmp_path / "split", 3, workers=SPLIT, **PPO)
    assert one[-1]["weight_transfer_copied_bytes"] == 0  # generation uses the trainer's own memory
    assert (
        split[-1]["weight_transfer_copied_bytes_all_ranks"]
        == 2 * one[-1]["weight_transfer_model_bytes"]
    )
    for name in ("reward", "loss", "grad_norm", "value_loss", "reference_kl", "response_tokens"):
        expected = [step[name] for step in one]
        assert [step[name] for step in split] == pytest.approx(expected, rel=1e-3, abs=1e-5), name


@pytest.mark.extended
def test_it_learns_on_ray(start: Path, tmp_path: Path):
    ray = pytest.importorskip("ray")
    shut_down()
    assert_learned(steps_of(start, tmp_path, STEPS, workers={"launcher": "ray", **TWO}))
    assert not ray.is_initialized()
    shut_down()


@pytest.mark.extended
def test_servers_beside_the_workers_generate_what_the_hybrid_engine_does(
    start: Path, tmp_path: Path
):
    hybrid = steps_of(start, tmp_path / "hybrid", 3, workers=TWO)
    served = steps_of(
        start,
        tmp_path / "served",
        3,
        workers=TWO,
        generation={
            "engine": "server",
            "args": {"backend": {"type": "embedded_torch", "max_context": 64, "num_threads": 1}},
        },
    )
    for name in ("reward", "loss", "grad_norm", "response_tokens"):
        expected = [step[name] for step in hybrid]
        assert [step[name] for step in served] == pytest.approx(expected, rel=1e-3, abs=1e-5), name
    assert max(step["logprob_diff_max"] for step in served) < 1e-4
    # A server has its own weights, and rank 0 keeps the version that was handed over.
    assert (
        served[-1]["weight_transfer_copied_bytes_all_ranks"]
        == 3 * served[-1]["weight_transfer_model_bytes"]
    )
    assert not list(Path("/dev/shm").glob(f"{PREFIX}*"))


@pytest.mark.parametrize("name", [pytest.param("sglang", marks=needs("sglang"))])
def test_a_real_engine_beside_each_worker_generates(name: str, start: Path, tmp_path: Path):
    engine = {
        "type": name,
        "python": str(sglang.PYTHON),
        "args": sglang.ARGS,
        "env": sglang.ENV,
        "log_file": str(tmp_path / "engine.log"),
    }
    generation = {"engine": "server", "args": {"backend": engine, "seeds": False}}
    steps = steps_of(start, tmp_path / "run", 3, generation=generation)
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert max(step["logprob_diff_max"] for step in steps) < 1e-3
    assert all(step["response_tokens"] > 0 for step in steps)


def test_torchrun_is_refused(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one controller"):
        steps_of(start, tmp_path, 1)
