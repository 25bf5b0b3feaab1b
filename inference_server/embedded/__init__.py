"""Continuous batching on torch: what the embedded torch backend runs on its engine thread."""
