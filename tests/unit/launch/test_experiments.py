"""Which experiments `headway run` starts."""

from __future__ import annotations

import pytest

from headway.contracts.errors import ConfigError
from headway.launch.experiments import load_run


@pytest.mark.parametrize("kind", ["ppo-hybrid", "sft"])
def test_a_run_refuses_what_needs_no_servers(kind: str):
    with pytest.raises(ConfigError, match=f"trainer.type={kind} does not .* `headway train`"):
        load_run(["--model", "model", "--trainer.type", kind])
