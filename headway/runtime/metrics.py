"""Prometheus text from a service's status; units are in the names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from headway.contracts.http import StatusResponse


def render_metrics(status: StatusResponse) -> bytes:
    """The `/metrics` page of a rollout service."""
    registry = CollectorRegistry()

    def put(name: str, meaning: str, value: float) -> None:
        Gauge(f"headway_{name}", meaning, registry=registry).set(value)

    put("weight_version", "Committed policy version", status.version)
    put("rollout_running_trajectories", "Trajectories being played", status.running)
    put("rollout_capacity_trajectories", "Trajectories that may start now", status.capacity)
    put("weight_updates_total", "Committed weight updates", status.updates)
    put(
        "weight_updates_in_flight_total",
        "Committed weight updates while sequences were being generated",
        status.updates_in_flight,
    )
    put("generated_tokens_total", "Tokens sampled", status.generated_tokens)
    trajectories = Gauge(
        "headway_ledger_trajectories", "Trajectories by state", ["state"], registry=registry
    )
    for state, count in status.counts.model_dump().items():
        trajectories.labels(state).set(count)
    versions = Gauge(
        "headway_server_weight_version",
        "Version that a server samples with",
        ["server"],
        registry=registry,
    )
    running = Gauge(
        "headway_server_running_sequences",
        "Sequences being generated",
        ["server"],
        registry=registry,
    )
    for server in status.servers:
        versions.labels(server.server_id).set(server.version)
        running.labels(server.server_id).set(server.running)
    return generate_latest(registry)
