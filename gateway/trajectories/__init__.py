"""One trajectory: the sample that is asked for, and the row of tokens that it becomes."""
