"""One version as a graph of calls on models: declared, checked, drawn, run."""
