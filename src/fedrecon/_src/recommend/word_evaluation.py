"""What people get from a model of the next word, personal or not, next to n-grams that are counted."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.clients import rows_of
from fedrecon._src.core.cohort import Needs, Packer
from fedrecon._src.core.display import Progress, lay_out, silent
from fedrecon._src.core.split import Split
from fedrecon._src.data import Sentences, Vocabulary, input_ids
from fedrecon._src.recommend.personal_words import DISCOUNT, NextWords, PersonalWords, expected_counts
from fedrecon._src.recommend.task import Measure, metric_cells

SUGGESTED, TYPED = 3, 2  # how many suggestions people see, and after how many letters at most
SENTENCES_AT_ONCE = 16
MOST_SENTENCES = 2**18  # of the training clients that n-grams are counted in: more hardly change what is counted
REPEATED, LEAST_REPEATED = 0.25, 4  # share of query sentences, and words of a sentence that counts as repeated
MOST_USED, BIGRAMS, TRIGRAMS = "most used word", "counted bigrams", "counted trigrams"
IMPERSONAL, FROZEN, PERSONAL = "impersonal", "personal_frozen", "personal"
MEASURES = (
    *(Measure(*names, 2, percent=True) for names in (("top1", "top 1"), ("top3", "top 3"), ("own_top3", "own words"))),
    Measure("perplexity", "perplexity", 1),
    Measure("keystrokes", "keystrokes saved", 2, percent=True),
)

Columns = Mapping[str, np.ndarray]  # of sentences
Predict = Callable[[Columns], np.ndarray]  # returns probabilities of (sentences, L, outputs), buckets last


# ---- what is measured of a sentence ----


# Rows of a tally, which has sums over the words of one person or of several, and what they are divided by:
# - TOP1: hits of the most probable output where words of the vocabulary come next, and the number of these.
# - TOP3, OWN_TOP3: words among three suggestions, and the number of words; of all words, and of those outside.
# - KEYS: characters that need not be typed, and the number of all.
# - LOSS: negative logarithms of probabilities, all words outside the vocabulary as one, and their number.
TOP1, TOP3, OWN_TOP3, KEYS, LOSS = range(5)


def tally_metrics(tally: np.ndarray) -> dict[str, float]:
    """Return the shares, and the perplexity; NaN of no words."""
    with np.errstate(invalid="ignore"):
        *shares, loss = (tally[:, 0] / tally[:, 1]).tolist()
    metrics = dict(zip(("top1", "top3", "own_top3", "keystrokes"), shares, strict=True))
    return metrics | {"perplexity": float(np.exp(min(loss, 700.0)))}


class Spelling:
    """The words of a vocabulary in alphabetical order, where those with the same first letters are neighbours."""

    def __init__(self, vocabulary: Vocabulary):
        """Sort the words."""
        words = np.array(vocabulary.words, str)
        order = np.argsort(words, kind="stable")
        self.ids = order + 1  # by alphabetical order
        self._sorted = words[order]

    def range(self, letters: str) -> tuple[int, int]:
        """Return where the words with these first letters begin and end."""
        last = letters + chr(sys.maxunicode)
        return int(np.searchsorted(self._sorted, letters)), int(np.searchsorted(self._sorted, last, "right"))


# What came next: its id for this person (-1 for a new word), its spelling (empty at the end of a sentence).
Target = tuple[int, str]


def measure_sentence(
    tally: np.ndarray,
    predicted: NextWords,
    targets: Sequence[Target],
    spelling: Spelling,
    own_words: Sequence[str],
    bucket: np.ndarray,
) -> np.ndarray:
    """Add one sentence to a tally.

    Args:
      tally: is changed.
      predicted: the probabilities at its positions.
      targets: what came next at each.
      spelling: of the vocabulary.
      own_words: the person's own words, in the order of their ids.
      bucket: `(positions,)` the share of the most probable bucket in that of all; it competes for the first place, as
        in the paper. 0 to leave words outside the vocabulary out.

    Returns:
      Which targets are among three suggestions.
    """
    words = len(spelling.ids)
    first_own = words + 3
    hits = np.zeros(len(targets), bool)
    for t, (number, word) in enumerate(targets):
        shares = predicted.shares[t]
        share = shares[number] if number >= 0 else 0.0
        outside = not 0 <= number < first_own
        mass = shares[first_own:].sum() + predicted.new[t] if outside else share
        tally[LOSS] += -np.log(max(mass, 1e-12)), 1
        if not word:
            continue  # the end of a sentence is not suggested
        if not outside:
            tally[TOP1] += share >= max(shares[1:].max(), predicted.new[t] * bucket[t]), 1
        needed = len(word)
        for typed in range(min(TYPED, len(word) - 1) + 1 if number >= 0 else 0):
            candidates = shares[spelling.ids[slice(*spelling.range(word[:typed]))]] if typed else shares[1 : words + 1]
            better = np.count_nonzero(candidates > share)
            better += sum(
                own_words[k].startswith(word[:typed]) for k in np.flatnonzero(shares[first_own:] > share).tolist()
            )
            if better < SUGGESTED:
                hits[t], needed = typed == 0, typed
                break
        tally[TOP3] += hits[t], 1
        if outside:
            tally[OWN_TOP3] += hits[t], 1
        tally[KEYS] += len(word) - needed, len(word) + 1
    return hits


# ---- people ----


@dataclasses.dataclass(frozen=True)
class PersonalResults:
    """What people get from a model of the next word.

    Attributes:
      rows: `{"impersonal", "personal_frozen", "personal", "counted bigrams", ...: metrics}`, over all people.
        "personal" goes on learning while the person writes; "personal_frozen" has learned their support.
      worse_off: the share of people with fewer hits among three suggestions when these are personal.
      clearly_worse_off: the share of people for whom that is beyond two standard errors.
      people: how many were measured.
      repeating: how many of them repeat whole sentences: a quarter of their query is in their support.

    Example:
      >>> import fedrecon as fr
      >>> fr.recommend.load_completer("runs/words").evaluate().personal  # doctest: +SKIP
    """

    rows: Mapping[str, Mapping[str, float]]
    worse_off: float
    clearly_worse_off: float
    people: int
    repeating: int

    def summary(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            **{name: dict(row) for name, row in self.rows.items()},
            "worse_off": self.worse_off,
            "clearly_worse_off": self.clearly_worse_off,
            "repeating_people": self.repeating,
        }

    def __str__(self) -> str:
        """Lay the table out as text."""
        titles = {IMPERSONAL: "nothing personal", FROZEN: "personal, frozen", PERSONAL: "personal, still learning"}
        rows = {titles.get(name, name): row for name, row in self.rows.items()}
        lines = lay_out(metric_cells(MEASURES, rows, "what people get"), right=True)
        lines.append(
            f"worse off with personal suggestions: {self.worse_off:.0%} of {self.people} people, "
            f"{self.clearly_worse_off:.0%} beyond two standard errors"
        )
        if self.repeating:
            lines.append(f"people who repeat whole sentences, which makes their figures high: {self.repeating}")
        return "\n".join(lines)


def _read_words(clients: Sentences, columns: Columns, k: int) -> tuple[list[str], bool]:
    """Return the words of a sentence, and whether it ends."""
    vocabulary, target = clients.vocabulary, columns["target"][k]
    ids = target[target > 0].tolist()
    ended = bool(ids) and ids[-1] == vocabulary.eos
    words = [
        vocabulary.words[number - 1]
        if number < vocabulary.first_oov
        else str(clients.other_words[index - 1]) or f"#{index}"  # whose spelling is not known
        for number, index in zip(ids[: len(ids) - ended], columns["other"][k].tolist(), strict=False)
    ]
    return words, ended


def predict_sentences(columns: Columns, predict: Predict) -> Iterator[np.ndarray]:
    """Yield the probabilities at the positions of each sentence that have a target, some sentences at a time.

    Args:
      columns: of sentences.
      predict: what predicts.
    """
    for begin in range(0, len(columns["target"]), SENTENCES_AT_ONCE):
        block = {name: column[begin : begin + SENTENCES_AT_ONCE] for name, column in columns.items()}
        short = SENTENCES_AT_ONCE - len(block["target"])
        padded = {name: np.pad(column, [(0, short), (0, 0)]) for name, column in block.items()}
        for probabilities, target in zip(predict(padded), block["target"], strict=False):
            yield probabilities[: np.count_nonzero(target)]


class Models(NamedTuple):
    """What predicts for one person.

    Attributes:
      anybody: the model as it serves anybody.
      personal: the model that personal words build on.
      baselines: other models to compare with, by name; personal words are not added to them.
    """

    anybody: Predict
    personal: Predict
    baselines: Mapping[str, Predict]


def measure_people(
    clients: Sentences,
    split: Split,
    models_of: Callable[[Columns], Models],
    *,
    biased: bool = True,
    progress: Progress = silent,
) -> PersonalResults:
    """Measure what people get who took no part in training.

    Args:
      clients: the people, with the spelling of words outside the vocabulary.
      split: how their sentences become support, which is known, and query.
      models_of: `(columns of a person's support) -> what predicts for them`.
      biased: whether what is personal includes an output bias.
      progress: a progress display.
    """
    spelling = Spelling(clients.vocabulary)
    totals: dict[str, Any] = {}
    worse = clearly = people = repeating = 0
    with progress("measuring what people get", len(clients)) as advance:
        for support, query in split_people(clients, split):
            advance()
            if not len(query["target"]):
                continue
            learning = PersonalWords(clients.vocabulary, biased=biased)
            tallies, (lost, won), is_repeating = measure_person(
                clients, support, query, models_of(support), learning, spelling
            )
            totals = {name: totals.get(name, 0) + tally for name, tally in tallies.items()}
            people, worse = people + 1, worse + (lost > won)
            clearly += lost - won > 2 * (lost + won) ** 0.5
            repeating += is_repeating
    rows = {name: tally_metrics(tally) for name, tally in totals.items()}
    return PersonalResults(rows, worse / max(people, 1), clearly / max(people, 1), people, repeating)


def split_people(clients: Sentences, split: Split) -> Iterator[list[Columns]]:
    """Yield the columns of each client's support and query."""
    columns = [name for name in ("word", "oov", "pair", "target", "other") if name in clients.columns]
    for begin, end in zip(clients.starts.tolist(), clients.ends.tolist(), strict=True):
        alone = dataclasses.replace(clients, starts=np.array([begin]), ends=np.array([end]), names=None)
        cohort = Packer(alone, Needs(split, columns=[*columns])).pack(np.arange(1))
        yield [
            {name: np.asarray(column)[0, : int(part.count[0])] for name, column in part.columns.items()}
            for part in (cohort.support, cohort.query)
        ]


def measure_person(
    clients: Sentences, support: Columns, query: Columns, models: Models, learning: PersonalWords, spelling: Spelling
) -> tuple[dict[str, np.ndarray], tuple[int, int], bool]:
    """Return the person's sums, how many hits personal suggestions lost and won, and whether they repeat sentences."""
    nobody, support_sentences = PersonalWords(clients.vocabulary), set()
    first_oov = clients.vocabulary.first_oov
    for k, probabilities in enumerate(predict_sentences(support, models.personal)):
        words, ended = _read_words(clients, support, k)
        learning.learn(words, expected_counts(probabilities, first_oov), ended=ended)
        support_sentences.add(tuple(words))
    frozen = learning.freeze()
    tallies = {name: np.zeros((5, 2)) for name in (IMPERSONAL, FROZEN, PERSONAL, *models.baselines)}
    lost = won = repeated = 0
    baseline_rows = [predict_sentences(query, model) for model in models.baselines.values()]
    base = None if models.anybody is models.personal else predict_sentences(query, models.personal)
    for k, probabilities in enumerate(predict_sentences(query, models.anybody)):
        personal = probabilities if base is None else next(base)
        words, ended = _read_words(clients, query, k)
        repeated += len(words) >= LEAST_REPEATED and tuple(words) in support_sentences
        hits = {}
        for name, person, rows in (
            (IMPERSONAL, nobody, probabilities),
            (FROZEN, frozen, personal),
            (PERSONAL, learning, personal),
        ):
            predicted = person.predict(rows, person.inputs(words)[: len(rows)])
            targets, bucket = _targets(person, words, ended), _largest_bucket(rows, first_oov)
            hits[name] = measure_sentence(tallies[name], predicted, targets, spelling, [*person.own], bucket)
        lost += int(np.count_nonzero(hits[IMPERSONAL] & ~hits[PERSONAL]))
        won += int(np.count_nonzero(hits[PERSONAL] & ~hits[IMPERSONAL]))
        learning.learn(words, expected_counts(personal, first_oov), ended=ended)
        for name, sentences in zip(models.baselines, baseline_rows, strict=True):
            shares = next(sentences)
            predicted = NextWords(shares[:, :first_oov], shares[:, first_oov:].sum(1))
            # Counted n-grams guess only words: all words outside the vocabulary together would often come first.
            bucket = np.zeros(len(shares)) if name in (BIGRAMS, TRIGRAMS) else _largest_bucket(shares, first_oov)
            measure_sentence(tallies[name], predicted, _targets(nobody, words, ended), spelling, (), bucket)
    return tallies, (lost, won), repeated >= REPEATED * len(query["target"])


def _largest_bucket(probabilities: np.ndarray, first_oov: int) -> np.ndarray:
    """Return the share of the most probable bucket in that of all."""
    buckets = probabilities[:, first_oov:]
    return buckets.max(1) / np.maximum(buckets.sum(1), 1e-30)


def _targets(person: PersonalWords, words: Sequence[str], ended: bool) -> list[Target]:
    end = [(person.vocabulary.eos, "")] if ended else []
    return [*((person.id_of(word), word) for word in words), *end]


def model_predictions(algorithm: Algorithm, params: Any, local: Any) -> Predict:
    """Return the probabilities of a model with these local parameters, compiled once for all people.

    Args:
      algorithm: its model predicts.
      params: global parameters.
      local: local parameters.
    """
    compiled = _compile(algorithm)
    return lambda columns: np.asarray(
        compiled(params, local, {name: columns[name] for name in ("word", "oov", "pair")})
    )


@functools.lru_cache(maxsize=2)
def _compile(algorithm: Algorithm) -> Callable[..., Any]:
    predict = algorithm.model.predict
    return jax.jit(lambda params, local, columns: jax.nn.softmax(predict(params, local, columns).values()))


# ---- n-grams of the training clients ----


class CountedWords:
    """Counted n-grams of training clients with absolute discounting: what a model must beat."""

    def __init__(self, train: Sentences):
        """Count."""
        rows = rows_of(train.starts, train.ends)[:MOST_SENTENCES]
        columns = {name: train.columns[name][rows] for name in ("word", "oov", "target")}
        self._vocab_size = train.vocab_size
        self._ids = train.vocab_size + 4  # all words outside the vocabulary are one
        contexts, target = self._contexts(columns)
        real = target > 0
        self.uses = np.bincount(target[real], minlength=self._ids)
        self._followers = [_Followers(context[real], target[real], self._ids) for context in contexts]
        total, kinds = max(1, self.uses.sum()), np.count_nonzero(self.uses)
        self._unigrams = (np.maximum(self.uses - DISCOUNT, 0) + DISCOUNT * kinds / self._ids + 1e-9) / (total + 1e-9)

    def _contexts(self, columns: Columns) -> tuple[list[np.ndarray], np.ndarray]:
        """Return numbers for the last word and the last two, and the next word, of (sentences, L)."""
        last = np.minimum(input_ids(columns, self._vocab_size), self._ids - 1).astype(np.int64)
        before = np.pad(last[:, :-1], [(0, 0), (1, 0)])
        return [last, before * self._ids + last], np.minimum(columns["target"], self._ids - 1)

    def models(self) -> dict[str, Predict]:
        """Return what predicts by bigrams and by trigrams, by name."""
        return {name: functools.partial(self.predict, order=order) for name, order in ((BIGRAMS, 2), (TRIGRAMS, 3))}

    def predict(self, columns: Columns, order: int) -> np.ndarray:
        """Return probabilities of (sentences, L, ids), words outside the vocabulary last.

        Args:
          columns: of sentences.
          order: 2 for bigrams, 3 for trigrams.
        """
        contexts, target = self._contexts(columns)
        shares = np.broadcast_to(self._unigrams.astype(np.float32), (*target.shape, self._ids)).copy()
        for k, t in np.argwhere(target > 0).tolist():
            for followers, context in zip(self._followers[: order - 1], contexts, strict=False):
                followers.mix(shares[k, t], int(context[k, t]))
        return shares


class _Followers:
    """How often each word followed each context, contexts in order."""

    def __init__(self, context: np.ndarray, target: np.ndarray, ids: int):
        pairs, self._counts = np.unique(context * ids + target, return_counts=True)
        self._contexts, self._targets = np.divmod(pairs, ids)

    def mix(self, shares: np.ndarray, context: int) -> None:
        """Mix what followed this context into the probabilities of a shorter one."""
        rows = slice(*np.searchsorted(self._contexts, [context, context + 1]))
        counts, total = self._counts[rows], self._counts[rows].sum()
        if total:
            shares *= DISCOUNT * len(counts) / total
            shares[self._targets[rows]] += (counts - DISCOUNT) / total


def word_baselines(train: Sentences, measured: Sentences, split: Split) -> dict[str, dict[str, float]]:
    """Count words of training clients, and return how often they tell the next word of other clients' query sentences.

    Args:
      train: who words are counted of.
      measured: who they are measured on.
      split: how sentences become support and query.

    Returns:
      The accuracy of each baseline, which guesses only words, over targets that are words of the vocabulary; nothing if
      there are none.
    """
    counted, words = CountedWords(train), train.vocab_size
    hits, number = np.zeros(3, int), 0
    most_used = 1 + int(np.argmax(counted.uses[1 : words + 1]))
    for _, query in split_people(measured, split):
        for begin in range(0, len(query["target"]), SENTENCES_AT_ONCE):
            columns = {name: column[begin : begin + SENTENCES_AT_ONCE] for name, column in query.items()}
            in_vocabulary = (columns["target"] > 0) & (columns["target"] <= words)
            target = columns["target"][in_vocabulary]
            best = [1 + counted.predict(columns, order)[in_vocabulary][:, 1 : words + 1].argmax(1) for order in (2, 3)]
            hits += [np.count_nonzero(guess == target) for guess in (most_used, *best)]
            number += len(target)
    if not number or not counted.uses[1 : words + 1].any():
        return {}
    names = (MOST_USED, BIGRAMS, TRIGRAMS)
    return {name: {"accuracy": hit / number} for name, hit in zip(names, hits.tolist(), strict=True)}
