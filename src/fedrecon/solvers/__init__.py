"""R and U: what a client solves, and the solvers."""
