"""From a saved model to a bundle for devices: what its ids stand for, the solver's settings, the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.federated_ials import BLEND_AFTER
from fedrecon._src.core.checks import MOST_INT, check_number
from fedrecon._src.core.pytrees import flatten
from fedrecon._src.core.upload import DELTA
from fedrecon._src.data import Vocabulary, personal_text, unique_labels
from fedrecon._src.data.sentences import prompt_columns
from fedrecon._src.device.bundle_writer import MOST_EXAMPLES, bundle
from fedrecon._src.device.export import Legend, Quantisation, made_up_ratings, of_counts, of_weighed
from fedrecon._src.device.update_graph import DevicePlan
from fedrecon._src.device.web_page import check_vendor, page_files
from fedrecon._src.privacy.accounting import Release, noise_for
from fedrecon._src.recommend.protection import fixed_scales
from fedrecon._src.recommend.rating_model import constant_parameters
from fedrecon._src.recommend.recipe import build_weights
from fedrecon._src.recommend.saved_models import SavedModel
from fedrecon._src.recommend.tasks import Items
from fedrecon._src.recommend.tasks.clicks import click_weight
from fedrecon._src.server.aggregator import Aggregator
from fedrecon._src.server.fixed_point import ClientNoise, secure
from fedrecon_device.bundle import ITEMS, WORDS

MOST_ROOM = 10**5  # examples of one person: graphs have room for this many, and are tested with them


class DeviceTraining(NamedTuple):
    """How devices train a saved model.

    Attributes:
      plan: what they agree to; with a helper, sums are made by two servers, else the coordinator sees every report.
      clip_norm: with a helper: the largest norm of what a device adds.
      bits: with a helper: 20, 24 or 32; fewer make reports smaller and rounding coarser.
      most: with a helper: the most reports of a sum.
      epsilon: with a helper: what all rounds together may give away; devices then add noise, so that nobody sees a sum
        without it. No sampling is claimed: a device may be in every round.
      noise_multiplier: noise in the sum, in units of the clipping norm, instead of what epsilon needs.
      per_round: with noise: how many reports a round has; the sum is divided by this. None for the plan's least.
    """

    plan: DevicePlan = DevicePlan()
    clip_norm: float = 5.0
    bits: int = 32
    most: int = 1000
    epsilon: float | None = None
    noise_multiplier: float | None = None
    per_round: int | None = None

    def algorithm(self, saved: SavedModel[Any], examples: int) -> Algorithm:
        """Return what is trained.

        Args:
          saved: the model.
          examples: how many of a person's examples a device uses at most.
        """
        if self.plan.helper is None:
            return saved.trainable(self.plan.rounds)
        multiplier = self.noise_multiplier if self.epsilon is None else self._noise_for(self.epsilon, saved)
        if multiplier is not None:
            return saved.trainable(self.plan.rounds, self._noised(saved, multiplier))
        weigh = build_weights(saved.config, saved.algorithm.model)
        tokens = examples * getattr(saved.config.model, "max_words", 1)
        # A higher limit of metrics would round small losses to nothing.
        aggregator = self._secure(weigh=weigh, max_weight=float(tokens), max_metric=10.0 * tokens)
        return saved.trainable(self.plan.rounds, aggregator)

    def _secure(self, **options: Any) -> Aggregator:
        return secure(self.clip_norm, clients=self.most, protocol="two-servers", bits=self.bits, **options)

    def _noised(self, saved: SavedModel[Any], multiplier: float) -> Aggregator:
        """Return a mean in which all devices weigh the same, so that the norm bounds what each of them adds."""
        per_round, scales = float(self.per_round or self.plan.least), fixed_scales(saved.config)
        return self._secure(noise=ClientNoise(multiplier, per_round, self.plan.least, scales, simulated=False))

    def _noise_for(self, epsilon: float, saved: SavedModel[Any]) -> float:
        """Return the noise multiplier with which all rounds stay within epsilon."""
        parts, rounds = {DELTA: flatten(saved.params)[0]}, self.plan.rounds

        def release(multiplier: float) -> Release:
            share = self._noised(saved, multiplier).share
            assert share is not None
            return share(parts).release(1.0, rounds)

        return noise_for(
            epsilon, clients=self.most, per_round=self.most, rounds=rounds, delta=self.plan.delta, release=release
        )


def bundle_model(
    saved: SavedModel[Any],
    out: str | Path,
    *,
    most: int = MOST_EXAMPLES,
    quantise: Quantisation | None = None,
    least_count: int | None = None,
    onnxruntime_web: Path | None = None,
    onnx: bool = True,
    train: DeviceTraining | None = None,
    replace: bool = False,
) -> Path:
    """Write the bundle of a saved model, with its page.

    Args:
      saved: the model.
      out: the folder to write.
      most: how many examples of a person a device uses, the newest ones.
      quantise: store tables in `int8` or `float16`; None keeps float32.
      least_count: items with fewer ratings in training are not recommended, where that is known; by default as
        the model's settings say.
      onnxruntime_web: the folder `dist` of the npm package, for a page of text or one that trains.
      onnx: whether to write graphs. The page of a model that ranks items needs none; without them, no exporter is
        needed.
      train: let devices train the model, in this way; None for not.
      replace: whether to replace a bundle that is there.

    Raises:
      ValueError: jax2onnx is not installed, `onnxruntime_web` is not that folder, or something cannot be exported
        (`ExportError`).
    """
    check_number("most", most, least=1, most=MOST_ROOM)
    check_number("least_count", least_count, most=MOST_INT)
    if onnxruntime_web is not None:
        check_vendor(onnxruntime_web)  # before the export, which takes long
    parts: Any = {"ratings": _ratings_parts, "clicks": _clicks_parts, "text": _text_parts}[saved.task.name]
    legend, like = parts(saved, most, least_count)
    return bundle(
        saved.algorithm if train is None else train.algorithm(saved, most),
        saved.params,
        out,
        like=like,
        most=most,
        quantise=quantise,
        legend=legend._replace(page=partial(page_files, vendor=onnxruntime_web), seed=saved.config.seed),
        onnx=onnx,
        train=False if train is None else train.plan._replace(constant=constant_parameters(saved.config.model)),
        replace=replace,
    )


Parts = tuple[Legend, Mapping[str, np.ndarray]]  # and examples of a person


def _ratings_parts(saved: SavedModel[Items], most: int, least_count: int | None) -> Parts:
    settings, scale = asdict(saved.config.reconstruct), saved.config.model.scale
    if scale is not None:
        settings["transform"] = scale.transform
    if scale is not None and scale.standardized:
        ridge = settings["ridge"]
        settings["ridges"] = {"bias": ridge * scale.user_ridge, "embedding": ridge * scale.noise}
        settings["ridges"]["traits"] = [ridge * value for value in scale.trait_ridges]
        settings["standard"] = {"mean": scale.mean, "deviation": scale.deviation}
    legend = items_legend(saved, least_count, of_counts if settings.get("transform") == "log1p" else None)
    return legend._replace(settings=settings), made_up_ratings(len(saved.legend), legend.scale, most)


def _clicks_parts(saved: SavedModel[Items], most: int, least_count: int | None) -> Parts:
    model = saved.config.model
    counted = model.counts != "ignore"
    legend = items_legend(saved, least_count, partial(of_weighed, weight=click_weight) if counted else None)
    like = made_up_ratings(len(saved.legend), (1, 9), most)
    if not counted:
        del like["rating"]
    settings = {"solver": "least-squares", "ridge": model.ridge, "unobserved": model.unobserved, "counts": model.counts}
    settings |= {"blend_after": list(BLEND_AFTER)}
    return legend._replace(exact=("gram", "*popularity*"), settings=settings), like


def _text_parts(saved: SavedModel[Vocabulary], most: int, least_count: int | None) -> Parts:
    words, max_words = saved.legend, saved.config.model.max_words
    queries = prompt_columns(list(words.words[:3]), words, max_words)[0]
    content = {"words": list(words.words), "buckets": words.buckets, "max_words": max_words}
    legend = Legend("text", {WORDS: content}, queries=queries, settings=asdict(saved.config.reconstruct))
    return legend, personal_text(_made_up_text(words), words, max_words).columns


def items_legend(saved: SavedModel[Items], least_count: int | None = None, adapt: Any = None) -> Legend:
    """Return what a bundle says about the items of a model, and about ratings or clicks of them."""
    items = saved.legend
    content = {
        "ids": _short(items.ids.tolist()),
        "labels": None if items.titles is None else unique_labels(items.titles.tolist(), items.ids.tolist()),
        "counts": None if items.counts is None else items.counts.tolist(),
    }
    least = saved.config.model.least_ratings if least_count is None else least_count
    queries = {"item": np.arange(min(20, len(items)), dtype=np.int32)}
    roles = {"/".join(part for part in path.split("/") if part != "shared"): path for path in flatten(saved.params)[0]}
    ends = saved.task.ends(saved.config, items)
    return Legend(saved.task.name, {ITEMS: content}, ends, least, roles, adapt, queries=queries)


def _short(ids: list[Any]) -> Any:
    """Write ids that are consecutive numbers as the first and their count."""
    if all(isinstance(item_id, int) for item_id in ids) and ids == list(range(ids[0], ids[0] + len(ids))):
        return {"first": ids[0], "count": len(ids)}
    return ids


def _made_up_text(vocabulary: Vocabulary) -> str:
    """Return made-up sentences of words inside and outside the vocabulary."""
    known_words = [word for word in vocabulary.words if word.isalpha()][:200] or ["a"]
    draw = np.random.default_rng(0)

    def word() -> str:
        return draw.choice(known_words) if draw.random() < 0.8 else f"zz{draw.integers(40)}q"

    return "\n".join(" ".join(word() for _ in range(draw.integers(2, 12))) for _ in range(64))
