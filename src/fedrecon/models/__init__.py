"""Models that come with the package, models of other frameworks, and ways to extend a model."""

from fedrecon.models.client_table import client_table as client_table
from fedrecon.models.from_equinox import from_equinox as from_equinox
from fedrecon.models.from_flax import from_flax as from_flax
from fedrecon.models.from_function import from_function as from_function
from fedrecon.models.from_keras import from_keras as from_keras
from fedrecon.models.implicit_feedback import implicit_feedback as implicit_feedback
from fedrecon.models.learned_default import learned_default as learned_default
from fedrecon.models.matrix_factorization import matrix_factorization as matrix_factorization
from fedrecon.models.next_word import next_word as next_word
from fedrecon.models.selection import rows as rows
