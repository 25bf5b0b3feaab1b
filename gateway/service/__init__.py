"""The rollout service, and its HTTP API."""
