"""Common ground of workflows, rewards, filters and tools: arguments from outside, and the services
that they may use."""
