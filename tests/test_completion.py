"""Personal next words: probabilities by hand, what is learned, and what is suggested."""

import jax
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.recommend.personal_words import PersonalWords, expected_counts
from fedrecon._src.recommend.word_evaluation import (
    KEYS,
    OWN_TOP3,
    PERSONAL,
    TOP1,
    TOP3,
    Models,
    NextWords,
    Spelling,
    measure_people,
    measure_sentence,
    model_predictions,
    predict_sentences,
    tally_metrics,
)
from fedrecon.data import Sentences, Vocabulary, personal_text

VOCABULARY = Vocabulary(("the", "a"), 2)  # ids: 0 padding, 1 the, 2 a, 3 begins, 4 ends, 5 and 6 buckets
SHARES = np.array([[0.0, 0.3, 0.2, 0.0, 0.1, 0.3, 0.1]])


def having(*sentences, biased=True):
    person = PersonalWords(VOCABULARY, biased=biased)
    for sentence in sentences:
        words = sentence.split()
        person.learn(words, expected_counts(np.repeat(SHARES, len(words) + 1, 0), VOCABULARY.first_oov))
    return person


def test_without_anything_learned_the_model_is_as_it_is():
    found = PersonalWords(VOCABULARY).predict(SHARES, [3])
    np.testing.assert_allclose(found.shares, SHARES[:, :5])
    assert found.new == pytest.approx([0.4])


def test_the_bias_by_hand():
    """Of three targets the model expects the .9, a .6, the end .3, others 1.2 times; they came 2, 0, 1, 0 times."""
    person = having("the the")
    found = person.predict(SHARES, [-1])  # a context that was never seen
    weights = np.array([0.3 * 7 / 5.9, 0.2 * 5 / 5.6, 0.1 * 6 / 5.3, 0.4 * 5 / 6.2])
    np.testing.assert_allclose(found.shares[0, [1, 2, 4]], weights[:3] / weights.sum())
    assert found.new == pytest.approx([weights[3] / weights.sum()])


def test_what_the_person_writes_about_now_by_hand():
    """Three targets, then two: the twice, the end twice and a once, of which the last two are two words younger."""
    person = having("the the", "a", biased=False)
    fade = 0.5 ** (2 / 100)
    recent = np.array([2 * fade, 1, fade + 1, 0])  # the, a, the end, others
    usual = np.array([2, 1, 2, 0]) * recent.sum() / 5
    weights = np.array([0.3, 0.2, 0.1, 0.4]) * (recent + 5) / (usual + 5)
    found = person.predict(SHARES, [-1])
    np.testing.assert_allclose(found.shares[0, [1, 2, 4]], weights[:3] / weights.sum())
    assert found.new == pytest.approx([weights[3] / weights.sum()])
    np.testing.assert_allclose(person.freeze().predict(SHARES, [-1]).shares, SHARES[:, :5])


def test_own_words_share_what_is_outside_the_vocabulary():
    person = having("ox ox cat", biased=False)  # cat once, ox twice
    found = person.predict(SHARES, [-1])
    assert list(person.own) == ["ox", "cat"]
    assert found.shares[0, 5:] == pytest.approx([0.4 * 1.3 / 4, 0.4 * 0.3 / 4])
    assert found.shares.sum() + found.new == pytest.approx([1])


def test_n_grams_by_hand():
    """`the` was followed twice by ox and once by a; `<s> the` twice by ox."""
    person = having("the ox", "the ox", "a the a", biased=False).freeze()
    ox = person.id_of("ox")
    outside = 0.4 * (2 - 0.7) / 3
    bigram = ((2 - 0.7) + (200 + 0.7 * 2) * outside) / 203
    trigram = ((2 - 0.7) + (5 + 0.7) * bigram) / 7
    found = person.predict(np.repeat(SHARES, 2, 0), person.inputs(["the"]))
    assert found.shares[1, ox] == pytest.approx(trigram)
    np.testing.assert_allclose(found.shares.sum(1) + found.new, 1)


def test_counts_and_expected_counts_are_what_closed_form_reconstructs():
    model = fr.models.next_word(2, 2, embedding=2, hidden=3, projection=2, local="output_bias")
    steps = fr.gradient_descent(optax.sgd(0.1), batch_size=2)
    algorithm = fr.federated_reconstruction(model, reconstruct=fr.closed_form(), update=steps, server=optax.sgd(1.0))
    params = model.init_global(jax.random.key(1))
    text = "the ox the\na cat\nthe a a a a a a a"
    columns = personal_text(text, VOCABULARY, 5).columns
    local = fr.reconstruct(algorithm, params, columns)
    predict = model_predictions(algorithm, params, model.init_local(jax.random.key(0)))
    person = PersonalWords(VOCABULARY)
    for line, probabilities in zip(text.split("\n"), predict_sentences(columns, predict), strict=True):
        words = line.split()[:5]
        person.learn(words, expected_counts(probabilities, VOCABULARY.first_oov), ended=len(words) < 5)
    np.testing.assert_allclose(person.count, local["count"])
    np.testing.assert_allclose(person.expected, local["expected"], rtol=1e-5)
    biased = np.asarray(jax.nn.softmax(fr.predict(model, params, local, columns)[0, :1]))
    found = person.freeze().predict(np.asarray(predict(columns))[0, :1], [-1])
    np.testing.assert_allclose(found.shares[0, :5], biased[0, :5], rtol=1e-4)


def test_a_word_of_ones_own_is_suggested_after_two_uses_and_by_its_letters_after_one():
    person = having("the zorblax", "the zorblax")
    assert "zorblax" in [found.word for found in person.suggest(SHARES, ["the"], n=5) if found.personal]
    assert [found.word for found in having("the zorblax").suggest(SHARES, ["a"], n=3, prefix="zo")] == ["zorblax"]


def test_equally_probable_words_are_suggested_in_alphabetical_order():
    person = PersonalWords(Vocabulary(("c", "b", "a"), 1))
    shares = np.array([[0, 0.2, 0.2, 0.2, 0, 0.2, 0.2]])
    assert [found.word for found in person.suggest(shares, [], n=2)] == ["a", "b"]


def test_the_last_of_five_suggestions_is_kept_for_a_word_of_ones_own():
    words = Vocabulary(tuple("abcdef"), 1)
    person = PersonalWords(words, biased=False)
    person.learn(["ox"], np.zeros(10))
    shares = np.array([[0, *[0.16] * 6, 0, 0, 0.04]])
    assert [found.word for found in person.suggest(shares, ["a"], n=5)] == ["a", "b", "c", "d", "e"]  # it has .006
    shares = np.array([[0, *[0.15] * 6, 0, 0, 0.1]])
    assert [found.word for found in person.suggest(shares, ["a"], n=5)] == ["a", "b", "c", "d", "ox"]
    assert [found.word for found in person.suggest(shares, ["a"], n=3)] == ["a", "b", "c"]


def test_a_sentence_is_measured_by_hand():
    """Words by use: the, a, then, bat. `bat` is fourth, and first once b is typed; ox is new; then it ends."""
    spelling = Spelling(Vocabulary(("the", "a", "then", "bat"), 1))
    shares = np.repeat([[0, 0.4, 0.2, 0.15, 0.1, 0, 0.05]], 4, 0)
    found, tally = NextWords(shares, np.full(4, 0.1)), np.zeros((5, 2))
    targets = [(1, "the"), (4, "bat"), (-1, "ox"), (6, "")]
    hits = measure_sentence(tally, found, targets, spelling, (), np.ones(4))
    assert hits.tolist() == [True, False, False, False]
    assert tally[TOP1].tolist() == [1, 2]
    assert tally[TOP3].tolist() == [1, 3]
    assert tally[OWN_TOP3].tolist() == [0, 1]
    assert tally[KEYS].tolist() == [3 + 2, 4 + 4 + 3]
    assert tally_metrics(tally)["perplexity"] == pytest.approx(np.exp(-np.log([0.4, 0.1, 0.1, 0.05]).mean()))


def test_learning_goes_on_while_a_person_writes():
    """The support has no word of their own; in the query the second `the ox` is known from the first."""
    texts = ["a a", "a a", "the ox", "the ox"]
    columns = personal_text("\n".join(texts), VOCABULARY, 4).columns
    columns["other"] = (columns["target"] >= VOCABULARY.first_oov).astype(np.int32)
    clients = Sentences(
        columns, np.array([0]), np.array([4]), words=np.array(VOCABULARY.words), buckets=2, other_words=np.array(["ox"])
    )

    def predict(columns):
        return np.broadcast_to(SHARES[0], (*columns["word"].shape, 7))

    found = measure_people(clients, fr.split.half(), lambda support: Models(predict, predict, {"same": predict}))
    assert found.rows[PERSONAL]["own_top3"] == 1 / 2
    assert found.rows["personal_frozen"]["own_top3"] == found.rows["impersonal"]["own_top3"] == 0
    assert found.rows["same"]["top3"] == found.rows["impersonal"]["top3"]
    assert (found.people, found.worse_off, found.repeating) == (1, 0, 0)
    assert found.summary()["worse_off"] == 0
