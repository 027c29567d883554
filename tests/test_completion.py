"""Completion: suggestions by hand, from a model that always says the same."""

import numpy as np
import pytest

from fedrecon._src.core.model import Model
from fedrecon._src.recommend.completer import Suggestion, suggest
from fedrecon.data import Vocabulary, personal_text

VOCABULARY = Vocabulary(("the", "a"), 2)  # ids: 0 padding, 1 the, 2 a, 3 begins, 4 ends, 5 and 6 buckets
SHARES = np.array([0.05, 0.1, 0.2, 0.05, 0.2, 0.3, 0.1])


def saying(shares, seen=None):
    def predict(params, local, batch):
        if seen is not None:
            seen.append({name: np.asarray(column) for name, column in batch.items()})
        logits = np.log(shares) + 7.0
        return np.broadcast_to(logits, (*batch["word"].shape, len(shares)))

    return Model(init_global=lambda key: {}, init_local=lambda key: {}, predict=predict, loss=lambda p, b: (p, p))


def test_a_bucket_is_shared_out_among_the_words_of_the_person():
    own = {0: {"cat": 5, "ox": 1}}
    found = suggest(saying(SHARES), {}, {}, "the", VOCABULARY, personal_words=own, n=10)
    assert [one.word for one in found] == ["cat", "a", "the", "ox"]  # neither marks nor buckets without words
    assert [one.personal for one in found] == [True, False, False, True]
    assert [one.probability for one in found] == pytest.approx([0.25, 0.2, 0.1, 0.05])


def test_of_many_words_the_most_probable_come_back():
    own = {1: {"zebra": 1}, 0: {"cat": 1}}
    assert suggest(saying(SHARES), {}, {}, "", VOCABULARY, personal_words=own, n=1) == [
        Suggestion("cat", pytest.approx(0.3), personal=True)
    ]
    assert suggest(saying(SHARES), {}, {}, "", VOCABULARY, n=1)[0].word == "a"
    with pytest.raises(ValueError, match="`n`"):
        suggest(saying(SHARES), {}, {}, "", VOCABULARY, n=0)


def test_the_place_after_the_prompt_counts():
    shares = np.full((4, 7), 1e-9)
    shares[[0, 1, 2, 3], [1, 2, 5, 6]] = 1.0  # at the beginning the, then a, then the buckets

    def predict(params, local, batch):
        return np.log(shares)[None]

    model = saying(SHARES)._replace(predict=predict)
    own = personal_text("cat zebra", VOCABULARY).words
    assert own == {0: {"cat": 1}, 1: {"zebra": 1}}
    prompts = ("", "the", ["the", "zebra"], "the zebra a")
    first = [suggest(model, {}, {}, prompt, VOCABULARY, personal_words=own, n=1, max_words=4)[0] for prompt in prompts]
    assert [(one.word, one.personal) for one in first] == [
        ("the", False),
        ("a", False),
        ("cat", True),
        ("zebra", True),
    ]


def test_a_long_prompt_is_read_from_its_end():
    seen = []
    suggest(saying(SHARES, seen), {}, {}, "the the a a the", VOCABULARY, max_words=4)
    assert seen[0]["word"].tolist() == [[3, 2, 2, 1]]
