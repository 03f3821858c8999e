"""Compiling for TPUs without one: reading compiled text, settings, the small shape."""

from __future__ import annotations

import csv
import importlib.util

import jax
import jax.numpy as jnp
import pytest

from configs import tpu_aot as tpu_aot_config
from experiments import tpu_aot, tpu_compile
from experiments.compiled_text import Program
from specjax.report import tpu_aot as report
from specjax.sampling import Sampling
from tests import pairs

CONFIG = pairs.ROOT / "configs" / "tpu_aot.py"
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs libtpu: install the extra `tpu`",
)
CACHE = (1, 6, 40, 64)
# A loop that moves a cache onto the chip, writes to it and moves it back; and, where
# {copy} is, does something more.
LOOP = """HloModule made_up

%write (p.0: bf16[1,6,40,64], p.1: bf16[1,6,1,64]) -> bf16[1,6,40,64] {
  %p.0 = bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)S(1)} parameter(0)
  %p.1 = bf16[1,6,1,64]{3,1,2,0:T(8,128)(2,1)S(1)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %dus = bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)S(1)} dynamic-update-slice(%p.0, %p.1, %zero, %zero, %zero, /*index=5*/%zero)
}

%body (carry: (s32[], bf16[1,6,40,64])) -> (s32[], bf16[1,6,40,64]) {
  %carry = (s32[]{:T(128)}, bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)}) parameter(0)
  %cache = bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)} get-tuple-element(%carry), index=1
  %new = bf16[1,6,1,64]{3,1,2,0:T(8,128)(2,1)S(1)} custom-call(), custom_call_target="x"
  %there = (bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)S(1)}, bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%cache)
  %near = bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)S(1)} copy-done(%there)
  %written = bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)S(1)} fusion(%near, %new), kind=kLoop, calls=%write
  %back = (bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)}, bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) copy-start(%written)
  %far = bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)} copy-done(%back)
{copy}  ROOT %both = (s32[]{:T(128)}, bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)}) tuple(%new, %far)
}

ENTRY %main (a: bf16[1,6,40,64]) -> bf16[1,6,40,64] {
  %a = bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)} parameter(0)
  %copied = bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)} copy(%a)
  %start = (s32[]{:T(128)}, bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)}) tuple(%a, %copied)
  %while = (s32[]{:T(128)}, bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)}) while(%start), condition=%cond, body=%body
  ROOT %out = bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)} get-tuple-element(%while), index=1
}
"""  # noqa: E501 (as a compiler writes it)
TYPE = "bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)}"
COPIES = {
    "": [],
    f"  %more = {TYPE} copy(%cache)\n": ["more (copy)"],
    # Of another order, on the way from memory to memory, and by a fusion.
    "  %turned = bf16[40,64,6]{2,1,0:T(8,128)(2,1)} transpose(%cache)\n": [
        "turned (transpose)"
    ],
    f"  %s = ({TYPE}, {TYPE}, u32[]{{:S(2)}}) copy-start(%cache)\n"
    f"  %e = {TYPE} copy-done(%s)\n": ["e (copy-done)"],
    f"  %f = {TYPE} fusion(%cache), kind=kLoop, calls=%none\n": ["f (fusion)"],
    # Names, what lies on the chip, and other shapes are no copies.
    f"  %b = {TYPE} bitcast(%cache)\n": [],
    "  %c = bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)S(1)} copy(%near)\n": [],
    "  %c = bf16[1,6,40,64]{3,1,2,0:T(8,128)(2,1)S(3)} copy(%near)\n": [],
    "  %c = bf16[6,8,64]{2,1,0:T(8,128)(2,1)} copy(%new)\n": [],
    "  %c = s32[6,40,64]{2,1,0:T(8,128)} copy(%new)\n": [],
}


@pytest.mark.parametrize(("line", "found"), COPIES.items())
def test_copies_within_a_loop_are_found(line, found):
    program = Program.parse(LOOP.replace("{copy}", line))
    assert program.copies(CACHE) == found


def test_caches_are_padded_to_tiles():
    # Of 64 by 6 the tiles make 128 by 8.
    program = Program.parse(LOOP.replace("{copy}", ""))
    assert program.loop_bytes(CACHE) == 40 * 128 * 8 * 2
    assert program.loop_bytes((1, 6, 41, 64)) == 0


STEP = """HloModule made_up

%look_up (p.0: bf16[1000,128], p.1: s32[8]) -> bf16[8,128] {
  %p.0 = bf16[1000,128]{1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = s32[8]{0:T(128)} parameter(1)
  ROOT %rows = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} gather(%p.0, %p.1), slice_sizes={1,128}
}

%put (p.0: bf16[80,128], p.1: bf16[8,128]) -> bf16[80,128] {
  %p.0 = bf16[80,128]{1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %dus = bf16[80,128]{1,0:T(8,128)(2,1)} dynamic-update-slice(%p.0, %p.1)
}

ENTRY %main (table: bf16[1000,128], weight: bf16[128,128]) -> f32[] {
  %table = bf16[1000,128]{1,0:T(8,128)(2,1)} parameter(0)
  %weight = bf16[128,128]{1,0:T(8,128)(2,1)} parameter(1)
  %ids = s32[8]{0:T(128)S(6)} parameter(2)
  %old = bf16[80,128]{1,0:T(8,128)(2,1)} parameter(3)
  %first = (bf16[1000,128]{1,0:T(8,128)(2,1)S(1)}, bf16[1000,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%table), cross_program_prefetch_index=0
  %fetched = bf16[1000,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%first)
  %found = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(%fetched, %ids), kind=kCustom, calls=%look_up
  %start = (bf16[128,128]{1,0:T(8,128)(2,1)S(1)}, bf16[128,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%weight)
  %near = bf16[128,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%start)
  %made = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} dot(%found, %near)
  %kept = bf16[80,128]{1,0:T(8,128)(2,1)} fusion(%old, %made), kind=kLoop, calls=%put
  ROOT %out = f32[]{:T(128)S(6)} reduce(%made)
}
"""  # noqa: E501


def test_bytes_are_those_of_the_memory():
    # Rows of the table, the weight once, and the part of the cache that is written.
    expected = 2 * (8 * 128 + 128 * 128 + 8 * 128)
    assert Program.parse(STEP).memory_bytes() == expected
    # Without on-chip memory, products are read and written too.
    plain = STEP.replace("S(1)", "").replace(", cross_program_prefetch_index=0", "")
    assert Program.parse(plain).memory_bytes() > 2 * (2 * 1000 * 128)


SETTINGS = {
    "chips=v3": "config.chips is 'v3': it must be one of v4, v5e, v5p, v6e",
    "chips=v4,v4": "config.chips is ('v4,v4',): one name or several, each only once",
    "targets=t5-v1_1-huge": "There is no T5 preset 't5-v1_1-huge'",
    "drafts=t5-v1_1-xxl": "no draft is smaller than a target",
    "gamma=0": "config.gamma is 0: at least 1",
    "dtype=float16": "config.dtype is 'float16': one of",
    "max_lengths=128,128": "config.max_lengths is (128, 128): two, the second",
    "max_lengths=128": "config.max_lengths is (128,): two",
    "temperature=-1": "config.temperature is -1.0: from 0",
}


@pytest.mark.parametrize(("setting", "message"), SETTINGS.items())
def test_settings_that_mean_nothing_are_refused(setting, message, tmp_path):
    flags = (f"--config={CONFIG}", f"--workdir={tmp_path}", f"--config.{setting}")
    run = pairs.run(tpu_aot.main, tmp_path, *flags)
    assert run.code == 2 and message in run.err


def test_the_extra_is_named_where_the_compiler_is_missing(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "libtpu" else find(name, *rest),
    )
    run = pairs.run(
        tpu_aot.main, tmp_path, f"--config={CONFIG}", f"--workdir={tmp_path}"
    )
    assert run.code == 2 and "pip install -e '.[tpu]'" in run.err
    assert not any(tmp_path.iterdir())


def test_the_report_tells_what_does_not_fit_and_what_is_copied(tmp_path):
    shared = {"draft": "small", "memory": 16e9, "counted": 2e9, "c": 0.01, "v": 1.1}
    for name, moved in (("step", 1.2e9), ("verify", 1.3e9), ("draft", 1e7)):
        shared |= {f"{name}_counted": 1e9, f"{name}_bytes": moved}
    shared |= {"c_bytes": 0.01, "v_bytes": 1.08}
    whole = {"arguments": 2e9, "temporaries": 1e8, "compile_seconds": 40.0}
    growth = {"growth": 3e8, "caches_growth": 2e8, "caches_growth_counted": 1e8}
    copied = {"copies": ["x (copy)"], "copies_caches": True}
    rows = [
        {"target": "a", "chip": "v4", "mesh": "model=1", "fits": True}
        | shared
        | whole
        | growth
        | copied,
        {
            "target": "b",
            "chip": "v5e",
            "mesh": "model=1",
            "fits": False,
            "refused": "Used 22G of 16G hbm",
        }
        | shared,
    ]
    text = report.markdown(rows, ["b: it broke"], {"gamma": 7})
    first, second = (
        line
        for line in text.split("\n")
        if line.startswith("| a |") or (line.startswith("| b |"))
    )
    cells = [cell.strip() for cell in first.split("|")[1:-1]]
    assert cells[:6] == ["a", "small", "v4", "model=1", "yes", "2.00"]
    assert cells[9] == "1.20" and cells[16:19] == ["1.50", "2.00", "1"]
    assert " no | - | - |" in second
    assert "- b, small on v5e, model=1: does not fit (Used 22G of 16G hbm)" in text
    assert "- a, small on v4, model=1: fits" in text and "caches are copied" in text
    assert "- failed: b: it broke." in text
    report.write_csv(rows, tmp_path / "report.csv")
    with open(tmp_path / "report.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["fits"] for row in table] == ["True", "False"]
    assert table[0]["copies"] == "x (copy)" and table[1]["arguments"] == ""


def test_the_compilers_own_words_are_kept():
    why = "Ran out of memory on HBM, the total (48.00G) exceeds what is there (15.75G)"
    assert tpu_compile.refusal(f"RESOURCE_EXHAUSTED: {why}.") == why
    assert tpu_compile.refusal(f"X: RESOURCE_EXHAUSTED: {why}. More.\nMore.") == why


@pytest.fixture(params=["model=1", "model=2"])
def job(request) -> tpu_aot.Job:
    tpu_aot.needs_libtpu()
    return tpu_aot.Job(
        target="t5-v1_1-small",
        draft="t5-v1_1-small",
        chip="v5e",
        mesh=request.param,
        gamma=7,
        sampling=Sampling(temperature=None),
        batch=1,
        source=128,
        lengths=(128, 1024),
        dtype="bfloat16",
    )


@needs_libtpu
def test_a_loop_that_copies_is_caught(job):
    def loop(cache):
        def body(carry):
            at, cache = carry
            row = jnp.full((64, 1, 128), 1, cache.dtype)
            written = jax.lax.dynamic_update_slice(cache, row, (0, at, 0))
            # Both the old and the new are needed: no write in place.
            return at + 1, written + jnp.flip(cache, 1)

        return jax.lax.while_loop(lambda carry: carry[0] < 9, body, (0, cache))

    # Too large for the chip's own memory.
    cache = jax.ShapeDtypeStruct((64, 20_000, 128), jnp.bfloat16)
    cache = tpu_compile.place(cache, job._rows)
    made = tpu_compile.compile_for_tpu(jax.jit(loop), [cache], job.on)
    assert made.program.copies(cache.shape)


@needs_libtpu
@pytest.mark.slow
def test_the_small_shape_compiles(job):
    row = job.run()
    assert row["fits"] and row["copies"] == [] and not row["copies_caches"], row
    for name in ("step", "verify", "draft"):
        assert row[f"{name}_bytes"] == pytest.approx(row[f"{name}_counted"], rel=0.15)
    assert row["arguments"] == pytest.approx(row["counted"], rel=0.1)
    if job.mesh == "model=1":
        assert row["c"] == 1.0 and row["c_bytes"] == 1.0
    assert report.line(row).endswith("caches are not copied")


def test_the_default_pairs_are_checked_without_a_compiler():
    pairs_found = tpu_aot.check(tpu_aot_config.get_config())
    assert ("t5-v1_1-xxl", "t5-v1_1-small") in pairs_found
