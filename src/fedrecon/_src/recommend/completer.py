"""Complete sentences: next-word suggestions for one person, which learn from everything the person writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.checks import check_number
from fedrecon._src.core.clients import Clients
from fedrecon._src.data import DataError, Vocabulary, personal_text, split_text
from fedrecon._src.data.sentences import prompt_columns
from fedrecon._src.data.sources import is_readable, open_bytes
from fedrecon._src.recommend.evaluation_table import EvaluationTable, evaluate_saved
from fedrecon._src.recommend.personal_words import PersonalWords, Suggestion, expected_counts
from fedrecon._src.recommend.saved_models import SavedModel, open_for
from fedrecon._src.recommend.task import Users
from fedrecon._src.recommend.tasks import TEXT
from fedrecon._src.recommend.word_evaluation import model_predictions, predict_sentences
from fedrecon._src.simulation.personalization import reconstruct
from fedrecon._src.simulation.training import Run


class Completion(NamedTuple):
    """What may come after a prompt.

    Attributes:
      prompt: as given.
      words: the words of it that are used: the last of its last sentence.
      initial: suggestions as for anybody.
      reconstructed: suggestions with what the person's text says about them.
    """

    prompt: str
    words: list[str]
    initial: list[Suggestion]
    reconstructed: list[Suggestion]


class Completions(NamedTuple):
    """Completions for one person.

    Attributes:
      sentences: how many sentences of theirs were learned.
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
        self.saved.save(folder)

    def evaluate(self, clients: Clients | None = None) -> EvaluationTable:
        """Measure the model on clients that took no part in training, next to baselines.

        Args:
          clients: with sentences in the words of the model; by default the test clients that `train_text` set aside.
        """
        if clients is None and self._users is None:
            raise ValueError("`clients` must be given: a model that was loaded has no test clients")
        return evaluate_saved(self.saved, self.algorithm, self._users, clients)

    def person(self, text: str | Sequence[str] = ()) -> PersonalCompleter:
        """Return what serves one person, and learns from what they write.

        Args:
          text: anything the person wrote before.

        Example:
          >>> import fedrecon as fr
          >>> person = fr.recommend.load_completer("runs/words").person("See you at the Zyzzyva.")  # doctest: +SKIP
          >>> person.learn("The Zyzzyva is closed.")  # doctest: +SKIP
          >>> person.suggest("see you at the", n=3)  # doctest: +SKIP
        """
        return PersonalCompleter(self, text if isinstance(text, str) else "\n".join(text))

    def suggest(self, prompt: str, text: str | Sequence[str] = (), n: int = 5) -> list[Suggestion]:
        """Suggest the `n` most probable next words.

        Args:
          prompt: the beginning of a sentence.
          text: anything the person wrote; without it, suggestions are the same for everybody.
          n: how many suggestions.
        """
        return self.person(text).suggest(prompt, n)

    def complete(self, text: str, prompts: Sequence[str], n: int = 5) -> Completions:
        """Learn from a person's text and suggest next words with and without what was learned.

        Args:
          text: anything the person wrote.
          prompts: beginnings of sentences.
          n: how many suggestions for each.

        Raises:
          DataError: there are no words in the text or in a prompt.
        """
        beginnings = [_read_prompt(prompt, self.saved.config.model.max_words) for prompt in prompts]
        anybody, person = self.person(), self.person(text)
        if not person.sentences:
            raise DataError("the text has no words to learn from")
        completions = [
            Completion(prompt, words, anybody.suggest(words, n), person.suggest(words, n))
            for prompt, words in zip(prompts, beginnings, strict=True)
        ]
        return Completions(person.sentences, len(person.words.own), completions)


class PersonalCompleter:
    """A model of the next word for one person, who goes on writing.

    Attributes:
      words: what has been learned about the person.
      sentences: from how many sentences.

    Example:
      >>> import fedrecon as fr
      >>> person = fr.recommend.load_completer("runs/words").person()  # doctest: +SKIP
      >>> person.learn("See you at the Zyzzyva.")  # doctest: +SKIP
      >>> person.suggest("see you at the", prefix="z")  # doctest: +SKIP
    """

    def __init__(self, completer: Completer, text: str):
        """Learn a person's text; embeddings of their own words, if the model has such, are reconstructed from it."""
        self._saved, algorithm = completer.saved, completer.algorithm
        part = self._saved.config.model.local
        self.words, self.sentences = PersonalWords(completer.vocabulary, biased=part == "output_bias"), 0
        local = algorithm.model.init_local(jax.random.key(self._saved.config.seed))
        columns = personal_text(text, completer.vocabulary, self._saved.config.model.max_words).columns
        if part == "oov_embedding" and len(columns["word"]):
            limit = algorithm.method.support_limit or len(columns["word"])
            newest = {name: column[-limit:] for name, column in columns.items()}
            local = reconstruct(algorithm, completer.params, newest, seed=self._saved.config.seed)
        self._predict = model_predictions(algorithm, completer.params, local)
        self.learn(text)

    def learn(self, text: str) -> None:
        """Learn what the person has written.

        Args:
          text: whole sentences.
        """
        vocabulary, max_words = self.words.vocabulary, self._saved.config.model.max_words
        sentences = [words[:max_words] for words in split_text(text)]
        columns = personal_text(text, vocabulary, max_words).columns
        for words, probabilities in zip(sentences, predict_sentences(columns, self._predict), strict=True):
            expected = expected_counts(probabilities, vocabulary.first_oov)
            self.words.learn(words, expected, ended=len(words) < max_words)
        self.sentences += len(sentences)

    def suggest(self, prompt: str | Sequence[str], n: int = 5, *, prefix: str = "") -> list[Suggestion]:
        """Suggest the `n` most probable next words.

        Args:
          prompt: the beginning of a sentence, as text or as words.
          n: how many suggestions.
          prefix: the letters of the next word that are typed already.
        """
        check_number("n", n, least=1)
        max_words = self._saved.config.model.max_words
        words = _read_prompt(prompt, max_words) if isinstance(prompt, str) else prompt
        columns, position = prompt_columns(words, self.words.vocabulary, max_words)
        return self.words.suggest(self._predict(columns)[:, position], words, n, prefix)


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
