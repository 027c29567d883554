"""Models that come with the package, and ways to extend a model."""

from fedrecon.models.client_table import client_table as client_table
from fedrecon.models.implicit_feedback import implicit_feedback as implicit_feedback
from fedrecon.models.learned_default import learned_default as learned_default
from fedrecon.models.matrix_factorization import matrix_factorization as matrix_factorization
from fedrecon.models.next_word import next_word as next_word
