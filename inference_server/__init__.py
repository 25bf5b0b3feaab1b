"""HTTP and one generation backend."""
