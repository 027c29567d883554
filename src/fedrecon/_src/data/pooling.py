"""Label examples with their client, and pool all examples in one place: for training with a `client_table`."""

from __future__ import annotations

import numpy as np

from fedrecon._src.core.clients import Clients, rows_of


def with_owner(clients: Clients, *, feature: str = "client") -> Clients:
    """Return the same clients with a column that holds, for every example, the index of its client.

    Args:
      clients: whose examples are copied.
      feature: the name of the new column.

    Example:
      >>> clients = fr.data.synthetic_ratings(num_users=2, num_items=9, mean_ratings=5)
      >>> fr.data.with_owner(clients).columns["client"].tolist()
      [0, 0, 0, 1, 1, 1]
    """
    owner = np.repeat(np.arange(len(clients), dtype=np.int32), clients.sizes)
    rows = rows_of(clients.starts, clients.ends)
    columns = {name: values[rows] for name, values in clients.columns.items()}
    ends = np.cumsum(clients.sizes)
    return Clients(columns | {feature: owner}, ends - clients.sizes, ends, clients.names)


def pooled(clients: Clients, *, seed: int, feature: str = "client") -> Clients:
    """Return one client that has everybody's examples, shuffled, with a column for the client of each.

    Args:
      clients: whose examples are copied.
      seed: decides the order.
      feature: the name of the new column.

    Example:
      >>> clients = fr.data.synthetic_ratings(num_users=2, num_items=9, mean_ratings=5)
      >>> fr.data.pooled(clients, seed=0)
      Clients(1 clients, 6 examples: ...)
    """
    owned = with_owner(clients, feature=feature)
    order = np.random.default_rng(seed).permutation(owned.num_examples)
    columns = {name: values[order] for name, values in owned.columns.items()}
    return Clients(columns, np.array([0]), np.array([len(order)]))
