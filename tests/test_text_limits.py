"""Text made to do harm, damaged corpora, and two processes that want the same corpus."""

import gzip
import json
import lzma
import os
import sqlite3
import sys
import threading

import numpy as np
import pytest

from fedrecon._src.data import corpus as corpus_module
from fedrecon._src.data import sources as sources_module
from fedrecon._src.data.posts import plain_text
from fedrecon._src.storage.ownership import LockedError, file_lock
from fedrecon.data import Corpus, DataError, load_text, prepare_posts, prepare_stackoverflow, prepare_text
from fuzz_loaders import bounded
from stackoverflow_files import write_database

POST = {"client": "ann", "text": "The cat sat."}
ROW = ("train", "c1", "2010-01-01 00:00:00.1 UTC", "a cat")


@pytest.fixture
def posts(tmp_path):
    path = tmp_path / "posts.jsonl"
    path.write_text("\n".join(json.dumps({**POST, "client": f"c{k}"}) for k in range(10)))
    return path


# ---- text made to do harm ----


@pytest.mark.parametrize("piece", ["<!--", "<a ", "<a '", '<a "', "<", "</", "<pre>", "&", "&#", "<!", "<!-- -->"])
def test_the_text_of_html_is_found_in_time_that_grows_with_its_length(piece):
    with bounded(20):
        plain_text(piece * 200_000)


def test_a_body_of_open_comments_is_a_post_without_words(tmp_path):
    row = '<row Id="1" PostTypeId="1" CreationDate="2008-08-01T00:00:00" OwnerUserId="7" Body="{}" />'
    bodies = ["&lt;!--" * 100_000, "&lt;p&gt;a &lt;!-- not this --&gt; cat&lt;/p&gt;"]
    (tmp_path / "Posts.xml").write_text("\n".join(map(row.format, bodies)))
    with bounded(20):
        corpus = prepare_posts(tmp_path / "Posts.xml", tmp_path / "corpus", fractions=(1, 0, 0))
    assert sorted(corpus.words) == ["a", "cat"]
    assert corpus.skipped["posts_without_words"] == 1


ENDLESS = "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n) SELECT k FROM n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (f"DROP TABLE examples; CREATE VIEW examples AS {ENDLESS}", "view"),
        ("DROP TABLE client_metadata; CREATE VIEW client_metadata AS SELECT 'c1' AS client_id", "view"),
        (
            "DROP TABLE examples; CREATE TABLE examples(split_name, client_id, serialized_example_proto "
            "GENERATED ALWAYS AS (zeroblob(1000000000)))",
            "examples must be a table without computed columns .*serialized_example_proto",
        ),
        ("DROP TABLE examples; CREATE VIRTUAL TABLE examples USING fts5(split_name, client_id)", "virtual table"),
        ("DROP TABLE examples", "no such table"),
    ],
)  # fmt: skip
def test_a_database_that_is_a_program_is_refused(tmp_path, change, message):
    path = tmp_path / "a.sqlite"
    write_database(path, [ROW])
    connection = sqlite3.connect(path)
    connection.executescript(change)
    connection.close()
    with bounded(20), pytest.raises(DataError, match=message) as error:
        prepare_stackoverflow(path, tmp_path / "corpus")
    assert "a.sqlite" in str(error.value)


def test_what_becomes_far_too_large_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(sources_module, "ALWAYS_ALLOWED", 1 << 20)
    (tmp_path / "a.sqlite.xz").write_bytes(lzma.compress(bytes(8_000_000)))
    with pytest.raises(DataError, match=r"a\.sqlite\.xz unpacks to more than 100 times its size"):
        prepare_stackoverflow(tmp_path / "a.sqlite.xz", tmp_path / "corpus", unpack=True)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(POST).encode() + b"\n" * 8_000_000))
    for policy in ("error", "skip"):
        with pytest.raises(DataError, match=r"a\.jsonl\.gz unpacks to more than 100 times its size"):
            prepare_text(tmp_path / "a.jsonl.gz", tmp_path / "corpus", bad_rows=policy)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl.gz", "a.sqlite.xz"]


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"client": ' * 10_000,
        '{"client": ' + "9" * 400 + ', "text": "a"}',
        '{"client": ' + "9" * 5000 + ', "text": "a"}',
        '{"client": "a", "text": "a", "time": ' + "9" * 400 + "}",
        '{"client": "a", "text": "a", "time": 1e400}',
        '{"client": {"a": "b"}, "text": "a"}',
    ],
)
def test_odd_lines_are_refused_by_file_and_line(tmp_path, line):
    path = tmp_path / "posts.jsonl"
    path.write_text(json.dumps(POST) + "\n" + line + "\n")
    with pytest.raises(DataError, match=r"posts\.jsonl line 2: "):
        prepare_text(path, tmp_path / "corpus")


# ---- digests ----


def test_every_changed_file_of_a_corpus_is_named(posts, tmp_path):
    prepare_text(posts, tmp_path / "corpus")
    for file in sorted((tmp_path / "corpus").iterdir()):
        content = file.read_bytes()
        changed = bytearray(content or b"..")
        changed[-2] ^= 1
        file.write_bytes(changed)
        with pytest.raises(DataError, match=rf"{file.name.replace('.', '[.]')}"):
            Corpus.open(tmp_path / "corpus")
        file.write_bytes(content)
    assert len(Corpus.open(tmp_path / "corpus", check="full").clients) == 10


def test_large_files_are_read_only_by_a_full_check(posts, tmp_path, monkeypatch):
    prepare_text(posts, tmp_path / "corpus")
    monkeypatch.setattr(corpus_module, "QUICK_BYTES", 10)
    tokens = np.load(tmp_path / "corpus" / "tokens.npy")
    np.save(tmp_path / "corpus" / "tokens.npy", tokens[::-1])
    Corpus.open(tmp_path / "corpus")
    with pytest.raises(DataError, match=r"tokens\.npy is damaged: its content is not what was written"):
        Corpus.open(tmp_path / "corpus", check="full")
    np.save(tmp_path / "corpus" / "tokens.npy", tokens[:-1])
    with pytest.raises(DataError, match=r"tokens\.npy is damaged: it has .* bytes"):
        Corpus.open(tmp_path / "corpus")
    with pytest.raises(ValueError, match="`check` must be one of 'quick', 'full'"):
        Corpus.open(tmp_path / "corpus", check="none")


# ---- two at a time ----


def test_of_two_who_want_one_corpus_one_prepares_it(posts, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDRECON_CACHE", str(tmp_path / "cache"))
    begun, found = threading.Barrier(2), []

    def work():
        begun.wait()
        found.append(load_text(posts).fingerprint())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]
    assert len(list((tmp_path / "cache" / "text").iterdir())) == 1


def test_a_folder_that_somebody_prepares_is_refused_with_a_name(posts, tmp_path):
    with (
        file_lock(tmp_path / ".corpus.lock"),
        pytest.raises(LockedError, match=rf"corpus is in use by process {os.getpid()} on "),
    ):
        prepare_text(posts, tmp_path / "corpus")
    assert len(prepare_text(posts, tmp_path / "corpus").clients) == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "posts.jsonl"]


# ---- pipes ----


def test_text_comes_from_standard_input_too(posts, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDRECON_CACHE", str(tmp_path / "cache"))
    expected = load_text(posts).fingerprint()
    for _ in range(2):  # the second time it is in the cache
        with posts.open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            assert load_text("-").fingerprint() == expected
    assert len(list((tmp_path / "cache" / "text").iterdir())) == 2
