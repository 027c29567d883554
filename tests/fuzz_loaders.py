"""A fuzzer of all loaders: good files, seeded damage, and the rule that a loader gives a result or a sentence.

`FEDRECON_FUZZ_CASES=3000 python -m pytest tests/test_fuzz.py` runs more cases than the usual few; `make fuzz` does
that. A case is its loader and its number: `run_case("ratings", 17, folder)` does it again.
"""

import contextlib
import gzip
import io
import json
import random
import shutil
import signal
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fedrecon._src.data.stackoverflow import read_word_count
from fedrecon._src.storage.atomic import StorageError
from fedrecon.data import (
    Corpus,
    DataError,
    Vocabulary,
    load_movielens,
    load_ratings,
    load_titles,
    prepare_posts,
    prepare_stackoverflow,
    prepare_text,
)
from stackoverflow_files import write_database

SECONDS = 30  # a case that takes longer fails

# What often breaks readers: words separated by spaces, then what has no letters or is long.
ODD = rb"""nan inf -inf 1e39 1e400 0x10 1_0 007 -0 +5 -1 null true user item rating time title client text , ,,,, :: ;
" "" ' { [[ } \u0000 \ud800 \ <!-- --> <row /> &#0; &amp; &bogus; <pre> </pre> <!DOCTYPE ]]> PK 0001-01-01 2020-02-30
9999-12-31T23:59:59-23:59""".split()
ODD += [
    b"",
    b"\0",
    b"\n",
    b"\r",
    b"\r\n",
    b"\t",
    b"\xff",
    b"\xfe\xff",
    b"\xef\xbb\xbf",
    b"\x1b[31m",
    b"\xe2\x80\xa8",
    b"\xc2\x85",
]
ODD += [b"\x1f\x8b", b"9" * 19, b"9" * 400, b"1" * 5000, b"x" * 300, b"[" * 2000, b'{"a":' * 500]


def damaged(content: bytes, dice: random.Random) -> bytes:
    """Change some bytes: flip, cut, repeat, move, or put in what often breaks readers."""
    data = bytearray(content)
    for _ in range(dice.choice([1, 1, 1, 2, 3, 8])):
        place = dice.randrange(len(data) + 1)
        end = min(len(data), place + dice.choice([1, 1, 2, 4, 16, 100]))
        match dice.randrange(8):
            case 0 if place < len(data):
                data[place] ^= 1 << dice.randrange(8)
            case 1 if place < len(data):
                data[place] = dice.randrange(256)
            case 2:
                del data[place:end]
            case 3:
                del data[place:]
            case 4:
                data[place:place] = data[place:end] * dice.choice([1, 2, 50])
            case 5:
                data[place:place] = dice.choice(ODD)
            case 6:
                data[place:end] = dice.choice(ODD)
            case _:
                data[place:place] = dice.choice(ODD) * dice.choice([1, 3, 1000])
    return bytes(data[: 1 << 20])


# ---- good files ----


def ratings_text(dice: random.Random) -> bytes:
    mark = dice.choice([",", ",", "\t", ";", "::"])
    user, item = dice.choice(["{}", "u{}", '"{}"', "{:03}"]), dice.choice(["{}", "i{}", '"{}"', "{:03}"])
    rows = [
        [user.format(dice.randrange(9)), item.format(dice.randrange(9)), str(dice.randrange(1, 11) / 2), str(10**9 + k)]
        for k in range(40)
    ]
    header = [["user", "item", "rating", "time"]] if dice.random() < 0.7 else []
    return "\n".join(mark.join(row) for row in header + rows).encode()


def parquet_ratings(dice: random.Random) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    count = dice.randrange(1, 200)
    user = [dice.randrange(9) for _ in range(count)]
    columns = {
        "user": user if dice.random() < 0.5 else [f"u{k}" for k in user],
        "item": [dice.randrange(50) for _ in range(count)],
        "rating": [dice.random() * 5 for _ in range(count)],
        "time": list(range(count)),
    }
    file = io.BytesIO()
    compression = dice.choice(["snappy", "gzip", "zstd", "none"])
    parquet.write_table(pa.table(columns), file, compression=compression, row_group_size=dice.choice([10, 1000]))
    return file.getvalue()


def movielens_zip(dice: random.Random, inside: Callable[[bytes], bytes]) -> bytes:
    ratings = b"".join(b"%d::%d::%d::%d\n" % (k % 7, k % 11, 1 + k % 5, k) for k in range(60))
    movies = b"".join(b"%d::Film %d::Drama\n" % (k, k) for k in range(11))
    file = io.BytesIO()
    kind = dice.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    with zipfile.ZipFile(file, "w", kind) as archive:
        archive.writestr("ml-1m/ratings.dat", inside(ratings))
        archive.writestr("ml-1m/movies.dat", inside(movies))
    return file.getvalue()


def posts_lines(dice: random.Random) -> bytes:
    texts = ["The cat sat. It slept!", "Is it?", "See http://x.org/a ...", "Çà et là"]
    times = [1.5, 10**9, "2024-05-01T10:00", "2024-05-01T10:00+02:00", None]
    posts = [{"client": f"c{k % 5}", "time": dice.choice(times), "text": dice.choice(texts)} for k in range(25)]
    return "\n".join(json.dumps(post) for post in posts).encode()


def posts_xml(dice: random.Random) -> bytes:
    row = (
        '  <row Id="{0}" PostTypeId="{1}" CreationDate="2008-08-0{2}T00:00:00.0" OwnerUserId="{3}" Title="About {0}" '
        'Body="&lt;p&gt;Some &lt;b&gt;text&lt;/b&gt; {0}.&lt;/p&gt;&lt;pre&gt;x = 1&lt;/pre&gt;" />'
    )
    rows = [row.format(k, 1 + k % 2, 1 + k % 9, k % 5) for k in range(20)]
    return "\n".join(['<?xml version="1.0" encoding="utf-8"?>', "<posts>", *rows, "</posts>"]).encode()


def database(dice: random.Random) -> bytes:
    place = Path(dice.scratch) / "good.sqlite"  # type: ignore[attr-defined]
    place.unlink(missing_ok=True)
    date = "2010-01-01 00:00:00.1 UTC"
    rows = [("train" if k % 4 else "heldout", f"c{k % 7}", date, f"a cat sat on {k}") for k in range(30)]
    write_database(place, rows, indexed=dice.random() < 0.5)
    return place.read_bytes()


# ---- loaders ----


class Target(NamedTuple):
    """A loader: the name of its file, good content, and how it is called."""

    file: str
    make: Callable[[random.Random], bytes]
    load: Callable[[Path, Path, random.Random], Any]


ENCODINGS = ["utf-8"] * 6 + ["latin-1", "utf-16", "cp1252", "klingon", "hex", "unicode_escape", "utf-7", "idna"]


def _ratings(path: Path, folder: Path, dice: random.Random) -> Any:
    options = {
        "bad_rows": dice.choice(["error", "skip", "skip"]),
        "duplicates": dice.choice(["last", "first", "mean", "error"]),
        "header": dice.choice([None, None, True, False]),
        "delimiter": dice.choice([None, None, None, ",", "::", " ", "", '"', "xx", "§"]),
        "encoding": dice.choice(ENCODINGS),
        "skip_lines": dice.choice([0, 0, 0, 1, 100]),
    }
    return load_ratings(path, **options).describe().sentence()


def _text(path: Path, folder: Path, dice: random.Random) -> Any:
    return prepare_text(path, folder, bad_rows=dice.choice(["error", "skip", "skip"]), fractions=(1, 0, 0))


def _posts(path: Path, folder: Path, dice: random.Random) -> Any:
    return prepare_posts(path, folder, bad_rows=dice.choice(["error", "skip", "skip"]), fractions=(1, 0, 0))


def _database(path: Path, folder: Path, dice: random.Random) -> Any:
    return prepare_stackoverflow(path, folder, bad_rows=dice.choice(["error", "skip"]))


def _whole(load: Callable[[Path], Any]) -> Callable[[Path, Path, random.Random], Any]:
    return lambda path, folder, dice: load(path)


def vocabulary_file(dice: random.Random) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        Vocabulary(("a", "b"), 3).save(Path(folder) / "a.json")
        return (Path(folder) / "a.json").read_bytes()


TARGETS = {
    "ratings": Target("a.csv", ratings_text, _ratings),
    "ratings.gz": Target("a.csv.gz", lambda dice: gzip.compress(ratings_text(dice)), _ratings),
    "parquet": Target("a.parquet", parquet_ratings, _ratings),
    "zip": Target("a.zip", lambda dice: movielens_zip(dice, bytes), _whole(load_movielens)),
    "zip content": Target(
        "a.zip", lambda dice: movielens_zip(dice, lambda good: damaged(good, dice)), _whole(load_movielens)
    ),
    "titles": Target("a.csv", lambda dice: b'item,title\n1,"A, b"\n2,C\n', _whole(load_titles)),
    "jsonl": Target("a.jsonl", posts_lines, _text),
    "jsonl.gz": Target("a.jsonl.gz", lambda dice: gzip.compress(posts_lines(dice)), _text),
    "jsonl.gz content": Target("a.jsonl.gz", lambda dice: gzip.compress(damaged(posts_lines(dice), dice)), _text),
    "posts.xml": Target("Posts.xml", posts_xml, _posts),
    "sqlite": Target("a.sqlite", database, _database),
    "word count": Target("a.txt", lambda dice: b"the 10\na 9\ncat 3\n", _whole(read_word_count)),
    "vocabulary": Target("a.json", vocabulary_file, _whole(Vocabulary.load)),
}
UNDAMAGED = {"zip content", "jsonl.gz content"}  # whose damage is inside


@contextlib.contextmanager
def bounded(seconds: int) -> Iterator[None]:
    """Fail if the block takes longer."""

    def too_long(*_: object) -> None:
        raise AssertionError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_case(name: str, number: int, scratch: Path) -> str:
    """Run one case and return what came of it; anything but a result or a sentence raises."""
    target, dice = TARGETS[name], random.Random(f"{name} {number}")
    dice.scratch = scratch  # type: ignore[attr-defined]
    content = target.make(dice)
    path, folder = scratch / target.file, scratch / "corpus"
    path.write_bytes(content if name in UNDAMAGED else damaged(content, dice))
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with bounded(SECONDS):
            target.load(path, folder, dice)
    except (DataError, StorageError) as problem:
        return "sentence" if str(problem).strip() else "an error without words"
    return "result"


def run_corpus_case(number: int, good: Path, scratch: Path) -> str:
    """Damage one file of a prepared corpus: it must be found, unless nothing was changed."""
    dice = random.Random(number)
    folder = scratch / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    file = dice.choice(sorted(folder.iterdir()))
    before = file.read_bytes()
    after = damaged(before, dice)
    file.write_bytes(after)
    same = after == before
    if file.suffix == ".json" and not same:
        with contextlib.suppress(ValueError, RecursionError):
            same = json.loads(after) == json.loads(before)
    try:
        with bounded(SECONDS):
            Corpus.open(folder)
    except DataError:
        assert after != before, f"{file.name} is as it was, but is refused"
        return "sentence"
    assert same, f"{file.name} was changed, and nobody noticed"
    return "result"
