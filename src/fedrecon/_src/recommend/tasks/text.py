"""Text: the next word, with local embeddings for the words that only one client uses."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedrecon._src.core.clients import Clients
from fedrecon._src.core.display import Progress, listed_counts
from fedrecon._src.core.model import Model
from fedrecon._src.data import Corpus, Sentences, Vocabulary, load_text, prepare_stackoverflow
from fedrecon._src.data.corpus_writer import KEPT_WORDS
from fedrecon._src.data.posts import choose_preparer
from fedrecon._src.data.sources import DataError, is_stream, open_bytes, private_cache
from fedrecon._src.data.tables import PARQUET
from fedrecon._src.data.vocabulary import PAIR_ROWS
from fedrecon._src.models import next_word
from fedrecon._src.recommend.config import NextWord, Reading, TextConfig, TextData, changed
from fedrecon._src.recommend.recipe import build_reconstruction_algorithm, build_split
from fedrecon._src.recommend.stopping import say_rounds
from fedrecon._src.recommend.task import ACCURACY, Measure, Read, Ready, Task, Users
from fedrecon._src.recommend.word_evaluation import word_baselines

EXAMPLES_FORMAT = "2"  # of what is written to the cache
IN_MEMORY = 4_000_000  # sentences; of more, the examples are written to the cache and mapped from there
MOST_VALID = 1_000  # clients that validate where the data itself only says who trains and who tests
CLIENTS_PER_PLACE, LEAST_COHORT, MOST_COHORT = 100, 8, 16  # few clients in many rounds learn most in the same time
PRIVATE_COHORT = 100  # at most, where noise hides each of them
HELD_OUT = "heldout"  # the split of federated Stack Overflow whose users do not train

# Which settings have a use when a corpus is prepared, by the option of `load_text`.
FILE = {"fractions": "fractions", "seed": "split_seed", "max_sentences": "max_sentences", "bad_rows": "bad_rows"}
DATABASE = {name: name for name in ("max_sentences", "bad_rows", "word_count", "unpack")}


def build_next_word(settings: NextWord, vocabulary: Vocabulary) -> Model:
    """Return the model."""
    return next_word(
        len(vocabulary),
        vocabulary.buckets,
        embedding=settings.embedding,
        hidden=settings.hidden,
        projection=settings.projection,
        local=settings.local,
        pair_rows=PAIR_ROWS if settings.ngrams else 0,
        head=min(settings.head, len(vocabulary)),
        loss_over=settings.loss_over,
    )


def load_corpus(config: TextConfig, progress: Progress) -> Corpus:
    """Open the corpus that settings name, preparing it the first time."""
    data, path = config.data, Path(config.data.source)
    if data.source == "":
        raise DataError("the data source is empty; give a text file or a prepared corpus.")
    database = choose_preparer(path) is prepare_stackoverflow
    used = {} if path.is_dir() else DATABASE if database else FILE
    chosen = changed(data, TextData)
    idle = [f"data.{name}" for name in chosen if name in {*FILE.values(), *DATABASE.values()} - set(used.values())]
    idle = [name for name in idle if name != "data.split_seed"]  # may still decide who validates
    if idle:
        kind = "a prepared corpus" if path.is_dir() else "federated Stack Overflow" if database else "a file of posts"
        raise DataError(f"{', '.join(idle)} cannot be used: {data.source} is {kind}.")
    options: dict[str, Any] = {option: getattr(data, name) for option, name in used.items() if name in chosen}
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
        raise DataError(f"{problem} {advice}", problem.fields) from None


def _is_table(path: Path) -> bool:
    """Tell whether a file begins as tables do: fields between delimiters, or Parquet."""
    if is_stream(path) or not path.is_file():
        return False
    try:
        with open_bytes(path) as stream:
            first = stream.readline(1000)
    except DataError:
        return False
    if first.startswith(PARQUET):
        return True
    other = b"\0" in first or first.lstrip().startswith((b"{", b"[", b"<"))
    return not other and any(mark in first for mark in (b",", b";", b"\t", b"::"))


def divide_corpus(config: TextConfig, corpus: Corpus, progress: Progress) -> Users:
    """Divide the clients and return their sentences as examples."""
    if HELD_OUT in corpus.splits:
        everyone = corpus.train
        held_back = min(MOST_VALID / max(len(everyone), 1), 0.1)
        divided = (
            *everyone.split_clients(1 - held_back, held_back, seed=config.data.split_seed),
            corpus.split(HELD_OUT),
        )
    else:
        divided = (corpus.train, corpus.valid, corpus.test)
    parts = [part.at_least(config.data.min_sentences) for part in divided]
    if not len(parts[0]):
        raise DataError(f"{config.data.source} has no training client with {config.data.min_sentences} sentences.")
    vocabulary = vocabulary_of(config, corpus)
    return Users(
        *(
            _examples(corpus, part, vocabulary, config.model.max_words, progress, spelled=measured)
            for part, measured in zip(parts, (False, True, True), strict=True)
        )
    )


def vocabulary_of(config: TextConfig, corpus: Corpus) -> Vocabulary:
    """Return the vocabulary of so many words as settings ask for, or of all where there are fewer."""
    return corpus.vocabulary(min(config.model.vocabulary, len(corpus.words)), config.model.oov_buckets)


def _examples(
    corpus: Corpus, clients: Clients, vocabulary: Vocabulary, max_words: int, progress: Progress, *, spelled: bool
) -> Sentences:
    """Return examples: in memory, or mapped where there are too many, and then without the spelling of other words."""
    if clients.num_examples <= IN_MEMORY:
        return corpus.in_words_of(vocabulary, clients, max_words, spelled=spelled)
    about = [
        EXAMPLES_FORMAT,
        corpus.fingerprint(),
        clients.fingerprint(),
        *vocabulary.words,
        str(vocabulary.buckets),
        str(max_words),
    ]
    digest = hashlib.blake2b("\n".join(about).encode(), digest_size=8).hexdigest()
    folder = private_cache("examples") / digest
    if folder.is_dir():
        return Sentences.open(folder)
    return corpus.in_words_of(vocabulary, clients, max_words, folder, progress)


def read_corpus(config: TextConfig, vocabulary: Vocabulary, path: Path, reading: Reading, progress: Progress) -> Read:
    """Read the clients of another corpus, all of them, in the words of a model."""
    idle = [f"data.{name}" for name in changed(reading, Reading) if name != "bad_rows"]
    if idle:
        raise DataError(f"{', '.join(idle)} cannot be used: {path} is read as text.")
    options: dict[str, Any] = {}
    if not path.is_dir():
        options["bad_rows"] = reading.bad_rows
        if choose_preparer(path) is not prepare_stackoverflow:
            options["fractions"] = (1.0, 0.0, 0.0)  # everybody counts, so that one client is enough
    corpus = load_text(path, progress=progress, **options)
    return Read(
        _examples(corpus, corpus.clients, vocabulary, config.model.max_words, progress, spelled=True), corpus.skipped
    )


def _read_node(config: TextConfig, vocabulary: Vocabulary, path: Path, reading: Reading, progress: Progress) -> Read:
    read = read_corpus(config, vocabulary, path, reading, progress)
    return read._replace(clients=read.clients.cap(config.data.max_sentences))


def _facts(config: TextConfig, corpus: Corpus) -> dict[str, Any]:
    vocabulary = vocabulary_of(config, corpus)
    return {
        "sentences": corpus.clients.num_examples,
        "words": len(corpus.tokens),
        "vocabulary": len(vocabulary),
        "coverage": round(corpus.coverage(len(vocabulary)), 4),
        **({} if config.data.word_count is None else {"word_count": str(Path(config.data.word_count).resolve())}),
    }


def _describe(vocabulary: Vocabulary) -> dict[str, Any]:
    return {"vocabulary": {"buckets": vocabulary.buckets, "words": list(vocabulary.words)}}


def _recall(description: Mapping[str, Any]) -> Vocabulary:
    words, buckets = description["vocabulary"]["words"], description["vocabulary"]["buckets"]
    if not words or not all(isinstance(word, str) for word in words) or not isinstance(buckets, int):
        raise ValueError("its vocabulary is not a list of words and a number of buckets")
    return Vocabulary(tuple(words), buckets)


def cohort_size(num_clients: int, *, private: bool = False) -> int:
    """Return how many of the training clients take part in a round by default.

    Args:
      num_clients: how many there are.
      private: whether noise hides each of them, which more of them outweigh.
    """
    if private:
        return min(PRIVATE_COHORT, num_clients)
    return min(max(num_clients // CLIENTS_PER_PLACE, LEAST_COHORT), MOST_COHORT, num_clients)


def _prepare(config: TextConfig, corpus: Corpus, users: Users, words: Vocabulary) -> Ready:
    """Choose how many clients a round takes, if settings leave that open, and describe the data."""
    if config.sampling.clients_per_round is None:
        sampling = dataclasses.replace(
            config.sampling, clients_per_round=cohort_size(len(users.train), private=config.privacy.on)
        )
        config = dataclasses.replace(config, sampling=sampling)
    left_out = listed_counts(corpus.skipped)
    data = (
        f"clients: {len(corpus.clients):,}; sentences: {corpus.clients.num_examples:,}; words: {len(corpus.tokens):,}. "
        f"The vocabulary of {len(words):,} covers {100 * corpus.coverage(len(words)):.1f} % of them. "
        f"{f'Left out: {left_out}.' if left_out else 'Nothing was left out.'}"
    )
    model = build_next_word(config.model, words)
    return Ready(config, users, words, model, (data, say_rounds(config, users, "clients")))


def read_words(path: Path, most: int, buckets: int) -> Vocabulary:
    """Read a vocabulary: one word per line, the most used first.

    Args:
      path: the file.
      most: take at most this many words, the first ones.
      buckets: how many buckets hold all other words.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from None
    words = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not words:
        raise DataError(f"{path} lists no words")
    return Vocabulary(tuple(words[:most]), buckets)


def _advice(best: str, config: TextConfig) -> str:
    del best, config
    return (
        "Counting words needs everybody's text in one place. Try more --rounds, a larger "
        "--sampling.clients-per-round, or a smaller --model.vocabulary."
    )


LOSS = Measure("loss", "loss")

TEXT: Task[TextConfig, Corpus, Vocabulary] = Task(
    name="text",
    config=TextConfig,
    people="clients",
    examples="tokens",
    measures=(LOSS, Measure("perplexity", "perplexity", 1), ACCURACY),
    curve=(LOSS, ACCURACY),
    goal=ACCURACY,
    untrained=TextConfig(data=TextData(source="")),
    load=load_corpus,
    legend=vocabulary_of,
    divide=divide_corpus,
    facts=_facts,
    build_model=lambda config, vocabulary: build_next_word(config.model, vocabulary),
    build_algorithm=build_reconstruction_algorithm,
    prepare=_prepare,
    view=lambda config, clients: clients,
    read=read_corpus,
    describe=_describe,
    recall=_recall,
    baselines=lambda config, words, train, measured: word_baselines(
        train, measured, build_split(config.split.evaluate, config.split)
    ),
    advice=_advice,
    serve='complete {run} --text FILE --prompt "..."',
    unit="sentences",
    page_needs_onnx=True,
    start_model=lambda config, vocabulary, zero: (config, build_next_word(config.model, vocabulary)),
    read_node=_read_node,
)
