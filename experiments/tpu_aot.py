"""Compiles the whole speculative loop for TPUs, where there is none.

    python -m experiments.tpu_aot --config=configs/tpu_aot.py --workdir=DIR

For each pair of T5 presets and each chip: memory of arguments and temporaries, whether
it fits, what a step reads by the compiler's account and by ours, c and v from both, and
whether a loop copies the cache. Weights are shapes alone: nothing is allocated. Needs
libtpu (the extra ``tpu``). Writes DIR/manifest.json, DIR/metrics.json, DIR/report.md
and DIR/report.csv; a run that was stopped goes on with DIR/cells.jsonl.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import math
import os
import pathlib
import re
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from absl import flags

from configs import tpu_aot as tpu_aot_config
from experiments import build, cells, command
from experiments.compiled_text import Program
from specjax import errors
from specjax.decoding import speculative_generate
from specjax.drafters.model import ModelDrafter
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config
from specjax.report import tpu_aot as report
from specjax.roofline import (
    ITEM_BYTES,
    Device,
    cost_ratio,
    decoder_parameters,
    decoder_pass,
    memory_needed,
    verify_ratio,
)
from specjax.sampling import Sampling

Row = dict[str, Any]

# The smallest topologies that libtpu knows, with what makes one device of each chip.
_TOPOLOGIES: dict[str, tuple[str, dict[str, str]]] = {
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
# Temporaries may grow beyond the caches by the target's scores of attention and the
# weights made of them, in float32, even if no layer reuses those of another.
_SCORES = 2 * 4


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> int:
    """Runs the command."""
    del values
    from rich.console import Console

    pairs = check(config)
    needs_libtpu()
    # A TPU or GPU of this machine is not needed, nor waited for.
    jax.config.update("jax_platforms", "cpu")
    workdir.mkdir(parents=True, exist_ok=True)
    settings = {
        name: own
        for name, own in config.to_dict().items()
        if name not in ("targets", "drafts", "chips")
    }
    done = cells.Cells(workdir / "cells.jsonl", settings | {"libtpu": _version()})
    command.write_json(
        workdir / "manifest.json", command.manifest(config, libtpu=_version())
    )
    console = Console()
    rows = []
    with console.status("") as status:
        for target, draft in pairs:
            for name in names(config, "chips"):
                status.update(f"{target}, {draft}: compiling for {name}")
                job = Job.of(config, target, draft, name)
                key = {"target": target, "draft": draft, "chip": name}
                row = done.get(key, job.run)
                if row is not None:
                    rows.append(row)
                    console.print(report.line(row), highlight=False, soft_wrap=True)
    command.write_json(workdir / "metrics.json", {"rows": rows, "failed": done.failed})
    text = report.markdown(rows, done.failed, settings)
    (workdir / "report.md").write_text(text, encoding="utf-8")
    report.write_csv(rows, workdir / "report.csv")
    for failure in done.failed:
        console.print(f"failed: {failure}", highlight=False, soft_wrap=True)
    print(f"written: {workdir}/{{manifest,metrics}}.json, report.md, report.csv")
    return 1 if done.failed else 0


def check(config: ml_collections.ConfigDict) -> list[tuple[str, str]]:
    """The pairs that are asked for.

    Raises:
        errors.InputError: a setting is missing, not known, or means nothing.
    """
    build.check_settings(config, tpu_aot_config.get_config())
    build.positive(config, "gamma", "batch_size", "source_length")
    for name in ("targets", "drafts", "chips"):
        given = names(config, name)
        if not all(given) or len(set(given)) < len(given):
            raise errors.InputError(
                f"config.{name} is {config[name]!r}: one name or several, each only "
                "once, such as A,B"
            )
    for name in names(config, "chips"):
        build.named(_TOPOLOGIES, name, "chips")
    if config.dtype not in ITEM_BYTES:
        raise errors.InputError(
            f"config.dtype is {config.dtype!r}: one of {', '.join(ITEM_BYTES)}"
        )
    if not 0 <= config.temperature < math.inf:
        raise errors.InputError(
            f"config.temperature is {config.temperature}: from 0 (greedy) on"
        )
    lengths = config.max_lengths
    if len(lengths) != 2 or not 2 <= lengths[0] < lengths[1]:
        raise errors.InputError(
            f"config.max_lengths is {lengths}: two, the second the longer, such as "
            "128,1024"
        )
    sizes = {
        name: decoder_parameters(T5Config.preset(name))
        for name in (*names(config, "targets"), *names(config, "drafts"))
    }
    pairs = [
        (target, draft)
        for target in names(config, "targets")
        for draft in names(config, "drafts")
        if sizes[draft] < sizes[target]
    ]
    if not pairs:
        raise errors.InputError(
            f"config.drafts is {config.drafts}: no draft is smaller than a target of "
            f"{config.targets}"
        )
    return pairs


def names(config: ml_collections.ConfigDict, setting: str) -> list[str]:
    """Names of a setting; on a command line, commas stand between them."""
    return ",".join(config[setting]).split(",")


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


def _version() -> str:
    return importlib.metadata.version("libtpu")


@functools.cache
def one_chip(name: str) -> jax.sharding.Sharding:
    """Where all arrays lie: the first chip of the smallest topology.

    A mesh over its four chips would be made here, and the rules by which parameters
    are split over it would take the place of the one sharding in `Job.abstract`.
    """
    from jax.experimental import topologies

    topology, settings = _TOPOLOGIES[name]
    found = topologies.get_topology_desc(
        platform="tpu", topology_name=topology, **settings
    )
    return jax.sharding.SingleDeviceSharding(found.devices[0])


@dataclasses.dataclass(frozen=True)
class Job:
    """One pair on one chip.

    Attributes:
        target: its preset.
        draft: its preset.
        chip: its short name.
        gamma: drafted tokens.
        sampling: of both.
        batch: rows.
        source: tokens of the source.
        lengths: of the output, two.
        dtype: of weights and caches.
    """

    target: str
    draft: str
    chip: str
    gamma: int
    sampling: Sampling
    batch: int
    source: int
    lengths: tuple[int, int]
    dtype: str

    @classmethod
    def of(
        cls, config: ml_collections.ConfigDict, target: str, draft: str, chip: str
    ) -> Job:
        """From the settings."""
        return cls(
            target=target,
            draft=draft,
            chip=chip,
            gamma=config.gamma,
            sampling=Sampling(temperature=config.temperature or None),
            batch=config.batch_size,
            source=config.source_length,
            lengths=tuple(config.max_lengths),
            dtype=config.dtype,
        )

    def run(self) -> Row:
        """Compiles everything: the row of the table."""
        row: Row = {"target": self.target, "draft": self.draft, "chip": self.chip}
        row |= self._modelled()
        first, longer = self.lengths
        loop = self.compile_loop(first)
        if isinstance(loop, str):
            return row | {"fits": False, "refused": loop} | self._passes()
        memory = _memory(loop.compiled)
        row |= memory | {"compile_seconds": loop.seconds}
        row["fits"] = memory["total"] <= self.device.memory
        row |= self._passes()
        again = self.compile_loop(longer)
        if isinstance(again, str):
            return row | {"growth": None, "longer": again}
        return row | self._growth(loop, again)

    @property
    def device(self) -> Device:
        """The chip's published figures."""
        return Device.preset(f"TPU {self.chip}")

    def slots(self, length: int) -> int:
        """Of each row's cache."""
        return length + self.gamma + 1

    def compile_loop(self, length: int) -> Compiled | str:
        """All of `speculative_generate`; why not, where it does not fit."""
        target, draft = (self._model(name) for name in (self.target, self.draft))
        rows = (self.batch, self.source)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), self.batch))
        arguments = self.abstract(
            (
                jax.ShapeDtypeStruct(rows, jnp.int32),
                jax.ShapeDtypeStruct(rows, bool),
                keys,
            )
        )
        generate = functools.partial(
            speculative_generate,
            sampling=self.sampling,
            gamma=self.gamma,
            max_length=length,
        )
        try:
            return _compile(
                jax.jit(generate), (target, ModelDrafter(draft), *arguments)
            )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return _used(str(error))

    def compile_pass(self, name: str, tokens: int) -> Compiled:
        """One decoder pass alone, its cache donated and laid out as it likes."""
        from jax.experimental.layout import Format, Layout

        free = Format(Layout.AUTO, one_chip(self.chip))
        model = self._model(name)
        rows = (self.batch, self.source)
        encoded = jax.eval_shape(
            lambda m, inputs, mask: m.encode(inputs, mask),
            model,
            jax.ShapeDtypeStruct(rows, jnp.int32),
            jax.ShapeDtypeStruct(rows, bool),
        )
        cache = jax.eval_shape(
            lambda m: m.init_cache(self.batch, self.slots(self.lengths[0])), model
        )
        fed = self.abstract(jax.ShapeDtypeStruct((self.batch, tokens), jnp.int32))

        def feed(model: T5, fed: Any, encoded: Any, cache: Any) -> Any:
            output, cache = model.decode(fed, cache, encoded)
            return jnp.argmax(output.logits, axis=-1), cache

        chip = one_chip(self.chip)
        call = jax.jit(
            feed,
            donate_argnums=3,
            in_shardings=(chip, chip, free, free),
            out_shardings=(chip, free),
        )
        return _compile(call, (model, fed, encoded, cache))

    def abstract(self, tree: Any) -> Any:
        """The same shapes, on the chip."""
        chip = one_chip(self.chip)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=chip), tree
        )

    def _model(self, name: str) -> T5:
        config = T5Config.preset(name)
        shapes = jax.eval_shape(lambda: T5(config, jax.random.key(0)))
        dtype = jnp.dtype(self.dtype)
        return self.abstract(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)
        )

    def _modelled(self) -> Row:
        """What our own count says, before anything compiles."""
        target, draft = T5Config.preset(self.target), T5Config.preset(self.draft)
        slots = self.slots(self.lengths[0])
        shape = dict(batch=self.batch, written=slots, source=self.source)
        need = memory_needed(
            [target, draft],
            self.dtype,
            batch=self.batch,
            slots=slots,
            source=self.source,
        )
        device, dtype, fed = self.device, self.dtype, self.gamma + 1
        return {
            "memory": device.memory,
            "counted": need.bytes,
            "c": cost_ratio(target, draft, device, dtype, **shape),
            "v": verify_ratio(target, device, dtype, tokens=fed, **shape),
            "step_counted": decoder_pass(target, dtype, **shape).bytes,
            "verify_counted": decoder_pass(target, dtype, tokens=fed, **shape).bytes,
            "draft_counted": decoder_pass(draft, dtype, **shape).bytes,
        }

    def _passes(self) -> Row:
        """Traffic of single passes, by the compiled text and by XLA's own count."""
        found: Row = {}
        passes = {"step": (self.target, 1), "verify": (self.target, self.gamma + 1)}
        passes["draft"] = (self.draft, 1)
        for name, (model, tokens) in passes.items():
            made = self.compile_pass(model, tokens)
            counted = made.compiled.cost_analysis()["bytes accessed"]
            found[f"{name}_bytes"] = made.program.memory_bytes()
            found[f"{name}_xla_bytes"] = counted
            found[f"{name}_temporaries"] = _memory(made.compiled)["temporaries"]
        found["c_bytes"] = found["draft_bytes"] / found["step_bytes"]
        found["v_bytes"] = found["verify_bytes"] / found["step_bytes"]
        return found

    def _growth(self, loop: Compiled, longer: Compiled) -> Row:
        """What a longer buffer adds, and whether a loop copies a cache."""
        shapes = set()
        counted = scores = 0
        for name in (self.target, self.draft):
            config = T5Config.preset(name)
            short, long = (
                (self.batch, config.num_heads, self.slots(length), config.d_kv)
                for length in self.lengths
            )
            shapes.add((short, long))
            arrays = 2 * config.num_decoder_layers * ITEM_BYTES[self.dtype]
            counted += arrays * (math.prod(long) - math.prod(short))
            wide = _SCORES * config.num_decoder_layers * (self.gamma + 1)
            scores += wide * (math.prod(long[:3]) - math.prod(short[:3]))
        copies: list[str] = []
        caches = 0
        for short, long in shapes:
            copies += longer.program.copies(long)
            caches += longer.program.loop_bytes(long) - loop.program.loop_bytes(short)
        memory = [_memory(own.compiled)["temporaries"] for own in (loop, longer)]
        grown = memory[1] - memory[0]
        return {
            "growth": grown,
            "caches_growth": caches,
            "caches_growth_counted": counted,
            "copies": copies,
            "copies_caches": bool(copies) or grown > caches + scores,
        }


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program and how long it took to make."""

    compiled: Any
    program: Program
    seconds: float


def _compile(call: Any, arguments: Sequence[Any]) -> Compiled:
    """Compiles for the chip of its arguments."""
    lowered = call.trace(*arguments).lower(lowering_platforms=("tpu",))
    with warnings.catch_warnings():
        # What is compiled for a chip that is not here cannot be read from a cache.
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
        start = time.perf_counter()
        compiled = lowered.compile()
        seconds = time.perf_counter() - start
    return Compiled(compiled, Program.parse(compiled.as_text()), seconds)


def _memory(compiled: Any) -> Row:
    """Bytes of the chip's memory that a run needs."""
    found = compiled.memory_analysis()
    parts = {
        "arguments": found.argument_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "code": found.generated_code_size_in_bytes,
    }
    output = found.output_size_in_bytes - found.alias_size_in_bytes
    return parts | {"total": sum(parts.values()) + output}


def _used(message: str) -> str:
    """The compiler's first sentence on what does not fit."""
    words = message.partition("RESOURCE_EXHAUSTED:")[2].strip() or message
    return re.split(r"\.\s|\n", words + "\n")[0].rstrip(".")[:200]


if __name__ == "__main__":
    command.run(main)
