"""Names in the code keep to docs/glossary.md. Numbers in this file only go down."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py")) + sorted((ROOT / "src-device").rglob("*.py"))
ROOMS = ROOT / "src" / "fedrecon" / "_src"
VAGUE_NAMES = 14
VAGUE_ARGUMENTS = 11
PARTICIPLES = 2
DEVICE_NAMES = 14
PARTICIPLE = re.compile(r"(?:^|_)(?:believ|ask|hold|told|meet|join|travel|besid|heed|settl|lik)(?:ing|ed|es|e)?(?:_|$)")


def avoided_words():
    table = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## Names that the code")[2]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {word for row in rows if " for " not in row for word in re.findall(r"`(\w+)`", row)}


def bindings(path):
    """Yield the names of variables, arguments, functions and classes, each with its place and kind."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, where, "definition"
        elif isinstance(node, ast.arg):
            yield node.arg, where, "argument"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, where, "variable"


BINDINGS = [binding for path in SOURCES for binding in bindings(path)]


def test_names_say_what_they_hold():
    vague = [f"{where} {name}" for name, where, kind in BINDINGS if kind == "variable" and name in avoided_words()]
    assert len(vague) <= VAGUE_NAMES, "\n".join(vague)


def test_arguments_say_what_they_take():
    vague = [f"{where} {name}" for name, where, kind in BINDINGS if kind == "argument" and name in avoided_words()]
    assert len(vague) <= VAGUE_ARGUMENTS, "\n".join(vague)


def test_functions_and_modules_are_not_participles():
    names = [(name, where) for name, where, kind in BINDINGS if kind == "definition" and name[0] != name[0].upper()]
    names += [(path.stem, str(path.relative_to(ROOT))) for path in SOURCES]
    participles = [f"{where} {name}" for name, where in names if PARTICIPLE.search(name)]
    assert len(participles) <= PARTICIPLES, "\n".join(participles)


def test_a_device_is_a_phone_or_a_browser():
    rooms = tuple(str((ROOMS / room).relative_to(ROOT)) for room in ("core", "client", "server", "simulation"))
    names = [f"{where} {name}" for name, where, _ in BINDINGS if where.startswith(rooms) and "device" in name.lower()]
    names = [name for name in names if "jax_device" not in name]
    assert len(names) <= DEVICE_NAMES, "\n".join(names)


@pytest.mark.parametrize("word", ["found", "kept", "rebuild", "told"])
def test_the_glossary_lists_words_to_avoid(word):
    assert word in avoided_words()
