"""The error of everything that reads or writes files of our own."""


class StorageError(ValueError):
    """Something on disk is not what it should be."""
