"""Compiles one case for a described TPU: python -m on_tpu.compiling CASE TOPOLOGY.

CASE is JSON, such as '["DigitCNN", "fedbn", "map", "bfloat16", 1]'. The last line of the output is
JSON too. It needs libtpu, and no TPU.
"""

import json
import re
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from fedjax_bn import models
from fedjax_bn.engine.backend import traced_for
from fedjax_bn.engine.devices import CLIENTS, padded
from fedjax_bn.engine.images import standardize
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.models.precision import in_dtype
from fedjax_bn.run.experiment.method import METHODS
from fedjax_bn.task import segmentation
from fedjax_bn.tasks.detection import detection
from on_accelerator import flops
from on_tpu import scheduled
from on_tpu.cases import MODELS, PRODUCTS, STEPS, Case, Size
from on_tpu.chips import chip_of

PyTree = Any
CLASSES, BOXES = 10, 20
KEPT = 40  # groups of instructions in the result


def compile_case(case: Case, topology: str) -> dict[str, Any]:
    """Traces and compiles a round; returns its outcome and its figures."""
    # Where nothing else is given a host has 2 x 2 chips, which one chip cannot be divided into.
    bounds = {"chips_per_host_bounds": (1, 1, 1)} if topology.endswith(":1x1") else {}
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **bounds)
    devices = described.devices[: case.devices]
    if case.method == PRODUCTS:
        return products_alone(case, SingleDeviceSharding(devices[0]))
    mesh = Mesh(devices, (CLIENTS,)) if case.devices > 1 else None
    begin = time.perf_counter()
    with traced_for("tpu"):
        method = method_of(case, case.clients, mesh)
        size = MODELS[case.model]
        shapes = arguments(method, case.model, size, padded(size.clients, mesh))
        given = placed(shapes, mesh, devices[0])
        lowered = method.round.trace(*given).lower()
    between = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"outcome": "does not fit", "why": without_room(str(error))}
    seconds = time.perf_counter() - between
    plan, program = compiled.memory_analysis(), scheduled.parse(compiled.as_text())
    cycles, work = scheduled.cycles(program), operations(case)
    return {
        "outcome": "done",
        "trace_seconds": round(between - begin, 1),
        "compile_seconds": round(seconds, 1),
        "arguments": plan.argument_size_in_bytes,
        "outputs": plan.output_size_in_bytes,
        "aliased": plan.alias_size_in_bytes,  # outputs that are written over arguments
        "temporaries": plan.temp_size_in_bytes,
        "collectives": scheduled.collectives(program),
        "round_cycles": cycles,
        "step_cycles": scheduled.cycles_of_a_step(program, STEPS),
        "flops": work,
        "share_of_peak": work / (cycles * chip_of(topology).per_cycle * case.devices),
        "where": scheduled.where(program)[:KEPT],
    }


def products_alone(case: Case, place: SingleDeviceSharding) -> dict[str, Any]:
    """Returns the figures of the convolutions and products of FedBN's step for all clients alone.

    They are those of the network's definition, each with arguments of its own, forward and for the
    gradients of maps and weights. What moves their arguments into another layout is not counted. It
    is a limit of what other operations of a step can be saved, as long as these stay as they are.
    """
    found = products_of_a_step(case)
    shapes = [
        [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, sharding=place) for x in one.invars]
        for one in found
    ]

    def together(arguments: list[list[jax.Array]]) -> list[jax.Array]:
        pairs = zip(found, arguments, strict=True)
        return [one.primitive.bind(*given, **one.params) for one, given in pairs]

    begin = time.perf_counter()
    compiled = jax.jit(together).lower(shapes).compile()
    seconds = time.perf_counter() - begin
    groups = scheduled.where(scheduled.parse(compiled.as_text()))
    cycles = sum(count for name, count in groups if name.endswith(flops.PRODUCTS))
    clients = MODELS[case.model].clients
    return {
        "outcome": "done",
        "compile_seconds": round(seconds, 1),
        "step_cycles": clients * cycles,
        "flops": clients * STEPS * sum(map(flops.of_equation, found)),
        "where": groups[:KEPT],
    }


def products_of_a_step(case: Case) -> list[Any]:
    """Returns the convolutions and matrix products of a local step of FedBN, as traced operations.

    They are those of the network's definition, as in `operations`.
    """
    with traced_for("cuda"):
        method = method_of(case._replace(method="fedbn"), "map", None)
        program = method.round.trace(*arguments(method, case.model, MODELS[case.model])).jaxpr
    return list(flops.products(flops.largest_loop(program.jaxpr)))


def method_of(case: Case, clients: str, mesh: Mesh | None) -> FederatedMethod:
    """Returns the method, with plain SGD."""
    model, options = network(case.model)
    if case.dtype != "float32":
        model = in_dtype(model, case.dtype)
    build = METHODS[case.method]
    return build(model, optax.sgd(0.01), clients=clients, mesh=mesh, **options)


def network(name: str) -> tuple[Any, dict[str, Any]]:
    """Returns a network of `MODELS`, or the U-Net, and what a method needs to train it."""
    if name == "UNet":
        return models.UNet(2, width=16, levels=3), {"task": segmentation(2)}
    model = getattr(models, name)(num_classes=CLASSES)
    if anchors := getattr(model, "anchors", None):
        between_0_and_1 = standardize((0.0,) * 3, (1.0,) * 3)
        return model, {"task": detection(anchors), "prepare": between_0_and_1}
    return model, {}


def arguments(
    method: FederatedMethod, name: str, size: Size, rows: int | None = None, dtype: Any = None
) -> tuple[PyTree, ...]:
    """Returns the shapes of a round's arguments: state, batches and key.

    Batches have `rows` clients where some are padding, and variables `dtype` if it is not theirs.
    """
    images = jax.ShapeDtypeStruct((2, size.side, size.side, 3), jnp.float32)
    model, _ = network(name)
    key = jax.eval_shape(jax.random.key, 0)
    variables = jax.eval_shape(model.init, key, images)
    variables = jax.tree.map(lambda leaf: leaf.update(dtype=dtype or leaf.dtype), variables)
    state = jax.eval_shape(lambda key, start: method.init(key, start, size.clients), key, variables)
    shape = (rows or size.clients, size.steps, size.batch)

    def array(*inner: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape, *inner), dtype)

    label: PyTree = array(dtype=jnp.int32)
    if name == "UNet":
        label = {"mask": array(size.side, size.side, dtype=jnp.uint8)}
    elif hasattr(model, "anchors"):
        boxes = array(BOXES, 4, dtype=jnp.float32)
        label = {"boxes": boxes, "class": array(BOXES, dtype=jnp.int32)}
    image = array(size.side, size.side, 3, dtype=jnp.uint8)
    return state, {"image": image, "label": label, "valid": array(dtype=bool)}, key


def placed(given: tuple[PyTree, ...], mesh: Mesh | None, device: Any) -> tuple[PyTree, ...]:
    """Returns the shapes with places: clients' rows are spread over the mesh, if there is one."""
    everywhere = by_client = SingleDeviceSharding(device)
    if mesh is not None:
        everywhere = NamedSharding(mesh, PartitionSpec())
        by_client = NamedSharding(mesh, PartitionSpec(CLIENTS))

    def put(tree: PyTree, sharding: Any) -> PyTree:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    state, batches, key = given
    rows = {name: put(getattr(state, name), by_client) for name in ("personal", "memory")}
    state = put(state._replace(personal=(), memory=()), everywhere)._replace(**rows)
    return state, put(batches, by_client), put(key, everywhere)


def operations(case: Case) -> int:
    """Returns the floating-point operations of a round of all clients, as the network defines them.

    They are counted in the program for a GPU, whose convolutions are those of the network's
    definition; programs for CPU and TPU may have convolutions in other forms, or padded ones.
    """
    with traced_for("cuda"):
        method = method_of(case, "map", None)
        shapes = arguments(method, case.model, MODELS[case.model])
        return flops.count(method.round.trace(*shapes).jaxpr)


def without_room(message: str) -> str:
    """Returns what a program that does not fit needs and has, from the compiler's message."""
    sizes = [
        re.search(r"Used (\S+) of (\S+) hbm", message),
        re.search(r"\((\S+)\) exceeds available HBM \((\S+)\)", message),
    ]
    needed, there = next((found.groups() for found in sizes if found), (None, None))
    if needed is None:
        return message.strip().splitlines()[0][:300]
    return (
        f"it needs {needed}iB of a device, which has {there}iB: map fewer clients at once (map or "
        "vmap:at_once=n), spread them over more devices, or take smaller batches"
    )


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)  # compile time is measured
    print(json.dumps(compile_case(Case(*json.loads(sys.argv[1])), sys.argv[2])))
