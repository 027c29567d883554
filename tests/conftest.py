"""Give JAX four CPU devices, so that layouts can be compared, and let it compile less: that is what takes long here.

XLA leaves out passes that only make code faster, here and in processes that tests start. What several tests share is
compiled once.
"""

import atexit
import gc
import os
import shutil
import tempfile

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)

os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # in processes that tests start

import jax  # reads its flags when it starts
from hypothesis import HealthCheck, settings

jax.config.update("jax_num_cpu_devices", 4)
gc.set_threshold(200_000, 100, 100)  # tracing makes many objects that live; looking through them took 4 % of the time

# How long an example takes says nothing on a machine that does other work, too.
settings.register_profile("fedrecon", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fedrecon")

compiled = tempfile.mkdtemp(prefix="fedrecon-tests-")  # one a process: workers must not read each other's half files
atexit.register(shutil.rmtree, compiled, ignore_errors=True)
jax.config.update("jax_enable_compilation_cache", True)
jax.config.update("jax_compilation_cache_dir", compiled)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

LONG = ["next_word", "from_keras", "train", "lookups", "engine", "cli", "cli_text", "trust", "device", "rounds"]


def pytest_collection_modifyitems(items):
    """Run the files that take longest first, so that the processes of pytest-xdist finish together."""
    names = [f"test_{name}" for name in LONG]
    items.sort(key=lambda item: names.index(item.path.stem) if item.path.stem in names else len(names))
