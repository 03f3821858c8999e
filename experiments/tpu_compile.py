"""Compiling for TPUs on a machine that has none: devices, programs, their memory."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import re
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.compiled_text import Program
from specjax import errors, sharding
from specjax.decoding import speculative_generate
from specjax.drafters.model import ModelDrafter
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config

# The smallest topologies that libtpu knows, with what makes one device of each chip.
TOPOLOGIES: dict[str, tuple[str, dict[str, str]]] = {
    "v4": ("v4:2x2x1", {"chip_config_name": "megacore"}),
    "v5e": ("v5e:2x2", {}),
    "v5p": ("v5p:2x2x1", {}),
    "v6e": ("v6e:2x2", {}),
}
# Without it libtpu looks for the machine's own TPU for minutes; the rest keeps it from
# writing on stderr that there is none.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


def needs_libtpu() -> None:
    """Refuses to go on without the compiler.

    Raises:
        errors.InputError: it is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise errors.InputError(
            "compiling for TPUs needs libtpu, which is not installed: it comes with "
            "the extra tpu, pip install -e '.[tpu]'"
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@functools.cache
def mesh_of_chips(name: str, text: str) -> Mesh:
    """A mesh of chips of the smallest topology.

    Args:
        name: of `TOPOLOGIES`.
        text: sizes of its axes, as of `sharding.make_mesh`; at most four chips.

    Raises:
        InputError: no such mesh, or more chips than the topology has.
    """
    from jax.experimental import topologies

    topology, settings = TOPOLOGIES[name]
    found = topologies.get_topology_desc(
        platform="tpu", topology_name=topology, **settings
    )
    count = math.prod(sharding.mesh_sizes(text).values())
    return sharding.make_mesh(text, found.devices[:count])


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program and how long it took to make."""

    compiled: Any
    program: Program
    seconds: float


def compile_for_tpu(call: Any, arguments: Sequence[Any], mesh: Mesh) -> Compiled:
    """Compiles for the chips of a mesh, on which its arguments lie."""
    with jax.set_mesh(mesh):
        lowered = call.trace(*arguments).lower(lowering_platforms=("tpu",))
    with warnings.catch_warnings():
        # What is compiled for a chip that is not here cannot be read from a cache.
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
        start = time.perf_counter()
        compiled = lowered.compile()
        seconds = time.perf_counter() - start
    return Compiled(compiled, Program.parse(compiled.as_text()), seconds)


def memory(compiled: Any) -> dict[str, int]:
    """Bytes of a chip's memory that a run needs: `total`, and its parts."""
    found = compiled.memory_analysis()
    parts = {
        "arguments": found.argument_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "code": found.generated_code_size_in_bytes,
    }
    output = found.output_size_in_bytes - found.alias_size_in_bytes
    return parts | {"total": sum(parts.values()) + output}


def place(tree: Any, where: Any) -> Any:
    """Shapes, on chips.

    Args:
        tree: of arrays or shapes.
        where: their shardings, one for each or one for all.
    """
    if isinstance(where, jax.sharding.Sharding):
        where = jax.tree.map(lambda _: where, tree)
    return jax.tree.map(
        lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own), tree, where
    )


def abstract_model(
    config: T5Config, dtype: str, mesh: Mesh, layout: sharding.Layout
) -> T5:
    """A T5 of shapes alone, on chips."""
    shapes = jax.eval_shape(lambda: T5(config, jax.random.key(0)))
    typed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)), shapes
    )
    return place(typed, sharding.shardings(typed, mesh, layout))


def compile_loop(
    target: T5, draft: T5, mesh: Mesh, *, rows: int, source: int, **settings: Any
) -> Compiled | str:
    """All of `speculative_generate`; the compiler's reason, where it does not fit.

    Args:
        target: from `abstract_model`.
        draft: the same.
        mesh: that they lie on.
        rows: of the batch.
        source: tokens of each source.
        **settings: of `speculative_generate`.
    """
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    arguments = place(
        (
            jax.ShapeDtypeStruct((rows, source), jnp.int32),
            jax.ShapeDtypeStruct((rows, source), bool),
            keys,
        ),
        NamedSharding(mesh, PartitionSpec(sharding.DATA)),
    )
    generate = jax.jit(functools.partial(speculative_generate, **settings))
    try:
        return compile_for_tpu(
            generate, (target, ModelDrafter(draft), *arguments), mesh
        )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return refusal(str(error))


def refusal(message: str) -> str:
    """The compiler's first sentence on what does not fit."""
    words = message.partition("RESOURCE_EXHAUSTED:")[2].strip() or message
    return re.split(r"\.\s|\n", words + "\n")[0].rstrip(".")[:200]
