"""Graphs: ONNX Runtime sessions with named inputs, which stop when they take too much time or memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from fedrecon_device.errors import BundleError
from fedrecon_device.onnx_files import check_graph_file

SECONDS = 60.0  # for one run at most
MEMORY = 1 << 30  # bytes that all graphs of a process may use together
DTYPES = {
    "tensor(float)": "float32",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(int16)": "int16",
    "tensor(uint32)": "uint32",
    "tensor(bool)": "bool",
}


class Graph:
    """One graph of a bundle, ready to run."""

    def __init__(self, name: str, data: bytes, about: Mapping[str, Any]):
        """Load a graph and compare its inputs and outputs with what the manifest says.

        Args:
          name: of the file, for messages.
          data: the graph.
          about: its entry in the manifest.
        """
        import onnxruntime  # takes longer to import than all the rest

        check_graph_file(name, data)
        _bound_memory()
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.log_severity_level = 4
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.use_deterministic_compute = True
        self.name, self._options = name, onnxruntime.RunOptions
        try:
            # Constants are not computed while a graph is loaded, where nothing stops it.
            self._session = onnxruntime.InferenceSession(
                data, options, providers=["CPUExecutionProvider"], disabled_optimizers=["ConstantFolding"]
            )
        except Exception as problem:  # onnxruntime has no common type of its errors
            raise BundleError(f"{name}: ONNX Runtime refuses it: {_first_line(problem)}") from None
        self.inputs = {
            node.name: (DTYPES.get(node.type, node.type), list(node.shape)) for node in self._session.get_inputs()
        }
        outputs = [node.name for node in self._session.get_outputs()]
        promised = {node["name"]: (node["dtype"], node["shape"]) for node in about["inputs"]}
        if self.inputs != promised:
            raise BundleError(f"{name} takes {self.inputs}; the manifest says {promised}")
        if outputs != [node["name"] for node in about["outputs"]]:
            raise BundleError(
                f"{name} gives {outputs}; the manifest says {[node['name'] for node in about['outputs']]}"
            )
        self.outputs = outputs

    def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Run it.

        Args:
          inputs: by name; extra ones are ignored.

        Raises:
          BundleError: an input is missing or of another shape, the graph fails, or it takes more than a minute.
        """
        feed = {}
        for name, (dtype, shape) in self.inputs.items():
            if name not in inputs:
                raise BundleError(f"{self.name} needs the input {name!r}")
            feed[name] = np.ascontiguousarray(inputs[name], dtype)  # this gives a scalar one dimension
            feed[name] = feed[name].reshape(np.shape(inputs[name]))
            fits = len(shape) == feed[name].ndim and all(
                want == have or not isinstance(want, int) for want, have in zip(shape, feed[name].shape, strict=True)
            )
            if not fits:
                raise BundleError(f"{self.name}: {name!r} has shape {list(feed[name].shape)}; expected {shape}")
        how = self._options()
        stop = threading.Timer(SECONDS, setattr, (how, "terminate", True))
        stop.daemon = True
        stop.start()
        try:
            results = self._session.run(None, feed, how)
        except Exception as problem:
            raise BundleError(f"{self.name} failed in ONNX Runtime: {_first_line(problem)}") from None
        finally:
            stop.cancel()
        return dict(zip(self.outputs, results, strict=True))


@cache
def _bound_memory() -> None:
    """Let sessions of this process share memory of a limited size; once, however many bundles are open."""
    import onnxruntime

    kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    memory = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, onnxruntime.OrtMemType.DEFAULT)
    as_asked = {"max_mem": MEMORY, "arena_extend_strategy": 1}  # 1: no more at a time than is asked for
    unset = {"initial_chunk_size_bytes": -1, "max_dead_bytes_per_chunk": -1}
    onnxruntime.create_and_register_allocator(memory, onnxruntime.OrtArenaCfg({**as_asked, **unset}))


def _first_line(problem: Exception) -> str:
    return next(iter(str(problem).strip().splitlines()), type(problem).__name__)[:300]
