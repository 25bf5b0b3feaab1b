"""A vLLM engine behind the contract of a backend."""
