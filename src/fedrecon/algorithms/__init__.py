"""Federated algorithms, one a file, each with its paper on top. Their public names are those of `fedrecon` itself."""
