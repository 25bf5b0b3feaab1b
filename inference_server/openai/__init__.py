"""OpenAI's completions and chat completions: their records, and generations in their words."""
