"""Times a shape's decoder steps and sets them beside the limit of the memory.

    python -m experiments.benchmark --config=configs/bench.py --workdir=DIR

A decoder step must read its weights once; bytes over bandwidth is the least time that
takes. Writes DIR/manifest.json and DIR/metrics.json.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pathlib
import resource
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import flags

from configs import bench
from experiments import build, command
from specjax import errors, metrics, roofline
from specjax.decoding import autoregressive_generate
from specjax.drafters.ngram import NgramDrafter
from specjax.models import t5, t5_config
from specjax.sampling import Sampling


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> None:
    """Runs the command."""
    del values
    from rich.console import Console

    build.check_settings(config, bench.get_config())
    build.positive(config, "batch_size", "source_length", "repeats")
    build.check_max_length(config)
    build.row_keys(config.seed, config.batch_size)
    shape = t5_config.T5Config.preset(config.model)
    dtype = build.named(build.DTYPES, config.dtype, "dtype")
    if not isinstance(config.fed, list | tuple) or not all(
        type(count) is int for count in config.fed
    ):
        raise errors.InputError(
            f"config.fed is {config.fed!r}: whole numbers of tokens, such as 4,8"
        )
    fed = sorted({1, *config.fed})
    if min(fed) < 1 or max(fed) >= config.max_length:
        raise errors.InputError(
            f"config.fed is {tuple(config.fed)}: numbers of tokens from 1 to below "
            f"config.max_length={config.max_length}"
        )
    workdir.mkdir(parents=True, exist_ok=True)
    console = Console()
    model = random_model(shape, dtype, config.seed)
    streamed = roofline.decoder_parameters(shape) * jnp.dtype(dtype).itemsize
    with console.status(f"timing passes of {fed} tokens"):
        costs = {m: time_pass(model, m, config) for m in fed if m > 1}
        # Before the reader's own buffer, which no decoding needs.
        peak = _peak_memory()
        streaming = time_streaming(model, streamed, config)
    result = {
        "model": config.model,
        "streamed_bytes": streamed,
        "bandwidth": streamed / streaming.read.median,
        "limit_seconds": streaming.read.median,
        "step": _timing(streaming.step) | {"over_limit": streaming.over_limit},
        "passes": {
            str(m): _timing(c.verify)
            | {
                # All ratios are of the same rounds: see `time_streaming`.
                "over_limit": c.verify_ratio * streaming.over_limit,
                "steps": c.verify_ratio,
            }
            for m, c in costs.items()
        },
        "encode": _timing(next(iter(costs.values())).encode) if costs else None,
        "peak_memory_bytes": peak,
        "parameter_bytes": t5_config.num_parameters(shape) * jnp.dtype(dtype).itemsize,
    }
    command.write_json(workdir / "manifest.json", command.manifest(config))
    command.write_json(workdir / "metrics.json", result)
    console.print(_table(result))
    console.print(f"written: {workdir}/{{manifest,metrics}}.json")


def random_model(shape: t5_config.T5Config, dtype: Any, seed: int) -> t5.T5:
    """A T5 of random weights, drawn one array at a time.

    One program for all of them would hold more than twice their bytes, and that would
    be the peak of memory.
    """
    rng = np.random.default_rng(seed)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.ndim < 2:  # scales of norms
            return jnp.ones(leaf.shape, dtype)
        values = rng.standard_normal(leaf.shape, np.float32)
        values *= leaf.shape[-1] ** -0.5
        return jnp.asarray(values, dtype)

    abstract = jax.eval_shape(lambda key: t5.T5(shape, key), jax.random.key(0))
    return jax.tree.map(fill, abstract)


def reader(nbytes: int) -> Callable[[], Any]:
    """A call that reads so many bytes from memory, on all threads of the device."""
    if jax.default_backend() != "cpu":
        # A copy reads and writes: half of the bytes each.
        array = jnp.ones(nbytes // 8, jnp.float32)
        copy = jax.jit(lambda x: x + 1)
        return lambda: copy(array)
    threads = os.cpu_count() or 1
    parts = np.array_split(np.ones(nbytes // 4, np.float32), threads)
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    return lambda: list(pool.map(np.max, parts))


_STEPS = 24  # in a round, and as many reads of the weights


@dataclasses.dataclass(frozen=True)
class Streaming:
    """A step beside reading its weights, taken in turn.

    Attributes:
        read: reading the weights once.
        step: one step.
    """

    read: metrics.Timing
    step: metrics.Timing

    @property
    def over_limit(self) -> float:
        """Median of step / read within each round."""
        return metrics.time_ratio(self.step, self.read)


def time_streaming(
    model: t5.T5, nbytes: int, config: ml_collections.ConfigDict
) -> Streaming:
    """Times steps of the autoregressive loop and reads of `nbytes` in the same rounds.

    A noisy machine has fast and slow moments: the bandwidth of one must not be set
    beside the steps of another.
    """
    inputs = jnp.full((config.batch_size, config.source_length), 2, jnp.int32)
    keys = build.row_keys(config.seed, config.batch_size)
    steps = min(_STEPS, config.max_length - 1)
    read = reader(nbytes)

    def decode(budget: int) -> Any:
        return autoregressive_generate(
            model,
            inputs,
            jnp.ones(inputs.shape, bool),
            keys,
            sampling=Sampling(temperature=None),
            max_length=config.max_length,
            budget=budget,
            eos_id=-1,
        )

    timings = metrics.time_calls(
        {
            "read": lambda: [read() for _ in range(steps)],
            "set-up": lambda: decode(0),
            "steps": lambda: decode(steps),
        },
        repeats=config.repeats,
    )
    # The set-up of the same round: the encoder's own noise is that of many steps.
    rounds = zip(timings["steps"].times, timings["set-up"].times, strict=True)
    return Streaming(
        read=metrics.Timing(tuple(t / steps for t in timings["read"].times)),
        step=metrics.Timing(
            tuple(max(whole - fixed, 1e-9) / steps for whole, fixed in rounds)
        ),
    )


def time_pass(
    model: t5.T5, fed: int, config: ml_collections.ConfigDict
) -> metrics.Costs:
    """A plain step beside a pass of `fed` tokens, in the decoding loops' own code."""
    inputs = jnp.full((config.batch_size, config.source_length), 2, jnp.int32)
    return metrics.measure_costs(
        model,
        NgramDrafter(),
        inputs,
        jnp.ones(inputs.shape, bool),
        build.row_keys(config.seed, config.batch_size),
        sampling=Sampling(temperature=None),
        gamma=fed - 1,
        max_length=config.max_length,
        repeats=config.repeats,
    )


def _timing(timing: metrics.Timing) -> dict[str, float]:
    return {
        "seconds": timing.median,
        "first_quartile": timing.low,
        "third_quartile": timing.high,
    }


def _peak_memory() -> int:
    """Bytes: of the device where it tells, else of this process."""
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _table(result: dict[str, Any]) -> Any:
    from rich.table import Table

    limit = result["limit_seconds"]
    table = Table(
        title=f"{result['model']}: {result['streamed_bytes'] / 1e6:.0f} MB read per "
        f"step at {result['bandwidth'] / 1e9:.1f} GB/s",
        caption=f"peak memory {result['peak_memory_bytes'] / 1e9:.2f} GB, of which "
        f"parameters {result['parameter_bytes'] / 1e9:.2f} GB; ratios are medians of "
        "ratios within a round",
    )
    table.add_column("pass")
    for name in ("ms", "quartiles", "x limit", "x step"):
        table.add_column(name, justify="right")
    table.add_row("limit: weights read once", f"{limit * 1e3:.1f}", "", "1.00", "")
    rows = {"1 token (a step)": result["step"] | {"steps": 1.0}} | {
        f"{m} tokens": timing for m, timing in result["passes"].items()
    }
    for name, timing in rows.items():
        low, high = timing["first_quartile"] * 1e3, timing["third_quartile"] * 1e3
        table.add_row(
            name,
            f"{timing['seconds'] * 1e3:.1f}",
            f"{low:.1f}-{high:.1f}",
            f"{timing['over_limit']:.2f}",
            f"{timing['steps']:.2f}",
        )
    return table


if __name__ == "__main__":
    command.run(main)
