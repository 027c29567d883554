"""Deployment: a coordinator and nodes on a network, with the client function that the simulator runs."""
