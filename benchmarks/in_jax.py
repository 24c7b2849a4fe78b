"""This library's side of the benchmarks beside PyTorch; all its calls of the library are here."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import uniform
from fedjax_bn.data.domain import Split
from fedjax_bn.data.pixels.images import standardize
from fedjax_bn.methods import fedavg
from fedjax_bn.run.evaluation.scoring import SplitBatches, score_clients
from tasks import LEARNING_RATE, Task, make_batches, make_test_images


def a_round(task: Task) -> tuple[Callable[[], Any], Callable[[Any], Callable[[], None]]]:
    """`compile_round() -> compiled` and `repeat(compiled) -> run`; `run()` makes a round."""
    batches = jax.tree.map(jnp.asarray, make_batches(task))
    key = jax.random.key(0)
    variables = jax.jit(task.model.init)(key, jnp.zeros((2, task.side, task.side, 3)))
    method = fedavg(task.model, optax.sgd(LEARNING_RATE), weigh=uniform)
    state = method.init(key, variables, task.clients)

    def compile_round() -> Any:
        return method.round.lower(state, batches, key).compile()

    def repeat(compiled: Any) -> Callable[[], None]:
        def run() -> None:
            nonlocal state
            state, metrics = compiled(state, batches, key)
            jax.block_until_ready((state, metrics))

        return run

    return compile_round, repeat


def evaluation(task: Task, images: int, batch: int) -> Callable[[], object]:
    """Accuracy on random images, in batches."""
    key = jax.random.key(0)
    variables = jax.jit(task.model.init)(key, jnp.zeros((2, task.side, task.side, 3)))
    state = fedavg(task.model, optax.sgd(LEARNING_RATE)).init(key, variables, 1)
    data = SplitBatches([Split(*make_test_images(task, images))], batch).all_at_once()
    score = score_clients(task.model, standardize(), 1)
    return lambda: score(state, data)


def matrix_product(size: int = 2048) -> tuple[Callable[[], object], float]:
    """A float32 matrix product, and its Gflop."""
    a = jnp.ones((size, size))
    product = jax.jit(jnp.dot)
    return lambda: product(a, a).block_until_ready(), 2e-9 * size**3
