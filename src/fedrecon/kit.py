"""Building blocks for your own algorithms: the public names that a method needs besides those of `fedrecon`."""

from fedrecon.aggregate import Aggregator as Aggregator
from fedrecon.aggregate import mean as mean_of_uploads
from fedrecon.algorithm import Algorithm as Algorithm
from fedrecon.algorithm import Method as Method
from fedrecon.algorithm import Stages as Stages
from fedrecon.algorithm import Trained as Trained
from fedrecon.algorithm import averaged as averaged
from fedrecon.algorithm import init_server as init_server
from fedrecon.algorithm import shapes_of as shapes_of
from fedrecon.algorithm import step_keys as step_keys
from fedrecon.algorithm import step_server as step_server
from fedrecon.cohort import Cohort as Cohort
from fedrecon.cohort import Examples as Examples
from fedrecon.cohort import Needs as Needs
from fedrecon.keys import client_keys as client_keys
from fedrecon.model import Batch as Batch
from fedrecon.model import Model as Model
from fedrecon.recipes import recorded as recorded
from fedrecon.solvers.descent import gradient_descent as gradient_descent
from fedrecon.solvers.problem import Objective as Objective
from fedrecon.solvers.problem import Problem as Problem
from fedrecon.solvers.problem import Solution as Solution
from fedrecon.solvers.problem import Solver as Solver
from fedrecon.solvers.problem import solve_local as solve_local
from fedrecon.solvers.reconstruction import Reconstruction as Reconstruction
from fedrecon.solvers.reconstruction import reconstruction as reconstruction
from fedrecon.solvers.statistics import settle as settle
from fedrecon.solvers.update import Updated as Updated
from fedrecon.solvers.update import Updater as Updater
from fedrecon.solvers.update import differentiate_through as differentiate_through
from fedrecon.solvers.update import hold as hold
from fedrecon.split import half as half
from fedrecon.split import query_only as query_only
from fedrecon.trees import Params as Params
from fedrecon.trees import flatten as flatten
from fedrecon.trees import unflatten as unflatten
from fedrecon.upload import DELTA as DELTA
from fedrecon.upload import Parts as Parts
from fedrecon.upload import RowChanges as RowChanges
from fedrecon.upload import Upload as Upload
from fedrecon.upload import against as against

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
