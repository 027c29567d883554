"""Select parameters: by pattern, by layer, by predicate, or some rows of a table."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

MOST_LISTED = 20
Locate = Callable[[Any], Collection[str] | None]  # a layer -> the paths of its parameters; None for anything else


class LocalRows(NamedTuple):
    """Some rows of the tables at a path or pattern; see `rows`."""

    pattern: str
    ids: Any


class Selection(NamedTuple):
    """The selected parameters: whole ones, and rows `{path: ascending ids}` of others."""

    whole: frozenset[str]
    rows: Mapping[str, np.ndarray]


def rows(pattern: str, ids: slice | Sequence[int] | np.ndarray) -> LocalRows:
    """Select some rows of a table for `local`; the other rows stay global.

    Args:
      pattern: the path of the table, or a pattern that matches it.
      ids: the rows, as a slice (`slice(100, None)`: all from row 100 on) or as row numbers.

    Example:
      >>> import fedrecon as fr
      >>> import jax
      >>> import jax.numpy as jnp
      >>> model = fr.models.from_function(
      ...     lambda params, word: params["table"][word].sum(-1),
      ...     {"table": jnp.zeros((100, 4))},
      ...     local=fr.models.rows("table", slice(90, None)),  # the last ten rows
      ...     inputs="word",
      ...     loss="mse",
      ... )
      >>> model.init_local(jax.random.key(0))["table"].shape
      (10, 4)
    """
    return LocalRows(pattern, ids)


def select(which: Any, argument: str, leaves: Mapping[str, Any], locate: Locate = lambda layer: None) -> Selection:
    """Find the parameters that an argument selects.

    Args:
      which: a glob pattern on paths (it also selects everything below a match, so "head" is every parameter of the
        layer `head`), a layer, a predicate `(path, leaf) -> bool`, `rows(...)`, or several of these.
      argument: the name of the argument, for error messages.
      leaves: parameters by path.
      locate: finds the paths of a layer's parameters.

    Raises:
      ValueError: if any of them selects nothing.
    """
    whole: set[str] = set()
    by_row: dict[str, np.ndarray] = {}
    for item in which if _is_several(which) else [which]:
        if isinstance(item, LocalRows):
            paths = _paths(item.pattern, argument, leaves, locate)
            by_row |= {path: _row_numbers(path, leaves[path], item.ids) for path in paths}
        else:
            whole |= set(_paths(item, argument, leaves, locate))
    both = sorted(whole & set(by_row))
    if both:
        raise ValueError(f"`{argument}` selects {both[0]!r} twice, whole and by rows; give one of them")
    return Selection(frozenset(whole), by_row)


def _is_several(which: Any) -> bool:
    return isinstance(which, (list, tuple, set, frozenset)) and not isinstance(which, LocalRows)


def _paths(which: Any, argument: str, leaves: Mapping[str, Any], locate: Locate) -> Collection[str]:
    if isinstance(which, str):
        paths = [p for p in leaves if fnmatch.fnmatchcase(p, which) or fnmatch.fnmatchcase(p, f"{which}/*")]
    elif (located := locate(which)) is not None:
        paths = [path for path in leaves if path in located]
    elif callable(which):
        paths = [path for path, leaf in leaves.items() if which(path, leaf)]
    else:
        raise TypeError(
            f"`{argument}` must be a path pattern, a layer of this model, a predicate of path and leaf, or a list of "
            f"these (got {which!r})"
        )
    if not paths:
        hint = near_miss(which, leaves) if isinstance(which, str) else ""
        more = f" and {len(leaves) - MOST_LISTED} more" if len(leaves) > MOST_LISTED else ""
        raise ValueError(
            f"`{argument}` is {which!r:.60}, which selects no parameter of this model{hint}; "
            f"the parameters are: {', '.join(list(leaves)[:MOST_LISTED])}{more}"
        )
    return paths


def near_miss(name: str, names: Collection[str]) -> str:
    """Return " (did you mean ...?)" for a name that is close to a known path or to a prefix of one.

    Args:
      name: a name that is not known.
      names: the known names or paths.
    """
    prefixes = {"/".join(parts[:n]) for parts in (path.split("/") for path in names) for n in range(1, len(parts) + 1)}
    close = difflib.get_close_matches(name.strip("*/"), sorted(prefixes | set(names)), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


def _row_numbers(path: str, leaf: Any, ids: Any) -> np.ndarray:
    size = leaf.shape[0] if leaf.shape else 0
    numbers = np.arange(size)[ids] if isinstance(ids, slice) else np.unique(np.asarray(ids, np.int64))
    if numbers.ndim != 1 or not 0 < numbers.size < size or numbers.min() < 0 or numbers.max() >= size:
        raise ValueError(
            f"`rows` of {path!r} must be some of its rows 0 to {size - 1}; for all of them, give its path itself "
            f"(got {ids!r})"
        )
    return np.sort(numbers)
