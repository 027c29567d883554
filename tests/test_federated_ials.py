"""Federated implicit least squares: gradients by hand and over all items, and what a client measures."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedrecon as fr
from fedrecon._src.client.closed_form import invert_positive
from fedrecon._src.core.clients import Clients
from fedrecon._src.models.factorization import ranking_params
from fedrecon._src.recommend import ranking
from toy_models import assert_close, one_by_one

ITEMS, DIM, UNOBSERVED, RIDGE = 12, 3, 0.3, 0.7
MODEL = fr.models.ranking_factorization(ITEMS, DIM, init_scale=1.5)


def people(sizes, seed=0):
    rng = np.random.default_rng(seed)
    item = np.concatenate([rng.permutation(ITEMS)[:size] for size in sizes]).astype(np.int32)
    weight = rng.uniform(0.5, 2, len(item)).astype(np.float32)
    return Clients.from_columns({"item": item, "weight": weight}, client=np.repeat(np.arange(len(sizes)), sizes))


def ials(model=MODEL, **options):
    options = {"unobserved": UNOBSERVED, "ridge": RIDGE, "server": optax.sgd(1.0), "split": fr.split.half(), **options}
    return fr.federated_ials(model, **options)


CLIENTS = people([6, 1, 4, 7, 2])


def items_of(clients, k):
    return clients.columns["item"][clients.starts[k] : clients.ends[k]]


def test_a_clients_embedding_is_least_squares_over_all_items():
    # As ordinary least squares with one row an item: weight 1 and target 1 for what the client has, beside every item
    # at weight `unobserved` and target 0.
    params = MODEL.init_global(jax.random.key(0))
    V = np.asarray(params["item_embedding"], float)
    found = np.asarray(fr.reconstruct(ials(), params, CLIENTS)["user_embedding"])
    for k in range(len(CLIENTS)):
        mine = V[items_of(CLIENTS, k)]
        rows = np.concatenate([mine, UNOBSERVED**0.5 * V, RIDGE**0.5 * np.eye(DIM)])
        target = np.concatenate([np.ones(len(mine)), np.zeros(ITEMS + DIM)])
        np.testing.assert_allclose(found[k], np.linalg.lstsq(rows, target)[0], atol=1e-5)


def dense_cost(V, support, query):
    """Half the cost of one client with all items at hand; support and query have a weight for every item, or 0."""
    A = V.T @ (support[:, None] * V) + UNOBSERVED * V.T @ V + RIDGE * jnp.eye(DIM)
    scores = V @ jnp.linalg.solve(A, V.T @ support)
    others = jnp.where(support > 0, 0, scores)
    return (jnp.sum(query * (scores - 1) ** 2) + UNOBSERVED * jnp.sum(others**2)) / 2


dense_gradient = jax.jit(jax.grad(dense_cost))


@pytest.mark.parametrize("weight", [None, "weight"])
@pytest.mark.parametrize("both_ways", [False, True])
def test_rows_and_a_small_matrix_give_the_gradient_over_all_items(weight, both_ways):
    model = fr.models.ranking_factorization(ITEMS, DIM, init_scale=1.5, weight=weight)
    algorithm = ials(model, both_ways=both_ways)
    state = algorithm.init(jax.random.key(1))
    V = state.method.params["item_embedding"]
    upload = fr.kit.client_update(algorithm, algorithm.message(state), CLIENTS, fr.kit.round_key(0, 0))
    assert jax.tree.map(np.shape, upload.delta["gram"]) == (len(CLIENTS), DIM, DIM)
    total, count = 0, 0
    for k in range(len(CLIENTS)):
        mine, size = items_of(CLIENTS, k), CLIENTS.sizes[k]
        if size < 2:
            assert upload.examples[k] == 0
            continue
        own = CLIENTS.columns["weight"][CLIENTS.starts[k] : CLIENTS.ends[k]] if weight else np.ones(size)
        half = -(-size // 2)
        ways = [(slice(0, half), slice(half, None)), (slice(half, None), slice(0, half))][: 1 + both_ways]
        for support, query in ways:
            weights = np.zeros((2, ITEMS), np.float32)
            weights[0, mine[support]], weights[1, mine[query]] = own[support], own[query]
            total += dense_gradient(V, *weights)
            count += len(mine[query])
    after = fr.kit.server_update(algorithm, state, [upload], fr.kit.round_key(0, 0)).method.params
    np.testing.assert_allclose(after["item_embedding"], V - total / count, atol=2e-6)
    np.testing.assert_allclose(after["gram"], after["item_embedding"].T @ after["item_embedding"], atol=1e-6)


def test_by_hand():
    # One dimension, items worth 1 and 2; support has the first, query the second. G = 5, and with unobserved 1 and
    # ridge 1 the embedding is 1 / (1 + 5 + 1) = 1/7.
    algorithm = ials(fr.models.ranking_factorization(2, 1), unobserved=1.0, ridge=1.0, both_ways=False)
    params = {**fr.models.ranking_params(jnp.array([[1.0], [2.0]])), "inverse": jnp.array([[1 / 6]])}
    clients = Clients.from_columns({"item": np.array([0, 1], np.int32)}, client=np.zeros(2, int))
    message = algorithm.message(algorithm.init(jax.random.key(0)))._replace(method=params)
    upload = fr.kit.client_update(algorithm, message, clients, fr.kit.round_key(0, 0))
    error, z = 2 / 7 - 1, 1 / 7
    of_z = 2 * error + 5 * z - z  # the item of the support counts for nothing
    w = of_z / 7
    assert -upload.delta["gram"][0, 0, 0] == pytest.approx(z * z / 2 - w * z, abs=1e-6)
    changes = upload.delta["item_embedding"].whole()[0, :, 0]
    np.testing.assert_allclose(-changes, [w * (1 - z) - w * z - z * z, error * z], atol=1e-6)


def test_first_order_leaves_the_support_of_a_client_alone():
    algorithm = ials(second_order=False, both_ways=False)
    state = algorithm.init(jax.random.key(1))
    clients = people([6])
    delta = fr.kit.client_update(algorithm, algorithm.message(state), clients, fr.kit.round_key(0, 0)).delta
    V = np.asarray(state.method.params["item_embedding"], float)
    z = np.asarray(fr.reconstruct(algorithm, state.method.params, clients.take([0]).cap(3))["user_embedding"])[0]
    np.testing.assert_allclose(-delta["gram"][0] * 3, UNOBSERVED / 2 * np.outer(z, z), atol=1e-6)
    known = items_of(clients, 0)[:3]
    np.testing.assert_allclose(
        -delta["item_embedding"].whole()[0, known] * 3, -UNOBSERVED * np.outer(V[known] @ z, z), atol=1e-6
    )


@pytest.mark.slow
def test_by_rows_and_by_whole_tables_give_the_same():
    def run(model):
        algorithm = ials(model, server=optax.adam(0.05), split=None)
        return fr.train(algorithm, CLIENTS, rounds=3, clients_per_round=4, seed=2, layout=one_by_one()).params

    assert_close(run(MODEL), run(MODEL._replace(lookups={})))


def test_rounds_are_those_of_a_loop_in_numpy():
    """All clients in every round, halves in stored order, both ways, weights sqrt(n), Adam and a prior on changes."""
    rate, prior, rounds, clients = 0.1, 3.0, 3, people([6, 4, 7, 2])
    examples = clients.num_examples
    server = fr.optimizers.with_prior(optax.adam(rate), prior, examples=examples, around_start=True)
    algorithm = ials(server=server, aggregate=fr.aggregators.mean("sqrt-examples"))
    run = fr.train(algorithm, clients, rounds=rounds, clients_per_round=4, seed=0, layout=one_by_one())
    V = np.asarray(algorithm.init(fr.kit.run_keys(0).init).method.params["item_embedding"], float)
    start, tables = np.stack([V, np.zeros_like(V)]), np.stack([V, np.zeros_like(V)])
    first, second = np.zeros_like(tables), np.zeros_like(tables)
    for number in range(1, rounds + 1):
        V, T = tables
        G, gradient = V.T @ V, np.zeros_like(tables)
        for k in range(len(clients)):
            mine, half = items_of(clients, k), -(-clients.sizes[k] // 2)
            for s, q in ((mine[:half], mine[half:]), (mine[half:], mine[:half])):
                A = V[s].T @ V[s] + UNOBSERVED * G + RIDGE * np.eye(DIM)
                z = np.linalg.solve(A, (V[s] + T[s]).sum(0))
                w = np.linalg.solve(A, V[q].T @ (V[q] @ z - 1) + UNOBSERVED * (G @ z - V[s].T @ (V[s] @ z)))
                here = np.zeros_like(tables)
                here[0, q] += np.outer(V[q] @ z - 1, z)
                here[0, s] += np.outer(1 - V[s] @ z, w) - np.outer(V[s] @ w, z) - UNOBSERVED * np.outer(V[s] @ z, z)
                here[0] += UNOBSERVED * V @ (np.outer(z, z) - np.outer(z, w) - np.outer(w, z))
                here[1, s] += w
                gradient += here / len(mine) * len(mine) ** 0.5
        gradient /= np.sqrt(clients.sizes).sum()
        gradient = clients.num_examples * gradient + prior * (tables - start)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        tables = tables - rate * first / (1 - 0.9**number) / (np.sqrt(second / (1 - 0.999**number)) + 1e-8)
    V, T = tables
    np.testing.assert_allclose(run.params["history_offset"], T, atol=2e-4)
    np.testing.assert_allclose(run.params["item_embedding"], V, atol=2e-4)


@pytest.mark.slow
def test_training_ranks_hidden_items_better():
    rng = np.random.default_rng(0)
    taste = rng.integers(0, 2, 60)  # two kinds of people, each with a half of the items
    item = np.concatenate([rng.permutation(6)[:5] + 6 * kind for kind in taste]).astype(np.int32)
    clients = Clients.from_columns({"item": item}, client=np.repeat(np.arange(60), 5))
    train, test = clients.take(np.arange(40)), clients.take(np.arange(40, 60))
    algorithm = ials(server=optax.adam(0.05), split=None)
    run = fr.train(algorithm, train, rounds=40, clients_per_round=20, seed=0)
    found = fr.evaluate(algorithm, run.params, test, split=fr.split.fraction(0.8))
    assert found.micro["hit@20"] == 1
    assert found.micro["ndcg@100"] > 0.6  # chance is about .4


def test_a_client_measures_itself_as_ranking_defines_it():
    clients = people([6, 1, 4, 7, 12, 2], seed=3)
    algorithm, params = ials(), MODEL.init_global(jax.random.key(4))
    params["item_embedding"] = params["item_embedding"].at[5:8].set(params["item_embedding"][4])  # equal scores
    params["gram"] = params["item_embedding"].T @ params["item_embedding"]
    split = fr.split.fraction(0.5)
    model = MODEL._replace(
        client_metrics=fr.models.ranking_metrics(
            lambda shared, local: shared["item_embedding"] @ local["user_embedding"],
            recall_at=(2, 5),
            ndcg_at=(3, 100),
            hit_at=(1, 4),
        )
    )
    found = fr.evaluate(ials(model), params, clients, split=split)
    division = ranking.split_items(clients, split)

    def score(known):
        owner = Clients.from_columns({"item": known.item.astype(np.int32)}, client=known.user)
        return np.asarray(fr.reconstruct(algorithm, params, owner)["user_embedding"] @ params["item_embedding"].T)

    expected = ranking.rank(score, division, ITEMS, recall_at=(2, 5), ndcg_at=(3, 100), hit_at=(1, 4))
    for name, values in expected.per_client.items():
        np.testing.assert_allclose(found.per_client[name], values, atol=1e-6, err_msg=name)
        assert found.micro[name] == pytest.approx(expected.metrics[name], abs=1e-6)
        assert found.macro[name] == found.micro[name]
    assert found.clients == expected.users == 5


@given(st.lists(st.integers(0, 50), min_size=3, max_size=20), st.integers(0, 3))
def test_factors_of_popularity_rank_everybodys_items_by_popularity(counts, size):
    person = ranking.ItemSets(1, np.zeros(size, int), np.arange(size))
    params = ranking_params(np.zeros((len(counts), 4)), np.array(counts))
    params["popularity_weight"][:] = 1
    scores = ranking.score_by_factors(params, 0.4, 1.0)(person)[0]
    assert (np.sign(np.subtract.outer(scores, scores)) == np.sign(np.subtract.outer(counts, counts))).all()


def test_popularity_decides_for_a_person_without_items_and_is_blended_in_for_others():
    params = fr.models.ranking_params(np.float32([[1], [2], [0]]), counts=np.array([1, 2, 4]))
    params["popularity_weight"][1:] = 0.5
    clients = Clients.from_columns({"item": np.array([0], np.int32)}, client=np.array([0]))
    algorithm = ials(fr.models.ranking_factorization(3, 1), unobserved=0.2, ridge=1.0)
    sets = ranking.item_sets(clients)._replace(users=2)  # the second has none
    expected = [[1 / 6 + 0.125, 1 / 3 + 0.25, 0.5], [0.25, 0.5, 1]]
    np.testing.assert_allclose(ranking.score_by_factors(params, 0.2, 1.0)(sets), expected, atol=1e-6)
    np.testing.assert_allclose(ranking.score_by_model(algorithm, params)(sets), expected, atol=1e-6)


@pytest.mark.parametrize("size", [1, 40, 150])
def test_the_inverse_of_a_positive_matrix(size):
    rows = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
    matrix = rows @ rows.T / size + np.eye(size, dtype=np.float32)
    np.testing.assert_allclose(invert_positive(jnp.asarray(matrix)) @ matrix, np.eye(size), atol=1e-4)


def test_settings_that_make_no_sense_are_errors():
    with pytest.raises(ValueError, match="`ridge`"):
        ials(ridge=0)
    with pytest.raises(ValueError, match="`unobserved`"):
        ials(unobserved=-1)
    with pytest.raises(ValueError, match="this model has item_embedding and user_embedding"):
        ials(fr.models.matrix_factorization(4, 2))
