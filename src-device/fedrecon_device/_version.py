"""The version of this distribution. What it can read is decided by the format number of a bundle, not by this."""

__version__ = "0.1.0"
