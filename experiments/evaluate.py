"""Scores models on held-out pairs: text against references, draft against target.

    python -m experiments.evaluate --config=configs/repair_evaluate.py \
        --input=DATA/test.jsonl --workdir=DIR

Text scores (of greedy output): exact match, character error rate, BLEU, chrF and ROUGE;
beside them, as `source`, those of the sources themselves. Alpha: mean of sum min(p, q)
over the target's own greedy and sampled output, of the draft and of the n-gram drafter,
which copies. Needs the extra `data`. Writes DIR/manifest.json, DIR/metrics.json and
DIR/outputs.jsonl. Where `target_finished` is false, ``config.max_length`` cut the
output; `cut` counts these.
"""

from __future__ import annotations

import json
import pathlib

import ml_collections
from absl import flags

from configs import repair_evaluate
from experiments import baseline, build, command, input_lines
from specjax import errors
from specjax.data import batches, pairs
from specjax.data import tokenizer as tokenizers
from specjax.drafters.ngram import NgramDrafter
from specjax.metrics import text
from specjax.pair import load_model
from specjax.sampling import Sampling


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> None:
    """Runs the command."""
    build.check_settings(config, repair_evaluate.get_config())
    build.positive(config, "batch_size")
    build.check_max_length(config)
    build.check_limit(config)
    buckets = build.buckets(config)
    dtype = build.named(build.DTYPES, config.dtype, "dtype")
    text.check_scores(tuple(text.SCORES))
    path = input_lines.input_file(values.input or config.input)
    examples = pairs.load_pairs(path)[: config.limit or None]
    models = {}
    for role in ("target", "draft"):
        if role == "target" or config[role].checkpoint:
            setting = f"{role}.checkpoint"
            folder = build.checkpoint_folder(config[role].checkpoint, setting)
            models[role] = load_model(folder, dtype, role)
    target, tokenizer, _ = models["target"]
    if "draft" in models:
        tokenizers.check_same_tokenizer(tokenizer, models["draft"][1])
    rows = [tokenizer.encode(pair.source) for pair in examples]
    input_lines.check_lengths(rows, buckets, path)
    parts = list(batches.inference_batches(rows, config.batch_size, buckets))
    keys = build.row_keys(config.seed, len(rows))
    references = [pair.target for pair in examples]
    copies = without_prefix(examples, config.prefix, path)

    workdir.mkdir(parents=True, exist_ok=True)
    result = {"source": text.text_scores(copies, references)}
    texts: dict[str, list[str]] = {}
    finished: dict[str, list[bool]] = {}
    for role, (model, _, num_tokens) in models.items():
        greedy = Sampling(temperature=None, num_tokens=num_tokens)
        outputs = baseline.decode_all(model, parts, keys, greedy, config.max_length)
        written = baseline.tokens_by_row(parts, outputs, len(rows))
        texts[role] = [tokenizer.decode(tokens) for tokens in written]
        finished[role] = [
            baseline.finished(tokens, tokenizer.eos_id) for tokens in written
        ]
        result[role] = text.text_scores(texts[role], references)
        result[role]["cut"] = finished[role].count(False)
        if role == "target" and "draft" in models:
            sampling = Sampling(num_tokens=num_tokens)
            sampled = baseline.decode_all(
                target, parts, keys, sampling, config.max_length
            )
            draft = models["draft"][0]
            ways = {"greedy": (outputs, greedy), "sampled": (sampled, sampling)}
            ngram = NgramDrafter()
            result["alpha"] = {
                name: baseline.alpha(target, draft, parts, *way)
                for name, way in ways.items()
            }
            result["alpha_ngram"] = {
                name: baseline.drafter_alpha(target, ngram, parts, *way)
                for name, way in ways.items()
            }
    with open(workdir / "outputs.jsonl", "w", encoding="utf-8") as file:
        for number, pair in enumerate(examples):
            line: dict[str, str | bool] = {
                "source": pair.source,
                "reference": pair.target,
            }
            line |= {role: own[number] for role, own in texts.items()}
            line |= {f"{role}_finished": own[number] for role, own in finished.items()}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    command.write_json(
        workdir / "manifest.json", command.manifest(config, lines=len(rows))
    )
    command.write_json(workdir / "metrics.json", result)
    print(json.dumps(result, indent=2))


def without_prefix(
    examples: list[pairs.Pair], prefix: str, path: pathlib.Path
) -> list[str]:
    """The sources as people wrote them, which a copy would be.

    Raises:
        InputError: a source that does not begin with the prefix.
    """
    for number, pair in enumerate(examples, start=1):
        if not pair.source.startswith(prefix):
            raise errors.InputError(
                f"--input={path}, pair {number} does not begin with config.prefix = "
                f"{prefix!r}: name what every source begins with, or leave it empty"
            )
    return [pair.source.removeprefix(prefix) for pair in examples]


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("input", None, "File of pairs.", flag_values=values)


if __name__ == "__main__":
    command.run(main, define=_define)
