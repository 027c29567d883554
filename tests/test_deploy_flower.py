"""What `deploy/flower.py` takes from Flower's inside is there, in every version that the extra `deploy` allows."""

import ast
import importlib
import inspect
import warnings
from pathlib import Path

import pytest

import fedrecon._src.deploy.flower as flower
import fedrecon._src.deploy.flower_server as flower_server
import fedrecon._src.deploy.superlink_process as superlink_process

pytest.importorskip("cryptography")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Flower's own command line uses what click deprecates
    flwr = pytest.importorskip("flwr", reason="the extra `deploy` is not installed")
SOURCES = [Path(module.__file__) for module in (flower, flower_server, superlink_process)]


def names_of_flower():
    nodes = [node for source in SOURCES for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("flwr"):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("module", "name"), sorted(set(names_of_flower())))
def test_every_name_that_is_used_exists(module, name):
    found = importlib.import_module(module)
    if not hasattr(found, name):
        importlib.import_module(f"{module}.{name}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_connection_is_made_as_we_make_it():
    from flwr.supernode.fleet_http_connection import http_request_response

    given = list(inspect.signature(http_request_response).parameters)[:4]
    assert given == ["server_address", "insecure", "root_certificates", "authentication_keys"]


def test_no_other_file_knows_flower():
    for path in SOURCES[0].parent.parent.rglob("*.py"):
        if path not in SOURCES:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                assert not any(name.split(".")[0] == "flwr" for name in named), path
