"""The base class of errors about fedrecon's own files."""


class StorageError(ValueError):
    """A file or folder is missing, damaged, not ours, or cannot be written."""
