from . import (
    aggregators as aggregators,
)
from . import (
    algorithms as algorithms,
)
from . import (
    data as data,
)
from . import (
    deploy as deploy,
)
from . import (
    device as device,
)
from . import (
    kit as kit,
)
from . import (
    models as models,
)
from . import (
    optimizers as optimizers,
)
from . import (
    privacy as privacy,
)
from . import (
    recommend as recommend,
)
from . import (
    split as split,
)
from ._src.algorithms.algorithm import Algorithm as Algorithm
from ._src.algorithms.federated_averaging import federated_averaging as federated_averaging
from ._src.algorithms.federated_ials import federated_ials as federated_ials
from ._src.algorithms.federated_reconstruction import federated_reconstruction as federated_reconstruction
from ._src.algorithms.federated_reconstruction import local_training as local_training
from ._src.algorithms.finetuning import with_finetuning as with_finetuning
from ._src.algorithms.saving import load_algorithm as load_algorithm
from ._src.algorithms.saving import save_algorithm as save_algorithm
from ._src.app.logs import log_to as log_to
from ._src.client.closed_form import closed_form as closed_form
from ._src.client.closed_form import least_squares as least_squares
from ._src.client.gradient_descent import gradient_descent as gradient_descent
from ._src.core.client_sampling import Sampling as Sampling
from ._src.core.clients import Clients as Clients
from ._src.core.model import Metric as Metric
from ._src.core.model import Model as Model
from ._src.core.pytrees import partition as partition
from ._src.simulation.comparison import compare as compare
from ._src.simulation.divergence import DivergenceWarning as DivergenceWarning
from ._src.simulation.engine import layout as layout
from ._src.simulation.evaluation import Evaluation as Evaluation
from ._src.simulation.evaluation import Evaluator as Evaluator
from ._src.simulation.evaluation import evaluate as evaluate
from ._src.simulation.evaluation import predict as predict
from ._src.simulation.evaluation import reconstruct as reconstruct
from ._src.simulation.explanation import explain as explain
from ._src.simulation.multihost import start_hosts as start_hosts
from ._src.simulation.multihost import start_jax_devices as start_jax_devices
from ._src.simulation.training import Callback as Callback
from ._src.simulation.training import EarlyStopping as EarlyStopping
from ._src.simulation.training import ProgressBar as ProgressBar
from ._src.simulation.training import Run as Run
from ._src.simulation.training import Validation as Validation
from ._src.simulation.training import train as train
from ._src.storage.run_folder import RunFolder as RunFolder
from ._version import __version__ as __version__
