"""Flags, folders and the manifest: what all commands share."""

import json
import sys

import ml_collections
import pytest

from configs import demo
from experiments import build, command
from specjax import errors
from tests import pairs

SETTINGS = """
import ml_collections

def get_config():
    return ml_collections.ConfigDict(dict(number=1, inner=dict(name="a")))
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "settings.py"
    path.write_text(SETTINGS)
    return path


def run_main(folder, *argv, main=lambda config, workdir, values: None):
    return pairs.run(main, folder, *argv)


def test_settings_and_folder_reach_the_command(config_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = list(sys.argv)
    seen = []

    def main(config, workdir, values):
        seen.append((config.to_dict(), workdir))
        command.write_json(tmp_path / "manifest.json", command.manifest(config, g=[7]))
        return 1

    flags = ("--config.number=3", "--config.inner.name=b c", "--workdir=new/run")
    run = run_main(tmp_path, "--config=settings.py", *flags, main=main)
    assert run.code == 1 and run.err == ""
    settings = {"number": 3, "inner": {"name": "b c"}}
    assert seen == [(settings, tmp_path / "new" / "run")]
    assert not (tmp_path / "new").exists()  # the command makes it when all is checked
    assert sys.argv == own
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    # The manifest tells of the command, not of the process that ran it.
    assert manifest["command"].startswith("command --config=settings.py")
    assert "'--config.inner.name=b c'" in manifest["command"]
    assert manifest["config"] == settings and manifest["effective"] == {"g": [7]}
    assert manifest["git"] is None or len(manifest["git"]["revision"]) == 40


@pytest.mark.parametrize(
    "added", [("-f", "/x/kernel-1.json"), ("--f=/x/kernel-1.json",)], ids=str
)
def test_a_notebook_s_own_arguments_are_dropped(config_file, tmp_path, added):
    flags = (f"--config={config_file}", f"--workdir={tmp_path}")
    assert run_main(tmp_path, *added, *flags).code == 0
    assert run_main(tmp_path, *flags, *added).code == 0
    # Other uses of the letter are not.
    assert run_main(tmp_path, *flags, "-f", "1").code == 2


def test_nothing_is_defined_for_other_programs(config_file, tmp_path):
    flags = (f"--config={config_file}", f"--workdir={tmp_path}")
    assert run_main(tmp_path, *flags).code == run_main(tmp_path, *flags).code == 0


BAD_FLAGS = {
    "no config": (["--workdir=W"], "--config is missing: name a file"),
    "empty config": (["--config=", "--workdir=W"], "--config is missing"),
    "no workdir": (["--config=C"], "--workdir is missing: name the folder"),
    "absent config": (["--config=absent.py", "--workdir=W"], "absent.py"),
    "folder as config": (["--config=.", "--workdir=W"], "directory"),
    "text as config": (["--config=text.md", "--workdir=W"], "text.md, line 2"),
    "two configs": (["--config=C", "--config=C", "--workdir=W"], "given 2 times"),
    "broken import": (["--config=import.py", "--workdir=W"], "no_such_module"),
    "no get_config": (["--config=empty.py", "--workdir=W"], "get_config"),
    "file as workdir": (["--config=C", "--workdir=text.md"], "--workdir=text.md"),
    "file above": (["--config=C", "--workdir=text.md/a/b"], "text.md is not a folder"),
    "unknown flag": (["--config=C", "--workdir=W", "--speed=1"], "'speed'"),
    "stray word": (["--config=C", "--workdir=W", "number=1"], "--config.NAME=VALUE"),
    "unknown setting": (
        ["--config=C", "--workdir=W", "--config.nomber=1"],
        "no --config.nomber",
    ),
    "unknown inner": (
        ["--config=C", "--workdir=W", "--config.inner.nome=1"],
        "no --config.inner.nome",
    ),
    "wrong type": (["--config=C", "--workdir=W", "--config.number=x"], "number=x"),
    "not whole": (["--config=C", "--workdir=W", "--config.number=1.5"], "1.5"),
}


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags_end_in_one_sentence(config_file, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.md").write_text("# a title '\nwith more text\n")
    (tmp_path / "empty.py").write_text("get_settings = None\n")
    (tmp_path / "import.py").write_text("import no_such_module\n")
    # A module of the same name is not to help out.
    monkeypatch.delitem(sys.modules, "config_config", raising=False)
    argv, expected = BAD_FLAGS[name]

    def main(config, workdir, values):
        raise AssertionError("the command ran")

    argv = [arg.replace("=C", f"={config_file}") for arg in argv]
    argv = [arg.replace("=W", f"={tmp_path / 'new'}") for arg in argv]
    run = run_main(tmp_path, *argv, main=main)
    assert run.code == 2 and run.out == ""
    assert run.err.startswith("error: ") and run.err.count("\n") == 1, run.err
    assert expected in run.err and "Traceback" not in run.err
    assert not (tmp_path / "new").exists()


def test_errors_and_interrupts_of_a_command(config_file, tmp_path):
    flags = (f"--config={config_file}", f"--workdir={tmp_path}")

    def refuse(config, workdir, values):
        raise errors.InputError("line 3\nis wrong")

    def interrupt(config, workdir, values):
        raise KeyboardInterrupt

    def fail(config, workdir, values):
        raise ValueError("a bug of ours")

    assert run_main(tmp_path, *flags, main=refuse).err == "error: line 3 is wrong\n"
    assert run_main(tmp_path, *flags, main=interrupt).code == 130
    # A bug keeps its traceback.
    with pytest.raises(ValueError, match="bug of ours"):
        command.run(fail, ["command", *flags])


def test_help_shows_the_command_s_own_text(capsys):
    from experiments import decode

    with pytest.raises(SystemExit) as caught:
        command.run(decode.main, ["decode", "--help"], define=decode._define)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "python -m experiments.decode" in out and "--input" in out


def test_json_is_written_whole(tmp_path):
    path = tmp_path / "a.json"
    command.write_json(path, {"text": "ä"})
    with pytest.raises(TypeError):
        command.write_json(path, {"text": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"text": "ä"}


def test_a_config_of_another_command_is_refused():
    known = demo.get_config()
    build.check_settings(demo.get_config(), known)
    other = demo.get_config()
    other.gama = 3
    with pytest.raises(errors.InputError, match="setting gama that"):
        build.check_settings(other, known)
    other = demo.get_config()
    del other.sampling["top_p"]
    with pytest.raises(errors.InputError, match=r"no setting sampling\.top_p"):
        build.check_settings(other, known)
    with pytest.raises(errors.InputError, match="no setting batch_size"):
        build.check_settings(ml_collections.ConfigDict(), known)
