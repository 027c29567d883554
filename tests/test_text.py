import gzip
import itertools
import json
import os
import random
import re
import resource
import tracemalloc
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedrecon as fr
from fedrecon._src.data.corpus_writer import CorpusSettings, Post, prepare_corpus
from fedrecon._src.data.sentences import word_hash
from fedrecon.data import Corpus, DataError, Sentences, input_ids, load_text, prepare_text, split_text, synthetic_text

POSTS = [
    {"client": "b", "time": 30, "text": "The cat sat. The dog ran!"},
    {"client": "b", "time": 10, "text": "A naïve cat"},
    {"client": "a", "time": 20, "text": "the the the"},
    {"client": "a", "time": 20, "text": "zebra"},
]


@pytest.fixture
def write(tmp_path):
    def write(posts, name="posts.jsonl"):
        lines = [post if isinstance(post, bytes) else json.dumps(post).encode() for post in posts]
        data = b"".join(line + b"\n" for line in lines)
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return tmp_path / name

    return write


def prepare(path, folder="corpus", **options):
    return prepare_text(path, path.parent / folder, **{"fractions": (1, 0, 0)} | options)


def texts(corpus):
    """Every client's sentences in stored order, with '*' for words that are not kept."""
    words = np.array(["*", *corpus.words])
    found = {}
    for name, client in zip(corpus.clients.names, corpus.clients, strict=True):
        codes = [corpus.tokens[begin:end] for begin, end in zip(client["begin"], client["end"], strict=True)]
        found[str(name)] = [" ".join(words[np.maximum(code, 0)]) for code in codes]
    return found


def content(corpus):
    """Everything a corpus holds."""
    columns = {name: values.tolist() for name, values in corpus.clients.columns.items()}
    clients = [corpus.clients.starts.tolist(), corpus.clients.ends.tolist(), corpus.clients.names.tolist()]
    lists = [corpus.tokens.tolist(), corpus.counts.tolist(), corpus.split_of.tolist()]
    words = corpus.words, corpus.other_words
    return columns, clients, lists, words, corpus.splits, corpus.train_tokens, dict(corpus.skipped)


# ---- what is kept ----


@pytest.mark.parametrize("name", ["posts.jsonl", "posts.jsonl.gz", "posts"])
def test_posts_become_clients_with_sentences_in_order_of_time(write, name):
    corpus = prepare(write(POSTS, name))
    assert corpus.words == ("the", "cat", "!", ".", "a", "dog", "naïve", "ran", "sat", "zebra")
    assert corpus.counts.tolist() == [5, 2, 1, 1, 1, 1, 1, 1, 1, 1]
    assert texts(corpus) == {"a": ["the the the", "zebra"], "b": ["a naïve cat", "the cat sat .", "the dog ran !"]}
    assert corpus.clients[1]["time"].tolist() == [10, 30, 30]
    assert corpus.skipped == {"bad_rows": 0, "sentences_over_maximum": 0}
    assert (corpus.train_tokens, corpus.coverage(2)) == (15, 7 / 15)
    assert repr(corpus) == "Corpus(2 clients (2 train, 0 valid, 0 test), 5 sentences, 15 words)"


def test_examples_by_hand(write):
    corpus = prepare(write(POSTS))
    train = corpus.next_words("train", 2, 5, max_words=4)
    the, cat, bos, eos = 1, 2, 3, 4

    def oov(word):
        return 5 + word_hash(word) % 5

    assert isinstance(train, Sentences)
    assert input_ids(train[0], 2).tolist() == [[bos, the, the, the], [bos, oov("zebra"), eos, 0]]
    assert train[0]["target"].tolist() == [[the, the, the, eos], [oov("zebra"), eos, 0, 0]]
    assert train[1]["target"].tolist() == [
        [oov("a"), oov("naïve"), cat, eos],
        [the, cat, oov("sat"), oov(".")],
        [the, oov("dog"), oov("ran"), oov("!")],
    ]
    assert train[0]["word"].tolist() == [[bos, the, the, the], [bos, 0, eos, 0]]
    assert train[0]["oov"].tolist() == [[0, 0, 0, 0], [0, oov("zebra") - 4, 0, 0]]
    assert train[1]["time"].tolist() == [10, 30, 30]
    assert train.vocabulary == corpus.vocabulary(2, 5)
    assert len(corpus.next_words("valid", 2, 5)) == 0


def test_a_word_outside_the_vocabulary_has_its_bucket_whether_it_is_kept_or_not(write):
    path = write(POSTS)
    many, few = prepare(path, "many"), prepare(path, "few", kept_words=2)
    assert few.words == many.words[:2]
    assert few.next_words("train", 2, 7).fingerprint() == many.next_words("train", 2, 7).fingerprint()


def test_splits_by_time_work_on_examples(write):
    train = prepare(write(POSTS)).next_words("train", 3, 1)
    early, late = train.split_time(0.5, 0.5)
    assert (early[1]["time"].tolist(), late[1]["time"].tolist()) == ([10], [30, 30])
    assert fr.split.half(by="time").by in train.columns


def test_only_the_first_sentences_of_a_client_are_kept(write):
    posts = [{"client": "c", "time": -k, "text": f"s{k} one. s{k} two."} for k in range(4)]
    corpus = prepare(write([*posts, POSTS[0]]), max_sentences=3)
    assert texts(corpus)["c"] == ["s1 one .", "s0 one .", "s0 two ."]
    assert corpus.skipped["sentences_over_maximum"] == 5
    assert "s2" not in corpus.words


def test_posts_without_time_keep_the_order_of_the_file(write):
    corpus = prepare(write([{"client": 7, "text": text} for text in ("b", "a", "c")]))
    assert texts(corpus) == {"7": ["b", "a", "c"]}
    assert corpus.clients[0]["time"].tolist() == [0, 0, 0]


def test_times_may_be_dates(write):
    dates = ["2008-08-10T08:28:52.5", "2008-08-10T08:28:51.5Z", "2008-08-10T09:28:50.5+01:00", None]
    corpus = prepare(write([{"client": "a", "time": date, "text": str(k)} for k, date in enumerate(dates)]))
    assert texts(corpus) == {"a": ["3", "2", "1", "0"]}
    assert corpus.clients[0]["time"].tolist() == [0, 1218356930.5, 1218356931.5, 1218356932.5]


def test_posts_without_words_are_left_out_and_counted(write):
    corpus = prepare(write([*POSTS, {"client": "nobody", "text": " \n "}]))
    assert corpus.clients.names.tolist() == ["a", "b"]
    assert corpus.skipped["posts_without_words"] == 1


def test_the_vocabulary_comes_from_training_clients_only(write):
    posts = [{"client": f"c{k}", "text": f"common own{k} own{k} own{k}"} for k in range(10)]
    corpus = prepare(write(posts), fractions=(0.6, 0.2, 0.2), seed=3)
    names = {name: set(corpus.split(name).names.tolist()) for name in ("train", "valid", "test")}
    assert [len(names[name]) for name in ("train", "valid", "test")] == [6, 3, 1]
    assert set.union(*names.values()) == {f"c{k}" for k in range(10)}
    assert set(corpus.words) == {"common", *(name.replace("c", "own") for name in names["train"])}
    assert (corpus.counts.tolist(), corpus.train_tokens) == ([6, *[3] * 6], 24)
    assert corpus.words[0] == "common"
    assert corpus.valid.names.tolist() == sorted(names["valid"])


def test_the_seed_decides_the_division(write):
    path = write([{"client": f"c{k}", "text": "x"} for k in range(40)])
    halves = {"fractions": (0.5, 0.25, 0.25)}
    first, same, other = (prepare(path, str(k), seed=seed, **halves) for k, seed in enumerate((1, 1, 2)))
    assert content(first) == content(same)
    assert first.train.names.tolist() != other.train.names.tolist()


# ---- two ways to the same corpus ----


def test_interleaved_posts_give_the_same_as_grouped_ones(write):
    rng = random.Random(0)
    words = [f"w{k}" for k in range(30)]
    grouped = [
        {"client": f"c{c}", "time": rng.randrange(3), "text": " ".join(rng.choices(words, k=rng.randrange(12)))}
        for c in rng.sample(range(20), 20)
        for _ in range(rng.randrange(1, 9))
    ]
    order = sorted(range(len(grouped)), key=lambda k: (rng.random(), k))
    turns = {}
    for k in order:  # any order that keeps each client's own
        turns.setdefault(grouped[k]["client"], []).append(k)
    kept = {client: iter(sorted(places)) for client, places in turns.items()}
    interleaved = [grouped[next(kept[grouped[k]["client"]])] for k in order]
    assert interleaved != grouped
    options = {"fractions": (0.5, 0.3, 0.2), "max_sentences": 4}
    expected = content(prepare(write(grouped, "a"), "one", **options))
    assert content(prepare(write(interleaved, "b"), "two", **options)) == expected
    assert content(prepare(write(interleaved, "c"), "three", words_in_memory=10, **options)) == expected
    assert content(prepare(write(grouped, "d"), "four", words_in_memory=1, **options)) == expected


posts = st.lists(
    st.tuples(
        st.sampled_from(["ann", "bob", "çem", "dan"]),
        st.integers(-2, 2),
        st.lists(st.lists(st.sampled_from("abcdefé"), min_size=1, max_size=7), max_size=4),
    ),
    min_size=1,
    max_size=12,
).filter(lambda found: any(sentences for _, _, sentences in found))


@settings(max_examples=40, deadline=None)
@given(posts, st.integers(1, 30), st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers(1, 5))
def test_a_corpus_holds_what_a_plain_program_finds(
    tmp_path_factory, found, words_in_memory, max_sentences, vocab_size, buckets, max_words
):
    folder = tmp_path_factory.mktemp("corpus")
    settings = CorpusSettings(
        fractions=(1, 0, 0), max_sentences=max_sentences, kept_words=vocab_size, words_in_memory=words_in_memory
    )
    corpus = prepare_corpus((Post(*post) for post in found), folder / "corpus", settings, "test", {})
    clients = {}
    for name, time, sentences in found:
        clients.setdefault(name, []).extend((time, sentence) for sentence in sentences)
    clients = {name: sorted(clients[name][:max_sentences], key=lambda pair: pair[0]) for name in sorted(clients)}
    clients = {name: pairs for name, pairs in clients.items() if pairs}
    counts = Counter(word for pairs in clients.values() for _, sentence in pairs for word in sentence)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[:vocab_size]
    assert corpus.words == tuple(ranked)
    assert corpus.clients.names.tolist() == list(clients)
    vocabulary = corpus.vocabulary(len(ranked), buckets)
    examples = corpus.next_words("train", len(ranked), buckets, max_words)
    streamed = corpus.next_words("train", len(ranked), buckets, max_words, folder=folder / "examples")
    assert streamed.fingerprint() == examples.fingerprint()
    for pairs, client in zip(clients.values(), examples, strict=True):
        ids = [vocabulary.encode(sentence, max_words).tolist() for _, sentence in pairs]
        assert input_ids(client, len(ranked)).tolist() == [row[:-1] for row in ids]
        assert client["target"].tolist() == [row[1:] for row in ids]
        assert client["time"].tolist() == [time for time, _ in pairs]


def test_streamed_examples_are_those_in_memory_for_more_than_one_block(tmp_path, monkeypatch):
    monkeypatch.setattr("fedrecon._src.data.corpus.SENTENCES_PER_BLOCK", 7)
    corpus = synthetic_text(20, sentences=5)
    some = corpus.train.take([3, 0, 7, 7, 1])
    streamed = corpus.next_words(some, 10, 3, folder=tmp_path / "a")
    monkeypatch.undo()
    expected = corpus.next_words(some, 10, 3)
    assert streamed.fingerprint() == expected.fingerprint()
    assert Sentences.open(tmp_path / "a").vocabulary == expected.vocabulary == corpus.vocabulary(10, 3)


def test_a_prepared_folder_opens_with_the_same_content(write):
    path = write(POSTS)
    corpus = prepare(path, kept_words=3)
    for again in (Corpus.open(path.parent / "corpus"), Corpus.open(path.parent / "corpus", mapped=False)):
        assert content(again) == content(corpus)
    names = {file.name for file in (path.parent / "corpus").iterdir()}
    arrays = {f"{name}.npy" for name in ("tokens", "begins", "times", "offsets", "names", "split", "counts")}
    assert names == arrays | {"corpus.json", "words.txt", "others.txt"}


def test_the_spelling_of_words_that_are_not_kept_is_stored_unless_they_are_too_many(tmp_path, monkeypatch):
    posts = [Post("a", 0.0, [["x", "x", "é", "z"]]), Post("b", 0.0, [["y", "x", "z"]], split=1)]

    def corpus_of(name, **options):
        settings = CorpusSettings(splits=("train", "test"), fractions=None, words_in_memory=1, **options)
        return prepare_corpus(posts, tmp_path / name, settings, "test", {})

    counted = corpus_of("counted")
    assert (counted.words, counted.other_words) == (("x", "z", "é"), ("y",))  # only a test client uses y
    assert (counted.counts.tolist(), counted.train_tokens) == ([2, 1, 1], 4)
    assert corpus_of("few", kept_words=1).other_words == ("y", "z", "é")
    assert corpus_of("given", words=("y", "q")).other_words == ("x", "z", "é")
    sentences = corpus_of("spelled", kept_words=2).in_words_of(fr.data.Vocabulary(("x",), 2), "test", spelled=True)
    assert sorted(sentences.other_words) == ["y", "z"]
    written = counted.in_words_of(fr.data.Vocabulary(("x",), 2), "test", folder=tmp_path / "written", spelled=True)
    assert "other" not in written.columns  # only in memory
    monkeypatch.setattr("fedrecon._src.data.corpus_writer.MOST_SPELLED", 3)
    assert corpus_of("many", kept_words=1).other_words == ()


def test_a_source_is_prepared_once_and_then_opened(write, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDRECON_CACHE", str(tmp_path / "cache"))
    path = write(POSTS)
    first = load_text(path, fractions=(1, 0, 0))
    folders = list((tmp_path / "cache" / "text").iterdir())
    monkeypatch.setattr("fedrecon._src.data.posts.prepare_text", None)
    assert content(load_text(path, fractions=(1, 0, 0))) == content(first)
    assert content(load_text(folders[0])) == content(first)
    monkeypatch.undo()
    monkeypatch.setenv("FEDRECON_CACHE", str(tmp_path / "cache"))
    load_text(path, fractions=(1, 0, 0), kept_words=3)
    assert len(list((tmp_path / "cache" / "text").iterdir())) == 2
    with pytest.raises(DataError, match="neither a file nor a prepared corpus"):
        load_text(tmp_path / "missing")


# ---- what cannot be read ----

BAD = [
    (b'{"client": "a"', "Expecting ',' delimiter"),
    (b"[1, 2]", "[1, 2]: Input should be a valid dictionary"),
    (b'{"text": "x"}', "'client' is missing"),
    (b'{"client": "a", "txt": "x"}', "'text' is missing"),
    (b'{"client": "a", "text": 3}', "text 3: Input should be a valid string"),
    (b'{"client": "a", "text": null}', "text None: Input should be a valid string"),
    (
        b'{"client": null, "text": "x"}',
        "client None: Input should be a valid string, or",
    ),
    (
        b'{"client": true, "text": "x"}',
        "client True: Input should be a valid string, or",
    ),
    (b'{"client": 1.5, "text": "x"}', "client 1.5: Input should be a valid string, or"),
    (b'{"client": "", "text": "x"}', "client '' is not 1 to 200 printable characters"),
    (b'{"client": "a\\nb", "text": "x"}', "is not 1 to 200 printable characters"),
    (b'{"client": "\\ud800", "text": "x"}', "is not 1 to 200 printable characters"),
    (b'{"client": "a", "time": "noon", "text": "x"}', "'noon' must be a date"),
    (b'{"client": "a", "time": NaN, "text": "x"}', "time nan: Input should be a finite number"),
    (b'{"client": "a", "time": [1], "text": "x"}', "time [1]: Input should be a valid number"),
    (b'{"client": "a", "time": true, "text": "x"}', "time True: Input should be a valid number"),
    (b'{"client": "a", "time": 1' + b"0" * 400 + b', "text": "x"}', "Input should be a valid number"),
    (b'{"client": "a", "text": "caf\xe9"}', "'utf-8' codec can't decode byte 0xe9"),
    (b"[" * 100_000, ""),
]


@pytest.mark.parametrize(("line", "problem"), BAD, ids=[str(line[:45]) for line, _ in BAD])
def test_a_bad_line_is_an_error_that_names_it_or_is_skipped_and_counted(write, line, problem):
    path = write([*POSTS[:2], b"", line, *POSTS[2:]])
    with pytest.raises(DataError, match=re.escape(f"{path} line 4: ") + ".*" + re.escape(problem)):
        prepare(path)
    assert not (path.parent / "corpus").exists()
    corpus = prepare(path, bad_rows="skip")
    assert corpus.skipped["bad_rows"] == 1
    assert texts(corpus) == texts(prepare(write(POSTS, "good"), "good corpus"))


def test_truncated_gzip_is_an_error_that_names_the_line_or_ends_the_file(write):
    rng = random.Random(0)
    path = write(
        [{"client": "a", "text": f"s{k} {rng.random()} {rng.random()}"} for k in range(2_000)], "posts.jsonl.gz"
    )
    path.write_bytes(path.read_bytes()[:-10_000])
    with pytest.raises(DataError, match=r"posts.jsonl.gz line \d+: .*posts.jsonl.gz is damaged or cut off"):
        prepare(path, max_sentences=5_000)
    corpus = prepare(path, bad_rows="skip", max_sentences=5_000)
    assert corpus.skipped["bad_rows"] == 1
    found = [sentence.split()[0] for sentence in texts(corpus)["a"] if sentence.startswith("s")]
    assert 1_000 < len(found) < 2_000
    assert found == [f"s{k}" for k in range(len(found))]


def test_a_line_without_end_is_refused_without_reading_it_whole(write, monkeypatch):
    monkeypatch.setattr("fedrecon._src.data.posts.LONGEST_LINE", 100)
    path = write([POSTS[0], b'{"client": "a", "text": "' + b"x" * 1000 + b'"}', POSTS[2]])
    with pytest.raises(DataError, match="line 2: longer than 100 bytes"):
        prepare(path)
    assert set(texts(prepare(path, bad_rows="skip"))) == {"a", "b"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"posts.jsonl has no sentences\."),
        (b'{"client": "a", "text": "."', "has no sentences left after leaving out bad rows"),
        (b"7z\xbc\xaf\x27\x1c123", "is a 7z archive: unpack it first"),
    ],
)
def test_files_with_nothing_to_read_are_refused_and_leave_nothing(tmp_path, content, message):
    (tmp_path / "posts.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "posts.jsonl", bad_rows="skip")
    assert [file.name for file in tmp_path.iterdir()] == ["posts.jsonl"]


def test_wrong_arguments_are_refused_before_anything_is_read(write):
    path = write([b"bad"])
    for wrong, message in [
        ({"bad_rows": "ignore"}, "`bad_rows` must be one of 'error', 'skip'"),
        ({"fractions": (0.5, 0.5)}, "`fractions` must have one share for each of train, valid, test"),
        ({"fractions": (0.5, 0.5, 0.5)}, "sum to 1"),
        ({"kept_words": 0}, "`kept_words`"),
        ({"max_sentences": 0}, "`max_sentences`"),
    ]:
        with pytest.raises(ValueError, match=message):
            prepare(path, **wrong)
    with pytest.raises(DataError, match="missing is not a file"):
        prepare_text(path.parent / "missing", path.parent / "corpus")
    with pytest.raises(DataError, match="none of its 2 clients is in train: no words to count"):
        prepare(write(POSTS, "good"), fractions=(0, 0.5, 0.5))


def test_questions_a_corpus_cannot_answer_are_refused(write, tmp_path):
    corpus = prepare(write(POSTS))
    with pytest.raises(ValueError, match=r"`vocab_size` must be .* at least 1 and at most 10"):
        corpus.next_words("train", 11, 1)
    with pytest.raises(DataError, match="no split 'heldout'; it has: train, valid, test"):
        corpus.split("heldout")
    with pytest.raises(ValueError, match="`max_words` must be"):
        corpus.next_words("train", 1, 1, max_words=0)
    with pytest.raises(DataError, match=r"is not a complete corpus: .*corpus\.json is missing"):
        Corpus.open(tmp_path)
    (tmp_path / "corpus" / "begins.npy").write_bytes(b"")
    with pytest.raises(DataError, match="is not a complete corpus"):
        Corpus.open(tmp_path / "corpus")


# ---- memory ----


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text_that_is_prepared(tmp_path):
    def peak(posts):
        path = tmp_path / f"{posts}.jsonl"
        with path.open("w") as file:
            for k in range(posts):
                text = " ".join(f"common{k % 97} unique{k}x{j}{30 * 'z'}" for j in range(12))
                file.write(json.dumps({"client": f"c{k % 50}", "time": k, "text": text}) + "\n")
        tracemalloc.start()
        try:
            corpus = prepare(path, str(posts), words_in_memory=20_000, kept_words=97)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert corpus.clients.num_examples == posts
        assert all(word.startswith("common") for word in corpus.words)
        return most, path.stat().st_size

    (small, _), (large, size) = peak(2_000), peak(8_000)
    assert large < 1.2 * small
    assert large < size / 2


@contextmanager
def few_files(more):
    """Let the process open only a few more files than it has open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/dev/fd")}
    free = (number for number in itertools.count() if number not in used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, more, None)), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_corpus_of_many_batches_needs_few_open_files(write):
    posts = [{"client": f"c{k % 30}", "time": k, "text": f"one two {k}"} for k in range(200)]
    path = write(posts)
    with few_files(50):
        corpus = prepare(path, words_in_memory=3)
    assert content(corpus) == content(prepare(path, "whole"))


def test_an_interrupted_preparation_leaves_nothing(tmp_path):
    def stop_halfway():
        yield Post("a", 0.0, [["x"]])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(stop_halfway(), tmp_path / "corpus", CorpusSettings(words_in_memory=1), "test", {})
    assert list(tmp_path.iterdir()) == []


# ---- synthetic ----


def test_synthetic_text_has_private_words_in_predictable_places():
    corpus = synthetic_text(num_clients=10, sentences=12, shared_words=6, private_words=2, kinds=3)
    assert len(corpus.train) + len(corpus.valid) + len(corpus.test) == 10
    assert corpus.words == ("w0", "w1", "w2", "w3", "w4", "w5", "k0", "k1", "k2")
    follows = {}
    for name, sentences in texts(corpus).items():
        assert len(sentences) == 12
        for sentence in sentences:
            first, second, private, kind, third, fourth = sentence.split()
            start = int(first[1:])
            assert [second, third, fourth] == [f"w{(start + k) % 6}" for k in (1, 2, 3)]
            assert (private, kind[0]) == ("*", "k")
        client = corpus.clients[corpus.clients.index_of(name)]
        for begin in client["begin"]:
            follows.setdefault((name, corpus.tokens[begin + 2]), set()).add(corpus.tokens[begin + 3])
    assert all(len(kinds) == 1 for kinds in follows.values())
    assert len(follows) == len({word for _, word in follows}) > 10
    assert content(synthetic_text(5)) == content(synthetic_text(5)) != content(synthetic_text(5, seed=1))
    with pytest.raises(ValueError, match="`kinds` must be"):
        synthetic_text(kinds=0)


def test_the_words_of_a_corpus_are_those_of_one_persons_text(write):
    text = "The cat sat... It's naïve! www.a.org"
    corpus = prepare(write([{"client": "a", "text": text}]))
    assert texts(corpus)["a"] == [" ".join(sentence) for sentence in split_text(text)]
    columns = fr.data.personal_text(text, corpus.vocabulary(3, 4)).columns
    examples = corpus.next_words("train", 3, 4)[0]
    assert all((columns[name] == examples[name]).all() for name in columns)
