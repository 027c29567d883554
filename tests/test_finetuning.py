import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from toy_models import a_and_b, assert_same_bits, descend, linear, one_by_one, one_round, squared_error, xy

START = {"w": jnp.float32(5.0)}
SPLIT = fr.split.alternate()  # client A: support (1, 5) and (3, 8), query (2, 6)


def all_global(w=0.0, b=0.0):
    """The model of the spec with nothing local."""
    return fr.Model(
        init_global=lambda key: {"w": jnp.float32(w), "bias": {"b": jnp.float32(b)}},
        init_local=lambda key: {},
        predict=lambda shared, local, batch: shared["w"] * batch["x"] + shared["bias"]["b"],
        loss=squared_error,
    )


def reconstruction(rate=0.1, **options):
    return fr.federated_reconstruction(
        linear(), reconstruct=descend(rate, **options), update=descend(0.1), server=optax.sgd(1.0), split=SPLIT
    )


def averaging():
    return fr.federated_averaging(all_global(), update=descend(0.1), server=optax.sgd(1.0))


def losses(algorithm, params, clients):
    found = fr.evaluate(algorithm, params, clients, split=SPLIT, layout=one_by_one())
    return found.per_client["loss"]


def follow(w, b, steps, *, rate, move_w, move_b):
    """Descend on (x, y) one after another by hand."""
    for x, y in steps:
        slope = 2 * (w * x + b - y)
        w, b = w - move_w * rate * slope * x, b - move_b * rate * slope
    return w, b


def test_global_parameters_are_finetuned_after_the_local_ones_are_rebuilt():
    algorithm = fr.with_finetuning(reconstruction(), descend(0.02))
    support = [(1, 5), (3, 8)]
    _, b = follow(5, 0, support, rate=0.1, move_w=0, move_b=1)
    assert b == pytest.approx(-1.4)  # as in the spec
    w, _ = follow(5, b, support, rate=0.02, move_w=1, move_b=0)
    assert losses(algorithm, START, a_and_b())[0] == pytest.approx((2 * w + b - 6) ** 2, rel=1e-5)
    mine = fr.reconstruct(algorithm, START, {"x": np.float32([1, 3]), "y": np.float32([5, 8])})
    assert mine["local"]["b"] == pytest.approx(b, rel=1e-5)
    assert mine["finetuned"]["w"] == pytest.approx(w, rel=1e-5)
    predicted = fr.predict(algorithm.model, START, mine, {"x": np.float32([2])})
    assert predicted == pytest.approx([2 * w + b], rel=1e-5)


@pytest.mark.parametrize(("which", "move_w", "move_b"), [("bias/*", 0, 1), ("w", 1, 0), ("*", 1, 1)])
def test_finetuning_begins_at_the_trained_values(which, move_w, move_b):
    algorithm = fr.with_finetuning(averaging(), descend(0.02, epochs=2), which=which)
    trained = {"w": jnp.float32(2.0), "bias": {"b": jnp.float32(1.0)}}
    w, b = follow(2, 1, 2 * [(1, 5), (3, 8)], rate=0.02, move_w=move_w, move_b=move_b)
    assert losses(algorithm, trained, a_and_b())[0] == pytest.approx((2 * w + b - 6) ** 2, rel=1e-4)


def test_without_steps_nothing_is_finetuned():
    algorithm = fr.with_finetuning(reconstruction(), descend(0.1, steps=0))
    assert losses(algorithm, START, a_and_b()) == pytest.approx([6.76, 14.44], rel=1e-5)  # as in the spec


@pytest.mark.slow
def test_clients_do_not_see_each_others_finetuning():
    algorithm = fr.with_finetuning(reconstruction(), descend(0.02))
    clients = a_and_b()
    together = losses(algorithm, START, clients)
    alone = [losses(algorithm, START, clients.take([i]))[0] for i in range(2)]
    side_by_side = fr.evaluate(algorithm, START, clients, split=SPLIT, layout=fr.layout(2, 1)).per_client["loss"]
    np.testing.assert_allclose(together, alone, 1e-6)
    np.testing.assert_allclose(side_by_side, alone, 1e-6)


@pytest.mark.slow
def test_training_and_what_is_uploaded_stay_what_they_were():
    algorithm = reconstruction()
    finetuned = fr.with_finetuning(algorithm, descend(0.1))
    assert finetuned.method.client is algorithm.method.client
    expected, found = (one_round(each, a_and_b(), rounds=2) for each in (algorithm, finetuned))
    assert_same_bits(found.params, expected.params)


def test_the_larger_of_two_supports_is_used():
    # One batch for reconstruction, three for finetuning; the fourth example is for neither.
    algorithm = fr.with_finetuning(reconstruction(steps=1), descend(0.02, steps=3))
    support = [(1, 5), (3, 8), (2, 1), (1, 100)]
    _, b = follow(5, 0, support[:1], rate=0.1, move_w=0, move_b=1)
    w, _ = follow(5, b, support[:3], rate=0.02, move_w=1, move_b=0)
    mine = fr.reconstruct(algorithm, START, xy(([x for x, _ in support], [y for _, y in support])))
    assert mine["finetuned"]["w"] == pytest.approx([w], rel=1e-5)
    assert fr.with_finetuning(reconstruction(), descend(0.02, steps=3)).method.support_limit is None


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match="`which`: 'oov\\*' selects no parameter; the parameters are: bias/b, w"):
        fr.with_finetuning(averaging(), descend(0.1), which="oov*")
    with pytest.raises(ValueError, match=r"`which`: .* selects no parameter; the parameters are: bias/b, w"):
        fr.with_finetuning(averaging(), descend(0.1), which=lambda path, leaf: False)


def test_few_clients_run_side_by_side_where_each_finetunes_a_large_model():
    model = fr.models.next_word(10_000, 500, local="nothing")
    algorithm = fr.federated_averaging(model, update=descend(0.3, 16), server=fr.optimizers.fedyogi(0.1))
    assert fr.layout(model=model).sharing == 16
    assert fr.layout(model=fr.with_finetuning(algorithm, descend(0.1, 16), which="oov_*").model).sharing == 16
    everything = fr.layout(model=fr.with_finetuning(algorithm, descend(0.1, 16)).model)
    assert (everything.block, everything.sharing) == (1, 1)


@pytest.mark.slow
def test_finetuning_the_words_of_ones_own_is_reconstruction_from_trained_values():
    sizes = {"embedding": 4, "hidden": 3, "projection": 4}
    generator = np.random.default_rng(0)
    oov = generator.integers(0, 3, (6, 3)).astype(np.int32)
    mine = {
        "word": np.where(oov > 0, 0, generator.integers(1, 5, (6, 3))).astype(np.int32),
        "oov": oov,
        "target": generator.integers(1, 5, (6, 3)).astype(np.int32),
    }
    in_one_place = fr.models.next_word(4, 2, local="nothing", **sizes)
    trained = in_one_place.init_global(jax.random.key(0))
    finetuned = fr.with_finetuning(
        fr.federated_averaging(in_one_place, update=descend(0.5, 2), server=fr.optimizers.fedyogi(0.1)),
        descend(0.5, 2),
        which="oov_embedding",
    )
    shared = {name: leaf for name, leaf in trained.items() if name != "oov_embedding"}
    from_trained = fr.models.next_word(4, 2, **sizes)._replace(
        init_local=lambda key: {"oov_embedding": trained["oov_embedding"]}
    )
    rebuilt = fr.federated_reconstruction(
        from_trained, reconstruct=descend(0.5, 2), update=descend(0.5, 2), server=optax.sgd(1.0)
    )
    found = fr.reconstruct(finetuned, trained, mine)
    assert found["local"] == {}
    expected = fr.reconstruct(rebuilt, shared, mine)["oov_embedding"]
    assert not np.allclose(expected, trained["oov_embedding"], atol=1e-4)
    np.testing.assert_allclose(found["finetuned"]["oov_embedding"], expected, 1e-5, 1e-6)
