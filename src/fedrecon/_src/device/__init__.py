"""Bundles for devices and browsers: local parameters are reconstructed where the person is."""

from fedrecon._src.device.exporting import Legend as Legend
from fedrecon._src.device.making import bundle as bundle
from fedrecon._src.device.onnx_graphs import ExportError as ExportError
