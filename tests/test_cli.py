"""The command line: exit codes and messages that a script or a person can act on."""

import json
import subprocess
import sys

import pytest

from subquad import cli
from subquad.layers import PRESETS
from subquad.recipes import steps
from subquad.recipes.loader import recipe_to_yaml

from .recipes.conftest import make_recipe, teacher_dir, text_files  # noqa: F401


@pytest.fixture
def command(capsys, monkeypatch):
    """Run the command line in this process; returns (exit code, standard output, standard error)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["subquad", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return run


@pytest.fixture
def recipe_file(make_recipe, tmp_path):  # noqa: F811
    path = tmp_path / "tiny.yaml"
    path.write_text(recipe_to_yaml(make_recipe()))
    return str(path)


COMMANDS = (
    "run",
    "plan",
    "mixers",
    "convert",
    "distill",
    "eval",
    "generate",
    "report",
    "doctor",
    "pretrain",
    "study",
    "memory",
    "recipes",
)


def test_help_lists_every_command(command):
    code, out, _ = command("--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("name", [*COMMANDS[:-1], "recipes list", "recipes show", "recipes copy"])
def test_every_command_has_examples(command, name):
    code, out, _ = command(*name.split(), "--help")
    assert code == 0
    assert "Examples:" in out
    assert f"subquad {name}" in out


def test_mixers_lists_every_preset(command):
    code, out, _ = command("mixers", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert list(rows) == list(PRESETS)
    assert rows["fox"]["forms"] == ["quadratic", "KV cache"]
    assert rows["2mamba-pure"]["cache"]["64"] == {"fixed": 135_392, "per_token": 0, "crossover": 1058}
    assert "(x + c)^2" in rows["2mamba"]["formula"]
    assert "2602.17363" in rows["2mamba"]["source"]
    code, out, _ = command("mixers")
    assert code == 0
    assert all(name in out for name in PRESETS)


def test_help_does_not_import_torch():
    script = (
        "import sys; sys.argv = ['subquad', '--help']\n"
        "from subquad.cli import main\n"
        "try: main()\n"
        "except SystemExit: print('heavy' if {'torch', 'transformers'} & sys.modules.keys() else 'light')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("light\n")


def test_version(command):
    assert command("--version")[:2] == (0, "subquad 0.1.0\n")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("runn",), "No such command"),
        (("run",), "Missing argument"),
        (("run", "demo", "--frsh"), "No such option"),
        (("generate", "x", "y", "-n", "many"), "Invalid value"),
        (("convert", "demo"), "--output"),
    ],
)
def test_wrong_usage_exits_with_2(command, arguments, message):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("run", "demmo"), "no recipe is called 'demmo'; did you mean 'demo'?"),
        (("run", "absent.yaml"), "absent.yaml does not exist"),
        (("plan", "demo", "stage1.token=5"), "stage1.token: unknown key 'token'; did you mean 'tokens'?"),
        (("plan", "demo", "convert.mixer=2mmba"), "mixer '2mmba' is unknown"),
        (("plan", "demo", "model.source=absent.gguf"), "absent.gguf"),
        (("recipes", "show", "demmo"), "did you mean 'demo'?"),
        (("recipes", "show", "theory-order", "--resolved"), "did you mean 'theory-orders'?"),
        (("run", "theory-orders"), "'theory-orders' is a recipe of another command: subquad study theory-orders"),
        (("study", "demo"), "'demo' is a recipe of another command: subquad run demo"),
        (("pretrain", "absent.yaml"), "absent.yaml does not exist"),
        (("pretrain", "tiny-2mamba", "mixer=2mmba"), "mixer '2mmba' is unknown"),
        (("pretrain", "tiny-2mamba", "training.token=5"), "unknown key 'token'; did you mean 'tokens'?"),
        (("study", "theory-recall", "--arms", "sofmax"), "theory-recall has no arm 'sofmax'; arms: mamba2s, 2mamba"),
        (("study", "theory-recall", "base.training.token=5"), "every arm: training.token: unknown key 'token'"),
        (("study", "theory-recall", "seeds=[]"), "seeds"),
        (("memory", "--dtype", "int8"), "dtype must be bfloat16 or float32, got 'int8'"),
        (("memory", "--head-dim", "7"), "head_dim must be an even number above 0, got 7"),
        (("mixers", "--json", "--markdown"), "--json and --markdown are two forms of one list"),
        (("report", "absent"), "is no folder"),
        (("generate", "absent", "hello"), "'absent' does not exist"),
    ],
)
def test_wrong_input_exits_with_1_and_one_message(command, arguments, message):
    code, out, err = command(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback(command):
    code, _, err = command("--debug", "run", "demmo")
    assert code == 1
    assert "Traceback" in err
    assert "error: no recipe is called" in err


def test_errors_that_are_bugs_are_not_hidden(monkeypatch):
    def fail(kind: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("subquad.recipes.library.packaged_recipes", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["recipes", "list"])


def test_recipes_can_be_listed_shown_and_copied(command, tmp_path):
    listed = command("recipes", "list")[1]
    assert "subquad run NAME\n  demo " in listed
    assert "subquad study NAME\n  theory-components" in listed
    assert {"demo", "tiny-2mamba", "theory-recall"} <= json.loads(command("recipes", "list", "--json")[1]).keys()
    assert "smollm2-taylor" in json.loads(command("recipes", "list", "--json")[1])
    assert command("recipes", "show", "demo")[1].startswith("# ")
    assert "tokens: 777216" in command("recipes", "show", "demo", "stage1.tokens=777216")[1]
    path = tmp_path / "mine.yaml"
    assert command("recipes", "copy", "demo", str(path))[0] == 0
    code, _, err = command("recipes", "copy", "demo", str(path))
    assert code == 1
    assert "is left as it is" in err


def test_plan_prints_a_table_or_json(command, recipe_file):
    code, out, _ = command("plan", recipe_file)
    assert code == 0
    assert "2mamba" in out
    assert "Counts of the attention itself, not times" in " ".join(out.split())
    layers = json.loads(command("plan", recipe_file, "convert.layers.0=softmax", "--json")[1])["layers"]
    assert [layer["to"].split()[0] for layer in layers] == ["softmax", "2mamba"]
    for key in ("prefill_crossover", "training_crossover", "decode_crossover"):
        assert layers[0][key] is None
        assert layers[1][key] > 0


def test_run_prints_the_summary_and_the_report(command, recipe_file, tmp_path):
    code, out, err = command("run", recipe_file)
    assert code == 0
    assert out.splitlines()[-1] == f"Report: {tmp_path / 'run' / 'report.html'}"
    assert "Teacher" in out
    assert "stage1:" in err
    code, out, err = command("run", recipe_file, "--json")
    assert code == 0
    assert {"teacher", "student"} <= json.loads(out)["loss"].keys()
    assert "is finished" in " ".join(err.split())
    code, out, _ = command("report", str(tmp_path / "run"))
    assert (code, "Report:" in out) == (0, True)


def test_ctrl_c_says_how_to_continue(command, recipe_file, monkeypatch):
    def interrupt(shop):
        raise KeyboardInterrupt

    monkeypatch.setitem(steps.STEPS, "convert", interrupt)
    code, out, err = command("run", recipe_file, "seed=3", "--fresh")
    assert (code, out) == (130, "")
    assert f"to continue where it was:\n  subquad run {recipe_file} seed=3\n" in err


def test_ctrl_c_while_loading_ends_the_same_way(command, recipe_file, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("subquad.recipes.loader.load_recipe", interrupt)
    for name in ("run", "plan", "distill"):
        code, _, err = command(name, recipe_file)
        assert (code, "Traceback" in err) == (130, False)
        assert f"subquad {name} {recipe_file}" in err


def test_converted_checkpoint_can_be_used(command, recipe_file, text_files, tmp_path):  # noqa: F811
    student = str(tmp_path / "student")
    code, out, _ = command("convert", recipe_file, "-o", student)
    assert (code, out) == (0, f"Checkpoint: {student}\n")
    evaluate = ("eval", student, "--text", str(text_files["eval"]), "--tokens", "128", "--seq-len", "32")
    assert json.loads(command(*evaluate, "--json")[1])["num_tokens"] == 4 * 31
    assert "far part off" in command(*evaluate)[1]
    written = json.loads(command("generate", student, "the heron", "-n", "3", "--json")[1])
    assert written["prompt"] == "the heron"
    assert command("generate", student, "the heron", "-n", "3")[1] == "the heron" + written["text"] + "\n"


def test_distill_ends_with_the_checkpoint(command, recipe_file, tmp_path):
    code, out, _ = command("distill", recipe_file, "stage1.tokens=0")
    assert (code, out) == (0, f"Checkpoint: {tmp_path / 'run' / 'student'}\n")
    assert not (tmp_path / "run" / "results.json").exists()
