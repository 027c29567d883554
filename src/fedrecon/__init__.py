"""Partially local federated learning: train the global part of a model, reconstruct the local part on each client.

The public names are listed in `__init__.pyi`, and each is imported when it is first used, so that `fedrecon --help`
does not wait for JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
