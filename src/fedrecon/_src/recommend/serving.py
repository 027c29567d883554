"""What a saved model does for people: items for users, next words for whoever writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedrecon._src.algorithms.rounds import as_clients
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.keys import client_keys
from fedrecon._src.data import DataError, Vocabulary, personal_text, split_text
from fedrecon._src.data.sources import is_readable, open_bytes
from fedrecon._src.recommend.completer import Suggestion, suggest
from fedrecon._src.recommend.ranking import Recommendation
from fedrecon._src.recommend.recommender import Recommender
from fedrecon._src.recommend.saved_models import SavedModel
from fedrecon._src.recommend.tasks import Items
from fedrecon._src.simulation.personalization import reconstruct


def recommend_items(
    model: SavedModel[Items], clients: Clients, n: int = 10, least_ratings: int | None = None
) -> list[Recommendation]:
    """Reconstruct every client's local parameters from all its ratings and recommend what it has not rated.

    Args:
      model: a model of ratings.
      clients: as the model sees them: `model.task.view(model.config, clients)` of ratings as they are given.
      n: how many items for each.
      least_ratings: only items with at least this many ratings by training users; by default the model's setting.
    """
    return Recommender(model).recommend_numbers(clients, n, least_ratings)


class Completion(NamedTuple):
    """What may come after a prompt.

    Attributes:
      prompt: as given.
      words: the words of it that are used: the last of its last sentence.
      without: suggestions with the local parameters as they start.
      reconstructed: suggestions with those reconstructed from the person's text.
    """

    prompt: str
    words: list[str]
    without: list[Suggestion]
    reconstructed: list[Suggestion]


class Completions(NamedTuple):
    """Completions for one person.

    Attributes:
      sentences: how many sentences of theirs the local parameters were reconstructed from.
      own_words: how many words they use that are outside the vocabulary.
      prompts: one completion for each prompt.
    """

    sentences: int
    own_words: int
    prompts: list[Completion]


def complete_text(model: SavedModel[Vocabulary], text: str, prompts: Sequence[str], n: int = 5) -> Completions:
    """Reconstruct a person's local parameters from text of theirs and suggest next words with and without them.

    Args:
      model: a model of text.
      text: anything the person wrote; of a long text, the last sentences are used, as many as reconstruction takes.
      prompts: beginnings of sentences.
      n: how many suggestions for each.

    Raises:
      DataError: there are no words in the text or in a prompt.
    """
    algorithm, vocabulary, most = model.algorithm, model.legend, model.config.model.max_words
    beginnings = [_words_of(prompt, most) for prompt in prompts]
    mine = personal_text(text, vocabulary, most)
    sentences = len(mine.columns["word"])
    if not sentences:
        raise DataError("the text has no words to reconstruct local parameters from")
    limit = min(sentences, algorithm.method.support_limit or sentences)
    newest = {name: column[sentences - limit :] for name, column in mine.columns.items()}
    person = as_clients(newest)
    local = jax.tree.map(lambda leaf: leaf[0], reconstruct(algorithm, model.params, person, seed=model.config.seed))
    key = client_keys(jax.random.key(model.config.seed), person.identities())[0]  # as `reconstruct` begins
    fresh = algorithm.model.init_local(key)

    def suggestions(words: list[str], local: Any) -> list[Suggestion]:
        return suggest(algorithm.model, model.params, local, words, vocabulary, own=mine.words, n=n, max_words=most)

    found = [
        Completion(prompt, words, suggestions(words, fresh), suggestions(words, local))
        for prompt, words in zip(prompts, beginnings, strict=True)
    ]
    return Completions(limit, sum(map(len, mine.words.values())), found)


def _words_of(prompt: str, max_words: int) -> list[str]:
    """Return the words of a prompt that a model reads; the mark that begins a sentence takes one place."""
    sentences = split_text(prompt)
    if not sentences:
        raise DataError(f"the prompt {prompt!r} has no words: give the beginning of a sentence")
    return sentences[-1][max(0, len(sentences[-1]) - max_words + 1) :]


def read_text(path: Path) -> str:
    """Read a file of plain text, a pipe, or standard input as "-".

    Raises:
      DataError: it is missing, or is not UTF-8 text.
    """
    if not is_readable(path):
        raise DataError(f"{path} is not a file; expected plain text. Check the path.")
    with open_bytes(path) as stream:
        data = stream.read()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"{path} is not UTF-8 text ({problem.reason} at byte {problem.start})") from None
