import lzma
import re
import sqlite3
from html import escape
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrecon._src.core.display import silent
from fedrecon._src.data.posts import plain_text
from fedrecon._src.data.stackoverflow import _unpack, decode_example, read_word_count
from fedrecon.data import DataError, load_text, prepare_posts, prepare_stackoverflow
from stackoverflow_files import blob, example, nested, varint, write_database

# ---- tf.train.Example ----


def test_an_example_byte_by_byte():
    # features { feature { key: "a" value { bytes_list { value: "hi" } } } }
    message = bytes.fromhex("0a0d 0a0b 0a0161 1206 0a04 0a026869")
    assert message == example({"a": [b"hi"]})
    assert decode_example(message) == {"a": [b"hi"]}


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.lists(st.binary(max_size=200), min_size=1, max_size=3)
        | st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4)
        | st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=4),
        max_size=4,
    ),
    st.booleans(),
)
def test_features_of_bytes_are_decoded_and_numbers_passed_over(features, packed):
    texts = {name: values if isinstance(values[0], bytes) else [] for name, values in features.items()}
    assert decode_example(example(features, packed)) == texts


def test_unknown_fields_are_passed_over():
    message = example({"a": [b"x"]})
    other = (
        varint(7 << 3) + varint(300) + varint(9 << 3 | 1) + bytes(8) + varint(9 << 3 | 5) + bytes(4) + nested(8, b"x")
    )
    assert decode_example(other + message + other) == {"a": [b"x"]}
    assert decode_example(b"") == {}


@given(st.binary(max_size=40))
def test_other_bytes_are_refused_or_hold_nothing_odd(message):
    try:
        found = decode_example(message)
    except ValueError:
        return
    assert all(isinstance(values, list) for values in found.values())


@pytest.mark.parametrize("cut", [1, 2, 10, 30])
def test_a_cut_example_is_refused(cut):
    with pytest.raises(ValueError, match="does not"):
        decode_example(example({"tokens": [b"one two three four five six"]})[:-cut])


# ---- the federated data set ----

ROWS = [
    ("train", "11", "2010-01-08 09:34:05 UTC", "if you're using sql , this is nice :"),
    ("heldout", "10", "2008-08-05 19:01:55.2 UTC", "thanks ."),
    ("train", "9", "2008-10-30 16:49:26.95 UTC", "edit :"),
    ("train", "11", "2008-08-10 08:28:52.1 UTC", "css3 does finally define the"),
    ("test", "11", "2018-02-01 00:00:00 UTC", "the spec is here ."),
    ("train", "11", "2008-08-10 08:28:52.1 UTC", "the <URL> , the"),
    ("train", "9", "2008-10-30 16:49:26.9 UTC", "the spec ."),
]


@pytest.fixture
def database(tmp_path):
    def database(rows=ROWS, name="stackoverflow.sqlite", indexed=True):
        return write_database(tmp_path / name, rows, indexed)

    return database


def texts(corpus, split):
    """Every client's sentences of a split in stored order, with '*' for words that are not kept."""
    words = np.array(["*", *corpus.words])
    clients = corpus.split(split)
    return {
        str(name): [
            " ".join(words[np.maximum(corpus.tokens[a:b], 0)]) for a, b in zip(own["begin"], own["end"], strict=True)
        ]
        for name, own in zip(clients.names, clients, strict=True)
    }


@pytest.mark.parametrize("indexed", [True, False])
def test_the_published_database_becomes_a_corpus_with_its_splits(database, tmp_path, indexed):
    corpus = prepare_stackoverflow(database(indexed=indexed), tmp_path / "corpus")
    assert corpus.splits == ("train", "heldout", "test")
    assert corpus.words[:6] == ("the", ",", ":", ".", "<URL>", "css3")
    assert corpus.counts[:4].tolist() == [4, 2, 2, 1]
    assert texts(corpus, "train") == {
        "11": ["css3 does finally define the", "the <URL> , the", "if you're using sql , this is nice :"],
        "9": ["the spec .", "edit :"],
    }
    assert texts(corpus, "heldout") == {"10": ["* ."]}
    assert texts(corpus, "test") == {"11": ["the spec is * ."]}
    assert corpus.train[0]["time"].tolist() == [1218356932.1, 1218356932.1, 1262943245]
    assert corpus.skipped == {"bad_rows": 0, "sentences_over_maximum": 0}
    assert len(corpus.next_words("heldout", 5, 3)) == 1


def test_the_vocabulary_file_gives_the_words_in_its_order(database, tmp_path):
    (tmp_path / "stackoverflow.word_count").write_text("thanks\t900\nthe\t800\n, 7\n.\t6\n")
    corpus = prepare_stackoverflow(
        database(), tmp_path / "corpus", word_count=tmp_path / "stackoverflow.word_count", kept_words=3
    )
    assert corpus.words == ("thanks", "the", ",")
    assert corpus.counts.tolist() == [0, 4, 2]
    assert texts(corpus, "heldout") == {"10": ["thanks *"]}
    assert corpus.vocabulary(2, 1).words == ("thanks", "the")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("the 5\nfour\n", "line 2: 'four' must be a new word and its count"),
        ("the 5\na b\n", "line 2: 'a b' must be a new word"),
        ("the 5\nthe 4\n", "line 2: 'the 4' must be a new word"),
        ("", "has no lines of a word and its count"),
        (b"BZh9\xff\xfe", "is not utf-8 text"),
        (None, "cannot read"),
    ],
)
def test_other_vocabulary_files_are_refused(tmp_path, content, message):
    path = tmp_path / "stackoverflow.word_count"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        read_word_count(path)


@pytest.mark.parametrize("indexed", [True, False])
def test_only_so_many_clients_and_sentences_are_taken(database, tmp_path, indexed):
    rows = [("train", str(k), f"20{20 - j}-01-01 00:00:00 UTC", f"word{k} {j}") for j in range(4) for k in range(30)]
    path = database([*rows, *ROWS], indexed=indexed)
    some = {"train": 10, "test": 0}
    corpus, same, other = (
        prepare_stackoverflow(path, tmp_path / name, clients=some, seed=seed, max_sentences=3)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert (len(corpus.train), len(corpus.split("heldout")), len(corpus.test)) == (10, 1, 0)
    assert corpus.train.names.tolist() == same.train.names.tolist() != other.train.names.tolist()
    assert corpus.train.max_size <= 3
    sizes = {"9": 6, "11": 7}  # of the two that are in both lists; all others have 4
    over = sum(sizes.get(name, 4) - 3 for name in corpus.train.names.tolist())
    assert corpus.skipped["sentences_over_maximum"] == over
    for name, sentences in texts(corpus, "train").items():
        if name not in sizes:  # the first three rows, in order of time
            assert sentences == [f"word{name} {j}" for j in (2, 1, 0)]


def test_both_ways_through_the_table_give_the_same(database, tmp_path):
    rows = [("train", str(k % 7), "2010-01-01 00:00:00 UTC", f"a b{k} " * (k % 3)) for k in range(60)]
    one, two = database(rows, "a.sqlite"), database(rows, "b.sqlite", indexed=False)
    first, second = (prepare_stackoverflow(path, path.with_suffix(""), max_sentences=5) for path in (one, two))
    assert texts(first, "train") == texts(second, "train")
    assert first.skipped == second.skipped
    assert first.skipped["sentences_without_words"] > 0


BAD = [
    (b"\xff\xff", "a number at byte 0 does not end"),
    (blob("2010-01-08 09:34:05 UTC", "some words")[:-3], "does not fit"),
    (blob("yesterday", "words"), "'yesterday' must be a date"),
    (example({"tokens": [b"words"]}), "creation_date and tokens must be one text each (got {'tokens'"),
    (
        example({"creation_date": [b"2010-01-08 09:34:05 UTC"], "tokens": [3]}),
        "must be one text each (got",
    ),
    (
        example({"creation_date": [b"2010-01-08 09:34:05 UTC"], "tokens": [b"caf\xe9"]}),
        "'utf-8' codec can't decode byte",
    ),
    ("text", "does not fit in 4"),
]


@pytest.mark.parametrize(("data", "problem"), BAD, ids=[problem[:30] for _, problem in BAD])
def test_a_bad_example_is_an_error_that_names_it_or_is_skipped_and_counted(database, tmp_path, data, problem):
    path = database([*ROWS[:2], ("train", "11", data), *ROWS[2:]])
    where = re.escape(f"{path} examples row 3 (client 11): ")
    with pytest.raises(DataError, match=where + ".*" + re.escape(problem)):
        prepare_stackoverflow(path, tmp_path / "corpus")
    corpus = prepare_stackoverflow(path, tmp_path / "corpus", bad_rows="skip")
    assert corpus.skipped["bad_rows"] == 1
    assert corpus.clients.num_examples == len(ROWS)


def test_a_compressed_database_is_unpacked_only_on_request(database, tmp_path):
    path = database()
    packed = tmp_path / "other.sqlite.lzma"
    packed.write_bytes(lzma.compress(path.read_bytes(), lzma.FORMAT_ALONE))
    with pytest.raises(DataError, match=r"is compressed\. Unpack it to other\.sqlite first .*unpack=True"):
        prepare_stackoverflow(packed, tmp_path / "corpus")
    corpus = prepare_stackoverflow(packed, tmp_path / "corpus", unpack=True)
    assert corpus.clients.num_examples == len(ROWS)
    assert (tmp_path / "other.sqlite").read_bytes() == path.read_bytes()
    prepare_stackoverflow(packed, tmp_path / "again")  # it is there by now
    (tmp_path / "cut.sqlite.lzma").write_bytes(packed.read_bytes()[:-100])
    with pytest.raises(DataError, match="is damaged or cut off"):
        prepare_stackoverflow(tmp_path / "cut.sqlite.lzma", tmp_path / "third", unpack=True)
    assert not [file for file in tmp_path.iterdir() if "cut.sqlite" in file.name and file.suffix != ".lzma"]


def test_a_database_appears_under_its_name_when_all_of_it_is_written(tmp_path, monkeypatch):
    packed, sizes = tmp_path / "other.sqlite.lzma", []
    packed.write_bytes(lzma.compress(b"so little that it waits in a buffer"))
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda old, new: (sizes.append(old.stat().st_size), replace(old, new)))
    _unpack(packed, tmp_path / "other.sqlite", silent)
    assert sizes == [len(b"so little that it waits in a buffer")]


def test_files_that_are_not_the_data_set_are_refused(tmp_path, database):
    with pytest.raises(DataError, match=r"is not a file; expected stackoverflow\.sqlite"):
        prepare_stackoverflow(tmp_path / "missing.sqlite", tmp_path / "corpus")
    (tmp_path / "text.sqlite").write_text("no database")
    with pytest.raises(DataError, match="file is not a database"):
        prepare_stackoverflow(tmp_path / "text.sqlite", tmp_path / "corpus")
    connection = sqlite3.connect(tmp_path / "empty.sqlite")
    connection.execute("CREATE TABLE something (a)")
    connection.close()
    with pytest.raises(DataError, match="cannot be read as federated Stack Overflow: no such table: client_metadata"):
        prepare_stackoverflow(tmp_path / "empty.sqlite", tmp_path / "corpus")
    with pytest.raises(ValueError, match="`clients` must map train, heldout, test"):
        prepare_stackoverflow(database(), tmp_path / "corpus", clients={"valid": 1})
    with pytest.raises(ValueError, match="`clients`"):
        prepare_stackoverflow(tmp_path / "stackoverflow.sqlite", tmp_path / "corpus", clients={"train": -1})
    assert not (tmp_path / "corpus").exists()


# ---- Posts.xml ----

HEAD, TAIL = '\ufeff<?xml version="1.0" encoding="utf-8"?>\r\n<posts>\r\n', "</posts>"
QUESTION = {
    "Id": "4",
    "PostTypeId": "1",
    "AcceptedAnswerId": "7",
    "CreationDate": "2008-07-31T21:42:52.667",
    "Score": "794",
    "Body": "<p>I want to use a <code>Track-Bar</code> to\n change it's <b>op</b>acity.</p>\n\n"
    '<p>This is my code:</p>\n\n<pre class="lang-cs"><code>decimal trans = trackBar1.Value / 5000;\n</code></pre>\n\n'
    "<p>When I build it &amp; run, a &lt; b?</p>\n",
    "OwnerUserId": "8",
    "LastEditorDisplayName": "Rich B",
    "Title": 'How to convert a "Decimal" to a Double in C#?',
    "Tags": "<c#><floating-point>",
    "ContentLicense": "CC BY-SA 4.0",
}
ANSWER = {
    "Id": "7",
    "PostTypeId": "2",
    "ParentId": "4",
    "CreationDate": "2008-07-31T22:17:57.883",
    "Body": "<p>Like this:</p>\n<ul><li>one</li><li>two<br>three</li></ul>",
    "OwnerUserId": "9",
}
EARLIER = ANSWER | {"Id": "12", "CreationDate": "2008-07-31T21:00:00", "Body": "<p>Über naïve.</p>", "OwnerUserId": "8"}
WIKI = ANSWER | {"PostTypeId": "5", "OwnerUserId": "-1"}
DELETED = {name: value for name, value in ANSWER.items() if name != "OwnerUserId"} | {"OwnerDisplayName": "user7"}
COMMUNITY = ANSWER | {"OwnerUserId": "-1"}


def row(attributes):
    inner = " ".join(f'{name}="{escape(value)}"' for name, value in attributes.items()).replace("\n", "&#xA;")
    return f"  <row {inner} />\r\n"


@pytest.fixture
def dump(tmp_path):
    def dump(rows, name="Posts.xml"):
        text = HEAD + "".join(item if isinstance(item, str) else row(item) for item in rows) + TAIL
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
        return tmp_path / name

    return dump


def test_a_published_dump_becomes_a_corpus_with_owners_as_clients(dump, tmp_path):
    path = dump([QUESTION, ANSWER, EARLIER, WIKI, DELETED, COMMUNITY])
    corpus = prepare_posts(path, tmp_path / "corpus", fractions=(1, 0, 0))
    assert texts(corpus, "train") == {
        "8": [
            "über naïve .",
            'how to convert a " decimal " to a double in c # ?',
            "i want to use a track-bar to change it's opacity .",
            "this is my code :",
            "when i build it & run , a < b ?",
        ],
        "9": ["like this :", "one", "two", "three"],
    }
    assert corpus.train[0]["time"][:2].tolist() == [1217538000, 1217540572.667]
    assert corpus.skipped == {
        "bad_rows": 0,
        "posts_of_other_types": 1,
        "posts_without_owner": 2,
        "sentences_over_maximum": 0,
    }


def test_only_the_wanted_types_of_posts_are_read(dump, tmp_path):
    corpus = prepare_posts(dump([QUESTION, ANSWER, EARLIER]), tmp_path / "a", types=(2,), fractions=(1, 0, 0))
    assert corpus.skipped["posts_of_other_types"] == 1
    assert corpus.clients.num_examples == 5


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("", ""),
        ("plain", "plain"),
        ("<p>a</p><p>b</p>", "a b"),
        ("a<br/>b<hr>c", "a b c"),
        ("<pre>code</pre>text<pre><code>more", "text"),
        ("use <code>x&lt;y</code> &eacute;", "use x<y é"),
        ('<a href="x" title="a > b">link</a>ed', "linked"),
        ("<!-- no -->yes <unknown>tag</unknown>", "yes tag"),
        ("a < b and <p", "a < b and"),
        ("</pre>after", "after"),
    ],
)
def test_html_is_stripped(html, text):
    assert " ".join(plain_text(html).split())[: len(text)] == text
    assert "code" not in plain_text(html)


BAD_ROWS = [
    ("  <row Id='1' PostTypeId=\r\n", "unclosed token"),
    ("  <row Id='1' Body='&bogus;' />\r\n", "undefined entity"),
    ("  <row Id='1' Body='\udcff' />\r\n", "not well-formed"),
    ("  <other />\r\n", "is not a <row .../>, which has a line of its own"),
    (row({name: value for name, value in ANSWER.items() if name != "Body"}), "no 'Body'"),
    (row({name: value for name, value in ANSWER.items() if name != "PostTypeId"}), "no 'PostTypeId'"),
    (row({name: value for name, value in ANSWER.items() if name != "CreationDate"}), "no 'CreationDate'"),
    (row(ANSWER | {"CreationDate": "long ago"}), "'long ago' must be a date"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_ROWS, ids=[line[:40] for line, _ in BAD_ROWS])
def test_a_bad_row_is_an_error_that_names_it_or_is_skipped_and_counted(dump, tmp_path, line, problem):
    path = dump([QUESTION, line, EARLIER])
    with pytest.raises(DataError, match=re.escape(f"{path} line 4: ") + ".*" + re.escape(problem)):
        prepare_posts(path, tmp_path / "corpus")
    corpus = prepare_posts(path, tmp_path / "corpus", bad_rows="skip", fractions=(1, 0, 0))
    assert corpus.skipped["bad_rows"] == 1
    assert len(texts(corpus, "train")["8"]) == 5


def test_the_kind_of_a_file_is_told_by_its_name(dump, database, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDRECON_CACHE", str(tmp_path / "cache"))
    assert load_text(dump([QUESTION, ANSWER]), fractions=(1, 0, 0)).splits == ("train", "valid", "test")
    assert load_text(database(), clients={"train": 1}).splits == ("train", "heldout", "test")
