"""Complete sentences: next-word suggestions for one person, including the person's own words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.rounds import as_clients
from fedrecon._src.core.checks import check_number
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.keys import client_keys
from fedrecon._src.core.model import Model
from fedrecon._src.data import DataError, Vocabulary, personal_text, split_text
from fedrecon._src.data.sentences import prompt_columns
from fedrecon._src.data.sources import is_readable, open_bytes
from fedrecon._src.data.vocabulary import MAX_WORDS
from fedrecon._src.recommend.evaluation_table import EvaluationTable, evaluate_saved
from fedrecon._src.recommend.saved_models import SavedModel, open_for, save_model
from fedrecon._src.recommend.task import Users
from fedrecon._src.recommend.tasks import TEXT
from fedrecon._src.simulation.personalization import predict, reconstruct
from fedrecon._src.simulation.training import Run


class Suggestion(NamedTuple):
    """A word that may come next.

    Attributes:
      word: the word.
      probability: that it comes next. The end of the sentence and unknown words have their share too.
      personal: whether it is one of the person's own words, outside the vocabulary.

    Example:
      >>> import fedrecon as fr
      >>> fr.recommend.Suggestion("soon", probability=0.25, personal=False).word
      'soon'
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
    personal_words: Mapping[int, Mapping[str, int]] | None = None,
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
      personal_words: by bucket, how often the person uses each of their own words in it, as `data.personal_text`
        returns them.
      n: how many suggestions; fewer if there are not enough words.
      max_words: the longest sentence that the model was trained on.

    Returns:
      Suggestions, most probable first.

    Example:
      >>> import fedrecon as fr
      >>> fr.recommend.suggest(model, params, local, "see you", vocabulary, n=3)  # doctest: +SKIP
    """
    check_number("n", n, least=1)
    columns, position = prompt_columns(prompt, vocabulary, max_words)
    logits = predict(model, params, local, columns)[0, position].astype(np.float64)
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    in_vocabulary = shares[1 : len(vocabulary) + 1]
    best = np.argsort(-in_vocabulary, kind="stable")[:n]
    suggestions = [Suggestion(vocabulary.words[k], float(in_vocabulary[k]), False) for k in best]
    for bucket, words in (personal_words or {}).items():
        total, share = sum(words.values()), float(shares[vocabulary.first_oov + bucket])
        suggestions += [Suggestion(word, share * count / total, True) for word, count in words.items()]
    return sorted(suggestions, key=lambda s: (-s.probability, s.word))[:n]


class Completion(NamedTuple):
    """What may come after a prompt.

    Attributes:
      prompt: as given.
      words: the words of it that are used: the last of its last sentence.
      initial: suggestions with the local parameters as they start.
      reconstructed: suggestions with those reconstructed from the person's text.
    """

    prompt: str
    words: list[str]
    initial: list[Suggestion]
    reconstructed: list[Suggestion]


class Completions(NamedTuple):
    """Completions for one person.

    Attributes:
      sentences: how many sentences of theirs the local parameters were reconstructed from.
      personal_words: how many words they use that are outside the vocabulary.
      prompts: one completion for each prompt.
    """

    sentences: int
    personal_words: int
    prompts: list[Completion]


class Completer:
    """A trained model of the next word, ready to serve.

    Attributes:
      algorithm: what was trained.
      params: its global parameters.
      vocabulary: the words that it knows.
      run: the history of the training; None for a model that was loaded.

    Example:
      >>> import fedrecon as fr
      >>> completer = fr.recommend.load_completer("runs/words")  # doctest: +SKIP
      >>> completer.suggest("see you", text=["See you at the Zyzzyva."], n=3)  # doctest: +SKIP
    """

    def __init__(self, saved: SavedModel[Vocabulary], users: Users | None = None, run: Run | None = None):
        """Serve with a model; nothing is compiled before it is needed."""
        self.saved, self.vocabulary, self.run = saved, saved.legend, run
        self.algorithm: Algorithm = saved.algorithm
        self.params = saved.params
        self._users = users

    def __repr__(self) -> str:
        """Describe the completer in one line."""
        return f"Completer({len(self.vocabulary):,} words)"

    def save(self, folder: str | Path) -> None:
        """Save the model to a folder, which `fr.recommend.load_completer` reads.

        Args:
          folder: one that does not exist, or holds another model, which is replaced.
        """
        save_model(Path(folder), self.saved.config, self.saved.params, self.saved.legend, self.saved.failed)

    def evaluate(self, clients: Clients | None = None) -> EvaluationTable:
        """Measure the model on clients that took no part in training, next to baselines.

        Args:
          clients: with sentences in the words of the model; by default the test clients that `train_text` set aside.
        """
        if clients is None and self._users is None:
            raise ValueError("`clients` must be given: a model that was loaded has no test clients")
        return evaluate_saved(self.saved, self.algorithm, self._users, clients)

    def suggest(self, prompt: str, text: str | Sequence[str] = (), n: int = 5) -> list[Suggestion]:
        """Suggest the `n` most probable next words.

        Args:
          prompt: the beginning of a sentence.
          text: anything the person wrote, to reconstruct their local parameters from; without it, they are initial.
          n: how many suggestions.
        """
        text = text if isinstance(text, str) else "\n".join(text)
        if split_text(text):
            return self.complete(text, [prompt], n).prompts[0].reconstructed
        local = self.algorithm.model.init_local(jax.random.key(self.saved.config.seed))
        words = _read_prompt(prompt, self.saved.config.model.max_words)
        return self._suggest(words, local, {}, n)

    def complete(self, text: str, prompts: Sequence[str], n: int = 5) -> Completions:
        """Reconstruct a person's local parameters from their text and suggest next words with and without them.

        Args:
          text: anything the person wrote; of a long text, the last sentences are used, as many as reconstruction takes.
          prompts: beginnings of sentences.
          n: how many suggestions for each.

        Raises:
          DataError: there are no words in the text or in a prompt.
        """
        max_words, seed = self.saved.config.model.max_words, self.saved.config.seed
        beginnings = [_read_prompt(prompt, max_words) for prompt in prompts]
        personal = personal_text(text, self.vocabulary, max_words)
        sentences = len(personal.columns["word"])
        if not sentences:
            raise DataError("the text has no words to reconstruct local parameters from")
        limit = min(sentences, self.algorithm.method.support_limit or sentences)
        person = as_clients({name: column[sentences - limit :] for name, column in personal.columns.items()})
        local = jax.tree.map(lambda leaf: leaf[0], reconstruct(self.algorithm, self.params, person, seed=seed))
        key = client_keys(jax.random.key(seed), person.identities())[0]  # as `reconstruct` begins
        initial = self.algorithm.model.init_local(key)
        completions = [
            Completion(
                prompt,
                words,
                self._suggest(words, initial, personal.words, n),
                self._suggest(words, local, personal.words, n),
            )
            for prompt, words in zip(prompts, beginnings, strict=True)
        ]
        return Completions(limit, sum(map(len, personal.words.values())), completions)

    def _suggest(self, words: list[str], local: Any, personal_words: Mapping[Any, Any], n: int) -> list[Suggestion]:
        return suggest(
            self.algorithm.model,
            self.params,
            local,
            words,
            self.vocabulary,
            personal_words=personal_words,
            n=n,
            max_words=self.saved.config.model.max_words,
        )


def load_completer(folder: str | Path) -> Completer:
    """Load a trained model of the next word, ready to serve.

    Args:
      folder: a run of text, or its saved model.

    Raises:
      StorageError: the folder holds no such model, it is damaged, its training failed, or it is of something else.

    Example:
      >>> import fedrecon as fr
      >>> fr.recommend.load_completer("runs/words").suggest("see you")  # doctest: +SKIP
    """
    return Completer(open_for(TEXT, folder))


def _read_prompt(prompt: str, max_words: int) -> list[str]:
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
