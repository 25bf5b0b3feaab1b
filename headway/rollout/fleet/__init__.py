"""The fleet: generation servers that come and go, and who of them plays what."""
