import re

import numpy as np
import pytest

from fedrecon._src.data.sentences import FORMAT, next_word_columns, word_hash
from fedrecon._src.storage.atomic import StorageError
from fedrecon._src.storage.manifest import write_manifest
from fedrecon.data import Sentences, Vocabulary, input_ids, personal_text, prompt_columns

# V = 3: ids 1 to 3, 4 begins, 5 ends, 6 and 7 are buckets
SMALL = Vocabulary(("the", "a", "."), 2)
THE, A, DOT, BOS, EOS, OOV = 1, 2, 3, 4, 5, 6
CAT = OOV + word_hash("cat") % 2
NAIVE = OOV + 1  # 920363459 is odd


def test_ids_are_laid_out_as_documented():
    assert (len(SMALL), SMALL.bos, SMALL.eos, SMALL.first_oov, SMALL.num_ids) == (3, BOS, EOS, OOV, 8)
    assert [SMALL.id_of(word) for word in ("the", "a", ".", "cat", "naïve")] == [THE, A, DOT, CAT, NAIVE]
    assert [SMALL.word_of(k) for k in range(8)] == [None, "the", "a", ".", None, None, None, None]
    assert repr(SMALL) == "Vocabulary(3 words, 2 buckets)"


@pytest.mark.parametrize(
    ("sentence", "ids"),
    [
        ("", [BOS, EOS, 0, 0, 0]),
        ("the", [BOS, THE, EOS, 0, 0]),
        ("the naïve .", [BOS, THE, NAIVE, DOT, EOS]),
        ("the naïve a .", [BOS, THE, NAIVE, A, DOT]),
        ("the naïve a the . a", [BOS, THE, NAIVE, A, THE]),
    ],
    ids=["empty", "short", "one below", "exact", "longer"],
)
def test_ids_of_a_sentence_of_up_to_four_words(sentence, ids):
    assert SMALL.encode(sentence.split(), 4).tolist() == ids


@pytest.mark.parametrize(
    ("words", "end"), [(3, [EOS, *[0] * 16]), (19, [EOS]), (20, []), (21, [])], ids=["3", "19", "20", "21"]
)
def test_ids_of_a_sentence_of_up_to_twenty_words(words, end):
    ids = SMALL.encode(["a"] * words)
    assert ids.tolist() == [BOS, *[A] * min(words, 20), *end]
    assert (len(ids), ids.dtype) == (21, np.int32)


def test_columns_keep_local_rows_apart_from_global_ones():
    ids = np.array([[BOS, THE, NAIVE, DOT, EOS], [BOS, OOV, EOS, 0, 0]])
    columns = next_word_columns(ids, 3, 2)
    assert columns["word"].tolist() == [[BOS, THE, 0, DOT], [BOS, 0, EOS, 0]]
    assert columns["oov"].tolist() == [[0, 0, 2, 0], [0, 1, 0, 0]]
    assert columns["target"].tolist() == [[THE, NAIVE, DOT, EOS], [OOV, EOS, 0, 0]]
    assert [columns[name].dtype.name for name in ("word", "oov", "target")] == ["int32", "int16", "int32"]
    assert input_ids(columns, 3).tolist() == ids[:, :-1].tolist()
    assert next_word_columns(ids, 3, 40_000)["oov"].dtype == np.int32


def test_a_vocabulary_survives_a_file(tmp_path):
    vocabulary = Vocabulary(("中文", "naïve", '"', "\\"), 500)
    vocabulary.save(tmp_path / "vocabulary.json")
    assert Vocabulary.load(tmp_path / "vocabulary.json") == vocabulary


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing"),
        ("{", "is not valid JSON"),
        ("[]", "is of format 'not an object'"),
        ('{"format": "other", "version": 1}', "is of format 'other' 1; this version of fedrecon reads"),
        ('{"format": "fedrecon-vocabulary", "version": 2}', "is of format 'fedrecon-vocabulary' 2"),
        ({"words": [1], "buckets": 1}, "`words` must be strings"),
        ({"words": ["a", "a"], "buckets": 1}, "twice"),
        ({"words": ["a"]}, "KeyError"),
    ],
)
def test_files_that_are_no_vocabulary_are_refused(tmp_path, content, message):
    path = tmp_path / "vocabulary.json"
    if isinstance(content, dict):
        write_manifest(path, FORMAT, content)
    elif content is not None:
        path.write_text(content)
    with pytest.raises(StorageError, match=f"{re.escape(str(path))}.*{message}"):
        Vocabulary.load(path)


def test_vocabularies_without_buckets_or_with_a_word_twice_are_refused():
    with pytest.raises(ValueError, match="`buckets` must be a finite number at least 1"):
        Vocabulary(("a",), 0)
    with pytest.raises(ValueError, match="'b' is in the vocabulary twice"):
        Vocabulary(("a", "b", "b"), 1)


def test_one_persons_text_becomes_examples_and_a_list_of_their_own_words():
    text = "The naïve cat. A cat!\nThe naïve NAÏVE one two dog"
    personal = personal_text(text, SMALL, max_words=5)
    ids = [SMALL.encode(s.split(), 5) for s in ("the naïve cat .", "a cat !", "the naïve naïve one two")]
    assert input_ids(personal.columns, 3).tolist() == [row[:-1].tolist() for row in ids]
    assert personal.columns["target"].tolist() == [row[1:].tolist() for row in ids]
    counts = {"naïve": 3, "cat": 2, "!": 1, "one": 1, "two": 1}  # the dog is the sixth word
    for bucket, words in personal.words.items():
        assert words == {word: n for word, n in counts.items() if word_hash(word) % 2 == bucket}
        assert list(words.values()) == sorted(words.values(), reverse=True)
    assert sum(map(len, personal.words.values())) == len(counts)


def test_a_person_without_text_has_no_examples():
    personal = personal_text("  \n", SMALL)
    assert personal.columns["word"].shape == (0, 20)
    assert personal.words == {}


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", [BOS]),
        ("The naïve", [BOS, THE, NAIVE]),
        ("A cat. The naïve", [BOS, THE, NAIVE]),
        ("the a . the naïve", [BOS, DOT, THE, NAIVE]),
    ],
    ids=["nothing", "short", "last sentence", "long"],
)
def test_a_prompt_ends_where_the_next_word_is_asked_for(text, ids):
    columns, position = prompt_columns(text if text != "the a . the naïve" else text.split(), SMALL, max_words=4)
    assert input_ids(columns, 3)[0].tolist() == ids + [0] * (4 - len(ids))
    assert position == len(ids) - 1
    assert "target" not in columns


def test_sentences_know_their_vocabulary_after_views_and_on_disk(tmp_path):
    columns = next_word_columns(np.array([SMALL.encode(["the", "cat"], 4)] * 3), 3, 2)
    sentences = Sentences(columns, [0, 2], [2, 3], words=np.array(SMALL.words), buckets=2)
    sentences.save(tmp_path / "a")
    for same in (sentences, sentences.take([1]), Sentences.open(tmp_path / "a")):
        assert same.vocabulary == SMALL
        assert (same.vocab_size, same.buckets, same.max_words) == (3, 2, 4)
