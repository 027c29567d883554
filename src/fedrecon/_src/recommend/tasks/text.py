"""Text: the next word, with a local output bias, or local embeddings of words outside the vocabulary."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.display import Progress, say_left_out, silent
from fedrecon._src.core.model import Model
from fedrecon._src.data import Corpus, Sentences, Vocabulary, load_text, prepare_stackoverflow
from fedrecon._src.data.corpus_writer import KEPT_WORDS
from fedrecon._src.data.posts import choose_preparer
from fedrecon._src.data.sentences import PAIR_ROWS
from fedrecon._src.data.sources import DataError, is_readable, is_stream, open_bytes, private_cache
from fedrecon._src.data.tables import PARQUET
from fedrecon._src.models import next_word
from fedrecon._src.recommend.config import NextWord, Reading, TextConfig, TextData, change_settings, changed
from fedrecon._src.recommend.recipe import build_reconstruction_algorithm, evaluation_split, server_optimizer
from fedrecon._src.recommend.stopping import say_rounds
from fedrecon._src.recommend.task import (
    ACCURACY,
    Measure,
    Read,
    Ready,
    Table,
    Task,
    Users,
    check_source,
    refuse_settings,
)
from fedrecon._src.recommend.word_evaluation import word_baselines
from fedrecon._src.server import Aggregator

EXAMPLES_FORMAT = "2"  # of what is written to the cache
IN_MEMORY = 4_000_000  # sentences; of more, the examples are written to the cache and mapped from there
MOST_VALID = 1_000  # clients that validate where the data itself only says who trains and who tests
CLIENTS_PER_PLACE, LEAST_COHORT, MOST_COHORT = 100, 8, 16  # few clients in many rounds learn most in the same time
PRIVATE_COHORT = 100  # at most, where noise hides each of them
HELD_OUT = "heldout"  # the split of federated Stack Overflow whose users do not train

# Which settings have a use when a corpus is prepared.
FILE: tuple[str, ...] = ("fractions", "split_seed", "max_sentences", "bad_rows")
DATABASE: tuple[str, ...] = ("max_sentences", "bad_rows", "word_count", "unpack")


def build_next_word(settings: NextWord, vocabulary: Vocabulary) -> Model:
    """Return the model."""
    names = ("embedding", "hidden", "projection", "local", "loss_over")
    options: dict[str, Any] = {name: getattr(settings, name) for name in names}
    pair_rows, head = PAIR_ROWS if settings.ngrams else 0, min(settings.head, len(vocabulary))
    return next_word(len(vocabulary), vocabulary.buckets, pair_rows=pair_rows, head=head, **options)


def _is_table(path: Path) -> bool:
    """Tell whether a file begins as tables do: fields between delimiters, or Parquet."""
    if is_stream(path) or not path.is_file():
        return False
    first = b""
    with contextlib.suppress(DataError), open_bytes(path) as stream:
        first = stream.readline(1000)
    if first.startswith(PARQUET):
        return True
    other = b"\0" in first or first.lstrip().startswith((b"{", b"[", b"<"))
    return not other and any(mark in first for mark in (b",", b";", b"\t", b"::"))


def _examples(
    corpus: Corpus, clients: Clients, vocabulary: Vocabulary, max_words: int, progress: Progress, *, spelled: bool
) -> Sentences:
    """Return examples: in memory, or mapped where there are too many, and then without the spelling of other words."""
    if clients.num_examples <= IN_MEMORY:
        return corpus.in_words_of(vocabulary, clients, max_words, spelled=spelled)
    about = [EXAMPLES_FORMAT, corpus.fingerprint(), clients.fingerprint(), *vocabulary.words]
    about += [str(vocabulary.buckets), str(max_words)]
    folder = private_cache("examples") / hashlib.blake2b("\n".join(about).encode(), digest_size=8).hexdigest()
    if folder.is_dir():
        return Sentences.open(folder)
    return corpus.in_words_of(vocabulary, clients, max_words, folder, progress)


def cohort_size(num_clients: int, *, private: bool = False) -> int:
    """Return how many of the training clients take part in a round by default.

    Args:
      num_clients: how many there are.
      private: whether noise hides each of them, which more of them outweigh.
    """
    if private:
        return min(PRIVATE_COHORT, num_clients)
    return min(max(num_clients // CLIENTS_PER_PLACE, LEAST_COHORT), MOST_COHORT, num_clients)


def read_text(path: Path) -> str:
    """Read a file of plain text, a pipe, or standard input as "-".

    Raises:
      DataError: it is missing, or is not UTF-8 text.
    """
    if not is_readable(path):
        raise DataError(f"{path} is not a file; expected plain text. Check the path.")
    try:
        with open_bytes(path) as stream:
            return stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"{path} is not UTF-8 text ({problem.reason} at byte {problem.start})") from None


def read_words(path: Path, most: int, buckets: int) -> Vocabulary:
    """Read a vocabulary: one word per line, the most used first.

    Args:
      path: the file.
      most: take at most this many words, the first ones.
      buckets: how many buckets hold all other words.
    """
    words = list(dict.fromkeys(line.strip() for line in read_text(path).splitlines() if line.strip()))
    if not words:
        raise DataError(f"{path} lists no words")
    return Vocabulary(tuple(words[:most]), buckets)


LOSS = Measure("loss", "loss")


class _TextTask(Task[TextConfig, Corpus, Vocabulary]):
    """Text: the next word."""

    name, people, examples, unit = "text", "clients", "tokens", "sentences"
    measures = (LOSS, Measure("perplexity", "perplexity", 1), ACCURACY)
    curve = (LOSS, ACCURACY)
    goal = ACCURACY
    serve = 'complete {run} --text FILE --prompt "..."'
    page_needs_onnx = True

    def load(self, config: TextConfig, progress: Progress) -> Corpus:
        """Open the corpus that settings name, preparing it the first time."""
        data, path = config.data, Path(config.data.source)
        check_source(data)
        database = choose_preparer(path) is prepare_stackoverflow
        kind, used = ("federated Stack Overflow", DATABASE) if database else ("a file of posts", FILE)
        if path.is_dir():
            kind, used = "a prepared corpus", ()
        options: dict[str, Any] = {name: getattr(data, name) for name in changed(data, TextData)}
        idle = {*FILE, *DATABASE} - {*used, "split_seed"}  # the seed may still decide who validates
        refuse_settings([name for name in options if name in idle], data.source, kind)
        options = {name.removeprefix("split_"): value for name, value in options.items() if name in used}
        if database:
            options["clients"] = {"test": 0}  # its users are those of the training split
        if config.model.vocabulary > KEPT_WORDS and not path.is_dir():
            options["kept_words"] = config.model.vocabulary
        try:
            return load_text(path, progress=progress, **options)
        except DataError as problem:
            if not _is_table(path):
                raise
            advice = "This looks like a table: for ratings give --task ratings, for clicks --task clicks."
            raise DataError(f"{advice} {problem.message}", problem.fields, **problem.remedies) from None

    def legend(self, config: TextConfig, corpus: Corpus, users: Users | None = None) -> Vocabulary:
        """Return the vocabulary of so many words as settings ask for, or of all where there are fewer."""
        return corpus.vocabulary(min(config.model.vocabulary, len(corpus.words)), config.model.oov_buckets)

    def divide(self, config: TextConfig, corpus: Corpus, progress: Progress) -> Users:
        """Divide the clients and return their sentences as examples."""
        train, test = corpus.train, corpus.split(HELD_OUT if HELD_OUT in corpus.splits else "test")
        if HELD_OUT in corpus.splits:
            share = min(MOST_VALID / max(len(train), 1), 0.1)
            train, valid = train.split_clients(1 - share, share, seed=config.data.split_seed)
        else:
            valid = corpus.valid
        train, valid, test = (part.at_least(config.data.min_sentences) for part in (train, valid, test))
        words, most = self.legend(config, corpus), config.model.max_words
        measured = (_examples(corpus, part, words, most, progress, spelled=True) for part in (valid, test))
        return Users(_examples(corpus, train, words, most, progress, spelled=False), *measured)

    def facts(self, config: TextConfig, corpus: Corpus) -> dict[str, Any]:
        vocabulary, word_count = self.legend(config, corpus), config.data.word_count
        return {
            "sentences": corpus.clients.num_examples,
            "words": len(corpus.tokens),
            "vocabulary": len(vocabulary),
            "coverage": round(corpus.coverage(len(vocabulary)), 4),
            **({} if word_count is None else {"word_count": str(Path(word_count).resolve())}),
        }

    def read(self, config: TextConfig, words: Vocabulary, path: Path, reading: Reading, progress: Progress) -> Read:
        """Read the clients of another corpus, all of them, in the words of a model."""
        refuse_settings([name for name in changed(reading, Reading) if name != "bad_rows"], path, "read as text")
        options: dict[str, Any] = {}
        if not path.is_dir():
            options["bad_rows"] = reading.bad_rows
            if choose_preparer(path) is not prepare_stackoverflow:
                options["fractions"] = (1.0, 0.0, 0.0)  # everybody counts, so that one client is enough
        corpus = load_text(path, progress=progress, **options)
        clients = _examples(corpus, corpus.clients, words, config.model.max_words, progress, spelled=True)
        return Read(clients, corpus.skipped)

    def read_node(
        self, config: TextConfig, words: Vocabulary, path: Path, reading: Reading, progress: Progress
    ) -> Read:
        read = self.read(config, words, path, reading, progress)
        return read._replace(clients=read.clients.cap(config.data.max_sentences))

    def describe(self, words: Vocabulary) -> dict[str, Any]:
        return {"vocabulary": {"buckets": words.buckets, "words": list(words.words)}}

    def recall(self, description: Mapping[str, Any]) -> Vocabulary:
        words, buckets = description["vocabulary"]["words"], description["vocabulary"]["buckets"]
        if not words or not all(isinstance(word, str) for word in words) or not isinstance(buckets, int):
            raise ValueError("its vocabulary is not a list of words and a number of buckets")
        return Vocabulary(tuple(words), buckets)

    def build_model(self, config: TextConfig, words: Vocabulary) -> Model:
        return build_next_word(config.model, words)

    def build_algorithm(self, config: TextConfig, model: Model, examples: float, aggregator: Aggregator) -> Algorithm:
        return build_reconstruction_algorithm(config, model, server_optimizer(config), aggregator)

    def prepare(
        self, config: TextConfig, corpus: Corpus, users: Users, words: Vocabulary, *, progress: Progress = silent
    ) -> Ready:
        """Choose how many clients a round takes, if settings leave that open, and describe the data."""
        if config.sampling.clients_per_round is None:
            size = cohort_size(len(users.train), private=config.privacy.on)
            config = change_settings(config, {"sampling.clients_per_round": size})
        data = (
            f"clients: {len(corpus.clients):,}; sentences: {corpus.clients.num_examples:,}; "
            f"words: {len(corpus.tokens):,}. "
            f"The vocabulary of {len(words):,} covers {100 * corpus.coverage(len(words)):.1f} % of them. "
            f"{say_left_out(corpus.skipped)}"
        )
        model = build_next_word(config.model, words)
        return Ready(config, users, words, model, (data, say_rounds(config, users, "clients")))

    def baselines(self, config: TextConfig, words: Vocabulary, users: Users | None, measured: Sentences) -> Table:
        return {} if users is None else word_baselines(cast(Sentences, users.train), measured, evaluation_split(config))

    def advice(self, best: str, config: TextConfig) -> str:
        return (
            "Counting words needs everybody's text in one place. Try more --rounds, a larger "
            "--sampling.clients-per-round, or a smaller --model.vocabulary."
        )


TEXT: Task[TextConfig, Corpus, Vocabulary] = _TextTask()
