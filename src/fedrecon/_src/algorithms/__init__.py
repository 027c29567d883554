"""Federated algorithms, one per file, each with its paper. They are exported from `fedrecon`."""
