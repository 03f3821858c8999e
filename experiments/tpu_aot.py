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
import importlib.metadata
import importlib.util
import itertools
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs import tpu_aot as tpu_aot_config
from experiments import build, cells, command
from experiments.tpu_compile import (
    TOPOLOGIES,
    Compiled,
    abstract_model,
    compile_for_tpu,
    compile_loop,
    memory,
    mesh_of_chips,
    needs_libtpu,
    place,
)
from specjax import errors, sharding
from specjax.memory_plan import Decode, plan
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config
from specjax.report import tpu_aot as report
from specjax.roofline import (
    ITEM_BYTES,
    Device,
    cost_ratio,
    decoder_parameters,
    decoder_pass,
    verify_ratio,
)
from specjax.sampling import Sampling
from specjax.sharding import DATA, MODEL

Row = dict[str, Any]

ROLES = ("target", "draft")
_CHIPS = 4  # of the topologies

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
            for name, mesh in itertools.product(names(config, "chips"), config.meshes):
                status.update(f"{target}, {draft}: compiling for {name}, {mesh}")
                job = Job.of(config, target, draft, name, mesh)
                key = {"target": target, "draft": draft, "chip": name, "mesh": mesh}
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
        build.named(TOPOLOGIES, name, "chips")
    for text in config.meshes:
        check_mesh(config, text)
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


def check_mesh(config: ml_collections.ConfigDict, text: str) -> None:
    """Refuses a mesh that the chips, the rows or a target's heads do not allow.

    Raises:
        errors.InputError: naming it.
    """
    try:
        sizes = sharding.mesh_sizes(text)
    except errors.InputError as error:
        raise errors.InputError(f"config.meshes: {error}") from error
    if math.prod(sizes.values()) > _CHIPS:
        raise errors.InputError(
            f"config.meshes has {text!r}: a topology of {_CHIPS} chips is compiled for"
        )
    if config.batch_size % sizes[DATA]:
        raise errors.InputError(
            f"config.meshes has {text!r} and config.batch_size is {config.batch_size}: "
            f"a multiple of {sizes[DATA]}"
        )
    for name in names(config, "targets"):
        try:
            sharding.check_heads(T5Config.preset(name).num_heads, sizes, name)
        except errors.InputError as error:
            raise errors.InputError(f"config.meshes has {text!r}: {error}") from error


def names(config: ml_collections.ConfigDict, setting: str) -> list[str]:
    """Names of a setting; on a command line, commas stand between them."""
    return ",".join(config[setting]).split(",")


def _version() -> str:
    return importlib.metadata.version("libtpu")


@dataclasses.dataclass(frozen=True)
class Job:
    """One pair on one chip.

    Attributes:
        target: its preset.
        draft: its preset.
        chip: its short name.
        mesh: of chips; the target is split over its `model`, rows over its `data`.
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
    mesh: str
    gamma: int
    sampling: Sampling
    batch: int
    source: int
    lengths: tuple[int, int]
    dtype: str

    @classmethod
    def of(
        cls,
        config: ml_collections.ConfigDict,
        target: str,
        draft: str,
        chip: str,
        mesh: str,
    ) -> Job:
        """From the settings."""
        return cls(
            target=target,
            draft=draft,
            chip=chip,
            mesh=mesh,
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
        row |= {"mesh": self.mesh}
        row |= self._modelled()
        first, longer = self.lengths
        loop = self.compile_loop(first)
        if isinstance(loop, str):
            return row | {"fits": False, "refused": loop} | self._passes()
        used = memory(loop.compiled)
        row |= used | {"compile_seconds": loop.seconds}
        row["fits"] = used["total"] <= self.device.memory
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
        return compile_loop(
            self._model("target"),
            self._model("draft"),
            self.on,
            rows=self.batch,
            source=self.source,
            sampling=self.sampling,
            gamma=self.gamma,
            max_length=length,
        )

    def compile_pass(self, role: str, tokens: int) -> Compiled:
        """One decoder pass alone, its cache donated and laid out as it likes."""
        from jax.experimental.layout import Format, Layout

        model = self._model(role)
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
        fed = jax.ShapeDtypeStruct((self.batch, tokens), jnp.int32)
        fed = place(fed, self._rows)

        def feed(model: T5, fed: Any, encoded: Any, cache: Any) -> Any:
            output, cache = model.decode(fed, cache, encoded)
            return jnp.argmax(output.logits, axis=-1), cache

        def free(tree: Any) -> Any:
            # Of heads, where a layer's memory has an axis of them.
            split = role == "target"

            def of(x: Any) -> Format:
                axes = (DATA, MODEL if split else None)[: 1 + (x.ndim == 4)]
                return Format(Layout.AUTO, NamedSharding(self.on, PartitionSpec(*axes)))

            return jax.tree.map(of, tree)

        places = jax.tree.map(lambda x: x.sharding, (model, fed))
        call = jax.jit(
            feed,
            donate_argnums=3,
            in_shardings=(*places, free(encoded), free(cache)),
            out_shardings=(self._rows, free(cache)),
        )
        return compile_for_tpu(call, (model, fed, encoded, cache), self.on)

    @property
    def on(self) -> Mesh:
        """The chips."""
        return mesh_of_chips(self.chip, self.mesh)

    @property
    def _rows(self) -> NamedSharding:
        return NamedSharding(self.on, PartitionSpec(DATA))

    def _config(self, role: str) -> T5Config:
        return T5Config.preset(self.target if role == "target" else self.draft)

    def _model(self, role: str) -> T5:
        # A small draft over many chips gets slower: each has the whole of it.
        layout = sharding.DECODING if role == "target" else sharding.REPLICATED
        return abstract_model(self._config(role), self.dtype, self.on, layout)

    def _modelled(self) -> Row:
        """What our own count says of a chip, before anything compiles."""
        target, draft = (self._config(role) for role in ROLES)
        decode = Decode(self.batch, self.source, self.lengths[0], self.gamma)
        need = plan(target, draft, self.dtype, self._sizes, decode)
        fed = self.gamma + 1
        row: Row = {
            "memory": self.device.memory,
            "counted": need.bytes - need.laws - need.activations,
            "step_counted": self._pass_bytes("target", 1),
            "verify_counted": self._pass_bytes("target", fed),
            "draft_counted": self._pass_bytes("draft", 1),
        }
        # Of several chips, what they tell each other is left out.
        if math.prod(self._sizes.values()) > 1:
            c = row["draft_counted"] / row["step_counted"]
            return row | {"c": c, "v": row["verify_counted"] / row["step_counted"]}
        shape = dict(
            batch=self.batch, written=self.slots(self.lengths[0]), source=self.source
        )
        c = cost_ratio(target, draft, self.device, self.dtype, **shape)
        v = verify_ratio(target, self.device, self.dtype, tokens=fed, **shape)
        return row | {"c": c, "v": v}

    @property
    def _sizes(self) -> dict[str, int]:
        return sharding.mesh_sizes(self.mesh)

    def _over(self, role: str) -> int:
        """Chips that a model's units are split over."""
        return self._sizes[MODEL] if role == "target" else 1

    def _pass_bytes(self, role: str, tokens: int) -> int:
        """What a chip moves in one decoder pass; each has all of the activations."""
        work = decoder_pass(
            self._config(role),
            self.dtype,
            tokens=tokens,
            batch=self.batch // self._sizes[DATA],
            written=self.slots(self.lengths[0]),
            source=self.source,
        )
        split = work.weights + work.self_attention + work.cross_attention
        return split // self._over(role) + work.activations

    def _passes(self) -> Row:
        """Traffic of single passes, by the compiled text and by XLA's own count."""
        found: Row = {}
        passes = {"step": ("target", 1), "verify": ("target", self.gamma + 1)}
        passes["draft"] = ("draft", 1)
        for name, (role, tokens) in passes.items():
            made = self.compile_pass(role, tokens)
            counted = made.compiled.cost_analysis()["bytes accessed"]
            found[f"{name}_bytes"] = made.program.memory_bytes()
            found[f"{name}_xla_bytes"] = counted
            found[f"{name}_temporaries"] = memory(made.compiled)["temporaries"]
        found["c_bytes"] = found["draft_bytes"] / found["step_bytes"]
        found["v_bytes"] = found["verify_bytes"] / found["step_bytes"]
        return found

    def _growth(self, loop: Compiled, longer: Compiled) -> Row:
        """What a longer buffer adds, and whether a loop copies a cache."""
        shapes = set()
        counted = scores = 0
        for role in ROLES:
            config = self._config(role)
            rows = self.batch // self._sizes[DATA]
            heads = config.num_heads // self._over(role)
            short, long = (
                (rows, heads, self.slots(length), config.d_kv)
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
        used = [memory(own.compiled)["temporaries"] for own in (loop, longer)]
        grown = used[1] - used[0]
        return {
            "growth": grown,
            "caches_growth": caches,
            "caches_growth_counted": counted,
            "copies": copies,
            "copies_caches": bool(copies) or grown > caches + scores,
        }


if __name__ == "__main__":
    command.run(main)
