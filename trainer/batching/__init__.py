"""Trajectories -> packed sequences -> balanced shares of the ranks -> micro-batches by token budget."""
