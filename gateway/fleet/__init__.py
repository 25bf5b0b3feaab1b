"""The fleet: generation servers that come and go, and which of them takes which request."""
