"""Stack Overflow: the federated data set that TensorFlow Federated publishes, and dumps of Stack Exchange sites.

Neither is downloaded: docs/data.md says where to get them.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from fedrecon._src.core.progress import Progress, silent
from fedrecon._src.data.errors import BadRows, DataError
from fedrecon._src.data.text.corpus import Corpus
from fedrecon._src.data.text.federated_sqlite import (
    SPLITS,
    UNREADABLE,
    choose_clients,
    connect,
    read_examples,
    unpacked,
)
from fedrecon._src.data.text.posts_xml import ANSWER, QUESTION, read_posts
from fedrecon._src.data.text.preparation import (
    FRACTIONS,
    KEPT_WORDS,
    MAX_SENTENCES,
    WORDS_IN_MEMORY,
    Plan,
    prepare_corpus,
)
from fedrecon._src.data.text.records import BadRecords

LONGEST_WORD = 10_000  # characters of a line of the word count


def prepare_stackoverflow(
    database: str | Path,
    folder: str | Path,
    *,
    word_count: str | Path | None = None,
    clients: Mapping[str, int] | None = None,
    seed: int = 0,
    kept_words: int = KEPT_WORDS,
    max_sentences: int = MAX_SENTENCES,
    unpack: bool = False,
    words_in_memory: int = WORDS_IN_MEMORY,
    bad_rows: BadRows = "error",
    progress: Progress = silent,
) -> Corpus:
    """Prepare a corpus from federated Stack Overflow, client by client.

    The corpus has the splits of the data set: `train`, `heldout` (other users) and `test` (later sentences of users
    in `train`). A user in both becomes two clients with the same name.

    Args:
      database: `stackoverflow.sqlite`; or `stackoverflow.sqlite.lzma` with `unpack`.
      folder: where the corpus goes; must not exist yet.
      word_count: `stackoverflow.word_count`, whose first words become the vocabulary; None counts the words of
        the training clients that are taken.
      clients: how many clients to draw at random from each split; all from a split that is not named.
      seed: decides which clients are taken.
      kept_words: how many words are kept: the largest possible vocabulary.
      max_sentences: at most this many of a client's sentences are kept, the first in the database.
      unpack: whether a compressed database may be unpacked to a file beside it, which then stays.
      words_in_memory: how many words are in memory at a time.
      bad_rows: "error" refuses examples that cannot be read and names the first; "skip" counts them.
      progress: a progress display.

    Raises:
      DataError: a file is missing or not what it should be.
    """
    bad = BadRecords(bad_rows)
    if unknown := set(clients or {}) - set(SPLITS):
        raise ValueError(f"`clients` names the split {unknown.pop()!r}; there are: {', '.join(SPLITS)}.")
    if min((clients or {"train": 0}).values()) < 0:
        raise ValueError(f"`clients` is {clients}; numbers of clients cannot be negative.")
    words = None if word_count is None else read_word_count(word_count, kept_words)
    plan = Plan(
        splits=SPLITS,
        fractions=None,
        words=words,
        kept_words=kept_words,
        max_sentences=max_sentences,
        words_in_memory=words_in_memory,
    )
    path = unpacked(Path(database), unpack, progress)
    with closing(connect(path)) as connection:
        try:
            chosen = choose_clients(connection, path, clients or {}, seed)
            posts = read_examples(connection, path, chosen, max_sentences, bad, progress)
            return prepare_corpus(posts, folder, plan, str(database), bad.skipped, progress)
        except UNREADABLE as problem:
            raise DataError(f"{path} cannot be read as federated Stack Overflow: {problem}.") from problem


def prepare_posts(
    path: str | Path,
    folder: str | Path,
    *,
    types: Collection[int] = (QUESTION, ANSWER),
    fractions: Sequence[float] = FRACTIONS,
    seed: int = 0,
    kept_words: int = KEPT_WORDS,
    max_sentences: int = MAX_SENTENCES,
    words_in_memory: int = WORDS_IN_MEMORY,
    bad_rows: BadRows = "error",
    progress: Progress = silent,
) -> Corpus:
    """Prepare a corpus from the `Posts.xml` of a Stack Exchange dump, with owners as clients.

    A post's text is its title, if it has one, and its body without HTML; blocks of code are left out. Posts without an
    owner are left out and counted.

    Args:
      path: the file, plain or gzip.
      folder: where the corpus goes; must not exist yet.
      types: which posts, by PostTypeId: 1 for questions, 2 for answers.
      fractions: the share of clients for training, validation and test.
      seed: decides which client goes to which split.
      kept_words: how many of the most used words of training clients are kept: the largest possible vocabulary.
      max_sentences: at most this many of a client's sentences are kept, the first in the file.
      words_in_memory: how many words are in memory at a time.
      bad_rows: "error" refuses lines that cannot be read and names the first; "skip" counts them.
      progress: a progress display.

    Raises:
      DataError: the file is missing, has no sentences, or is malformed; the message names the line.
    """
    bad = BadRecords(bad_rows)
    plan = Plan(
        fractions=fractions,
        seed=seed,
        kept_words=kept_words,
        max_sentences=max_sentences,
        words_in_memory=words_in_memory,
    )
    posts = read_posts(path, types, bad, progress)
    return prepare_corpus(posts, folder, plan, str(path), bad.skipped, progress)


def read_word_count(path: str | Path, most: int = KEPT_WORDS) -> list[str]:
    """Return the first words of `stackoverflow.word_count`: lines of a word and its count, most used first.

    Raises:
      DataError: the file is missing or has other lines.
    """
    words: dict[str, None] = {}
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_WORD), ""), 1):
                fields = line.split()
                if len(fields) != 2 or not fields[1].isdigit():
                    raise DataError(f"{path} line {number}: {line[:50]!r} is not a word and its count.")
                if fields[0] in words:
                    raise DataError(f"{path} line {number}: {fields[0]!r} is listed twice.")
                words[fields[0]] = None
                if len(words) == most:
                    break
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"cannot read {path}: {problem}. Expected stackoverflow.word_count, unpacked.") from problem
    if not words:
        raise DataError(f"{path} is empty; expected a word and its count on each line.")
    return list(words)
