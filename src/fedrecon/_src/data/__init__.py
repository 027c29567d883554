"""Data sets of clients: MovieLens and ratings files; text and Stack Overflow; synthetic ones of the same shape."""

from pathlib import Path
from typing import Any

from fedrecon._src.data.errors import DataError
from fedrecon._src.data.ratings.accepted import Accepted
from fedrecon._src.data.ratings.files import Ratings, load_ratings
from fedrecon._src.data.ratings.movielens import NAMES, movielens
from fedrecon._src.data.ratings.summary import Summary
from fedrecon._src.data.ratings.synthetic import synthetic_ratings
from fedrecon._src.data.ratings.titles import load_titles, unique_labels
from fedrecon._src.data.sources import is_readable as _is_readable
from fedrecon._src.data.text.corpus import Corpus
from fedrecon._src.data.text.files import load_text, prepare_text
from fedrecon._src.data.text.sentences import PersonalText, Sentences, input_ids, personal_text, prompt_columns
from fedrecon._src.data.text.stackoverflow import prepare_posts, prepare_stackoverflow
from fedrecon._src.data.text.synthetic import synthetic_text
from fedrecon._src.data.text.vocabulary import Vocabulary
from fedrecon._src.data.text.words import split_text

__all__ = [
    "Accepted",
    "Corpus",
    "DataError",
    "PersonalText",
    "Ratings",
    "Sentences",
    "Summary",
    "Vocabulary",
    "input_ids",
    "load",
    "load_ratings",
    "load_text",
    "load_titles",
    "movielens",
    "personal_text",
    "prepare_posts",
    "prepare_stackoverflow",
    "prepare_text",
    "prompt_columns",
    "split_text",
    "synthetic_ratings",
    "synthetic_text",
    "unique_labels",
]


def load(source: str | Path, **options: Any) -> Ratings:
    """Load ratings by name or from a path.

    Args:
      source: "movielens-small", "movielens-1m", "movielens-100k", "synthetic", a MovieLens zip or folder,
        a ratings file, a pipe, or "-" for standard input.
      ***options: options of `movielens`, `synthetic_ratings` or `load_ratings`, depending on the source.

    Raises:
      DataError: there is no such name or file, or it cannot be read.
    """
    path = Path(source)
    if source == "synthetic":
        return synthetic_ratings(**options)
    if source in NAMES or path.is_dir() or (path.is_file() and path.suffix == ".zip"):
        return movielens(source, **options)
    if not _is_readable(path):
        known = ", ".join((*NAMES, "synthetic"))
        raise DataError(f"{source} is neither a file nor a known data set; known names are: {known}.")
    return load_ratings(path, **options)
