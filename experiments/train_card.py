"""The card and the curves that go with an exported model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib

import jax

from specjax import errors
from specjax.models import t5
from specjax.report import card, curves


def write_card(workdir: pathlib.Path, model: t5.T5, step: int) -> None:
    """Writes `README.md` and, where matplotlib is at hand, `curves.svg` to the export.

    Args:
        workdir: of the run; has `manifest.json`, and `train.jsonl` if a step was taken.
        model: what was exported.
        step: whose weights these are.
    """
    folder = workdir / "export"
    log = workdir / "train.jsonl"
    text = log.read_text(encoding="utf-8") if log.is_file() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    picture = None
    # Without the extra `plots`, a card without curves.
    with contextlib.suppress(errors.InputError):
        if lines:
            curves.plot(lines, folder / "curves.svg")
            picture = "curves.svg"
    manifest = json.loads((workdir / "manifest.json").read_text(encoding="utf-8"))
    content = card.markdown(
        title=workdir.name,
        shape=dataclasses.asdict(model.config),
        parameters=sum(leaf.size for leaf in jax.tree.leaves(model)),
        manifest=manifest,
        lines=lines,
        step=step,
        picture=picture,
    )
    (folder / "README.md").write_text(content, encoding="utf-8")
