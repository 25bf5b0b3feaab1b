"""One URL for rollouts in front of a fleet of generation servers: what opens it, and its routes."""
