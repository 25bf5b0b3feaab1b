"""Trajectories -> new version."""
