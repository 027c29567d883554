"""Deployment: a server and nodes on a network, with the client function that the simulator runs."""

from fedrecon.deploy.algorithm_plan import AlgorithmPlan as AlgorithmPlan
from fedrecon.deploy.algorithm_plan import plan_for as plan_for
from fedrecon.deploy.grid import Clock as Clock
from fedrecon.deploy.grid import Grid as Grid
from fedrecon.deploy.grid import InProcess as InProcess
from fedrecon.deploy.grid import Reply as Reply
from fedrecon.deploy.holding import Holding as Holding
from fedrecon.deploy.holding import hold as hold
from fedrecon.deploy.holding import read_holding as read_holding
from fedrecon.deploy.members import NotEnoughNodes as NotEnoughNodes
from fedrecon.deploy.members import Pace as Pace
from fedrecon.deploy.memory import Memory as Memory
from fedrecon.deploy.node import Node as Node
from fedrecon.deploy.plan import Plan as Plan
from fedrecon.deploy.plan import PlanError as PlanError
from fedrecon.deploy.plan import Promises as Promises
from fedrecon.deploy.plan import weaker as weaker
from fedrecon.deploy.server import Outcome as Outcome
from fedrecon.deploy.server import serve as serve
from fedrecon.deploy.settings_plan import SettingsPlan as SettingsPlan
from fedrecon.deploy.settings_plan import make_plan as make_plan
