"""The order of the house: data walks one way, public names hide no module, the package speaks one language."""

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import fedrecon as fr

ROOT = Path(fr.__file__).parent

# Each may import those before it, never those after. A folder is one place, but for the command line, which comes last.
PLACES = """
_version recipes trees display keys split model upload disk clients cohort lookups solvers optimizers
privacy aggregate algorithm fitting kit algorithms cluster engine hosts travel sampling spending evaluation
training personalize explanation comparison models data preparation priors baselines ranking attacks
app deploy device studies cli __init__ __main__
"""
ORDER = PLACES.split()


def place_of(module):
    parts = module.split(".")[1:] or ["__init__"]
    if parts[0] == "privacy" and parts[-1] in ("spending", "leakage", "attacks", "canaries"):
        return "spending" if parts[-1] == "spending" else "attacks"  # what runs algorithms comes after them
    if parts[:2] == ["privacy", "round_zero"]:
        return "attacks"  # it is after `preparation`, and what runs it after both
    return "cli" if parts[:2] == ["app", "cli"] else parts[0]


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(["fedrecon", *(parts[:-1] if parts[-1] == "__init__" else parts)]), path


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "fedrecon":
            for name in node.names:
                inside = (ROOT / f"{name.name}.py").exists() or (ROOT / name.name).is_dir()
                yield f"fedrecon.{name.name}" if inside else "fedrecon"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedrecon."):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "fedrecon")


def test_every_module_has_its_place_in_the_order():
    unknown = sorted({place_of(module) for module, _ in modules()} - set(ORDER))
    assert not unknown, f"give these a place in ORDER: {unknown}"


def test_data_walks_one_way():
    against = []
    for module, path in modules():
        for imported in imports_of(path):
            if imported == "fedrecon" and place_of(module) == "studies":
                continue  # studies are written as a user would write them: import fedrecon as fr
            if ORDER.index(place_of(imported)) > ORDER.index(place_of(module)):
                against.append(f"{module} imports {imported}")
    assert not against


@pytest.mark.parametrize("package", ["fedrecon", "fedrecon.models", "fedrecon.data", "fedrecon.aggregate"])
def test_no_public_function_has_the_name_of_a_module(package):
    found = importlib.import_module(package)
    submodules = {info.name for info in pkgutil.iter_modules(found.__path__)}
    hidden = [name for name in submodules & set(vars(found)) if callable(getattr(found, name))]
    assert not hidden


def test_few_modules_lie_at_the_top():
    assert len(list(ROOT.glob("*.py"))) <= 32


@pytest.mark.parametrize("name", ["scaffold", "ditto"])
def test_an_algorithm_is_one_short_file_of_public_names(name):
    path = ROOT / "algorithms" / f"{name}.py"
    assert len(path.read_text().splitlines()) < 80
    assert set(imports_of(path)) == {"fedrecon.kit"}


def test_every_module_says_what_lives_there():
    for module, path in modules():
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), module


def test_no_module_is_called_by_a_name_that_says_nothing():
    assert not [m for m, _ in modules() if re.search(r"(^|_)(utils?|helpers?|common|manager|misc)$", m.split(".")[-1])]
