"""The metrics of a run, and where they go besides its folder."""
