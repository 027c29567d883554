"""Deployment: a coordinator and nodes on a network, with the client function that the simulator runs."""

from typing import TYPE_CHECKING

from fedrecon._src.deploy.admission import issue_token as issue_token
from fedrecon._src.deploy.algorithm_plan import AlgorithmPlan as AlgorithmPlan
from fedrecon._src.deploy.algorithm_plan import plan_for as plan_for
from fedrecon._src.deploy.coordinator import ServeResult as ServeResult
from fedrecon._src.deploy.coordinator import serve as serve
from fedrecon._src.deploy.node import Memory as Memory
from fedrecon._src.deploy.node import Node as Node
from fedrecon._src.deploy.plan import NodeData as NodeData
from fedrecon._src.deploy.plan import Plan as Plan
from fedrecon._src.deploy.plan import PlanError as PlanError
from fedrecon._src.deploy.plan import Promises as Promises
from fedrecon._src.deploy.plan import weaker as weaker
from fedrecon._src.deploy.registry import NotEnoughNodes as NotEnoughNodes
from fedrecon._src.deploy.registry import Pace as Pace
from fedrecon._src.deploy.settings_plan import SettingsPlan as SettingsPlan
from fedrecon._src.deploy.settings_plan import make_plan as make_plan
from fedrecon._src.deploy.transport import Clock as Clock
from fedrecon._src.deploy.transport import Grid as Grid
from fedrecon._src.deploy.transport import InProcess as InProcess
from fedrecon._src.deploy.transport import Reply as Reply

if TYPE_CHECKING:  # what editors and the reference read; Python imports them below, when they are used
    from fedrecon._src.deploy.http_client import Connection as Connection
    from fedrecon._src.deploy.http_client import run_node as run_node
    from fedrecon._src.deploy.http_server import Limits as Limits
    from fedrecon._src.deploy.http_server import Tls as Tls
    from fedrecon._src.deploy.tasks import serve_tasks as serve_tasks


def __getattr__(name: str) -> object:
    """Import what needs the extra `deploy` when it is used."""
    if name in ("Connection", "run_node"):
        from fedrecon._src.deploy import http_client

        return getattr(http_client, name)
    if name in ("Limits", "Tls", "serve_tasks"):
        from fedrecon._src.deploy import tasks

        return getattr(tasks, name)
    raise AttributeError(name)
