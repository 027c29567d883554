"""Building blocks for your own algorithms: the public names that a method needs besides those of `fedrecon`."""

from fedrecon._src.algorithms.algorithm import Algorithm as Algorithm
from fedrecon._src.algorithms.algorithm import Method as Method
from fedrecon._src.algorithms.algorithm import Stages as Stages
from fedrecon._src.algorithms.algorithm import Trained as Trained
from fedrecon._src.algorithms.algorithm import averaged as averaged
from fedrecon._src.algorithms.algorithm import init_server as init_server
from fedrecon._src.algorithms.algorithm import shapes_of as shapes_of
from fedrecon._src.algorithms.algorithm import step_keys as step_keys
from fedrecon._src.algorithms.algorithm import step_server as step_server
from fedrecon._src.client.batch_statistics import settle as settle
from fedrecon._src.client.gradient_descent import gradient_descent as gradient_descent
from fedrecon._src.client.objectives import Objective as Objective
from fedrecon._src.client.objectives import Problem as Problem
from fedrecon._src.client.objectives import Solution as Solution
from fedrecon._src.client.objectives import Solver as Solver
from fedrecon._src.client.objectives import solve_local as solve_local
from fedrecon._src.client.reconstruction import Reconstruction as Reconstruction
from fedrecon._src.client.reconstruction import reconstruction as reconstruction
from fedrecon._src.client.update import Updated as Updated
from fedrecon._src.client.update import Updater as Updater
from fedrecon._src.client.update import differentiate_through as differentiate_through
from fedrecon._src.client.update import hold as hold
from fedrecon._src.core.cohort import Cohort as Cohort
from fedrecon._src.core.cohort import Examples as Examples
from fedrecon._src.core.cohort import Needs as Needs
from fedrecon._src.core.factories import recorded as recorded
from fedrecon._src.core.keys import client_keys as client_keys
from fedrecon._src.core.model import Batch as Batch
from fedrecon._src.core.model import Model as Model
from fedrecon._src.core.pytrees import Params as Params
from fedrecon._src.core.pytrees import flatten as flatten
from fedrecon._src.core.pytrees import unflatten as unflatten
from fedrecon._src.core.split import half as half
from fedrecon._src.core.split import query_only as query_only
from fedrecon._src.core.upload import DELTA as DELTA
from fedrecon._src.core.upload import Parts as Parts
from fedrecon._src.core.upload import RowChanges as RowChanges
from fedrecon._src.core.upload import Upload as Upload
from fedrecon._src.core.upload import against as against
from fedrecon._src.server import Aggregator as Aggregator
from fedrecon._src.server import mean as mean_of_uploads

__all__ = [
    "DELTA",
    "Aggregator",
    "Algorithm",
    "Batch",
    "Cohort",
    "Examples",
    "Method",
    "Model",
    "Needs",
    "Objective",
    "Params",
    "Parts",
    "Problem",
    "Reconstruction",
    "RowChanges",
    "Solution",
    "Solver",
    "Stages",
    "Trained",
    "Updated",
    "Updater",
    "Upload",
    "against",
    "averaged",
    "client_keys",
    "differentiate_through",
    "flatten",
    "gradient_descent",
    "half",
    "hold",
    "init_server",
    "mean_of_uploads",
    "query_only",
    "reconstruction",
    "recorded",
    "settle",
    "shapes_of",
    "solve_local",
    "step_keys",
    "step_server",
    "unflatten",
]
