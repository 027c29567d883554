"""Data sets of clients: MovieLens, ratings files, and synthetic ones of the same shape."""

from pathlib import Path
from typing import Any

from fedrecon.data.errors import DataError
from fedrecon.data.movielens import NAMES, movielens
from fedrecon.data.ratings import Ratings, load_ratings
from fedrecon.data.synthetic import synthetic_ratings

__all__ = ["DataError", "Ratings", "load", "load_ratings", "movielens", "synthetic_ratings"]


def load(source: str | Path, **options: Any) -> Ratings:
    """Load ratings by name or from a path.

    Args:
      source: "movielens-small", "movielens-1m", "movielens-100k", "synthetic", a MovieLens zip or folder,
        or a ratings file.
      **options: of `movielens`, `synthetic_ratings` or `load_ratings`, whichever it is.

    Raises:
      DataError: there is no such name or file, or it cannot be read.
    """
    path = Path(source)
    if source == "synthetic":
        return synthetic_ratings(**options)
    if source in NAMES or path.is_dir() or (path.is_file() and path.suffix == ".zip"):
        return movielens(source, **options)
    if not path.is_file():
        known = ", ".join((*NAMES, "synthetic"))
        raise DataError(f"{source} is neither a file nor a known data set; known names are: {known}.")
    return load_ratings(path, **options)
