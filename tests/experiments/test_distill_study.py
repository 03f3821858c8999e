"""A study runs every pair of divergence and texts once, and goes on where it was."""

import json
import pathlib

import jax
import pytest

from configs import distill_study as shipped
from experiments import distill_study, teacher, train, train_data, train_settings
from specjax import errors
from specjax.models import t5, t5_weights
from specjax.training import init
from tests import tiny_run

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tiny_run.make_folder(tmp_path_factory.mktemp("study"))
    config = shipped.get_config()
    config.divergences, config.writers = ("sequence", "jsd"), ("truth", "draft")
    config.gamma = 3
    with config.unlocked():
        config.train = tiny_run.tiny_config(folder)
        config.train.model.dropout_rate = 0.0
        config.train.optimizer.steps = 4
        config.train.distill.target = str(folder)
    shape = train_settings.model_config(config.train)
    target = init.mimetic_init(t5.T5(shape, jax.random.key(5)))
    t5_weights.save_t5(target, folder)
    return config


@pytest.mark.slow
def test_every_pair_is_measured_once(config, tmp_path, monkeypatch):
    distill_study.main(config, tmp_path, None)
    rows = json.loads((tmp_path / "metrics.json").read_text())
    cells = [(row["writer"], row["divergence"]) for row in rows]
    assert cells == [
        ("truth", "sequence"),
        ("truth", "jsd"),
        ("draft", "sequence"),
        ("draft", "jsd"),
    ]
    for row in rows:
        assert row["steps"] == 4 and 0 < row["alpha_sampled"] < 1
        assert 1 <= row["tokens_per_call_greedy"] <= 4
    assert len({row["alpha_sampled"] for row in rows}) == 4
    assert (tmp_path / "study.png").stat().st_size > 10_000
    assert "| draft | jsd |" in (tmp_path / "study.md").read_text()

    def refuse(*arguments):
        raise AssertionError("it was measured before")

    monkeypatch.setattr(train, "train", refuse)
    distill_study.main(config, tmp_path, None)
    assert json.loads((tmp_path / "metrics.json").read_text()) == rows
    # What was measured otherwise does not stand in one table with it.
    for name, value, message in (
        ("gamma", 2, "was measured with config.gamma = 3, not 2"),
        ("train.seed", 3, "was measured with config.train.seed = 0, not 3"),
    ):
        other = config.copy_and_resolve_references()
        other.update_from_flattened_dict({name: value})
        with pytest.raises(errors.InputError, match=message):
            distill_study.main(other, tmp_path, None)
    assert json.loads((tmp_path / "metrics.json").read_text()) == rows
    train_file = pathlib.Path(config.train.data.folder) / "train.jsonl"
    content = train_file.read_text()
    train_file.write_text(content.partition("\n")[2])
    with pytest.raises(errors.InputError, match="with the data's fingerprint = "):
        distill_study.main(config, tmp_path, None)
    train_file.write_text(content)
    target = t5_weights.load_t5(config.train.distill.target)
    target.head[...] = 1.01 * target.head[...]
    t5_weights.save_t5(target, config.train.distill.target)
    with pytest.raises(errors.InputError, match="with the target's fingerprint = "):
        distill_study.main(config, tmp_path, None)


@pytest.mark.slow
def test_what_is_measured_is_what_is_exported(config, tmp_path, monkeypatch):
    """The best of a run, where that is asked for, and not its last."""
    own = config.train.copy_and_resolve_references()
    own.update(best="alpha_sampled", evaluate_every=2)
    own.export.which = "best"
    score = train.evaluate
    worse, real = iter([0.9, 0.1]), []  # so that the first of two is the best

    def evaluate(*arguments):
        real.append(score(*arguments))
        return real[-1] | {"alpha_sampled": next(worse)}

    monkeypatch.setattr(train, "evaluate", evaluate)
    judge = distill_study.Judge.of(own)
    row = distill_study.run(("jsd", "truth"), own, 3, tmp_path, judge)
    master = teacher.load_teacher(own)
    data = train_data.load_data(own, lambda line: None)
    best = t5_weights.load_t5(tmp_path / "export")
    expected = master.alphas(best, master.held_out(own, data))
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-6)
    assert row["alpha_sampled"] == pytest.approx(real[0]["alpha_sampled"], rel=1e-3)
    assert row["alpha_sampled"] != pytest.approx(real[1]["alpha_sampled"], rel=2e-3)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "divergences",
            ("jsd", "kl"),
            "config.divergences has 'kl': it takes some of f",
        ),
        ("writers", ("people",), "config.writers has 'people': it takes some of truth"),
        ("divergences", (), r"config.divergences is \(\): it takes some of"),
        ("writers", (), r"config.writers is \(\): it takes some of truth"),
        ("train.distill.name", "jsd", "config.train.distill.name is jsd, which none"),
        ("train.distill.texts.target", 1.0, "distill.texts.target is 1.0, which none"),
        ("gamma", 0, "config.gamma is 0"),
        ("train.distill.target", "", "config.train.distill.target is empty"),
        ("train.distill.beta", 2.0, "config.distill.beta is 2.0"),
        ("train.distill.decay", 2.0, "which none of the runs reads: leave it at 3.0"),
    ],
)
def test_settings_that_mean_nothing(config, tmp_path, name, value, message):
    own = config.copy_and_resolve_references()
    with own.unlocked():
        own.update_from_flattened_dict({name: value})
    with pytest.raises(errors.InputError, match=message):
        distill_study.main(own, tmp_path / "new", None)
    assert not (tmp_path / "new").exists()
