"""The version of the device runtime: that of the fedrecon that it is released with."""

__version__ = "0.1.0"
