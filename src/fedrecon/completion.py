"""Next words for one person: what a model suggests after the beginning of a sentence, with that person's own words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedrecon.data.text.sentences import prompt_columns
from fedrecon.data.text.vocabulary import MAX_WORDS, Vocabulary
from fedrecon.model import Model
from fedrecon.personalize import predict


class Suggestion(NamedTuple):
    """A word that may come next.

    Attributes:
      word: the word.
      probability: among everything that may come next, the end of the sentence and unknown words included.
      personal: whether it is a word of the person's own, outside the vocabulary.
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

    The model gives a probability to every bucket of words outside the vocabulary. Which words that may be is known to
    the person alone, from their own text: the probability is shared out among these by how often they use each.

    Args:
      model: predicts the next word, as `models.next_word` does.
      params: global parameters.
      local: the person's local parameters.
      prompt: the beginning of a sentence, as text or as words; its last words count if it is too long.
      vocabulary: of the model.
      own: by bucket, how often the person uses each of their own words in it, as `data.personal_text` finds them.
      n: how many; fewer come back if there are fewer words.
      max_words: of a sentence, as the model was trained.

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
