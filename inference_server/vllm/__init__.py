"""The parts of the vLLM backend."""
