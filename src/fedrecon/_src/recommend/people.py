"""People as Python has them, dicts of ratings or lists of items, made into items by their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from fedrecon._src.core.progress import warn_caller

SOME = 5  # ids that a message names
RATED = "a dict {item: rating}, such as {1: 5.0, 7: 2.0}, or a list of such dicts"
CLICKED = "items, such as [1, 7], a dict {item: count}, or a list of such people"


def as_people(given: Any, clicks: bool) -> tuple[list[Mapping[Any, float]], bool]:
    """Return what each person has, and whether one person was given rather than a list.

    Args:
      given: a dict or, of clicks, items of one person; or several such.
      clicks: whether items without a rating say enough.

    Raises:
      TypeError: it is something else; the message says what is expected.
    """
    if isinstance(given, Mapping):
        return [given], True
    if not _holds_several(given):
        raise TypeError(f"people are given as {type(given).__name__}; expected {CLICKED if clicks else RATED}")
    several = _listed(given)
    if _is_one_person(given, several):
        return [_person(several, clicks)], True
    return [_person(one, clicks) for one in several], False


def _listed(values: Iterable[Any]) -> list[Any]:
    """Return values in their order; those of a set, whose order is chance, sorted, so that results repeat."""
    return sorted(values, key=str) if isinstance(values, Set) else list(values)


def _holds_several(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


def _is_one_person(given: Any, entries: Sequence[Any]) -> bool:
    """Tell items of one person from a list of people; an empty list is nobody, an empty set or array one person."""
    if not entries:
        return not isinstance(given, list | tuple)
    return not _holds_several(entries[0])


def _person(one: Any, clicks: bool) -> Mapping[Any, float]:
    if isinstance(one, Mapping):
        return one
    if not clicks:
        raise TypeError(
            f"a person is given as {type(one).__name__}; expected {RATED}: the model was trained on ratings"
        )
    items = _listed(one) if _holds_several(one) else [one]
    odd = [item for item in items if _holds_several(item)]
    if odd or not _holds_several(one):
        kind = type(odd[0] if odd else one).__name__
        raise TypeError(f"items and people are mixed: there is a {kind} among them; expected {CLICKED}")
    return Counter(items)


def known_items(people: Sequence[Mapping[Any, float]], numbers: Mapping[str, int]) -> list[dict[int, float]]:
    """Return what each person has by the numbers of items, and warn of items that the model does not know.

    Args:
      people: what each has, by the ids of items.
      numbers: of the items that the model knows, by their ids as text.

    Raises:
      ValueError: all items of a person are unknown.
    """
    missing: list[Any] = []
    for place, one in enumerate(people):
        unknown = [item for item in one if str(item) not in numbers]
        if unknown and len(unknown) == len(one):
            whose = f" of person {place}" if len(people) > 1 else ""
            raise ValueError(
                f"the model knows none of the items{whose}: {_named(unknown)}. Ids of items are those of the training "
                f"data, such as {', '.join(list(numbers)[:3])}"
            )
        missing += unknown
    if missing:
        total = sum(map(len, people))
        warn_caller(f"the model does not know {len(missing)} of {total} items, which are left out: {_named(missing)}")
    return [{numbers[str(item)]: value for item, value in one.items() if str(item) in numbers} for one in people]


def _named(ids: Sequence[Any]) -> str:
    rest = f" and {len(ids) - SOME} more" if len(ids) > SOME else ""
    return ", ".join(str(one) for one in ids[:SOME]) + rest
