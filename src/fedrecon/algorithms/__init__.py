"""Relatives of Federated Reconstruction, one a file."""

from fedrecon.algorithms.federated_averaging import federated_averaging as federated_averaging
from fedrecon.algorithms.finetuning import then_finetune as then_finetune
from fedrecon.algorithms.local_training import local_training as local_training
