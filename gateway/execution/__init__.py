"""Queued rollouts are claimed, and run to their end."""
