"""Continuous batching on torch: CPU or one GPU."""
