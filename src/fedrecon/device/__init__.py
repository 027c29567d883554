"""Bundles for devices and browsers: local parameters are reconstructed where the person is."""

from fedrecon.device.exporting import Legend as Legend
from fedrecon.device.making import bundle as bundle
from fedrecon.device.onnx_graphs import ExportError as ExportError
