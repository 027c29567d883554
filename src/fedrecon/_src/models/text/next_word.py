"""Next-word prediction: an LSTM with a local part, the embeddings of out-of-vocabulary words or an output bias."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

from fedrecon._src.core.checks import check_choice, check_number, check_numbers
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.model import Batch, Metric, Model, Weighted
from fedrecon._src.core.pytrees import Params
from fedrecon._src.models.factorization import draw_uniform
from fedrecon._src.models.text.lstm import lstm
from fedrecon._src.models.text.softmax import Logits, Outputs

LocalPart = Literal["oov_embedding", "output_bias", "nothing"]
INIT_SCALE = 0.05  # of embeddings
PRIOR = 5.0  # imagined uses of every word, as many as the global model expects: with few words the bias stays near 0


@register_factory
def next_word(
    vocabulary: int,
    oov_buckets: int = 1,
    *,
    embedding: int = 96,
    hidden: int = 670,
    projection: int = 96,
    local: LocalPart = "oov_embedding",
    pair_rows: int = 0,
    head: int = 0,
    loss_over: Literal["tokens", "positions"] = "tokens",
) -> Model:
    """Predict the next word at every position of a sentence.

    Words are embedded, run through an LSTM, projected and compared with all outputs; no weights are tied. Words outside
    the vocabulary are hashed into buckets.

    What is local is either of two things. As in the paper, the input embeddings of the buckets, which gradient descent
    reconstructs. Or a bias of every output, `log((count + 5) / (expected + 5))`, from how often the client used a word
    and how often the global model expected it; all buckets share one bias. `closed_form` reconstructs the two counts,
    and since they are sums, a client can go on adding to them.

    A batch has, each `(examples, length)`:

    - `word`: the row of the input in the global table: 0 for padding and for words outside the vocabulary, 1 to
      `vocabulary` for words, then one for the beginning and one for the end of a sentence;
    - `oov`: 0 where the input is in the vocabulary, else its bucket + 1;
    - `pair`: with `pair_rows`, the row of the last two inputs, a hash of their ids;
    - `target`: the output that should come next: 0 for padding, words and end as above, then the buckets.

    Padding comes last in a sentence. It changes nothing: no earlier output depends on it, and it has no weight.

    Predictions are logits of `(examples, length, vocabulary + 3 + oov_buckets)`. They are computed only when needed,
    for example by `np.asarray`.

    Args:
      vocabulary: how many words it has.
      oov_buckets: how many buckets there are for other words.
      embedding: length of the embeddings.
      hidden: width of the LSTM.
      projection: width of the projection that is compared with the outputs.
      local: the `oov_embedding` of the buckets, the `output_bias`, or `nothing`. Embeddings of buckets that are not
        local are global.
      pair_rows: rows of a hashed table of trigrams: the row of the last two words, and one of the last word alone
        (bigrams), are added to the projection. They are trained like all other global parameters. 0 for neither.
      head: how many of the most used words (the first ones) are compared directly. The other words are a group with
        one place among these, and so are the buckets; the members of a group are compared only where one of them comes
        next, which makes a step several times cheaper. 0 for a single softmax over everything, as in the paper.
      loss_over: take the mean loss over `tokens` that are not padding, or over all `positions`, where padding adds 0.

    Returns:
      A `Model`. `accuracy` is that of the most probable output, at targets that are words of the vocabulary; if several
      outputs have the highest logit, any of them counts.

    References:
      Hard et al., Federated Learning for Mobile Keyboard Prediction, 2018; Reddi et al., Adaptive Federated
      Optimization, ICLR 2021.

    Example:
      >>> import fedrecon as fr
      >>> import jax
      >>> model = fr.models.next_word(vocabulary=100, oov_buckets=5, embedding=8, hidden=16, projection=8)
      >>> model.init_local(jax.random.key(0))["oov_embedding"].shape
      (5, 8)
    """
    widths = {"embedding": embedding, "hidden": hidden, "projection": projection}
    check_numbers({"vocabulary": vocabulary, "oov_buckets": oov_buckets, **widths}, least=1)
    check_choice("loss_over", loss_over, ("tokens", "positions"))
    check_choice("local", local, get_args(LocalPart))
    check_number("pair_rows", pair_rows)
    check_number("head", head, most=vocabulary)
    end = vocabulary + 2
    outputs = _outputs(vocabulary, oov_buckets, head)

    def init_oov(key: Array) -> Params:
        return {"oov_embedding": draw_uniform(key, (oov_buckets, embedding), INIT_SCALE)}

    def init_global(key: Array) -> Params:
        keys = jax.random.split(key, 6)
        params = {"word_embedding": draw_uniform(keys[0], (vocabulary + 3, embedding), INIT_SCALE)}
        params |= _init_layers(keys[1:4], (embedding, hidden, projection))
        params["output"] = _init_outputs(keys[4], projection, outputs, end)
        if pair_rows:
            params["bigrams"] = jnp.zeros((vocabulary + 3, projection))
            params["trigrams"] = jnp.zeros((pair_rows, projection))
        return params if local == "oov_embedding" else params | init_oov(keys[5])

    def init_counts(key: Array) -> Params:
        return {"count": jnp.zeros(end + 2), "expected": jnp.zeros(end + 2)}  # the last is of all buckets together

    def predict(shared: Params, local_params: Params, batch: Batch) -> Logits:
        oov_embedding = (local_params if local == "oov_embedding" else shared)["oov_embedding"]
        biases = _biases(local_params, outputs, end) if local == "output_bias" else None
        return _predict(shared, oov_embedding, biases, batch, outputs)

    def statistics(predictions: Logits, batch: Batch, mask: Array) -> Params:
        target = jnp.where(mask[:, None], batch["target"], 0)
        used = jnp.zeros(outputs.count).at[target.reshape(-1)].add((target.reshape(-1) != 0).astype(jnp.float32))
        return {"count": _per_word(used, end), "expected": _per_word(predictions.expected(target), end)}

    return Model(
        init_global=init_global,
        init_local={"oov_embedding": init_oov, "output_bias": init_counts, "nothing": lambda key: {}}[local],
        predict=predict,
        statistics=statistics if local == "output_bias" else None,
        loss=_cross_entropy if loss_over == "tokens" else _cross_entropy_over_positions,
        metrics=_metrics(end, in_training=not outputs.groups),  # two levels save comparing all outputs in training
        lookups={"word_embedding": "word"} | ({"bigrams": "word", "trigrams": "pair"} if pair_rows else {}),
    )


def _outputs(vocabulary: int, oov_buckets: int, head: int) -> Outputs:
    """Return which outputs are scored together: without a head, all of them."""
    first_oov, count = vocabulary + 3, vocabulary + 3 + oov_buckets
    groups = ((head + 1, vocabulary + 1), (first_oov, count)) if head else ()
    return Outputs(count, tuple((first, after) for first, after in groups if after > first))


def _init_layers(keys: Array, widths: tuple[int, int, int]) -> Params:
    """Draw the LSTM, with its forget gates open, and the projection."""
    embedding, hidden, projection = widths
    glorot = jax.nn.initializers.glorot_uniform()
    return {
        "lstm": {
            "kernel": glorot(keys[0], (embedding, 4 * hidden)),
            "recurrent": jax.nn.initializers.orthogonal()(keys[1], (hidden, 4 * hidden)),
            "bias": jnp.zeros((4, hidden)).at[1].set(1.0).reshape(-1),
        },
        "projection": {"kernel": glorot(keys[2], (hidden, projection)), "bias": jnp.zeros(projection)},
    }


def _init_outputs(key: Array, projection: int, outputs: Outputs, end: int) -> Params:
    """Draw the output layer: a kernel and a bias, and as many for each group of outputs."""
    glorot = jax.nn.initializers.glorot_uniform()
    # The n-th most used word is about 1 / n as frequent as the first; a single softmax starts as in the paper.
    last = float(end - 2)
    ranks = [last], jnp.arange(1, last + 1), [last, 1.0], jnp.full(outputs.count - end - 1, last)
    frequency = -jnp.log(jnp.concatenate([jnp.asarray(rank) for rank in ranks])) if outputs.groups else 0.0
    biases = outputs.divide(frequency * jnp.ones(outputs.count), [jnp.zeros(1)] * len(outputs.groups))
    keys = [key] if len(biases) == 1 else jax.random.split(key, len(biases))
    kernels = [glorot(key, (projection, len(bias))) for key, bias in zip(keys, biases, strict=True)]
    levels = [{"kernel": kernel, "bias": bias} for kernel, bias in zip(kernels, biases, strict=True)]
    return levels[0] | {f"group_{number}": level for number, level in enumerate(levels[1:])}


def _per_word(sums: Array, end: int) -> Array:
    """Add up the buckets, whose sums come last."""
    return jnp.append(sums[: end + 1], jnp.sum(sums[end + 1 :]))


def _biases(local: Params, outputs: Outputs, end: int) -> list[Array]:
    """Return the bias of every output and of every group, from how often they were used and expected.

    All buckets share one bias, which their group has too; within it, they then have none that matters.
    """

    def bias_of(count: Array, expected: Array) -> Array:
        return jnp.log((jnp.maximum(count, 0) + PRIOR) / (jnp.maximum(expected, 0) + PRIOR))

    per_word = bias_of(local["count"], local["expected"])
    members = [slice(first, after) if after <= end + 1 else slice(end + 1, None) for first, after in outputs.groups]
    per_group = [
        bias_of(*(jnp.sum(local[name][part], keepdims=True) for name in ("count", "expected"))) for part in members
    ]
    of_buckets = jnp.broadcast_to(per_word[-1], (outputs.count - end - 1,))
    return outputs.divide(jnp.concatenate([per_word[:-1], of_buckets]), per_group)


def _predict(
    shared: Params, oov_embedding: Array, biases: list[Array] | None, batch: Batch, outputs: Outputs
) -> Logits:
    oov = batch["oov"]
    of_bucket = oov_embedding[jnp.maximum(oov - 1, 0)]
    of_word = shared["word_embedding"][batch["word"]]
    embedded = jnp.where((oov > 0)[..., None], of_bucket, of_word)
    memory, dense = shared["lstm"], shared["projection"]
    weights = memory["kernel"], memory["recurrent"], memory["bias"]
    after_oov = jax.lax.cummax((oov > 0).astype(jnp.int32), axis=1) > 0
    states, frozen_states = lstm(embedded, *weights, _lengths(batch), after_oov[:, -1], (of_word,))

    ngrams: Any = 0.0
    if "trigrams" in shared:
        ngrams = shared["bigrams"][batch["word"]] + shared["trigrams"][batch["pair"]]

    def project(states: Array) -> Array:
        return states @ dense["kernel"] + dense["bias"] + ngrams  # (examples, length, projection)

    held = of_word, *weights, dense["kernel"], dense["bias"], jnp.asarray(ngrams)
    levels = [shared["output"], *(shared["output"][f"group_{k}"] for k in range(len(outputs.groups)))]
    personal = [0.0] * len(levels) if biases is None else biases
    of_outputs = [(level["kernel"], level["bias"] + bias) for level, bias in zip(levels, personal, strict=True)]
    return Logits(project(states + frozen_states), of_outputs, after_oov, project(states), held, outputs)


def _cross_entropy(predictions: Logits, batch: Batch) -> Weighted:
    return predictions.losses(batch["target"]), (batch["target"] != 0).astype(jnp.float32)


def _cross_entropy_over_positions(predictions: Logits, batch: Batch) -> Weighted:
    return predictions.losses(batch["target"]), jnp.ones(batch["target"].shape)


def _metrics(end: int, *, in_training: bool) -> dict[str, Metric]:
    """Return the metrics; accuracies compare all outputs, `in_training` or not."""

    def accuracy(with_oov: bool = False, with_end: bool = False) -> Metric:
        def measure(predictions: Logits, batch: Batch) -> Weighted:
            target = batch["target"]
            counts = (target > 0) & (with_end | (target != end)) & (with_oov | (target <= end))
            return predictions.hits(target), counts.astype(jnp.float32)

        return Metric(measure, in_training=in_training)

    return {
        "accuracy": accuracy(),
        "accuracy_with_eos": accuracy(with_end=True),
        "accuracy_with_oov_eos": accuracy(with_oov=True, with_end=True),
        "perplexity": Metric(_cross_entropy, lambda mean: math.exp(min(mean, 700.0))),
    }


def _lengths(batch: Batch) -> Array:
    """Return the length of each sentence; the full length if there are no targets."""
    examples, length = batch["oov"].shape
    if "target" not in batch:
        return jnp.full(examples, length, jnp.int32)
    return jnp.max(jnp.where(batch["target"] != 0, jnp.arange(1, length + 1), 0), 1)
