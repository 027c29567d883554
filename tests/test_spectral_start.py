"""Round zero of clicks: eigenvectors from sums over users, whoever adds them."""

import numpy as np
import pytest

import fedrecon as fr
from fedrecon._src.recommend.spectral_start import SpectralStart, estimate_clicks

ITEMS = 12


def people(seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 8, 40)
    item = np.concatenate([rng.permutation(ITEMS - 1)[:size] for size in sizes]).astype(np.int32)  # nobody has the last
    return fr.Clients.from_columns({"item": item}, client=np.repeat(np.arange(40), sizes))


def test_the_start_is_the_eigenvectors_of_the_scaled_matrix():
    clients = people()
    matrix = fr.recommend.item_sets(clients).matrix(ITEMS)
    count, size = matrix.sum(0), matrix.sum(1)
    scaled = size[:, None] ** -0.5 * matrix * np.where(count > 0, np.maximum(count, 1) ** -0.25, 0)
    values, vectors = np.linalg.eigh(scaled.T @ scaled)
    expected = count[:, None] ** 0.25 * vectors * np.sqrt(np.maximum(values, 0))
    expected *= 0.5 / np.sqrt(count @ (expected**2).sum(1) / count.sum())
    found = estimate_clicks(clients, ITEMS, ITEMS).item_embedding
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=1e-4)
    assert not found[-1].any()


def test_sums_of_parts_give_what_all_clients_give():
    clients, zero = people(), SpectralStart(num_items=ITEMS, dim=3)
    parts, state = (clients.take(np.arange(15)), clients.take(np.arange(15, 40))), zero.start()
    while not state.done:
        answers = [zero.answer(zero.from_bytes(zero.to_bytes(state)), part) for part in parts]
        zeros = zero.zeros(state.answered)
        assert {name: value.shape for name, value in zeros.items()} == {k: v.shape for k, v in answers[0].items()}
        state = zero.advance(state, {name: answers[0][name] + answers[1][name] for name in zeros})
    result = zero.read_result(zero.to_bytes(state))
    np.testing.assert_allclose(result.item_embedding, estimate_clicks(clients, ITEMS, 3).item_embedding, atol=1e-4)
    assert result.num_examples == clients.num_examples


def test_states_that_cannot_be_are_refused():
    zero = SpectralStart(num_items=ITEMS, dim=3)
    state = zero.advance(zero.start(), zero.answer(zero.start(), people()))
    with pytest.raises(ValueError, match="not over"):
        zero.read_result(zero.to_bytes(state))
    with pytest.raises(ValueError, match="invalid values"):
        zero.from_bytes(zero.to_bytes(state._replace(answered=9)))
    with pytest.raises(ValueError, match="non-finite"):
        zero.from_bytes(zero.to_bytes(state._replace(basis=state.basis * np.nan)))
    with pytest.raises(ValueError, match="`dim`"):
        SpectralStart(num_items=2, dim=3)
