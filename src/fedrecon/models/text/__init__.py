"""The next word model."""
