"""Consumers of finished rollouts: the one that is attached, and the owner of each consumer's
name."""
