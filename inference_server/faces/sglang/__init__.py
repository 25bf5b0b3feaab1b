"""SGLang's native contract."""
