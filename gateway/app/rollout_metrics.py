"""Metrics of the rollouts that this gateway ran and delivered; units are in the names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

from gateway.ledger.observer import Attempt

SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
TOKENS = tuple(2**power for power in range(4, 18))


class RolloutMetrics:
    """A `LedgerObserver` for Prometheus; everything begins at zero with the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._attempts = Histogram(
            "headway_rollout_attempt_seconds",
            "From the lease of a rollout to the end of that attempt: ready, filtered, failed or requeued",
            ["workflow", "outcome"],
            buckets=SECONDS,
            registry=registry,
        )
        self._rewards = Summary(
            "headway_rollout_reward",
            "Rewards of finished trajectories",
            ["reward"],
            registry=registry,
        )
        self._verdicts = Counter(
            "headway_rollout_verdicts",
            "Finished trajectories by what the verifier said",
            ["verdict"],
            registry=registry,
        )
        self._tokens = Histogram(
            "headway_rollout_sampled_tokens",
            "Sampled tokens per finished trajectory",
            buckets=TOKENS,
            registry=registry,
        )
        self._staleness = Histogram(
            "headway_rollout_staleness_versions",
            "Trajectories given out, by versions since their group's oldest token was sampled",
            buckets=VERSIONS,
            registry=registry,
        )
        self._expirations = Counter(
            "headway_rollout_expirations",
            "Prompt groups whose lease ended unrenewed, or whose timeout_s ran out, as found here",
            registry=registry,
        )

    def ended(self, attempt: Attempt) -> None:
        request = attempt.request
        self._attempts.labels(request.workflow.name, attempt.outcome).observe(attempt.seconds)
        if attempt.group is None:
            return
        rewards = self._rewards.labels(request.reward.name)
        for row in attempt.group.trajectories:
            rewards.observe(row.reward)
            self._verdicts.labels(row.verdict).inc()
            self._tokens.observe(int(row.loss_mask.sum()))

    def delivered(self, staleness: int, num_trajectories: int) -> None:
        for _ in range(num_trajectories):
            self._staleness.observe(staleness)

    def expired(self, num_groups: int) -> None:
        self._expirations.inc(num_groups)
