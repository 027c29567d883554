"""Bundles for devices and browsers: local parameters are reconstructed where the person is."""

from fedrecon._src.device.bundle_writer import bundle as bundle
from fedrecon._src.device.export import Legend as Legend
from fedrecon._src.device.inlining import ExportError as ExportError
from fedrecon._src.device.update_graph import DevicePlan as DevicePlan
