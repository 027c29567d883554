"""Partially local federated learning: train the global part of a model, reconstruct the local part on each client.

A name is imported when it is first used, so that `fedrecon --help` does not wait for JAX. To export a name, add it
twice below: to the imports, which type checkers and editors read, and to `_NAMES` or `_MODULES`, which Python reads. A
test compares the two.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedrecon._version import __version__ as __version__

if TYPE_CHECKING:
    from fedrecon import aggregators as aggregators
    from fedrecon import data as data
    from fedrecon import device as device
    from fedrecon import models as models
    from fedrecon import optimizers as optimizers
    from fedrecon import privacy as privacy
    from fedrecon import recommend as recommend
    from fedrecon import split as split
    from fedrecon._src.algorithms.algorithm import Algorithm as Algorithm
    from fedrecon._src.algorithms.algorithm import Method as Method
    from fedrecon._src.algorithms.algorithm import RoundMessage as RoundMessage
    from fedrecon._src.algorithms.algorithm import ServerState as ServerState
    from fedrecon._src.algorithms.ditto import ditto as ditto
    from fedrecon._src.algorithms.federated_averaging import federated_averaging as federated_averaging
    from fedrecon._src.algorithms.federated_ials import federated_ials as federated_ials
    from fedrecon._src.algorithms.federated_reconstruction import federated_reconstruction as federated_reconstruction
    from fedrecon._src.algorithms.finetuning import with_finetuning as with_finetuning
    from fedrecon._src.algorithms.local_training import local_training as local_training
    from fedrecon._src.algorithms.rounds import client_round as client_round
    from fedrecon._src.algorithms.rounds import client_total as client_total
    from fedrecon._src.algorithms.rounds import client_update as client_update
    from fedrecon._src.algorithms.rounds import server_round as server_round
    from fedrecon._src.algorithms.rounds import server_update as server_update
    from fedrecon._src.algorithms.saving import SavedAlgorithm as SavedAlgorithm
    from fedrecon._src.algorithms.saving import digest as digest
    from fedrecon._src.algorithms.saving import load_algorithm as load_algorithm
    from fedrecon._src.algorithms.saving import save_algorithm as save_algorithm
    from fedrecon._src.algorithms.scaffold import scaffold as scaffold
    from fedrecon._src.algorithms.validation import decide_lookups as decide_lookups
    from fedrecon._src.app.logs import log_to as log_to
    from fedrecon._src.app.tuning import Trial as Trial
    from fedrecon._src.app.tuning import Tuned as Tuned
    from fedrecon._src.app.tuning import tune as tune
    from fedrecon._src.client.gradient_descent import gradient_descent as gradient_descent
    from fedrecon._src.client.least_squares import least_squares as least_squares
    from fedrecon._src.client.lookups.tracing import find_lookups as find_lookups
    from fedrecon._src.client.objectives import Solver as Solver
    from fedrecon._src.core.client_sampling import Sampling as Sampling
    from fedrecon._src.core.clients import Clients as Clients
    from fedrecon._src.core.cohort import Lengths as Lengths
    from fedrecon._src.core.factories import RecipeError as RecipeError
    from fedrecon._src.core.keys import round_key as round_key
    from fedrecon._src.core.keys import run_keys as run_keys
    from fedrecon._src.core.model import ClientMetrics as ClientMetrics
    from fedrecon._src.core.model import Metric as Metric
    from fedrecon._src.core.model import Model as Model
    from fedrecon._src.core.model import ModelState as ModelState
    from fedrecon._src.core.pytrees import partition as partition
    from fedrecon._src.core.upload import RowChanges as RowChanges
    from fedrecon._src.core.upload import Upload as Upload
    from fedrecon._src.core.wire import WireError as WireError
    from fedrecon._src.core.wire import from_bytes as from_bytes
    from fedrecon._src.core.wire import to_bytes as to_bytes
    from fedrecon._src.data.pooling import pooled as pooled
    from fedrecon._src.data.pooling import with_owner as with_owner
    from fedrecon._src.simulation.comparison import Comparison as Comparison
    from fedrecon._src.simulation.comparison import compare as compare
    from fedrecon._src.simulation.divergence import DivergenceWarning as DivergenceWarning
    from fedrecon._src.simulation.engine import Layout as Layout
    from fedrecon._src.simulation.engine import layout as layout
    from fedrecon._src.simulation.evaluation import Evaluation as Evaluation
    from fedrecon._src.simulation.evaluation import Evaluator as Evaluator
    from fedrecon._src.simulation.evaluation import evaluate as evaluate
    from fedrecon._src.simulation.evaluation import init_client_state as init_client_state
    from fedrecon._src.simulation.explanation import Explanation as Explanation
    from fedrecon._src.simulation.explanation import explain as explain
    from fedrecon._src.simulation.multihost import HostError as HostError
    from fedrecon._src.simulation.multihost import start_hosts as start_hosts
    from fedrecon._src.simulation.multihost import start_jax_devices as start_jax_devices
    from fedrecon._src.simulation.personalization import predict as predict
    from fedrecon._src.simulation.personalization import reconstruct as reconstruct
    from fedrecon._src.simulation.training import Callback as Callback
    from fedrecon._src.simulation.training import EarlyStopping as EarlyStopping
    from fedrecon._src.simulation.training import Run as Run
    from fedrecon._src.simulation.training import train as train
    from fedrecon._src.storage.run_folder import RunFolder as RunFolder

# Names by the module of fedrecon._src that defines them.
_NAMES = {
    "algorithms.algorithm": "Algorithm Method RoundMessage ServerState",
    "algorithms.ditto": "ditto",
    "algorithms.federated_averaging": "federated_averaging",
    "algorithms.federated_ials": "federated_ials",
    "algorithms.federated_reconstruction": "federated_reconstruction",
    "algorithms.finetuning": "with_finetuning",
    "algorithms.validation": "decide_lookups",
    "algorithms.local_training": "local_training",
    "algorithms.rounds": "client_round client_total client_update server_round server_update",
    "algorithms.saving": "SavedAlgorithm digest load_algorithm save_algorithm",
    "algorithms.scaffold": "scaffold",
    "app.logs": "log_to",
    "app.tuning": "Trial Tuned tune",
    "client.gradient_descent": "gradient_descent",
    "client.least_squares": "least_squares",
    "client.lookups.tracing": "find_lookups",
    "client.objectives": "Solver",
    "core.clients": "Clients",
    "core.cohort": "Lengths",
    "core.factories": "RecipeError",
    "core.keys": "round_key run_keys",
    "core.model": "ClientMetrics Metric Model ModelState",
    "core.pytrees": "partition",
    "core.upload": "RowChanges Upload",
    "core.wire": "WireError from_bytes to_bytes",
    "data.pooling": "pooled with_owner",
    "simulation.comparison": "Comparison compare",
    "simulation.divergence": "DivergenceWarning",
    "simulation.engine": "Layout layout",
    "simulation.evaluation": "Evaluation Evaluator evaluate init_client_state",
    "simulation.explanation": "Explanation explain",
    "simulation.multihost": "HostError start_hosts start_jax_devices",
    "simulation.personalization": "predict reconstruct",
    "core.client_sampling": "Sampling",
    "simulation.training": "Callback EarlyStopping Run train",
    "storage.run_folder": "RunFolder",
}
_MODULES = {
    "aggregators": "fedrecon.aggregators",
    "data": "fedrecon.data",
    "device": "fedrecon.device",
    "models": "fedrecon.models",
    "optimizers": "fedrecon.optimizers",
    "recommend": "fedrecon.recommend",
    "privacy": "fedrecon.privacy",
    "split": "fedrecon.split",
}
_MODULE_OF = {name: f"fedrecon._src.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in _MODULES:
        value: Any = importlib.import_module(_MODULES[name])
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    else:
        raise AttributeError(f"module 'fedrecon' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List public names, imported or not."""
    return sorted({*globals(), *_MODULES, *_MODULE_OF})
