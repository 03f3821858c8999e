"""Speculative decoding of encoder-decoder models in JAX, exact by construction."""

from specjax.beam import BeamOutput, beam_generate
from specjax.decoding import (
    DecodeOutput,
    autoregressive_generate,
    autoregressive_step,
    speculative_generate,
    speculative_init,
    speculative_step,
)
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NgramDrafter
from specjax.drafters.tree import TreeDrafter
from specjax.errors import InputError
from specjax.generation import Generation
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config
from specjax.models.t5_weights import load_t5, save_t5
from specjax.pair import Pair, load
from specjax.sampling import Sampling
from specjax.verify import Verifier, block_verify, token_verify

__version__ = "0.1.0"

__all__ = [
    "BeamOutput",
    "DecodeOutput",
    "Generation",
    "InputError",
    "ModelDrafter",
    "NgramDrafter",
    "Pair",
    "Sampling",
    "T5",
    "T5Config",
    "TreeDrafter",
    "Verifier",
    "autoregressive_generate",
    "autoregressive_step",
    "beam_generate",
    "block_verify",
    "load",
    "load_t5",
    "save_t5",
    "speculative_generate",
    "speculative_init",
    "speculative_step",
    "token_verify",
]
