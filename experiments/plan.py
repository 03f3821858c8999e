"""What each device of a mesh holds while a pair decodes, before anything is loaded.

    python -m experiments.plan --config=configs/plan.py --workdir=DIR

For each place of ``config.place``: bytes of the parameters, caches, laws and
activations on each of its devices, and whether they fit. With ``config.compile``,
TPUs' programs are compiled too (extra ``tpu``), and the compiler's count stands beside
ours.
Writes DIR/manifest.json, DIR/metrics.json and DIR/plan.md. Exit code 1: nothing fits.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from typing import Any

import jax
import ml_collections
from absl import flags

from configs import plan as plan_config
from experiments import build, command, tpu_compile
from specjax import errors, sharding, zoo
from specjax.memory_plan import TPU_LANES, Decode, Plan, plan
from specjax.models import t5_weights
from specjax.models.t5_config import T5Config
from specjax.report import plan as report
from specjax.roofline import Device
from specjax.sampling import Sampling

_TPU = "TPU "


@dataclasses.dataclass(frozen=True)
class Place:
    """Devices, and what each would hold.

    Attributes:
        name: of the settings.
        device: one of them.
        mesh: how they are laid out, as `sharding.mesh_sizes` reads it.
        plan: what each holds.
    """

    name: str
    device: Device
    mesh: str
    plan: Plan


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> int:
    """Runs the command."""
    del values
    from rich.console import Console

    target, draft, places = check(config)
    workdir.mkdir(parents=True, exist_ok=True)
    command.write_json(workdir / "manifest.json", command.manifest(config))
    console = Console()
    rows = []
    for place in places:
        row = report.row(place.name, place.device, place.mesh, place.plan)
        if config.compile and place.device.name.startswith(_TPU):
            with console.status(f"{place.name}: compiling for {place.device.name}"):
                row |= compiled(config, target, draft, place)
        rows.append(row)
    command.write_json(workdir / "metrics.json", {"rows": rows})
    (workdir / "plan.md").write_text(report.markdown(rows), encoding="utf-8")
    report.show(console, rows)
    print(f"written: {workdir}/{{manifest,metrics}}.json, plan.md")
    return 0 if any(row["fits"] for row in rows) else 1


def check(
    config: ml_collections.ConfigDict,
) -> tuple[T5Config, T5Config | None, list[Place]]:
    """The shapes, and what our own count says of each place.

    Raises:
        errors.InputError: a setting means nothing, or a mesh does not divide the pair.
    """
    build.check_settings(config, plan_config.get_config(), tables=("place",))
    if not config.place:
        raise errors.InputError("config.place is empty: name devices and their mesh")
    target = shape(config.target, "target")
    draft = shape(config.draft, "draft") if config.draft else None
    decode = Decode(
        batch=config.batch_size,
        source=config.source_length,
        length=config.max_length,
        gamma=config.gamma,
        greedy=not config.temperature,
    )
    places = []
    for name, own in config.place.items():
        try:
            device, sizes = Device.preset(own.device), sharding.mesh_sizes(own.mesh)
            held = plan(
                target,
                draft,
                config.dtype,
                sizes,
                decode,
                split_draft=config.split_draft,
                lanes=TPU_LANES if device.name.startswith(_TPU) else 1,
            )
        except errors.InputError as error:
            raise errors.InputError(f"config.place.{name}: {error}") from error
        places.append(Place(name, device, own.mesh, held))
    if config.compile:
        if draft is None:
            raise errors.InputError(
                "config.compile is on and config.draft is empty: the speculative loop "
                "is what is compiled"
            )
        tpu_compile.needs_libtpu()
        jax.config.update("jax_platforms", "cpu")
    return target, draft, places


def shape(name: str, role: str) -> T5Config:
    """Of a preset, or of the model in a folder.

    Raises:
        errors.InputError: it is neither.
    """
    try:
        return T5Config.preset(name)
    except errors.InputError as unknown:
        try:
            folder = zoo.locate(name).expanduser()
        except errors.InputError as error:
            raise errors.InputError(f"config.{role}: {error}") from error
        if not folder.is_dir():
            raise errors.InputError(
                f"config.{role} is {name!r}, which is no folder; and {unknown}"
            ) from unknown
        return T5Config.from_json(folder / t5_weights.CONFIG_FILE)


def compiled(
    config: ml_collections.ConfigDict,
    target: T5Config,
    draft: T5Config | None,
    place: Place,
) -> dict[str, Any]:
    """What the compiler says of one device's memory."""
    assert draft is not None  # `check` has seen to it
    chip = place.device.name.removeprefix(_TPU)
    mesh = tpu_compile.mesh_of_chips(chip, place.mesh)
    whole = sharding.DECODING if config.split_draft else sharding.REPLICATED

    made = tpu_compile.compile_loop(
        tpu_compile.abstract_model(target, config.dtype, mesh, sharding.DECODING),
        tpu_compile.abstract_model(draft, config.dtype, mesh, whole),
        mesh,
        rows=config.batch_size,
        source=config.source_length,
        sampling=Sampling(temperature=config.temperature or None),
        gamma=config.gamma,
        max_length=config.max_length,
    )
    if isinstance(made, str):
        return {"compiler": None, "refused": made}
    found = tpu_compile.memory(made.compiled)
    counts: collections.Counter[str] = collections.Counter()
    for (operation, _), count in made.program.collectives().items():
        counts[operation] += count
    return {
        "compiler": found["total"] - found["code"],
        "code": found["code"],
        "exchanges": dict(counts),
    }


if __name__ == "__main__":
    command.run(main)
