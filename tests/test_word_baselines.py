import numpy as np
import pytest

import fedrecon as fr
from fedrecon._src.data.sentences import next_word_columns
from fedrecon._src.recommend.config import TextConfig
from fedrecon._src.recommend.evaluation_table import compare_with_baselines
from fedrecon._src.recommend.word_evaluation import BIGRAMS, MOST_USED, TRIGRAMS, CountedWords, word_baselines
from fedrecon._src.simulation.evaluation import Evaluation
from fedrecon.data import Sentences, Vocabulary

WORDS = Vocabulary(("the", "a", "cat", "dog"), 2)  # most used first; "sat" and all others are outside


def sentences_of(*clients):
    """Clients from lists of sentences."""
    ids = np.stack([WORDS.encode(text.split(), 5) for one in clients for text in one])
    ends = np.cumsum([len(one) for one in clients])
    columns = next_word_columns(ids, len(WORDS), WORDS.buckets) | {"time": np.arange(len(ids), dtype=np.float64)}
    return Sentences(columns, np.append(0, ends[:-1]), ends, words=np.array(WORDS.words), buckets=WORDS.buckets)


TRAIN = sentences_of(["the cat sat", "the cat", "the dog"], ["a dog sat the cat"])


def test_accuracy_is_that_of_counting_by_hand():
    """Support is left out. Query: `the dog`, `a dog`; after `the` comes `cat`, after `a` comes `dog`."""
    found = word_baselines(TRAIN, sentences_of(["a a a", "the dog"], ["a a", "a dog"]), fr.split.half())
    # Targets are the, dog, a, dog. `the` begins most sentences and is used most.
    accuracy = {name: row["accuracy"] for name, row in found.items()}
    assert accuracy == {MOST_USED: 1 / 4, BIGRAMS: 2 / 4, TRIGRAMS: 2 / 4}


def test_ends_and_words_outside_the_vocabulary_are_no_targets():
    found = word_baselines(TRAIN, sentences_of(["sat", "the sat sat"]), fr.split.half())
    assert found[MOST_USED] == {"accuracy": 1.0}  # `the` is the only target


def test_a_word_outside_the_vocabulary_is_followed_by_what_follows_such_words():
    found = word_baselines(TRAIN, sentences_of(["a", "sat the"]), fr.split.half())  # `sat the` was seen in training
    assert found[BIGRAMS]["accuracy"] == 1.0


def test_what_nothing_followed_is_followed_by_the_most_used_word():
    found = word_baselines(TRAIN, sentences_of(["a", "cat the"]), fr.split.half())  # after `cat` there was no word
    assert found[BIGRAMS]["accuracy"] == 1 / 2  # `cat` first, which `the` begins more often, then `the`


@pytest.mark.parametrize("texts", [["sat", "sat"], ["the"]], ids=["no words", "no query"])
def test_there_is_no_baseline_where_there_is_nothing_to_word_baselines(texts):
    assert word_baselines(TRAIN, sentences_of(texts), fr.split.half()) == {}


def test_n_grams_by_hand():
    """`the` came 5 times and was followed by cat three times and by dog once; `<s> the` 3 times, twice by cat.

    Of 15 targets: the 4, a 1, cat 3, dog 2, the end 3, outside 2.
    """
    counted = CountedWords(TRAIN)
    columns = next_word_columns(np.stack([WORDS.encode(["the", "cat"], 5)]), 4, 2)
    cat, total = 3, counted.uses.sum()
    assert counted.uses.tolist() == [0, 4, 1, 3, 2, 0, 3, 2]
    unigram = (3 - 0.7 + 0.7 * 6 / 8) / total
    bigram = (3 - 0.7) / 4 + 0.7 * 2 / 4 * unigram
    trigram = (2 - 0.7) / 3 + 0.7 * 2 / 3 * bigram
    assert counted.predict(columns, 2)[0, 1, cat] == pytest.approx(bigram, rel=1e-5)
    assert counted.predict(columns, 3)[0, 1, cat] == pytest.approx(trigram, rel=1e-5)
    assert counted.predict(columns, 3)[0, :3].sum(1) == pytest.approx([1, 1, 1], rel=1e-5)


@pytest.mark.parametrize(("ours", "loses"), [(0.4, True), (0.5, False)])
def test_a_model_that_is_less_often_right_than_counting_is_told(ours, loses):
    table = {MOST_USED: {"accuracy": 0.25}, BIGRAMS: {"accuracy": 0.5}}
    found = Evaluation("recon", 20, 0, 200, {"accuracy": ours}, {}, {}, {})
    said = compare_with_baselines(found, table, TextConfig())
    assert (said is not None) == loses
    assert not loses or "'counted bigrams' has accuracy 0.5000, the model 0.4000" in said
