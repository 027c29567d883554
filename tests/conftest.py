"""Give JAX four CPU devices, so that layouts can be compared, and let it compile what several tests share once."""

import atexit
import shutil
import tempfile

import jax

jax.config.update("jax_num_cpu_devices", 4)

compiled = tempfile.mkdtemp(prefix="fedrecon-tests-")  # one a process: workers must not read each other's half files
atexit.register(shutil.rmtree, compiled, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", compiled)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
