"""Training methods: Federated Reconstruction and its relatives, each named as its paper names it."""

from fedrecon._src.algorithms.apfl import apfl as apfl
from fedrecon._src.algorithms.ditto import ditto as ditto
from fedrecon._src.algorithms.fedalt import fedalt as fedalt
from fedrecon._src.algorithms.fedbabu import fedbabu as fedbabu
from fedrecon._src.algorithms.fedbn import fedbn as fedbn
from fedrecon._src.algorithms.federated_averaging import federated_averaging as federated_averaging
from fedrecon._src.algorithms.federated_ials import federated_ials as federated_ials
from fedrecon._src.algorithms.federated_reconstruction import federated_reconstruction as federated_reconstruction
from fedrecon._src.algorithms.federated_reconstruction import local_training as local_training
from fedrecon._src.algorithms.fedmf import fedmf as fedmf
from fedrecon._src.algorithms.fedncf import fedncf as fedncf
from fedrecon._src.algorithms.fedper import fedper as fedper
from fedrecon._src.algorithms.fedper import fedsim as fedsim
from fedrecon._src.algorithms.fedper import lg_fedavg as lg_fedavg
from fedrecon._src.algorithms.fedprox import fedprox as fedprox
from fedrecon._src.algorithms.fedrep import fedrep as fedrep
from fedrecon._src.algorithms.per_fedavg import per_fedavg as per_fedavg
from fedrecon._src.algorithms.pfedme import pfedme as pfedme
from fedrecon._src.algorithms.pfedrec import pfedrec as pfedrec
from fedrecon._src.algorithms.reptile import reptile as reptile
from fedrecon._src.algorithms.scaffold import scaffold as scaffold
