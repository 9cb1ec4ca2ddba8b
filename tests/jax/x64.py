"""enable_x64, where the JAX that is installed has it."""

import jax
import jax.experimental

enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
