import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedrecon as fr
from fedrecon._src.core.model import finish, measure
from fedrecon._src.models.text import lstm as lstm_module
from fedrecon._src.models.text import softmax
from toy_models import assert_close, assert_same_history, descend, one_round, plain_lstm

WORDS, BUCKETS, LENGTH = 6, 3, 5
BEGIN, END, FIRST_BUCKET = WORDS + 1, WORDS + 2, WORDS + 3
SIZES = {"embedding": 4, "hidden": 3, "projection": 4}


@functools.cache
def small(**options):
    return fr.models.next_word(WORDS, BUCKETS, **SIZES, **options)


def sentences(lengths, seed=0):
    """Random sentences of these lengths, as (examples, LENGTH) features."""
    generator = np.random.default_rng(seed)
    shape = (len(lengths), LENGTH)
    there = np.arange(LENGTH) < np.array(lengths)[:, None]
    oov = np.where(generator.random(shape) < 0.4, generator.integers(1, BUCKETS + 1, shape), 0)
    target = generator.choice([*range(1, WORDS + 1), END, *range(FIRST_BUCKET, FIRST_BUCKET + BUCKETS)], shape)
    word = np.where(oov > 0, 0, generator.integers(1, END + 1, shape))
    return {
        name: np.where(there, column, 0).astype(np.int32)
        for name, column in (("word", word), ("oov", oov), ("target", target))
    }


def people(*lengths):
    """Clients with sentences of these lengths each."""
    columns = [sentences(each, seed) for seed, each in enumerate(lengths)]
    ends = np.cumsum([len(each) for each in lengths])
    together = {name: np.concatenate([c[name] for c in columns]) for name in columns[0]}
    return fr.Clients(together, ends - [len(each) for each in lengths], ends)


def parameters(model, seed=0):
    keys = jax.random.split(jax.random.key(seed))
    larger = lambda tree: jax.tree.map(lambda x: 3 * x + 0.1, tree)  # noqa: E731  (else all logits are nearly alike)
    return larger(model.init_global(keys[0])), larger(model.init_local(keys[1]))


@functools.cache
def differentiated(**options):
    """Compile the gradients of both parts, and the sums of metrics."""
    model = small(**options)

    def loss(params, local, batch):
        return measure(model, model.predict(params, local, batch), batch, jnp.ones(len(batch["word"]), bool))

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


# ---- parameters ----


def counts(model):
    shapes = [jax.eval_shape(init, jax.random.key(0)) for init in (model.init_global, model.init_local)]
    return [sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(part)) for part in shapes]


@pytest.mark.parametrize(("vocabulary", "buckets"), [(10_000, 1), (10_000, 500), (5_000, 500), (1_000, 1)])
def test_parameters_are_as_many_as_the_paper_has(vocabulary, buckets):
    shared = 96 * (vocabulary + 3) + 2_055_560 + 64_416 + 97 * (vocabulary + 3 + buckets)
    assert counts(fr.models.next_word(vocabulary, buckets)) == [shared, 96 * buckets]
    assert counts(fr.models.next_word(vocabulary, buckets, local="nothing")) == [shared + 96 * buckets, 0]
    if (vocabulary, buckets) == (10_000, 1):
        assert shared + 96 * buckets == 4_050_748


def test_parameters_start_as_is_usual():
    params, local = (init(jax.random.key(0)) for init in (small().init_global, small().init_local))
    assert np.abs(local["oov_embedding"]).max() <= 0.05
    assert np.abs(params["word_embedding"]).max() <= 0.05
    np.testing.assert_array_equal(params["lstm"]["bias"].reshape(4, -1), [[0] * 3, [1] * 3, [0] * 3, [0] * 3])
    recurrent = params["lstm"]["recurrent"]
    np.testing.assert_allclose(recurrent @ recurrent.T, np.eye(3), atol=1e-5)
    assert np.abs(params["lstm"]["kernel"]).max() <= math.sqrt(6 / (4 + 12))
    assert not params["projection"]["bias"].any()
    assert not params["output"]["bias"].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary": 0}, "`vocabulary`"),
        ({"oov_buckets": 0}, "`oov_buckets`"),
        ({"hidden": -1}, "`hidden`"),
        ({"loss_over": "words"}, "`loss_over`"),
        ({"head": 6}, "`head`"),
    ],
)
def test_impossible_sizes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fr.models.next_word(**{"vocabulary": 5, **options})


# ---- predictions ----


def by_hand(params, local, batch):
    """Logits of one word after another."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    own = np.asarray(local["oov_embedding"], np.float64)
    found = np.zeros((*batch["word"].shape, FIRST_BUCKET + BUCKETS))
    for example, (words, oovs) in enumerate(zip(batch["word"], batch["oov"], strict=True)):
        output, cell = np.zeros(3), np.zeros(3)
        for t, (word, oov) in enumerate(zip(words, oovs, strict=True)):
            x = own[oov - 1] if oov else p["word_embedding"][word]
            i, f, g, o = np.split(x @ p["lstm"]["kernel"] + output @ p["lstm"]["recurrent"] + p["lstm"]["bias"], 4)
            i, f, o = (1 / (1 + np.exp(-gate)) for gate in (i, f, o))
            cell = f * cell + i * np.tanh(g)
            output = o * np.tanh(cell)
            projected = output @ p["projection"]["kernel"] + p["projection"]["bias"]
            found[example, t] = projected @ p["output"]["kernel"] + p["output"]["bias"]
    return found


def test_predictions_are_those_of_a_loop_by_hand():
    params, local = parameters(small())
    batch = sentences([5, 2, 3])
    expected, there = by_hand(params, local, batch), batch["target"] > 0
    np.testing.assert_allclose(fr.predict(small(), params, local, batch)[there], expected[there], 1e-4, 1e-5)
    del batch["target"]  # as where a word is asked for
    np.testing.assert_allclose(fr.predict(small(), params, local, batch), expected, 1e-4, 1e-5)


def test_global_embeddings_of_buckets_give_the_same_predictions():
    params, local = parameters(small())
    batch = sentences([5, 2, 3])
    found = fr.predict(small(local="nothing"), {**params, **local}, {}, batch)
    np.testing.assert_array_equal(found, fr.predict(small(), params, local, batch))


def test_metrics_are_those_of_the_definitions():
    params, local = parameters(small())
    batch = sentences([5, 2, 5, 4, 5, 5, 3, 5], seed=3)
    logits = by_hand(params, local, batch)
    target = batch["target"]
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, target[..., None], -1)[..., 0]
    hit = logits.argmax(-1) == target
    word, end, oov = (target > 0) & (target <= WORDS), target == END, target >= FIRST_BUCKET
    assert all(kind.any() for kind in (word, end, oov))
    (mean, sums), _ = differentiated()(params, local, batch)
    found = finish(small(), sums)
    expected = {
        "loss": losses[target > 0].mean(),
        "accuracy": hit[word].mean(),
        "accuracy_with_eos": hit[word | end].mean(),
        "accuracy_with_oov_eos": hit[word | end | oov].mean(),
        "perplexity": math.exp(losses[target > 0].mean()),
    }
    assert found == pytest.approx(expected, rel=1e-4)
    assert float(mean) == pytest.approx(expected["loss"], rel=1e-4)


def test_a_tie_for_the_highest_logit_counts_as_a_hit():
    hidden, kernel = jnp.ones((3, 1)), jnp.array([[2.0, 5.0, 5.0, 1.0]])
    outputs = softmax.Outputs(4)
    logits = softmax.Logits(hidden, [(kernel, jnp.zeros(4))], jnp.ones(3, bool), hidden, (), outputs)
    assert logits.hits(jnp.array([3, 1, 2])).tolist() == [0, 1, 1]


def test_huge_logits_give_a_finite_loss():
    hidden, kernel = jnp.array([[1e4], [-1e4]]), jnp.array([[2.0, 1.0]])
    losses, _ = softmax.cross_entropy(hidden, kernel, jnp.zeros(2), jnp.array([1, 1]), jnp.ones(2, bool), hidden, ())
    np.testing.assert_allclose(losses, [1e4, 0])


@pytest.mark.slow
def test_a_loss_over_positions_is_the_loss_over_tokens_scaled():
    params, local = parameters(small())
    lengths = [5, 2, 3, 1]
    batch = sentences(lengths)
    (over_tokens, sums), slope = differentiated()(params, local, batch)
    (over_positions, other_sums), other_slope = differentiated(loss_over="positions")(params, local, batch)
    share = sum(lengths) / (len(lengths) * LENGTH)
    assert float(over_positions) == pytest.approx(share * float(over_tokens), rel=1e-5)
    assert_close(other_slope, jax.tree.map(lambda x: share * x, slope), 1e-6)
    np.testing.assert_array_equal(other_sums[1:], sums[1:])


# ---- padding ----


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(0, LENGTH), min_size=4, max_size=4), seed=st.integers(0, 1000))
def test_padding_never_changes_a_gradient_or_a_metric(lengths, seed):
    """Whatever stands where nothing is asked for, it is as if it were not there."""
    params, local = parameters(small())
    batch = sentences(lengths, seed)
    junk = sentences([LENGTH] * 4, seed + 1)
    padding = batch["target"] == 0
    other = {name: np.where(padding, junk[name], batch[name]) for name in ("word", "oov")} | {"target": batch["target"]}
    expected, found = (differentiated()(params, local, each) for each in (batch, other))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert float(found[0][1][0, 1]) == sum(lengths)
    assert not np.any(found[1][0]["word_embedding"][0])  # neither padding nor words without a row teach row 0


@pytest.mark.slow
def test_an_example_that_is_masked_never_changes_a_gradient_or_a_metric():
    model = small()
    params, local = parameters(model)
    batch, junk = sentences([5, 2, 3, 4]), sentences([5, 5, 5, 5], seed=1)
    mask = jnp.array([True, True, False, True])

    @jax.jit
    def run(batch):
        def loss(params):
            return measure(model, model.predict(params, local, batch), batch, mask)

        return jax.value_and_grad(loss, has_aux=True)(params)

    other = {name: np.where(mask[:, None], column, junk[name]) for name, column in batch.items()}
    jax.tree.map(np.testing.assert_array_equal, run(other), run(batch))


# ---- logits in parts ----


def plain_cross_entropy(hidden, kernel, bias, target):
    logits = hidden @ kernel + bias
    at_target = jnp.take_along_axis(logits, target[:, None], 1)[:, 0]
    losses, hits = jax.nn.logsumexp(logits, -1) - at_target, at_target >= logits.max(-1)
    return jnp.where(target > 0, losses, 0), jnp.where(target > 0, hits, 0).astype(jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("part", "axes"), [(64, (0, None, None, 0)), (2, (0, None, None, 0)), (2, (0, 0, 0, 0))])
@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("wanted", [(0,), (0, 1, 2)])
def test_cross_entropy_has_the_derivatives_of_the_plain_one(monkeypatch, part, axes, wanted, clients):
    """With the weights frozen or not, shared or not, in one part or in several."""
    monkeypatch.setattr(softmax, "PART", part)
    rows, features, outputs = 7, 3, 11
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(clients, rows, features), (clients, features, outputs), (clients, outputs)]
    arguments = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)]
    arguments.append(jnp.maximum(jax.random.randint(keys[3], (clients, rows), -outputs, outputs), 0))
    arguments = [x if axis == 0 else x[0] for x, axis in zip(arguments, axes, strict=True)]

    def both(function):
        def loss(*args):
            losses, hits = function(*args)
            return jnp.sum(losses * jax.random.normal(keys[4], (rows,))), (losses, hits)

        return jax.jit(jax.vmap(jax.value_and_grad(loss, wanted, has_aux=True), axes))(*arguments)

    def found(hidden, kernel, bias, target):
        places = jnp.where(target > 0, target, -1)
        return softmax.cross_entropy(hidden, kernel, bias, places, jnp.ones(rows, bool), hidden, ())

    assert_close(both(found), both(plain_cross_entropy), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["local", "lstm", "word_embedding", "projection", "output"])
def test_a_part_has_the_same_gradient_alone_as_with_all_others(monkeypatch, part):
    """What is left out where only some parameters are differentiated is zero indeed."""
    model = small()
    params, local = parameters(model)
    batch = sentences([5, 2, 0, 4, 3, 1], seed=2)
    batch["oov"][3] = 0  # a sentence without words of the client's own
    (value, _), (of_global, of_local) = differentiated()(params, local, batch)
    monkeypatch.setattr(softmax, "PART", 3)
    monkeypatch.setattr(lstm_module, "TILE", 4)

    def loss(some):
        whole = (params, some) if part == "local" else (params | {part: some}, local)
        return measure(model, model.predict(*whole, batch), batch, jnp.ones(6, bool))[0]

    same, found = jax.jit(jax.value_and_grad(loss))(local if part == "local" else params[part])
    assert float(same) == pytest.approx(float(value), rel=1e-5)
    assert_close(found, of_local if part == "local" else of_global[part])


def plain_loss(params, local, batch):
    """The loss as the model's definition says it, with nothing left out."""
    oov, target, memory = batch["oov"], batch["target"], params["lstm"]
    of_bucket = local["oov_embedding"][jnp.maximum(oov - 1, 0)]
    x = jnp.where((oov > 0)[..., None], of_bucket, params["word_embedding"][batch["word"]])
    states = plain_lstm(x, memory["kernel"], memory["recurrent"], memory["bias"], jnp.sum(target != 0, 1))
    hidden = states @ params["projection"]["kernel"] + params["projection"]["bias"]
    rows, output = hidden.reshape(-1, hidden.shape[-1]), params["output"]
    losses, _ = plain_cross_entropy(rows, output["kernel"], output["bias"], target.reshape(-1))
    return jnp.sum(losses) / jnp.sum(target != 0)


@pytest.mark.slow
def test_second_derivatives_include_sentences_that_reconstruction_skips():
    """The gradient, in global parameters, of the length of the gradient in local ones."""
    model = small()
    params, local = parameters(model)
    batch = sentences([5, 2, 4, 3], seed=2)
    batch["oov"][2] = 0  # a sentence without words of the client's own

    def ours(params, local, batch):
        return measure(model, model.predict(params, local, batch), batch, jnp.ones(4, bool))[0]

    def steepness(loss):
        return lambda params: jnp.sum(jax.grad(loss, 1)(params, local, batch)["oov_embedding"] ** 2)

    found, expected = (jax.jit(jax.grad(steepness(loss)))(params) for loss in (ours, plain_loss))
    assert_close(found, expected, 1e-5)
    assert max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(found)) > 1e-3


# ---- two levels of outputs ----


def two_levels(head=2, **options):
    """A model, its parameters and sentences; words after the first `head` have a softmax of their own, buckets too."""
    model = small(head=head, **options)
    params, local = parameters(model)
    return model, params, local, sentences([5, 2, 5, 4, 5, 3], seed=3)


@pytest.mark.parametrize("head", [1, 2, 5, WORDS])
def test_a_rare_word_has_its_share_of_the_share_of_all_rare_words(head):
    """By hand: the first level has padding, the head, beginning and end, then a place for each group."""
    model, params, local, batch = two_levels(head)
    logits = model.predict(params, local, batch)
    output, hidden = params["output"], np.asarray(logits.hidden)[0, 0]
    levels = [output, *(output[name] for name in sorted(output) if name.startswith("group"))]
    top, *groups = (np.asarray(jax.nn.softmax(hidden @ level["kernel"] + level["bias"])) for level in levels)
    rare = [top[head + 3] * groups[0]] if head < WORDS else []
    expected = np.concatenate(
        [top[: head + 1], *rare, top[head + 1 : head + 3], top[3 + head + len(rare)] * groups[-1]]
    )
    found = np.exp(np.asarray(logits)[0, 0])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found.sum() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("part", [2, 64])
def test_two_levels_have_the_losses_hits_and_gradients_of_their_probabilities(monkeypatch, part):
    monkeypatch.setattr(softmax, "PART", part)
    model, params, local, batch = two_levels()
    target = batch["target"]
    target[0] = np.asarray(model.predict(params, local, batch))[0].argmax(-1)  # so that there are hits
    real = target > 0

    def plain(params):
        shares = jax.nn.log_softmax(model.predict(params, local, batch).values())
        losses = -jnp.take_along_axis(shares, target[..., None], -1)[..., 0]
        return jnp.sum(jnp.where(real, losses, 0)) / real.sum()

    def ours(params):
        return measure(model, model.predict(params, local, batch), batch, jnp.ones(len(target), bool))[0]

    assert_close(jax.jit(jax.value_and_grad(ours))(params), jax.jit(jax.value_and_grad(plain))(params), 1e-5)
    logits = model.predict(params, local, batch)
    hits = np.asarray(logits).argmax(-1) == target
    np.testing.assert_array_equal(logits.hits(target), np.where(real, hits, 0))
    assert hits[real].any()


def test_words_start_as_frequent_as_zipf_says():
    output = small(head=2).init_global(jax.random.key(0))["output"]
    np.testing.assert_allclose(output["bias"], -np.log([6, 1, 2, 6, 1, 1, 1]), atol=1e-6)  # the end is as frequent
    np.testing.assert_allclose(output["group_0"]["bias"], -np.log([3, 4, 5, 6]), rtol=1e-6)


def test_accuracy_over_two_levels_is_measured_only_in_evaluation():
    model, params, local, batch = two_levels()
    predictions, mask = model.predict(params, local, batch), jnp.ones(len(batch["word"]), bool)
    in_use, in_training = (
        finish(model, measure(model, predictions, batch, mask, training=training)[1]) for training in (False, True)
    )
    assert math.isnan(in_training["accuracy"])
    assert not math.isnan(in_use["accuracy"])
    assert in_training["loss"] == in_use["loss"]


# ---- in the library ----


@functools.cache
def one_round_of(*, sharing=None, second_order=False):
    """One round with four clients, one by one but for reconstruction, weighed by tokens."""
    model = small(loss_over="positions")
    algorithm = fr.federated_reconstruction(
        model,
        reconstruct=descend(0.5, 2),
        update=descend(0.5, 2),
        server=optax.sgd(1.0),
        second_order=second_order,
        aggregate=fr.aggregators.mean(fr.aggregators.weight_of(model, "perplexity")),
    )
    clients = people([5, 3, 4], [2, 5, 5, 1, 3], [4, 4], [5, 5, 2, 3])
    return one_round(algorithm, clients, layout=fr.layout(1, 1, sharing=sharing))


@pytest.mark.slow
def test_clients_side_by_side_learn_what_they_learn_one_by_one():
    expected, found = one_round_of(), one_round_of(sharing=4)
    assert_close(found.params, expected.params)
    assert_same_history(found, expected, 1e-4)


@pytest.mark.slow
def test_clients_can_weigh_as_many_tokens_as_they_have():
    # The query is the second half: of three sentences one, of five two, of two one, of four two.
    assert one_round_of().history[0]["weight"] == 4 + (1 + 3) + 4 + (2 + 3)
    with pytest.raises(ValueError, match=r"`metric`.*'tokens'"):
        fr.aggregators.weight_of(small(), "tokens")


@pytest.mark.slow
def test_second_order_differentiates_through_reconstruction():
    first, second = one_round_of().params, one_round_of(second_order=True).params
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(second))
    assert not np.allclose(first["lstm"]["kernel"], second["lstm"]["kernel"], atol=1e-7)


@pytest.mark.slow
def test_everything_global_is_averaged_with_yogi_by_rows_as_by_whole_tables():
    clients, model = people([5, 3, 4], [2, 5, 5, 1, 3]), small(local="nothing")
    by_rows, whole = (
        one_round(
            fr.federated_averaging(each, update=descend(0.5, 2), server=fr.optimizers.fedyogi(0.1, eps=0.1)),
            clients,
            rounds=8,
        )
        for each in (model, model._replace(lookups={}))
    )
    assert_close(by_rows.params, whole.params, 1e-4)
    assert by_rows.history[-1]["loss"] < by_rows.history[0]["loss"]


# ---- words of one's own ----

FOLLOWERS = 4


def with_private_words(number, seed, *, told_apart=True):
    """Clients with two words of their own, which nobody else can know: each is followed by a word of its own choice.

    Where they are not told apart both fall into one bucket.
    """
    generator = np.random.default_rng(seed)
    which = np.tile([0, 1], 8)
    columns = {"word": [], "oov": [], "target": []}
    for _ in range(number):
        followers = 1 + generator.permutation(FOLLOWERS)[:2]
        bucket = which if told_apart else 0 * which
        columns["word"].append(np.stack([0 * which + FOLLOWERS + 1, 0 * which], 1))
        columns["oov"].append(np.stack([0 * which, bucket + 1], 1))
        columns["target"].append(np.stack([FOLLOWERS + 3 + bucket, followers[which]], 1))
    ends = (1 + np.arange(number)) * len(which)
    together = {name: np.concatenate(parts).astype(np.int32) for name, parts in columns.items()}
    return fr.Clients(together, ends - len(which), ends)


@pytest.mark.slow
def test_only_local_embeddings_learn_what_follows_a_private_word():
    model = fr.models.next_word(FOLLOWERS, 2, embedding=8, hidden=8, projection=8)
    options = {"update": descend(0.5, 8), "server": optax.adam(0.03)}
    algorithm = fr.federated_reconstruction(model, reconstruct=descend(2.0, 4, epochs=5), **options)
    never = fr.federated_reconstruction(model, reconstruct=descend(2.0, 4, steps=0), **options)
    place = fr.layout(10, 1)

    def accuracy(trained_on, tested_on, tested_with):
        run = fr.train(algorithm, trained_on, rounds=40, clients_per_round=20, layout=place)
        evaluations = [fr.evaluate(each, run.params, tested_on, layout=place) for each in tested_with]
        return [evaluation.micro["accuracy"] for evaluation in evaluations]

    apart, unaware = accuracy(with_private_words(40, 0), with_private_words(40, 1), [algorithm, never])
    mixed_up = accuracy(
        with_private_words(40, 0, told_apart=False), with_private_words(40, 1, told_apart=False), [algorithm]
    )[0]
    assert apart > 0.95
    assert unaware < 0.4  # one of four followers
    assert mixed_up < 0.6  # one of the client's two
