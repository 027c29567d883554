"""The examples at small size: what they print is measured on clients never seen, and what they show is there."""

import importlib.util
import math
import re
import runpy
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOK = EXAMPLES / "quickstart.ipynb"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
WAYS = ["local only", "global only", "partially local"]


def run(name, **sizes):
    """Run the `main` of an example."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(**sizes)


def assert_all_measured_alike(found, clients):
    """Every way was measured on the same examples of this many clients, and none diverged."""
    assert list(found.rows)[:3] == WAYS
    evaluations = [way.unseen[0] for way in found.rows.values()]
    assert len({one.clients for one in evaluations}) == 1
    assert 0 < evaluations[0].clients < 2 * clients  # drawn by name: about as many as asked for
    assert len({one.examples for one in evaluations}) == 1
    assert [one.diverged for one in evaluations] == [0] * len(evaluations)
    assert all(math.isfinite(value) for name in found.rows for value in found[name].values())
    sent = [found.rows[name].costs.up for name in WAYS]
    assert sent[0] == 0 < sent[2] < sent[1]
    assert found.rows["local only"].runs[0].rounds == 0 < found.rows["partially local"].runs[0].rounds


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 80
    assert any(f"python examples/{path.name}" in line for line in lines[:15])


def test_matrix_factorization_learns_from_others_and_from_oneself():
    found = run("matrix_factorization_keras", rounds=20, clients=120)
    assert_all_measured_alike(found, clients=12)
    assert found["partially local"]["rmse"] < found["global only"]["rmse"]
    assert found["partially local"]["rmse"] < found["local only"]["rmse"]


def test_an_example_prints_its_table(monkeypatch, capsys):
    name = "matrix_factorization_flax"
    monkeypatch.setattr("sys.argv", [name, "--rounds", "20", "--clients", "120"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    head, _, *rows, last = capsys.readouterr().out.splitlines()[-6:]
    assert [row[:15].strip() for row in rows] == WAYS
    assert head.split()[:2] == ["unseen", "rmse"]
    local_only, global_only, partially_local = (float(row[15:].split()[0]) for row in rows)
    assert partially_local < min(local_only, global_only)
    assert re.match(r"\d+ clients never seen in training", last)


def test_a_local_tower_serves_users_better_than_the_same_tower_for_all():
    found = run("two_towers", rounds=5, clients=60)
    assert_all_measured_alike(found, clients=6)
    assert found["with a learned start"]["rmse"] < found["global only"]["rmse"]


def test_a_local_head_knows_the_classes_of_its_client():
    found = run("digits_local_head", rounds=20, clients=60)
    assert_all_measured_alike(found, clients=24)
    assert found["partially local"]["accuracy"] > found["global only"]["accuracy"] + 0.05


def test_local_batch_normalisation_undoes_a_client_s_camera():
    found = run("digits_local_batchnorm", rounds=20, clients=40)
    assert_all_measured_alike(found, clients=16)
    assert found["partially local"]["accuracy"] > found["local only"]["accuracy"]
    assert found["partially local"]["accuracy"] > found["global only"]["accuracy"]


def test_local_adapters_learn_a_client_s_words():
    found = run("transformer_adapters", rounds=60, clients=40, rank=1)
    assert_all_measured_alike(found, clients=8)
    assert found["partially local"]["accuracy"] > found["local only"]["accuracy"]
    assert found["partially local"]["accuracy"] > found["global only"]["accuracy"]


def as_committed():
    return nbformat.read(NOTEBOOK, as_version=4).cells


def printed_by(cell):
    return "".join(output.text for output in cell.get("outputs", []) if output.get("name") == "stdout")


def test_the_notebook_runs_from_data_to_recommendations():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    sizes = [cell for cell in notebook.cells if cell.source.startswith("rounds = 200")]
    assert len(sizes) == 1
    sizes[0].source = sizes[0].source.replace("rounds = 200", "rounds = 10")
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    for cell, stored in zip(notebook.cells, as_committed(), strict=True):
        if cell is sizes[0]:
            break
        assert printed_by(cell) == printed_by(stored)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    printed = "".join(map(printed_by, notebook.cells))
    assert "user_bias  local" in printed
    assert re.search(r"\d+ clients never seen in training", printed)
    assert len(printed.split("recommended: ")[1].split("; ")) == 5


def test_the_notebook_shows_what_a_whole_run_gave():
    """All cells have run, in order, without an error or a warning."""
    cells = [cell for cell in as_committed() if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}
