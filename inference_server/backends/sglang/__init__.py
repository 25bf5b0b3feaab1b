"""An SGLang engine behind the contract of a backend."""
