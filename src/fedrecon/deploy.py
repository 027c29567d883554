"""Deployment: a server and nodes on a network, with the client function that the simulator runs."""

from fedrecon._src.deploy import AlgorithmPlan as AlgorithmPlan
from fedrecon._src.deploy import Clock as Clock
from fedrecon._src.deploy import Grid as Grid
from fedrecon._src.deploy import Holding as Holding
from fedrecon._src.deploy import InProcess as InProcess
from fedrecon._src.deploy import Memory as Memory
from fedrecon._src.deploy import Node as Node
from fedrecon._src.deploy import NotEnoughNodes as NotEnoughNodes
from fedrecon._src.deploy import Outcome as Outcome
from fedrecon._src.deploy import Pace as Pace
from fedrecon._src.deploy import Plan as Plan
from fedrecon._src.deploy import PlanError as PlanError
from fedrecon._src.deploy import Promises as Promises
from fedrecon._src.deploy import Reply as Reply
from fedrecon._src.deploy import SettingsPlan as SettingsPlan
from fedrecon._src.deploy import hold as hold
from fedrecon._src.deploy import make_plan as make_plan
from fedrecon._src.deploy import plan_for as plan_for
from fedrecon._src.deploy import read_holding as read_holding
from fedrecon._src.deploy import serve as serve
from fedrecon._src.deploy import weaker as weaker
