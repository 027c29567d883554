"""Next-word suggestions for one person, including the person's own words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedrecon._src.core.model import Model
from fedrecon._src.data.sentences import prompt_columns
from fedrecon._src.data.vocabulary import MAX_WORDS, Vocabulary
from fedrecon._src.simulation.personalization import predict


class Suggestion(NamedTuple):
    """A word that may come next.

    Attributes:
      word: the word.
      probability: that it comes next. The end of the sentence and unknown words have their share too.
      personal: whether it is one of the person's own words, outside the vocabulary.
    """

    word: str
    probability: float
    personal: bool


def suggest(
    model: Model,
    params: Any,
    local: Any,
    prompt: str | Sequence[str],
    vocabulary: Vocabulary,
    *,
    own: Mapping[int, Mapping[str, int]] | None = None,
    n: int = 5,
    max_words: int = MAX_WORDS,
) -> list[Suggestion]:
    """Suggest the `n` most probable next words.

    The model gives a probability to every bucket of words outside the vocabulary. Only the person's own text tells
    which words these are: the bucket's probability is divided among them by how often the person uses each.

    Args:
      model: predicts the next word, as `models.next_word` does.
      params: global parameters.
      local: the person's local parameters.
      prompt: the beginning of a sentence, as text or as words; if it is too long, only its last words are used.
      vocabulary: the model's vocabulary.
      own: by bucket, how often the person uses each of their own words in it, as `data.personal_text` returns them.
      n: how many suggestions; fewer if there are not enough words.
      max_words: the longest sentence that the model was trained on.

    Returns:
      Suggestions, most probable first.
    """
    if n < 1:
        raise ValueError(f"`n` is {n}; it must be at least 1")
    columns, position = prompt_columns(prompt, vocabulary, max_words)
    logits = predict(model, params, local, columns)[0, position].astype(np.float64)
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    known = shares[1 : len(vocabulary) + 1]
    found = [Suggestion(vocabulary.words[k], float(known[k]), False) for k in np.argsort(-known, kind="stable")[:n]]
    for bucket, words in (own or {}).items():
        total, share = sum(words.values()), float(shares[vocabulary.first_oov + bucket])
        found += [Suggestion(word, share * count / total, True) for word, count in words.items()]
    return sorted(found, key=lambda one: (-one.probability, one.word))[:n]
