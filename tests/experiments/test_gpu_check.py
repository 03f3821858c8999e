"""The check of a GPU, dry: its decoder, its stages on a tiny shape, its limits."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import gpu_check, gpu_decoder
from experiments.gpu_decoder import Shape

TINY = gpu_check.SETUPS["tiny"]


def run(tmp_path, *words: str) -> tuple[int, dict]:
    """Exit code and the file."""
    path = tmp_path / "found.json"
    code = gpu_check.main([f"--out={path}", "--shape=tiny", *words])
    return code, json.loads(path.read_text())


FEED = jax.jit(gpu_decoder.feed, static_argnums=0)


def logits(weights, *widths: int) -> np.ndarray:
    """Of one text, fed in passes of these widths at each row's own place."""
    shape, batch = TINY.target, 2
    scanned = isinstance(weights["layers"], dict)
    memory = gpu_decoder.make_memory(shape, batch, 16, scanned)
    cross = gpu_decoder.make_cross(shape, batch, scanned)
    tokens = jnp.arange(2 * sum(widths), dtype=jnp.int32).reshape(batch, -1) + 3
    length, found, at = jnp.array([0, 4], jnp.int32), [], 0
    for width in widths:
        fed = tokens[:, at : at + width]
        out, memory = FEED(shape, weights, memory, cross, fed, length)
        found.append(np.asarray(out))
        length, at = length + width, at + width
    return np.concatenate(found, axis=1)


@pytest.mark.slow
def test_passes_of_any_width_and_both_forms_agree():
    weights = gpu_decoder.make_weights(TINY.target, TINY.core, seed=0)
    once = logits(weights, 4)
    for other in (logits(weights, 2, 2), logits(gpu_decoder.stacked(weights), 4)):
        # Bfloat16 has 8 bits; logits have a standard deviation of six.
        np.testing.assert_allclose(other, once, atol=0.3)
    assert np.std(once) > 3  # and so they say something
    assert np.abs(once[0] - once[1]).max() > 1


def test_a_step_reads_all_but_the_embedding():
    shape = TINY.target

    def read():
        weights = gpu_decoder.make_weights(shape, TINY.core, seed=0)
        memory = gpu_decoder.make_memory(shape, 2, gpu_decoder.SLOTS, False)
        cross = gpu_decoder.make_cross(shape, 2, False)
        return [weights[name] for name in ("layers", "head", "norm")], memory, cross

    arrays = jax.tree.leaves(jax.eval_shape(read))
    assert shape.bytes(batch=2) == sum(own.size * own.dtype.itemsize for own in arrays)


def test_shapes_are_the_presets():
    from specjax.models.t5_config import T5Config

    full = gpu_check.SETUPS["full"]
    for name, shape in {"xxl": full.target, **full.drafts}.items():
        own = T5Config.preset(f"t5-v1_1-{name}")
        sizes = (own.d_model, own.num_heads, own.d_kv, own.d_ff, own.num_decoder_layers)
        assert shape == Shape(*sizes, vocab=own.vocab_size)


def test_buckets_are_t5s():
    from specjax.models.t5_bias import relative_position_bucket

    wanted = relative_position_bucket(-np.arange(200), bidirectional=False)
    np.testing.assert_array_equal(gpu_decoder._buckets(200), wanted)


def test_nothing_starts_without_time(tmp_path):
    code, found = run(tmp_path, "--seconds=0")
    assert code == 0 and list(found["stages"]) == list(gpu_check.STAGES)
    for own in found["stages"].values():
        assert (own["done"], own["stopped"]) == (False, "the time limit")


def test_the_longest_program_must_still_fit(tmp_path):
    report = gpu_check.Report(tmp_path / "found.json", 100.0)
    report._longest = 99.0
    assert report.room() > 99.0
    report._longest = 101.0
    with pytest.raises(gpu_check.OutOfTime):
        report.timed(lambda: pytest.fail("it was run"))


def test_without_specjax_the_rest_is_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "experiments.gpu_decodes", None)
    code, found = run(tmp_path, "--stages=bandwidth,batch_1")
    assert code == 1
    assert found["stages"]["bandwidth"]["bytes_per_second"] > 0
    own = found["stages"]["batch_1"]
    assert not own["done"] and "whole decodes are specjax's" in own["stopped"]


def test_an_unknown_stage_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, "--stages=target,decode")
    assert "--stages names 'decode'" in capsys.readouterr().err


@pytest.fixture
def few_rounds(monkeypatch) -> None:
    """Less straight-line code to compile."""
    from experiments import gpu_decodes

    monkeypatch.setattr(gpu_decodes, "_ROUNDS", 2)
    monkeypatch.setattr(gpu_check, "_STRAIGHT", 2)


@pytest.mark.slow
def test_all_stages_of_the_tiny_shape(tmp_path, few_rounds):
    code, found = run(tmp_path, "--seconds=300")
    assert code == 0, found
    stages = found["stages"]
    assert all(own["done"] for own in stages.values())
    step = stages["target"]["step"]
    assert stages["target"]["form"] in ("scanned", "written_out")
    bytes_ms = 1e3 * TINY.target.bytes() / stages["bandwidth"]["bytes_per_second"]
    assert step["bytes_ms"] == pytest.approx(bytes_ms)
    assert step["of_bound"] == pytest.approx(step["ms"] / bytes_ms)
    four = stages["target"]["verify_4"]
    assert four["v"] == pytest.approx(four["ms"] / step["ms"])
    small = stages["drafts"]["small"]
    for form in ("looped", "straight"):
        assert small[form]["c"] == pytest.approx(small[form]["ms"] / step["ms"])
    assert set(stages["launches"]["default"]) >= {"looped", "straight"}
    decodes = stages["batch_1"] | stages["batches"]
    cells = {name: own for name, own in decodes.items() if name.startswith("batch ")}
    assert list(cells) == [
        "batch 1, gamma 3, greedy",
        "batch 1, gamma 3, T=1",
        "batch 1, gamma 3, greedy, straight",
        "batch 2, gamma 3, greedy",
    ]
    for own in cells.values():
        assert own["speedup"] > 0 and 1 <= own["tokens_per_call"] <= 4
        assert all(gap < 0.5 for gap in own.get("gaps", ()))
    greedy, _, straight, _ = cells.values()
    assert greedy["survival"] == straight["survival"]


@pytest.mark.slow
def test_straight_code_decodes_what_loops_do(few_rounds):
    from experiments import gpu_decodes
    from specjax.decoding import speculative_generate
    from specjax.drafters.model import ModelDrafter
    from specjax.sampling import Sampling, with_arrays

    batch, gamma, length = 2, 3, TINY.length
    target, draft = (
        gpu_decodes.Decoder(
            weights=gpu_decoder.make_weights(shape, TINY.core, seed),
            cross=gpu_decoder.make_cross(shape, batch, False),
            shape=shape,
        )
        for seed, shape in enumerate((TINY.target, TINY.drafts["small"]))
    )
    inputs = jnp.ones((batch, gpu_decoder.SOURCE), jnp.int32)
    mask, keys = jnp.ones(inputs.shape, bool), jax.random.split(jax.random.key(1), 2)
    prefix = jnp.array([[2], [5]], jnp.int32)
    settings = dict(gamma=gamma, max_length=length)
    drawn = with_arrays(Sampling())
    looped = speculative_generate(
        target,
        ModelDrafter(draft),
        inputs,
        mask,
        keys,
        sampling=drawn,
        prefix=prefix,
        eos_id=-1,
        **settings,
    )
    straight = gpu_decodes._straight(
        target,
        gpu_decodes.StraightDrafter(draft),
        inputs,
        mask,
        keys,
        prefix,
        drawn,
        **settings,
    )
    np.testing.assert_array_equal(straight.tokens, looped.tokens)
    np.testing.assert_array_equal(straight.stats.accepted, looped.stats.accepted)
    assert 0 < int(jnp.sum(looped.stats.accepted))
