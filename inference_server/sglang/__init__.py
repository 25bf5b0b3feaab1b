"""The parts of the SGLang backend."""
