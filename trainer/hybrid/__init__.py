"""One set of parameters that trains and generates by turns, in one process per rank."""
