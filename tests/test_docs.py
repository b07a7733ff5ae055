"""The documentation is true: commands parse, recipes load, links lead somewhere, messages and keys exist."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from support.docs import PAGES, ROOT, Command, anchor, blocks, commands, headings, links
from support.models import tiny_checkpoint
from support.recipes import run_rpft, tiny_tokenizer

from rpft.cli import app
from rpft.recipe.importing.run import PROGRAMS
from rpft.recipe.keys import field_at
from rpft.recipe.load import load_recipe
from rpft.recipe.overrides import apply_override
from rpft.recipe.yaml_tree import Located

COMMANDS = sorted({str(command): command for page in PAGES for command in commands(page)}.items())
DOCS = ROOT / "docs"


def of_program(*programs: str) -> list[pytest.param]:  # type: ignore[valid-type]
    chosen = [command for _, command in COMMANDS if command.words[0] in programs]
    return [pytest.param(command, id=str(command)) for command in chosen]


@cache
def program_that_does_nothing() -> Any:
    """The program's own parser; what it would call is nothing."""

    def silence(command: Any) -> None:
        command.callback = lambda **_: None
        for inner in getattr(command, "commands", {}).values():
            silence(inner)

    program = typer.main.get_command(app)
    silence(program)
    return program


def parse(words: list[str]) -> None:
    """Fails as the program would; a mention of a verb alone need have no arguments."""
    program = program_that_does_nothing()
    if words and words[-1] in getattr(verb(program, words[:-1]), "commands", {}):
        return
    program.main(words, standalone_mode=False)


def verb(command: Any, words: list[str]) -> Any:
    for word in words:
        command = getattr(command, "commands", {}).get(word)
    return command


@pytest.mark.parametrize("command", of_program("rpft"))
def test_an_rpft_command_parses_and_its_overrides_are_keys(command: Command) -> None:
    words = command.words[1:]
    words = list(itertools.takewhile(lambda word: word not in ("<", ">"), words))
    if words != ["--debug"]:
        parse(words)
    for word in words:
        if re.match(r"[a-z_]+(\.[a-z_0-9]+)*=", word):
            key = word.partition("=")[0]
            assert apply_override(Located({}, "here"), f"{key}=") == [], word


@pytest.mark.parametrize(
    "words",
    [["plan", "a.yaml", "--machin", "x"], ["recipes", "importt", "a"], ["recipes", "show", "a", "b"], ["nope"]],
)
def test_a_command_that_does_not_parse_would_be_found(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|unexpected extra"):
        parse(words)


@pytest.mark.parametrize("command", of_program("python"))
def test_a_python_command_names_a_file_that_has_its_options(command: Command) -> None:
    script, *arguments = command.words[1:]
    if script in ("-c", "-m"):
        return
    source = (ROOT / script).read_text(encoding="utf-8")
    imported = re.findall(r"^from (\w+) import", source, re.MULTILINE)  # which may add options to its own
    beside = [path for name in imported if (path := (ROOT / script).parent / f"{name}.py").exists()]
    known = source + "".join(path.read_text(encoding="utf-8") for path in beside)
    for word in arguments:
        if word.startswith("--"):
            assert f'"{word}"' in known, word


@pytest.mark.parametrize("command", of_program("pytest"))
def test_a_pytest_command_names_files_that_are_there(command: Command) -> None:
    for word in command.words[1:]:
        assert "/" not in word or (ROOT / word).exists(), word


@pytest.mark.parametrize("command", of_program("make"))
def test_a_make_command_names_a_target(command: Command) -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for word in command.words[1:]:
        assert "=" in word or word in targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_pages_and_headings_that_are_there(page: Path) -> None:
    for link in links(page):
        if link.startswith(("https://", "mailto:")):
            continue
        target, _, fragment = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), link
        if fragment:
            assert fragment in [anchor(text) for _, text in headings(path)], link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipes_load(page: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    for block in blocks(page):
        if block.language == "yaml":
            whole = {"model": {"path": "m"}, "data": {"train": ["rows"]}, "output_dir": "out"}
            written = yaml.safe_load(block.text)
            missing = {name: value for name, value in whole.items() if name not in written}
            path.write_text(block.text + (yaml.safe_dump(missing) if missing else ""), encoding="utf-8")
            load_recipe(path)


def test_every_page_of_docs_is_in_the_navigation() -> None:
    class Loader(yaml.SafeLoader):
        """mkdocs.yml may name Python objects."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=Loader)
    listed = {page for entry in settings["nav"] for page in pages_of(entry)}
    assert listed == {page.name for page in DOCS.glob("*.md")}


def test_ci_builds_the_pages_strictly_with_pinned_packages() -> None:
    assert "step make docs" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "mkdocs build --strict" in (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = re.search(r"^docs = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert extras is not None
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r'"([\w-]+)', extras[1])) <= set(pinned)


def pages_of(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for value in entry.values():
            yield from pages_of(value)
    else:
        assert isinstance(entry, list)
        for value in entry:
            yield from pages_of(value)


@cache
def texts_of_the_code() -> list[str]:
    """Every text in the program's code, with … for what is put in; parts side by side are one text."""
    found = []
    for path in sorted((ROOT / "rpft").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def quoted_messages() -> list[str]:
    return [text.strip("`") for level, text in headings(DOCS / "trouble.md") if text.startswith("`")]


@pytest.mark.parametrize("message", quoted_messages())
def test_a_message_in_trouble_md_is_one_of_the_code(message: str) -> None:
    parts = [part for part in message.split("…") if part]
    assert len(max(parts, key=len)) > 8, "too little to be found by"
    assert any(holds(text, parts) for text in texts_of_the_code()), message


def holds(text: str, parts: list[str]) -> bool:
    """Whether the parts stand in ``text``, one after the other."""
    position = 0
    for part in parts:
        position = text.find(part, position)
        if position < 0:
            return False
        position += len(part)
    return True


def test_the_keys_in_coming_from_md_are_keys() -> None:
    tables = re.split(r"^## ", (DOCS / "coming-from.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    rows = [line.split("|")[1:3] for table in tables for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 60
    for _, ours in rows:
        for key in re.findall(r"`([a-z_.0-9]+)[`:]", ours):
            if "." in key or key in ("adapter", "output_dir"):
                path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
                assert field_at(path) is not None, key


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_keys_of_other_programs_in_coming_from_md_are_those_that_are_imported(program) -> None:
    text = (DOCS / "coming-from.md").read_text(encoding="utf-8")
    section = text.split(f"## {program.name}, key by key")[1].split("\n## ")[0]
    for theirs in re.findall(r"^\| (`.+?) \|", section, re.MULTILINE):
        if theirs.startswith("`datasets` entry"):
            continue
        for key in re.findall(r"`(\w+)", theirs):
            known = key in program.rules or any(fnmatch(key, pattern) for pattern, _ in program.patterns)
            assert known, key


def test_the_first_page_leads_to_a_model_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files and commands, in its order, on a model of its kind that is tiny."""
    monkeypatch.chdir(tmp_path)
    page = blocks(DOCS / "index.md")
    model = Path("models/SmolLM2-135M-Instruct")
    tiny_checkpoint(model, "llama", max_position_embeddings=2048)
    tiny_tokenizer().save_pretrained(model)
    for block in page:
        if block.name is not None:
            Path(block.name).write_text(block.text, encoding="utf-8")
    ran = []
    for block in page:
        for line in block.text.splitlines() if block.language == "sh" else []:
            words = Command("docs/index.md", line).words
            if words[0] == "rpft":
                ran.append(words[1])
                if words[2] == "mine.yaml":
                    words += ["engine.device=cpu", "engine.cpu_threads=1", "train.max_steps=2"]
                done = run_rpft(*words[1:])
                assert done.code == 0, done.err
    assert ran == ["data", "plan", "train", "generate", "export"]
    assert done.out.strip()
