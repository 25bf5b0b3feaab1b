"""OpenAI's contract."""
