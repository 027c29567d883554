"""Models of other frameworks as fedrecon models."""
