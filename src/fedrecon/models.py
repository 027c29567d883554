"""Models that come with the package, adapters for other frameworks, and extensions of models."""

from fedrecon._src.models import client_table as client_table
from fedrecon._src.models import from_equinox as from_equinox
from fedrecon._src.models import from_flax as from_flax
from fedrecon._src.models import from_function as from_function
from fedrecon._src.models import from_keras as from_keras
from fedrecon._src.models import implicit_feedback as implicit_feedback
from fedrecon._src.models import learned_default as learned_default
from fedrecon._src.models import logistic_factorization as logistic_factorization
from fedrecon._src.models import matrix_factorization as matrix_factorization
from fedrecon._src.models import next_word as next_word
from fedrecon._src.models import ranking_factorization as ranking_factorization
from fedrecon._src.models import ranking_metrics as ranking_metrics
from fedrecon._src.models import ranking_params as ranking_params
from fedrecon._src.models import rows as rows
from fedrecon._src.models import standardize as standardize
from fedrecon._src.models.network import Options as Options
