"""The order of the house: data walks one way, public names hide no module, the package speaks one language."""

import ast
import importlib
import pkgutil
import re
import sys
from pathlib import Path

import pytest

import fedrecon as fr

ROOT = Path(fr.__file__).parent

# Each may import those before it, never those after. The most specific name counts.
PLACES = """
_version core.checks core.pytrees core.factories core.display core.keys storage core client
privacy server algorithms.algorithm algorithms.validation algorithms.rounds algorithms.saving kit algorithms
simulation.multihost simulation.engine simulation.sampling privacy.ledger simulation models data recommend
deploy app device app.cli facade __main__
"""
ORDER = PLACES.split()


def place_of(module):
    parts = module.split(".")[1:]
    if parts == ["_src"]:
        return "_version"
    if parts[:1] != ["_src"]:
        return parts[0] if parts and parts[0] in ("_version", "kit", "__main__") else "facade"
    return next((".".join(parts[1:k]) for k in (4, 3, 2) if ".".join(parts[1:k]) in ORDER), ".".join(parts[1:]))


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(["fedrecon", *(parts[:-1] if parts[-1] == "__init__" else parts)]), path


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "fedrecon":
            yield from (f"fedrecon.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedrecon."):
            for name in node.names:
                path = ROOT.parent.joinpath(*node.module.split("."), name.name)
                inside = path.with_suffix(".py").exists() or path.is_dir()
                yield f"{node.module}.{name.name}" if inside else node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "fedrecon")


def test_every_module_has_its_place_in_the_order():
    unknown = sorted({place_of(module) for module, _ in modules()} - set(ORDER))
    assert not unknown, f"give these a place in ORDER: {unknown}"


def test_data_walks_one_way():
    against = []
    for module, path in modules():
        for imported in imports_of(path):
            if ORDER.index(place_of(imported)) > ORDER.index(place_of(module)):
                against.append(f"{module} imports {imported}")
    assert not against, "\n".join(against)


@pytest.mark.parametrize("package", ["fedrecon", "fedrecon._src.models", "fedrecon._src.data"])
def test_no_public_function_has_the_name_of_a_module(package):
    found = importlib.import_module(package)
    submodules = {info.name for info in pkgutil.iter_modules(found.__path__)}
    hidden = [name for name in submodules & set(dir(found)) if callable(getattr(found, name))]
    assert not hidden


def test_few_modules_lie_at_the_top():
    assert len(list(ROOT.glob("*.py"))) <= 32


RELATIVES = sorted(
    path
    for path in (ROOT / "_src" / "algorithms").glob("*.py")
    if "\nfrom fedrecon import kit\n" in path.read_text() and path.stem != "federated_ials"
)


@pytest.mark.parametrize("path", RELATIVES, ids=lambda path: path.stem)
def test_an_algorithm_is_one_short_file_of_public_names(path):
    """A method that is a setting of another imports that one beside the kit."""
    methods = {f"fedrecon._src.algorithms.{other.stem}" for other in RELATIVES}
    methods |= {f"fedrecon._src.algorithms.{name}" for name in ("federated_averaging", "finetuning")}
    assert len(path.read_text().splitlines()) <= 80
    assert "fedrecon.kit" in imports_of(path)
    assert set(imports_of(path)) <= {"fedrecon.kit"} | methods


def test_every_method_is_public():
    assert len(RELATIVES) >= 14
    assert all(hasattr(fr.algorithms, path.stem) for path in RELATIVES)


def test_only_commands_know_the_command_line():
    known = {
        module for module, path in modules() if re.search(r"^ *(import|from) tyro", path.read_text(), re.MULTILINE)
    }
    assert known
    assert not [module for module in known if not module.startswith("fedrecon._src.app.cli")]


def test_every_module_has_a_docstring():
    for module, path in modules():
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), module


def test_no_module_has_a_vague_name():
    vague = [m for m, _ in modules() if re.search(r"(^|_)(utils?|helpers?|common|manager|misc)$", m.split(".")[-1])]
    assert vague == ["fedrecon._src.app.cli.helper"]  # the command that runs the helper, a server


def test_the_public_surface_is_small():
    assert len(fr.__all__) <= 50
    for name in fr.__all__:
        assert getattr(fr, name) is not None


# ---- other packages: public interfaces only ----

REPOSITORY = ROOT.parents[1]
SOURCES = [path for folder in ("src", "src-device", "studies") for path in sorted((REPOSITORY / folder).rglob("*.py"))]
PRIVATE = re.compile(r"(^|\.)_(?!_)|^(keras\.src|jaxlib)|^flwr\.(?!(app|clientapp|serverapp)$)")


def is_ours(module):
    return module.split(".")[0] in ("fedrecon", "fedrecon_device", "studies", "benchmarks", "")


def private_imports(tree):
    """Yield imports of other packages' private modules and names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module, *(f"{node.module}.{name.name}" for name in node.names if name.name[0] == "_")]
        else:
            continue
        yield from (name for name in names if not is_ours(name) and PRIVATE.search(name))


def foreign_assignments(tree):
    """Yield assignments to attributes of imported modules or classes, the standard library's excepted."""
    foreign = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [name.name for name in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if not any(is_ours(module) or module.split(".")[0] in sys.stdlib_module_names for module in modules):
                foreign |= {(name.asname or name.name).split(".")[0] for name in node.names}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            targets = [ast.Attribute(node.args[0], "")]
        for target in targets:
            owner = target
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            if isinstance(target, ast.Attribute) and getattr(owner, "id", "") in foreign:
                yield f"{owner.id} in line {node.lineno}"


def private_names(path):
    """Yield the private names that a file defines, and of its private attributes those that it reads."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = getattr(node, "attr", getattr(node, "name", getattr(node, "id", None))) or ""
        if re.match(r"_(?!_)", name):
            read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            yield name, f"{path.relative_to(REPOSITORY)}:{node.lineno}" if read else None


def test_private_attributes_are_our_own():
    names = [pair for path in SOURCES for pair in private_names(path)]
    ours = {name for name, where in names if where is None} | {"_replace", "_fields", "_asdict", "_getframe", "_exit"}
    assert not [f"{where} {name}" for name, where in names if name not in ours]


@pytest.mark.parametrize("check", [private_imports, foreign_assignments])
def test_other_packages_are_used_through_their_public_interfaces(check):
    defects = {
        path.relative_to(REPOSITORY).as_posix(): list(check(ast.parse(path.read_text(encoding="utf-8"))))
        for path in SOURCES
    }
    assert not {name: problems for name, problems in defects.items() if problems}


def test_private_imports_and_foreign_assignments_are_noticed():
    tree = ast.parse("import jax._src\nimport tyro\nfrom jax import _x\ntyro.conf.x = 1\nsetattr(tyro, 'y', 2)")
    assert set(private_imports(tree)) == {"jax._src", "jax._x"}
    assert len(list(foreign_assignments(tree))) == 2
