import os
import pathlib
import shlex
import signal
import subprocess
import sys

import pytest

from axon_dist import __version__
from axon_dist.core.errors import ConfigError
from axon_dist.train.cli import main as command
from axon_dist.train.cli.main import CONFIG_KEYS, VERBS, _parse, main
from axon_dist.train.config import completion_words

QUICKSTART = pathlib.Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def error_of(capsys, *arguments):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "axon: error: got no verb. Valid: bisect, completion, "),
        (["trian"], "axon: error: there is no verb 'trian'. Did you mean 'train'?"),
        (["train", "none.yaml"], "axon: error: cannot read the config 'none.yaml': No such file"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(capsys, arguments, message):
    assert error_of(capsys, *arguments).startswith(message)


@pytest.mark.parametrize("arguments", [["train"], ["train", "a.yaml", "--fast"], ["doctor", "a"]])
def test_mistakes_of_arguments_too(capsys, arguments):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    err = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert err.startswith("axon: error: ")
    assert err.endswith("--help\n")
    assert err.count("\n") == 1


def test_an_unknown_option_is_suggested_one(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "runs/a", "--prompt", "a", "--max-tokens", "3"])
    assert (
        "--max-tokens 3. Did you mean '--tokens'? See axon generate --help"
        in capsys.readouterr().err
    )


def test_a_misspelt_option_is_named_before_the_required_one_that_it_was_meant_for(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "runs/a", "--propmt", "a"])
    err = capsys.readouterr().err
    assert "--propmt. Did you mean '--prompt'? See axon generate --help" in err
    assert "required" not in err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=3", "train.stepz: there is no such key. Did you mean 'steps'?"),
        ("optimizer.lr=abc", "optimizer.lr: there is no such key. Did you mean 'learning_rate'?"),
        ("optimizer={name:adamw}", "got the key 'name:adamw' without a value; YAML needs a space"),
        ("train={steps:3}", "got the key 'steps:3' without a value; YAML needs a space after the"),
        ("train.steps=ten", "train.steps: got 'ten', which must be a whole number"),
        ("mesh=dp=3", "mesh dp=3 needs 3 devices and got 8"),
        ("data.files=[/none/*]", "data.files: '/none/*' matches no file"),
        ("nonsense", "cannot read 'nonsense'; write key.path=value"),
    ],
)
def test_mistakes_in_a_config(capsys, tmp_path, override, message):
    path = tmp_path / "run.yaml"
    path.write_text(f"run_dir: {tmp_path / 'run'}\ndevices: {{emulate: 8}}\n")
    assert error_of(capsys, "train", str(path), override).startswith(f"axon: error: {message}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments", [["--resume", "auto", "train.steps=ten"], ["train.steps=ten", "--resume", "auto"]]
)
def test_overrides_come_before_or_after_options(capsys, tmp_path, arguments):
    path = tmp_path / "run.yaml"
    path.write_text("devices: {emulate: 8}")
    assert "train.steps: got 'ten'" in error_of(capsys, "train", str(path), *arguments)


def test_a_warning_of_the_command_has_no_place_in_its_script(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/axon", "train"])
    command._show_warning("mind the gap", UserWarning, "/usr/bin/axon", 8)
    assert capsys.readouterr().err == "axon: warning: mind the gap\n"
    command._show_warning("mind the gap", UserWarning, "/home/me/loss.py", 3)
    assert "loss.py:3: UserWarning: mind the gap" in capsys.readouterr().err


def test_help_names_every_verb(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for verb in VERBS:
        assert verb.name in text
        assert verb.help in text


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"axon_dist {__version__}\n"


def test_an_interruption_is_no_traceback(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("axon_dist.train.cli.runs.load_config", interrupted)
    assert main(["train", str(QUICKSTART)]) == 130
    assert capsys.readouterr().err == "axon: interrupted\n"


def test_an_interruption_may_come_as_another_error(capsys, monkeypatch):
    """If SIGINT interrupts an import of C code, the import raises `ImportError`."""

    def interrupted(*_):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("numpy._core.multiarray failed to import") from None

    monkeypatch.setattr("axon_dist.train.cli.runs.load_config", interrupted)
    assert main(["train", str(QUICKSTART)]) == 130
    assert capsys.readouterr().err == "axon: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_closed_streams_change_nothing_else(tmp_path):
    """No file gets the descriptor of a closed stream, and the exit codes stay."""
    program = (
        "import os, sys, axon_dist.train.cli.main as main\n"
        "code = main.main()\n"
        "file = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)\n"
        "streams = sys.stdin, sys.stdout, sys.stderr\n"
        "is_usual = file > 2 and all(map(os.get_inheritable, range(3))) and all(streams)\n"
        "os.write(file, f'{code} {is_usual}'.encode())"
    )
    told = tmp_path / "told"
    command = shlex.join([sys.executable, "-c", program, "trian", str(told)])
    subprocess.run(["/bin/sh", "-c", f"{command} <&- >&- 2>&-"], check=True)
    assert told.read_text() == "2 True"


def test_an_interruption_while_jax_is_imported_does_not_import_it_again(tmp_path):
    """A second import on top of the half-imported one may abort the process."""
    (tmp_path / "jax.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    done = run_with_path(tmp_path, "train", QUICKSTART)
    assert (done.returncode, done.stderr) == (130, "axon: interrupted\n")


def test_a_broken_import_of_jax_is_named_as_it_is(tmp_path):
    (tmp_path / "jax.py").write_text(
        "import pathlib\nhere = pathlib.Path(__file__).with_name('count')\n"
        "here.open('a').write('x')\n"
        "raise ImportError(f'jaxlib is broken, {len(here.read_text())}')\n"
    )
    done = run_with_path(tmp_path, "train", QUICKSTART)
    assert done.returncode == 1
    assert done.stderr.startswith("axon: unexpected ImportError: jaxlib is broken, 1; its trace")
    assert done.stderr.count("\n") == 1


def run_with_path(folder, *arguments):
    """Runs the command with a folder of other modules."""
    program = (
        f"import sys\nsys.path.insert(0, {str(folder)!r})\n"
        "import axon_dist.train.cli.main as main\nsys.exit(main.main())"
    )
    env = {**os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.mark.parametrize("name", ["_parse", "_check_keys"])
def test_an_interruption_before_the_verb_runs_is_one_too(capsys, monkeypatch, name):
    def interrupted(*_):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, name, interrupted)
    assert main(["train", str(QUICKSTART)]) == 130
    assert capsys.readouterr().err == "axon: interrupted\n"


def test_a_bug_is_one_line_that_names_the_file_with_the_traceback(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("axon_dist.train.cli.runs.load_config", lambda *_: 1 / 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["train", str(QUICKSTART)]) == 1
    out, err = capsys.readouterr()
    (file,) = tmp_path.iterdir()
    assert out == ""
    assert err == (
        f"axon: unexpected ZeroDivisionError: division by zero; its traceback is in {file}\n"
    )
    text = file.read_text()
    assert "in train_config" in text
    assert text.endswith("ZeroDivisionError: division by zero\n")


def test_a_bug_is_one_line_where_no_file_can_be_written(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("axon_dist.train.cli.runs.load_config", lambda *_: 1 / 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    assert main(["train", str(QUICKSTART)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("axon: unexpected ZeroDivisionError: division by zero; at ")
    assert err.count("\n") == 1


def test_errors_keep_their_kind_for_callers():
    assert issubclass(ConfigError, ValueError)


@pytest.mark.full
def test_as_a_module():
    command = [sys.executable, "-m", "axon_dist.train.cli", "train", "none.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("axon: error: cannot read the config 'none.yaml'")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_help_has_examples_that_can_be_parsed(verb, capsys):
    with pytest.raises(SystemExit):
        main([verb.name, "--help"])
    text = capsys.readouterr().out
    assert "\nexamples:\n" in text
    assert verb.examples
    for example in verb.examples:
        assert example in text
        command = example.removeprefix('eval "$(').removesuffix(')"').partition(" > ")[0]
        program, *arguments = shlex.split(command)
        assert program == "axon"
        assert _parse(arguments).verb is verb


def test_a_shell_completes_verbs_options_and_keys(capsys, tmp_path):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    program = f"""
        {script}
        try() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _axon 2>/dev/null
                 echo "${{COMPREPLY[@]}}"; }}
        try axon sch; try axon train c.yaml train.st; try axon train --dr; try axon completion z
        try axon config optimizer.s
    """
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    expected = ["schedule", "train.steps=", "--dry-run", "zsh", "optimizer.schedule"]
    assert done.stdout.splitlines() == expected
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload -U +X bashcompinit")


def test_the_words_of_a_config_are_those_of_its_code():
    command = (
        "from axon_dist.train.config import completion_words; print(*completion_words(), sep='\\n')"
    )
    assert CONFIG_KEYS.read_text().split() == completion_words(), (
        f'run: python -c "{command}" > axon_dist/train/cli/config_keys.txt'
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["plan", "--help"], 0),
        (["train", "a.yaml", "--fast"], 2),
        (["trian"], 2),
        (["completion", "bash"], 0),
        (["verify", str(QUICKSTART), "checkpoint.evry=3"], 2),
    ],
)
def test_verbs_without_arrays_do_not_import_jax(arguments, code):
    program = (
        "import sys, axon_dist.train.cli.main as main\n"
        "try: code = main.main(sys.argv[1:])\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'jax', 'numpy', 'flax', 'rich', 'yaml'} & set(sys.modules)\n"
        # These read the keys of a config.
        "heavy -= {'yaml'} if '=' in sys.argv[-1] else set()\n"
        "sys.exit(f'imports {heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
