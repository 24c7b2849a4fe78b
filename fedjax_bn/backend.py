"""The one place that asks which machine a program is traced for.

Code made for CPU (`models.cpu`, `normalization.instance`, `client`) asks here and is plain XLA on
any other backend.
"""

import jax


def on_cpu() -> bool:
    """Whether what is traced now is for CPU, by JAX's default backend."""
    return jax.default_backend() == "cpu"
