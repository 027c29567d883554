"""The error of all loaders: one sentence that says what is wrong with the data and what to do."""


class DataError(ValueError):
    """Data that is missing, malformed or not what was asked for."""
