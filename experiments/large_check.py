"""A large target from sharded files to speculative tokens, watching the memory.

    python -m experiments.large_check --config=configs/large_check.py --workdir=DIR

Writes a model of random weights as a sharded Hugging Face directory (kept, and not
written again), reads it, and decodes with a draft and without. Shows what each took of
time and of memory beyond the parameters. Writes DIR/manifest.json and DIR/metrics.json.
Exit code 1: reading took more than the largest parameter and 1 GB, decoding kept
another copy of the weights, or tokens differ by more than rounding explains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import flags
from flax import nnx

from configs import large_check as large_check_config
from experiments import baseline, build, build_mesh, command
from specjax import errors, metrics, sharding
from specjax.decoding import autoregressive_generate, speculative_generate
from specjax.drafters.model import ModelDrafter
from specjax.models import t5_weights
from specjax.models.formats.base import CONFIG_FILE
from specjax.models.formats.hf_safetensors import INDEX_FILE
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config, num_parameters
from specjax.roofline import ITEM_BYTES
from specjax.sampling import Sampling

_SPARE = 1_000_000_000  # bytes, beside the largest parameter
_STATUS = pathlib.Path("/proc/self/status")


@dataclasses.dataclass
class Phase:
    """What a part of the run took.

    Attributes:
        seconds: of it.
        peak: bytes of memory that were the process's own at once, beyond those before
            the run; files that are mapped do not count. 0: not known here.
    """

    seconds: float = 0.0
    peak: int = 0


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> int:
    """Runs the command; returns the exit code."""
    del values
    from rich.console import Console

    build.check_settings(config, large_check_config.get_config())
    build.positive(config, "shard_bytes", "source_length", "gamma")
    build.check_max_length(config)
    dtype = build.named(build.DTYPES, config.dtype, "dtype")
    shapes = {}
    for role in ("target", "draft"):
        try:
            shapes[role] = T5Config.preset(config[role])
        except errors.InputError as error:
            raise errors.InputError(f"config.{role}: {error}") from error
    console = Console()
    with build_mesh.entered(config) as mesh:
        weights = num_parameters(shapes["target"]) * ITEM_BYTES[config.dtype]
        folder = workdir / "target"
        phases: dict[str, Phase] = {}
        measured = functools.partial(_measured, phases, own_memory())
        with measured("write"), console.status(f"writing {folder}"):
            write_random(shapes["target"], folder, dtype, config)
        with measured("read"), console.status(f"reading {folder}"):
            target = build_mesh.load(folder, dtype, mesh, "target")
            jax.block_until_ready(jax.tree.leaves(target))
        draft = random_model(shapes["draft"], dtype, config.seed + 1)
        drafter = ModelDrafter(draft)
        if mesh is not None:
            drafter = sharding.place(drafter, mesh, sharding.REPLICATED)
        arguments = dict(
            sampling=Sampling(temperature=None),
            max_length=config.max_length,
            eos_id=shapes["target"].eos_id,
        )
        rows = _rows(config, shapes["target"])
        outputs = {}
        with measured("plain"), console.status("decoding without the draft"):
            outputs["plain"] = jax.block_until_ready(
                autoregressive_generate(target, *rows, **arguments)
            )
        with measured("drafted"), console.status("decoding with the draft"):
            outputs["drafted"] = jax.block_until_ready(
                speculative_generate(
                    target, drafter, *rows, gamma=config.gamma, **arguments
                )
            )
        apart = metrics.differences(
            target,
            *rows,
            outputs["plain"],
            outputs["drafted"],
            sampling=arguments["sampling"],
        )
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(target))
    result = {
        "weights": weights,
        "largest_parameter": largest,
        "phases": {name: dataclasses.asdict(own) for name, own in phases.items()},
        "tokens": np.asarray(outputs["drafted"].tokens).tolist(),
        "differences": [dataclasses.asdict(own) for own in apart],
    }
    workdir.mkdir(parents=True, exist_ok=True)
    command.write_json(workdir / "manifest.json", command.manifest(config))
    command.write_json(workdir / "metrics.json", result)
    faults = judge(result, config.dtype)
    for line in describe(result) + faults:
        console.print(line, highlight=False, soft_wrap=True)
    print(f"written: {workdir}/{{manifest,metrics}}.json")
    return 1 if faults else 0


def judge(result: dict[str, Any], dtype: str) -> list[str]:
    """What went wrong, a sentence each.

    Args:
        result: as written.
        dtype: of the model, which says what counts as a tie.
    """
    phases, weights = result["phases"], result["weights"]
    most = weights + result["largest_parameter"] + _SPARE
    faults = []
    if phases["read"]["peak"] > most:
        faults.append(
            f"reading took {_gigabytes(phases['read']['peak'])}: at most "
            f"{_gigabytes(most)}, the largest parameter and 1 GB beside the weights"
        )
    for name in ("plain", "drafted"):
        if phases[name]["peak"] > 2 * weights + 2 * _SPARE:
            faults.append(
                f"decoding ({name}) took {_gigabytes(phases[name]['peak'])}: another "
                "copy of the weights was kept"
            )
    faults += [
        f"the outputs part at position {own['position']}, where the best two tokens "
        f"are {own['gap']:.3g} apart"
        for own in result["differences"]
        if own["gap"] > baseline.TIES[dtype]
    ]
    return faults


def describe(result: dict[str, Any]) -> list[str]:
    """What each part took, a line each."""
    weights = result["weights"]
    lines = [f"weights: {_gigabytes(weights)}"]
    for name, own in result["phases"].items():
        beside = (own["peak"] - weights) / 1e9
        memory = f", {beside:.2f} GB beside the weights" if own["peak"] else ""
        lines.append(f"{name}: {own['seconds']:.0f} s{memory * (name != 'write')}")
    return lines


def write_random(
    shape: T5Config, folder: pathlib.Path, dtype: Any, config: ml_collections.ConfigDict
) -> None:
    """Writes a model that was never in memory as a whole; one that stands is kept."""
    from safetensors.numpy import save_file

    if (folder / CONFIG_FILE).is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    skeleton = jax.eval_shape(lambda: T5(shape, jax.random.key(0)))
    parameters = nnx.to_pure_dict(nnx.state(skeleton))
    generator = np.random.default_rng(config.seed)
    held: dict[str, np.ndarray] = {}
    files: dict[str, str] = {}

    def flush() -> None:
        file = f"model-{len(set(files.values())) + 1:05d}.safetensors"
        save_file(held, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(held, file))
        held.clear()

    for name, (path, index) in t5_weights.tensor_table(shape).items():
        own = t5_weights.get(parameters, path)
        dims = own.shape if index is None else own.shape[1:]
        values = generator.standard_normal(dims, np.float32)
        # Near the laws of a model before training: no activation grows.
        values *= 1.0 if len(dims) == 1 else dims[-1] ** -0.5
        if sum(x.nbytes for x in held.values()) > config.shard_bytes:
            flush()
        held[name] = values.astype(dtype)
    flush()
    index_text = json.dumps({"metadata": {}, "weight_map": files})
    (folder / INDEX_FILE).write_text(index_text, encoding="utf-8")
    # Last: a folder that has it is whole.
    text = json.dumps(shape.to_json())
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def random_model(shape: T5Config, dtype: Any, seed: int) -> T5:
    """A model of random weights."""
    made = jax.jit(lambda key: T5(shape, key))(jax.random.key(seed))
    graph, state = nnx.split(made)
    return nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), state))


@contextlib.contextmanager
def _measured(phases: dict[str, Phase], before: int, name: str) -> Iterator[None]:
    """Times what is within, and watches the process's own memory."""
    phase = phases.setdefault(name, Phase())
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            phase.peak = max(phase.peak, own_memory() - before)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    begin = time.perf_counter()
    try:
        yield
    finally:
        phase.seconds = time.perf_counter() - begin
        done.set()
        watcher.join()


def own_memory() -> int:
    """Bytes that are this process's own, files that it maps apart; 0: not known."""
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return 0
    found = [line.split()[1] for line in lines if line.startswith("RssAnon")]
    return 1024 * int(found[0]) if found else 0


def _rows(config: ml_collections.ConfigDict, shape: T5Config) -> tuple[Any, Any, Any]:
    ids = np.random.default_rng(config.seed).integers(
        2, shape.vocab_size, (1, config.source_length), np.int32
    )
    inputs = jnp.asarray(ids)
    return inputs, jnp.ones_like(inputs, bool), build.row_keys(config.seed, 1)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


if __name__ == "__main__":
    command.run(main)
