"""The C loop of W1: compiled with the machine's compiler, called through ctypes."""

import ctypes
import subprocess
import tempfile
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_name("w1.c")
FLAGS = ["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]


class CLoop:
    """Holds a table and changes it round by round."""

    def __init__(self, table, *, batch, most_steps, rate_reconstruct, rate_update):
        folder = tempfile.mkdtemp(prefix="fedrecon-bench-")
        library = Path(folder) / "w1.so"
        subprocess.run(["cc", *FLAGS, str(SOURCE), "-o", str(library)], check=True)
        self._round = ctypes.CDLL(str(library)).w1_round
        self._round.restype = ctypes.c_double
        self.table = np.ascontiguousarray(table, np.float32).copy()
        self._change = np.empty_like(self.table)
        self._settings = (
            ctypes.c_int(self.table.shape[1]),
            ctypes.c_int(batch),
            ctypes.c_int(most_steps),
            ctypes.c_float(rate_reconstruct),
            ctypes.c_float(rate_update),
            ctypes.c_long(self.table.shape[0]),
        )

    def round(self, begins, ends, item, rating, user_start):
        """Run one round; arrays must be C-contiguous int64, int64, int32, float32, float32 of (clients, dim)."""
        arrays = [begins, ends, item, rating, user_start]
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in arrays]
        tail = [array.ctypes.data_as(ctypes.c_void_p) for array in (self.table, self._change)]
        return self._round(ctypes.c_int(len(begins)), *pointers, *self._settings, *tail)
