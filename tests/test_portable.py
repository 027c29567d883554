"""Models and algorithms that travel: the same digest and the same results at the other end; damage is noticed."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.core.factories import follow, recipe_of
from fedrecon._src.storage.atomic import StorageError
from relatives import RELATIVES, WHOLE, make
from toy_models import assert_same_bits, descend, lookup_model, one_round

RATED = fr.data.synthetic_ratings(num_users=8, num_items=9, mean_ratings=6, seed=0)


def factorization():
    return fr.models.learned_default(fr.models.matrix_factorization(9, dim=2))


def algorithm(model=None, **options):
    sgd = fr.optimizers.sgd(0.1)
    settings = {
        "reconstruct": fr.gradient_descent(sgd, batch_size=2, steps=3),
        "update": fr.gradient_descent(sgd, batch_size=2),
        "server": fr.optimizers.adam(0.1),
        "split": fr.split.redrawn(fr.split.half()),
        "aggregate": fr.aggregators.mean("uniform", clip_norm=1.0),
        **options,
    }
    return fr.federated_reconstruction(factorization() if model is None else model, **settings)


def relative_model(name):
    model = fr.models.matrix_factorization(9, dim=2)
    return fr.models.client_table(model, num_clients=8) if name in WHOLE else model


MADE = {
    "reconstruction": algorithm,
    "least squares": lambda: algorithm(reconstruct=fr.least_squares(0.5), second_order=True),
    "schedule": lambda: algorithm(
        server=fr.optimizers.chain(
            fr.optimizers.sgd(1.0), fr.optimizers.scale_by_schedule(fr.optimizers.linear_schedule(1.0, 0.1, 10))
        )
    ),
    "federated adagrad": lambda: algorithm(server=fr.optimizers.fedadagrad(0.1)),
    "optax adagrad": lambda: algorithm(server=fr.optimizers.adagrad(0.1)),
    "averaging": lambda: fr.federated_averaging(
        fr.models.matrix_factorization(9, dim=2),
        update=fr.gradient_descent(fr.optimizers.sgd(0.1), batch_size=2),
        server=fr.optimizers.sgd(1.0),
        aggregate=fr.aggregators.chain(fr.aggregators.finite(), fr.aggregators.by_weight()),
    ),
    "finetuning": lambda: fr.with_finetuning(
        algorithm(), fr.gradient_descent(fr.optimizers.sgd(0.1), batch_size=2), which="*item*"
    ),
    **{name: functools.partial(lambda name: make(name, relative_model(name)), name) for name in RELATIVES},
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_from_a_recipe_has_the_same_recipe(name):
    made = MADE[name]()
    recipe = json.loads(json.dumps(recipe_of(made)))
    assert recipe_of(follow(recipe)) == recipe
    assert fr.kit.digest(follow(recipe)) == fr.kit.digest(made)
    assert fr.kit.digest(MADE[name]()) == fr.kit.digest(made)


def test_digests_tell_algorithms_apart():
    assert len({fr.kit.digest(make()) for make in MADE.values()}) == len(MADE)
    assert fr.kit.digest(algorithm(fr.models.matrix_factorization(9, dim=3))) != fr.kit.digest(algorithm())


@pytest.mark.slow
def test_a_saved_algorithm_trains_to_the_same_bits(tmp_path):
    made = algorithm()
    start = one_round(made, RATED, rounds=1).params
    digest = fr.save_algorithm(tmp_path / "it", made, start)
    there, params = fr.load_algorithm(tmp_path / "it")
    assert fr.kit.digest(there) == digest
    assert_same_bits(params, start)
    assert_same_bits(one_round(there, RATED, rounds=2).params, one_round(made, RATED, rounds=2).params)


def test_another_process_builds_the_same_algorithm(tmp_path):
    made = algorithm()
    digest = fr.save_algorithm(tmp_path / "it", made, made.model.init_global(jax.random.key(0)))
    script = "import sys, fedrecon as fr; print(fr.kit.digest(fr.load_algorithm(sys.argv[1]).algorithm))"
    found = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "it"], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.strip() == digest


def test_every_factory_is_known_to_a_process_that_loads():
    from fedrecon._src.algorithms.saving import _FACTORY_MODULES

    source = Path(fr.__file__).parent
    names = {
        ".".join(p.relative_to(source.parent).with_suffix("").parts)
        for p in source.rglob("*.py")
        if re.search(r"^@register_factory|= register_factory\(", p.read_text(), re.M)
    }
    script = f"import sys, importlib; [importlib.import_module(m) for m in {_FACTORY_MODULES}]; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert names <= set(found.stdout.split())


def test_decided_lookups_travel_with_a_model_of_ones_own(tmp_path):
    """The loading side sees no data; it runs by rows because the saving side decided so."""
    own = algorithm(lookup_model()._replace(lookups="auto"))
    clients = fr.Clients(
        {
            "item": np.zeros(4, np.int32),
            "tags": np.zeros((4, 3), np.int32),
            "main_tag": np.zeros(4, np.int32),
            "y": np.zeros(4, np.float32),
        },
        [0],
        [4],
    )
    with pytest.raises(ValueError, match="lookups are not decided"):
        fr.kit.digest(own)
    decided = fr.kit.decide_lookups(own, clients)
    fr.save_algorithm(tmp_path / "it", decided, own.model.init_global(jax.random.key(0)))
    with pytest.raises(StorageError, match="`algorithm`"):
        fr.load_algorithm(tmp_path / "it")
    there = fr.load_algorithm(tmp_path / "it", own).algorithm
    assert there.method.needs.groups == decided.method.needs.groups != {}
    assert fr.kit.digest(there) == fr.kit.digest(decided)


def test_what_was_changed_by_hand_is_not_passed_off_as_made(tmp_path):
    model = factorization()
    changed = model._replace(loss=lambda predictions, batch: (predictions, predictions))
    with pytest.raises(fr.kit.RecipeError, match="changed after learned_default made it: `loss` was replaced"):
        recipe_of(changed)
    with pytest.raises(fr.kit.RecipeError, match="`server` of federated_reconstruction was not made by a factory"):
        recipe_of(algorithm(server=optax.sgd(0.1)))
    with pytest.raises(fr.kit.RecipeError, match="`optimizer` of gradient_descent was not made"):
        recipe_of(descend(0.1))


def test_damage_and_foreign_folders_are_named(tmp_path):
    made = algorithm()
    params = made.model.init_global(jax.random.key(0))
    fr.save_algorithm(tmp_path / "it", made, params)
    arrays = tmp_path / "it" / "params.safetensors"
    good = arrays.read_bytes()
    arrays.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(StorageError, match=r"params\.safetensors"):
        fr.load_algorithm(tmp_path / "it")
    arrays.write_bytes(good)
    with pytest.raises(StorageError, match="other shapes"):
        fr.load_algorithm(
            tmp_path / "it",
            algorithm(fr.models.learned_default(fr.models.matrix_factorization(9, dim=3)), update=descend(0.1)),
        )
    with pytest.raises(ValueError, match="paths and shapes of the global parameters: "):
        fr.save_algorithm(tmp_path / "other", made, {"w": np.zeros(1)})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    fr.save_algorithm(tmp_path / "saved", made, params)
    (tmp_path / "saved" / "notes.txt").write_text("mine")
    for folder, file in (("mine", "thesis.tex"), ("saved", "notes.txt")):
        with pytest.raises(StorageError, match=rf"holds {file}, and fedrecon did not make it"):
            fr.save_algorithm(tmp_path / folder, made, params, replace=True)
        assert (tmp_path / folder / file).read_text() == "mine"


@pytest.mark.parametrize(
    "recipe",
    [
        {"make": "os.system", "settings": {"command": "true"}},
        {"make": "half", "settings": {"nothing": 1}},
        {"make": "half"},
        {"make": 7, "settings": {}},
    ],
)
def test_a_recipe_calls_nothing_but_factories(recipe):
    with pytest.raises(fr.kit.RecipeError):
        follow(recipe)


def test_a_recipe_that_is_nested_too_deeply_is_refused():
    recipe = {"make": "half", "settings": {}}
    for _ in range(100):
        recipe = {"make": "redrawn", "settings": {"split": recipe}}
    with pytest.raises(fr.kit.RecipeError, match="nested too deeply"):
        follow(recipe)
