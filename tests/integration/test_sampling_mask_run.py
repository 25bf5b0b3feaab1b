"""A real run whose sampling cuts: its masks reach the trainer, whose logprobs are the server's."""

from __future__ import annotations

import pytest

from tests.integration.driving import finish, steps_of

pytestmark = pytest.mark.extended


def test_ratios_of_a_run_that_cuts_are_one_before_the_first_update(make_config, start):
    sampling = {"max_new_tokens": 12, "ignore_eos": True, "top_p": 0.7, "temperature": 0.8}
    algorithm = {"num_minibatches": 2, "entropy_coef": 0.01}
    config = make_config(steps=2, max_staleness=0, sampling=sampling, algorithm=algorithm)
    run = start(config)
    run.start_trainer()
    finish(run)
    steps = steps_of(config)
    assert len(steps) == 2
    for step in steps:
        assert step["staleness_max"] == 0
        assert step["logprob_diff_mean"] <= 1e-5
        assert step["logprob_diff_max"] <= 1e-4
