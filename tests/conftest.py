"""Give JAX four CPU devices before any test uses it, so that layouts can be compared."""

import jax

jax.config.update("jax_num_cpu_devices", 4)
