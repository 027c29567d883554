"""Bundles for devices and browsers: local parameters are reconstructed where the person is."""

from fedrecon._src.device import DevicePlan as DevicePlan
from fedrecon._src.device import ExportError as ExportError
from fedrecon._src.device import Legend as Legend
from fedrecon._src.device import bundle as bundle
