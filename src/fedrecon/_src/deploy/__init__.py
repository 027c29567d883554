"""Deployment: a server and nodes on a network, with the client function that the simulator runs."""

from fedrecon._src.deploy.algorithm_plan import AlgorithmPlan as AlgorithmPlan
from fedrecon._src.deploy.algorithm_plan import plan_for as plan_for
from fedrecon._src.deploy.grid import Clock as Clock
from fedrecon._src.deploy.grid import Grid as Grid
from fedrecon._src.deploy.grid import InProcess as InProcess
from fedrecon._src.deploy.grid import Reply as Reply
from fedrecon._src.deploy.holding import Holding as Holding
from fedrecon._src.deploy.holding import hold as hold
from fedrecon._src.deploy.holding import read_holding as read_holding
from fedrecon._src.deploy.members import NotEnoughNodes as NotEnoughNodes
from fedrecon._src.deploy.members import Pace as Pace
from fedrecon._src.deploy.memory import Memory as Memory
from fedrecon._src.deploy.node import Node as Node
from fedrecon._src.deploy.plan import Plan as Plan
from fedrecon._src.deploy.plan import PlanError as PlanError
from fedrecon._src.deploy.plan import Promises as Promises
from fedrecon._src.deploy.plan import weaker as weaker
from fedrecon._src.deploy.server import Outcome as Outcome
from fedrecon._src.deploy.server import serve as serve
from fedrecon._src.deploy.settings_plan import SettingsPlan as SettingsPlan
from fedrecon._src.deploy.settings_plan import make_plan as make_plan
