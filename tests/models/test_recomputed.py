"""The baseline that projects its source at every step: what it is, and that it does."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import checks, decoding
from specjax.models.recomputed import RecomputedCross
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config
from specjax.sampling import Sampling

SOURCE, WIDTH, LAYERS = 37, 40, 2  # numbers that nothing else has
SHAPE = T5Config(
    vocab_size=64,
    d_model=WIDTH,
    d_kv=8,
    num_heads=3,
    d_ff=48,
    num_encoder_layers=1,
    num_decoder_layers=LAYERS,
)


@pytest.fixture(scope="module")
def model():
    return jax.jit(T5, static_argnums=0)(SHAPE, jax.random.key(3))


@pytest.fixture(scope="module")
def source():
    inputs = jnp.arange(SOURCE, dtype=jnp.int32)[None] % 60 + 2
    keys = jax.random.split(jax.random.key(1, impl="threefry2x32"), 1)
    return inputs, jnp.ones((1, SOURCE), bool), keys


def reached(text: str, first: str) -> str:
    """What a computation of compiled text and all that it calls say."""
    bodies = dict(
        re.findall(r"^(?:ENTRY )?%(\S+) \(.*?\{\n(.*?)^\}", text, re.M | re.S)
    )
    seen: dict[str, str] = {}
    waiting = [first]
    while waiting:
        name = waiting.pop()
        if name in bodies and name not in seen:
            seen[name] = bodies[name]
            waiting += re.findall(r"%([\w.\-]+)", bodies[name])
    return "\n".join(seen.values())


def projections(model, source) -> tuple[int, int]:
    """Products that project all source tokens: in the loop, and in all."""
    settings = dict(sampling=Sampling(temperature=None), max_length=16)
    arguments = checks.decode_arguments(
        model,
        *source,
        budget=None,
        prefix=None,
        prefix_length=None,
        eos_id=1,
        **settings,
    )
    lowered = decoding._autoregressive_loop.lower(
        model, stop=None, log_probs=False, **arguments
    )
    text = lowered.compile().as_text()
    (body,) = set(re.findall(r" while\(.*body=%([\w.\-]+)", text))
    # [37, 2 x 24] in some order, from [37, 40].
    made = rf"= f32\[(?:{SOURCE},48|48,{SOURCE}|2,{SOURCE},24|2,24,{SOURCE})\]\S* dot\("
    return len(re.findall(made, reached(text, body))), len(re.findall(made, text))


def test_the_loop_projects_the_source_at_every_step(model, source):
    inside, everywhere = projections(RecomputedCross(model), source)
    assert inside == everywhere == LAYERS
    # What it is a switch of does so once, before the loop.
    assert projections(model, source) == (0, LAYERS)


def test_it_writes_what_the_model_writes(model, source):
    plain = decoding.autoregressive_generate(
        model, *source, max_length=16, sampling=Sampling(temperature=None)
    )
    again = decoding.autoregressive_generate(
        RecomputedCross(model),
        *source,
        max_length=16,
        sampling=Sampling(temperature=None),
    )
    np.testing.assert_array_equal(plain.tokens, again.tokens)
    assert RecomputedCross(model).encode(*source[:2]).cross is None
