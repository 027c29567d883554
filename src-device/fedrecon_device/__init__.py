"""Bundles on a device: reconstruct and predict with numpy and ONNX Runtime alone; nothing here imports JAX."""

from fedrecon_device._version import __version__ as __version__
from fedrecon_device.bundle import Bundle as Bundle
from fedrecon_device.check import Checked as Checked
from fedrecon_device.check import check as check
from fedrecon_device.errors import BundleError as BundleError
from fedrecon_device.errors import ParticipationError as ParticipationError
from fedrecon_device.errors import StoreError as StoreError
from fedrecon_device.participant import Participant as Participant
from fedrecon_device.personal import Added as Added
from fedrecon_device.personal import Personal as Personal
from fedrecon_device.personal import Recommended as Recommended
from fedrecon_device.training import Trainer as Trainer
from fedrecon_device.training import Update as Update
from fedrecon_device.words import Suggestion as Suggestion
