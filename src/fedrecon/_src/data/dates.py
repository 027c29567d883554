"""Dates as seconds."""

from datetime import UTC, datetime, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def seconds(date: str) -> float:
    """Return the time of a date such as 2008-08-10T08:28:52.1 in seconds since 1970; without a zone it is UTC.

    Args:
      date: in one of the forms of ISO 8601.

    Raises:
      ValueError: it is not a date.
    """
    when = _parsed(date)
    try:
        return when.timestamp()
    except OverflowError:
        raise ValueError(f"{date[:50]!r} is beyond the years that can be told apart") from None


def whole_seconds(date: str) -> int:
    """Return the last whole second since 1970 that is not after a date; without a zone it is UTC.

    Args:
      date: in one of the forms of ISO 8601.

    Raises:
      ValueError: it is not a date.
    """
    return (_parsed(date) - EPOCH) // timedelta(seconds=1)


def _parsed(date: str) -> datetime:
    try:
        when = datetime.fromisoformat(date)
    except ValueError:
        raise ValueError(f"{date[:50]!r} is not a date such as 2008-08-10T08:28:52") from None
    return when.replace(tzinfo=UTC) if when.tzinfo is None else when
