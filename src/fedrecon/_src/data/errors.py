"""The error of all loaders: one sentence that says what is wrong with the data and what to do."""

from typing import Any, Literal

BadRows = Literal["error", "skip"]  # whether records that cannot be read are refused, or left out and counted


class DataError(ValueError):
    """Data that is missing, malformed or not what was asked for."""


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ValueError unless an argument is one of the values of a `Literal`."""
    if value not in choices.__args__:
        raise ValueError(f"`{name}` must be one of {', '.join(choices.__args__)}, but is {value!r}.")
