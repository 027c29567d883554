"""What people get from next words: personal ones, next to finetuning whose settings are chosen on validation people."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import fedrecon as fr
from fedrecon._src.core.display import Progress
from fedrecon._src.core.split import Split
from fedrecon._src.recommend.config import TEXT_PAPER, TextConfig
from fedrecon._src.recommend.personal_words import PersonalWords
from fedrecon._src.recommend.tasks import build_algorithm
from fedrecon._src.recommend.tasks.text import build_next_word
from fedrecon._src.recommend.word_evaluation import (
    FROZEN,
    KEYS,
    PERSONAL,
    SENTENCES_AT_ONCE,
    SUGGESTED,
    TOP3,
    CountedWords,
    Models,
    Predict,
    Spelling,
    measure_person,
    model_predictions,
    split_people,
    tally_metrics,
)
from fedrecon.data import Sentences
from studies.study import Block, Result, Results, Section, Table

PEOPLE, CHOOSING = 40, 8  # drawn from the people who test and validate; all if there are fewer
# What is tried for finetuning, from the places in `FIRST` on to neighbours while they are better.
RATES, EPOCHS, EVERY = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0), (1, 2, 5, 10, 20), (1, 2, 4, 8, 16)
FIRST = ((3, 2), (3, 2))
CLIP_NORM = 1.0
RESAMPLES = 2000
ONCE, GOING_ON, OOV = "everything finetuned", "everything finetuned, going on", "the paper's local part"

Columns = Mapping[str, np.ndarray]


class Finetuning(NamedTuple):
    """How everything is finetuned.

    Attributes:
      rate: of SGD on what is known.
      epochs: how often it goes through it, in batches of 16 sentences.
      later_rate: when it goes on, of a step on new sentences.
      every: how many new sentences a step takes.
    """

    rate: float
    epochs: int
    later_rate: float
    every: int


class Finetuner:
    """SGD with clipped gradients on all parameters of a model, or on some, compiled once for all people."""

    def __init__(self, model: fr.Model, vocabulary: int):
        """Compile for a model without local parameters."""
        # Without donation every step copies all tables, which takes longer than the step.
        self._step = jax.jit(functools.partial(_step, model), static_argnames="which", donate_argnums=0)
        self._hits = jax.jit(functools.partial(_count_hits, model, vocabulary))

    def descend(self, params: Any, columns: Columns, rate: float, epochs: int, which: str | None = None) -> Any:
        """Finetune on sentences, or only the parameters named by `which`."""
        params = copy_params(params)
        for _ in range(epochs):
            for block in blocks_of(columns, SENTENCES_AT_ONCE):
                params = self._step(params, block, rate, which=which)
        return params

    def count_hits(self, params: Any, columns: Columns) -> int:
        """Count the words that are among three suggestions."""
        return sum(int(self._hits(params, block)) for block in blocks_of(columns, SENTENCES_AT_ONCE))

    def count_going_on(self, params: Any, columns: Columns, rate: float, every: int) -> int:
        """Count them when every block of sentences is learned after it was predicted."""
        hits, params = 0, copy_params(params)
        for block in blocks_of(columns, every):
            hits += int(self._hits(params, block))
            params = self._step(params, block, rate)
        return hits

    def going_on(self, predict_with: Any, params: Any, rate: float, every: int) -> Predict:
        """Return predictions of a model that learns every block of sentences after it has predicted them."""
        params = copy_params(params)

        def predict(columns: Columns) -> np.ndarray:
            nonlocal params
            probabilities = []
            for block in blocks_of({name: columns[name] for name in INPUTS}, every):
                probabilities.append(predict_with(params)(block))
                params = self._step(params, block, rate)
            return np.concatenate(probabilities)

        return predict


INPUTS = ("word", "oov", "pair", "target")


def copy_params(params: Any) -> Any:
    """Copy parameters that steps may overwrite."""
    return jax.tree.map(jnp.copy, params)


def _step(model: fr.Model, params: Any, batch: Any, rate: Any, which: str | None = None) -> Any:
    lookups: Any = model.lookups  # the column that has the rows of each table

    def loss(params: Any, batch: Any) -> Array:
        values, weights = model.loss(model.predict(params, {}, batch), batch)
        return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1)

    def clipped(gradient: Any) -> Array:
        return rate * jnp.minimum(1.0, CLIP_NORM / optax.tree.norm(gradient))

    if which is not None:
        gradient = jax.grad(lambda part: loss({**params, which: part}, batch))(params[which])
        return {**params, which: params[which] - clipped(gradient) * gradient}
    # Of large tables, only the rows of the batch have a gradient.
    rows = {name: jnp.unique(batch[name], size=batch[name].size, fill_value=-1) for name in set(lookups.values())}
    small = {name: params[name][rows[column]] for name, column in lookups.items()}
    places = {
        name: jnp.searchsorted(jnp.where(ids < 0, jnp.iinfo(jnp.int32).max, ids), batch[name])
        for name, ids in rows.items()
    }
    gradient = jax.grad(loss)({**params, **small}, {**batch, **places})
    scale = clipped(gradient)
    new = {
        name: jax.tree.map(lambda leaf, slope: leaf - scale * slope, params[name], gradient[name])
        for name in params
        if name not in small
    }
    tables = {
        name: params[name].at[rows[column]].add(-scale * gradient[name], mode="drop", wrap_negative_indices=False)
        for name, column in lookups.items()
    }
    return {**new, **tables}


def _count_hits(model: fr.Model, vocabulary: int, params: Any, batch: Any) -> Array:
    target = batch["target"]
    logits = model.predict(params, {}, batch).values()[..., 1 : vocabulary + 1]
    at_target = jnp.take_along_axis(logits, jnp.clip(target - 1, 0, vocabulary - 1)[..., None], -1)
    suggested = jnp.sum(logits > at_target, -1) < SUGGESTED
    return jnp.sum(suggested & (target > 0) & (target <= vocabulary))


def blocks_of(columns: Columns, size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield blocks of sentences, the last one padded."""
    for begin in range(0, len(columns["target"]), size):
        short = max(0, begin + size - len(columns["target"]))
        yield {
            name: np.pad(columns[name][begin : begin + size], [(0, short), (0, 0)])
            for name in INPUTS
            if name in columns
        }


def choose_finetuning(finetuner: Finetuner, params: Any, people: Sequence[tuple[Columns, Columns]]) -> Finetuning:
    """Choose what brings most words among three suggestions on people's query: first once, then from there going on."""

    def count_once(rate: float, epochs: int) -> int:
        descended = (finetuner.descend(params, known, rate, epochs) for known, _ in people)
        return sum(finetuner.count_hits(new, query) for new, (_, query) in zip(descended, people, strict=True))

    once = climb((RATES, EPOCHS), FIRST[0], count_once)
    finetuned = [finetuner.descend(params, known, *once) for known, _ in people]

    def count_later(rate: float, every: int) -> int:
        pairs = zip(finetuned, people, strict=True)
        return sum(finetuner.count_going_on(new, query, rate, every) for new, (_, query) in pairs)

    return Finetuning(*once, *climb((RATES, EVERY), FIRST[1], count_later))


def climb(grid: tuple[Sequence[Any], ...], place: tuple[int, ...], count: Callable[..., int]) -> tuple[Any, ...]:
    """Go from a place in a grid to the best of its neighbours until none of them is better; return what is there."""

    @functools.cache
    def count_at(place: tuple[int, ...]) -> int:
        return count(*(values[k] for values, k in zip(grid, place, strict=True)))

    while True:
        moves = [(axis, k) for axis in range(len(grid)) for k in (place[axis] - 1, place[axis] + 1)]
        near = [(*place[:axis], k, *place[axis + 1 :]) for axis, k in moves if 0 <= k < len(grid[axis])]
        best = max([place, *near], key=count_at)
        if best == place:
            return tuple(values[k] for values, k in zip(grid, place, strict=True))
        place = best


def sample_people(clients: Sentences, number: int, most: int) -> Sentences:
    """Draw people at random, always the same ones, and keep so many of their sentences, the first ones."""
    order = np.sort(np.random.default_rng(0).permutation(len(clients))[:number])
    return clients.take(order).cap(most)


def measure_sample(
    config: TextConfig,
    params: Any,
    parts: tuple[Sentences, Sentences, Sentences],
    few: Sequence[int],
    progress: Progress,
) -> dict[str, Any]:
    """Measure what people get by how many of their sentences are known.

    Args:
      config: how the model was trained.
      params: its parameters.
      parts: the sentences of those who train, in which n-grams are counted, of those on whom finetuning is chosen, and
        of those who are measured.
      few: numbers of known sentences.
      progress: a progress display.
    """
    most, train = max(few), parts[0]
    valid, unseen = (
        sample_people(part, number, 2 * most) for part, number in zip(parts[1:], (CHOOSING, PEOPLE), strict=True)
    )
    impersonal = replace(config.model, local="nothing")
    algorithm = build_algorithm(config, build_next_word(impersonal, unseen.vocabulary))
    finetuner = Finetuner(algorithm.model, len(unseen.vocabulary))

    def predict_with(params: Any) -> Predict:
        return model_predictions(algorithm, params, {})

    counted, anybody, results = CountedWords(train), predict_with(params), {}

    def models_of(chosen: Finetuning, support: Columns, *, all_rows: bool) -> Models:
        once = finetuner.descend(params, support, chosen.rate, chosen.epochs)
        baselines: dict[str, Predict] = {
            ONCE: predict_with(once),
            GOING_ON: finetuner.going_on(predict_with, once, chosen.later_rate, chosen.every),
        }
        if all_rows:
            rate = TEXT_PAPER.reconstruct.learning_rate
            baselines[OOV] = predict_with(finetuner.descend(params, support, rate, 1, which="oov_embedding"))
            baselines |= counted.models()
        return Models(anybody, anybody, baselines)

    for known in few:
        split = fr.split.at_most(known, fr.split.half())
        people = [(support, query) for support, query in split_people(valid, split) if len(query["target"])]
        chosen = choose_finetuning(finetuner, params, people)
        models = functools.partial(models_of, chosen, all_rows=known == most)  # n-grams know nothing of the person
        results[str(known)] = _measure(unseen, split, models, progress) | {"finetuning": chosen._asdict()}
    return results


def _measure(unseen: Sentences, split: Split, models_of: Any, progress: Progress) -> dict[str, Any]:
    spelling, tallies, changes, repeating, known = Spelling(unseen.vocabulary), [], [], 0, []
    with progress("measuring what people get", len(unseen)) as advance:
        for support, query in split_people(unseen, split):
            advance()
            if not len(query["target"]):
                continue
            learning = PersonalWords(unseen.vocabulary)
            tally, change, repeats = measure_person(unseen, support, query, models_of(support), learning, spelling)
            tallies.append(tally)
            changes.append(change)
            known.append(len(support["target"]))
            repeating += repeats
    lost, won = np.array(changes).T
    return {
        "rows": {name: tally_metrics(np.sum([tally[name] for tally in tallies], 0)) for name in tallies[0]},
        "people": len(tallies),
        "repeating_people": repeating,
        "known": float(np.median(known)),
        "worse_off": int(np.sum(lost > won)),
        "clearly_worse_off": int(np.sum(lost - won > 2 * np.sqrt(lost + won))),
        "above": {
            f"{name} over {other}": {
                m: difference(tallies, name, other, row) for m, row in (("top3", TOP3), ("keystrokes", KEYS))
            }
            for name, other in ((PERSONAL, GOING_ON), (PERSONAL, ONCE), (FROZEN, ONCE))
        },
    }


def difference(tallies: Sequence[Mapping[str, np.ndarray]], name: str, other: str, row: int) -> list[float]:
    """Return how much higher a share is than another, over all people, and its 95 % interval by resampling people."""
    sums = np.array([[tally[name][row, 0] - tally[other][row, 0], tally[name][row, 1]] for tally in tallies])
    draws = np.random.default_rng(0).integers(0, len(sums), (RESAMPLES, len(sums)))
    hits, number = np.moveaxis(sums[draws].sum(1), -1, 0)
    low, high = np.quantile(hits / np.maximum(number, 1), [0.025, 0.975])
    return [float(sums[:, 0].sum() / max(sums[:, 1].sum(), 1)), float(low), float(high)]


def personal_section(jobs: Mapping[int, str], title: str) -> Section:
    """Return the section of tables of what people get, one for each vocabulary and amount of known text."""

    def blocks_for(size: int, known: str, results: Sequence[Result]) -> list[Block]:
        people = [result["people"][known] for result in results]
        first, names = people[0], ("top1", "top3", "own_top3", "perplexity", "keystrokes")
        cells = [
            [
                row,
                *(
                    f"{np.mean([p['rows'][row][m] for p in people]) * (1 if m == 'perplexity' else 100):.2f}"
                    for m in names
                ),
            ]
            for row in first["rows"]
        ]
        above = "; ".join(
            f"{pair}: "
            + ", ".join(f"{m} {100 * d:+.2f} [{100 * low:.2f}, {100 * high:.2f}]" for m, (d, low, high) in each.items())
            for pair, each in first["above"].items()
        )
        return [
            f"V = {size:,}, at most {known} known sentences, {first['people']} people ({len(results)} seeds, percent):",
            Table(["", "top 1", "top 3", "own words", "perplexity", "keystrokes saved"], cells),
            f"Differences of the first seed in points, with 95 % intervals by resampling people. {above}. "
            f"Worse off than with nothing personal: {first['worse_off']} people, {first['clearly_worse_off']} of them "
            f"beyond two standard errors. People who repeat whole sentences: {first['repeating_people']}. "
            f"Finetuning as chosen on {CHOOSING} validation people: {first['finetuning']}.",
        ]

    def compose(results: Results) -> list[Block]:
        blocks: list[Block] = []
        for size, job in jobs.items():
            for known in results[job][0]["people"] if job in results else ():
                blocks += blocks_for(size, known, results[job])
        missing = [f"V = {size:,}" for size, job in jobs.items() if job not in results]
        return [*blocks, f"Not run at this scale: {', '.join(missing)}."] if missing else blocks

    return Section(title, tuple(jobs.values()), compose)
