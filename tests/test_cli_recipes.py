"""The command line: exit codes, what failures print, `rpft recipes`, and a start without torch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import rpft.cli
from rpft import __version__
from rpft.cli import main
from rpft.errors import UserError
from rpft.recipe.shipped import read_shipped, shipped_names

ROOT = Path(__file__).parents[1]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command line."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


@pytest.fixture
def failing_verb(monkeypatch: pytest.MonkeyPatch):
    """Make `rpft recipes show` raise what the test hands in."""

    def fail_with(error: BaseException) -> None:
        def raise_error(name: str) -> str:
            raise error

        monkeypatch.setattr("rpft.cli.recipes.read_shipped", raise_error)

    return fail_with


def test_help_and_the_list_of_recipes_import_nothing_heavy() -> None:
    # typer itself loads pydantic to convert arguments, so the schema stands for our own use of it.
    heavy = ["torch", "transformers", "numpy", "yaml", "rpft.recipe.schema"]
    code = (
        "import sys, rpft.cli\n"
        "try: rpft.cli.main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code, end\n"
        f"print('LOADED', *(name for name in {heavy} if name in sys.modules))"
    )
    for arguments in (["--help"], ["recipes"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert "recipes" in done.stdout or "quickstart" in done.stdout
        assert done.stdout.splitlines()[-1] == "LOADED"


def test_python_dash_m_is_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rpft", "recipes", "show", "quikstart"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: no shipped recipe is called 'quikstart'; did you mean `quickstart`?\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"rpft {__version__}\n", "")


def test_a_usage_error_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "recipes", "--nope")[0] == 2
    assert run(capsys, "nope")[0] == 2


def test_an_error_of_the_user_is_one_line_without_traceback(capsys, failing_verb) -> None:
    failing_verb(UserError("r.yaml:3: train.seed: expected a whole number"))
    code, out, err = run(capsys, "recipes", "show", "x")
    assert (code, out, err) == (2, "", "error: r.yaml:3: train.seed: expected a whole number\n")
    code, _, err = run(capsys, "--debug", "recipes", "show", "x")
    assert code == 2
    assert "Traceback" in err


def test_a_fault_is_reported_in_short_and_says_how_to_see_the_traceback(capsys, failing_verb) -> None:
    failing_verb(RuntimeError("stage 3 fell over"))
    code, _, err = run(capsys, "recipes", "show", "a b")
    assert code == 1
    assert "fault: RuntimeError: stage 3 fell over" in err
    assert "rpft --debug recipes show 'a b'" in err
    assert "Traceback" not in err
    code, _, err = run(capsys, "--debug", "recipes", "show", "x")
    assert code == 1
    assert "Traceback" in err
    assert "for the traceback" not in err


def test_an_interrupt_exits_130(capsys, failing_verb) -> None:
    failing_verb(KeyboardInterrupt())
    assert run(capsys, "recipes", "show", "x")[0] == 130


def test_recipes_lists_every_recipe_with_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "recipes")
    assert code == 0
    for name in shipped_names():
        assert f"{name} " in out
    assert "no GPU" in out


def test_show_prints_the_file_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "recipes", "show", "quickstart") == (0, read_shipped("quickstart"), "")


def test_copy_writes_once_and_then_refuses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "recipes", "copy", "quickstart")[0] == 0
    assert Path("quickstart.yaml").read_text().startswith("# rpft train quickstart.yaml\n")
    code, _, err = run(capsys, "recipes", "copy", "quickstart")
    assert code == 2
    assert "already there" in err


def test_show_schema_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    from rpft.recipe.schema_text import schema_text

    assert run(capsys, "recipes", "show-schema") == (0, schema_text(), "")


@pytest.mark.skipif(not importlib.util.find_spec("rpft.cli.train"), reason="the verb is not there yet")
def test_train_takes_overrides_and_options_in_any_order(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "train", "missing.yaml", "train.seed=1", "output_dir=x", "--resume", "--dry-run")
    assert code == 2
    assert "missing.yaml: no such recipe" in err


def test_the_console_script_is_main() -> None:
    assert rpft.cli.main is main
    assert 'rpft = "rpft.cli:main"' in (ROOT / "pyproject.toml").read_text()
