"""Models that come with the package, adapters for other frameworks, and extensions of models."""

from fedrecon._src.models.equinox import from_equinox as from_equinox
from fedrecon._src.models.extensions import client_table as client_table
from fedrecon._src.models.extensions import implicit_feedback as implicit_feedback
from fedrecon._src.models.extensions import learned_default as learned_default
from fedrecon._src.models.extensions import standardize as standardize
from fedrecon._src.models.factorization import logistic_factorization as logistic_factorization
from fedrecon._src.models.factorization import matrix_factorization as matrix_factorization
from fedrecon._src.models.factorization import ranking_factorization as ranking_factorization
from fedrecon._src.models.factorization import ranking_metrics as ranking_metrics
from fedrecon._src.models.factorization import ranking_params as ranking_params
from fedrecon._src.models.flax import from_flax as from_flax
from fedrecon._src.models.keras import from_keras as from_keras
from fedrecon._src.models.network import from_function as from_function
from fedrecon._src.models.network import rows as rows
from fedrecon._src.models.text.next_word import next_word as next_word
