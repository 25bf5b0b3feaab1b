"""Headway: asynchronous rollout and training for reinforcement learning of language models."""

__version__ = "0.1.0"
