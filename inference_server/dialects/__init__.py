"""The HTTP contracts that a generation server speaks."""
