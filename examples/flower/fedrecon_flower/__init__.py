"""A Flower app that carries the messages of fedrecon between processes outside Flower."""
