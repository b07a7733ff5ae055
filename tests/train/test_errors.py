"""What a person may do wrong, with every command: exit code 2, what, where and the way out, and no traceback."""

import json
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from support.recipes import run_rpft

RECIPE_VERBS = ("train", "plan", "profile", "bench", "data")
RUN_VERBS = ("report", "compare", "export", "generate")


@pytest.fixture(scope="module")
def made(project):
    """A project that has run once; its files are copied before anything is done to them."""
    made = project("errors", "qwen3", sections={"checkpoint": {"every_steps": 1}, "train": {"max_steps": 2}})
    made.train_well("done")
    return made


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    """A fresh folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_said(ran, *parts):
    """One error, in words, that says ``parts``; texts of other programs and tracebacks are none of it."""
    assert ran.code == 2, ran
    said = ran.err[ran.err.index("error: ") :]
    for part in parts:
        assert part in said, said
    assert not re.search(r"Traceback|fault:|\[Errno|<class|object at 0x", ran.err), said
    return said


def command(verb, *words):
    """The words of ``verb`` with what it needs to be complete."""
    return [verb, *map(str, words), *{"generate": ["hello"], "compare": ["another"]}.get(verb, [])]


def written(recipe):
    return recipe.read_text(encoding="utf-8")


BAD_RECIPES = {
    "not there": (None, ["no such recipe", "rpft recipes"]),
    "empty": (b"", ["recipe.yaml: the recipe is empty", "rpft recipes show-schema"]),
    "tabs": (b"model:\n\tpath: m\n", ["recipe.yaml:2: a tab", "spaces"]),
    "not UTF-8": (
        b"model:\n  path: \xff\xfe\n",
        ["recipe.yaml:2: byte 0xff is not UTF-8", "save the recipe as UTF-8"],
    ),
    "UTF-16": ("model: {path: m}".encode("utf-16"), ["recipe.yaml:1:", "is not UTF-8"]),
    "binary": (b"\x00\x01\x02", ["recipe.yaml:1: the character U+0000"]),
    "a list": (b"- a\n- b\n", ["recipe.yaml:1: a recipe is a mapping"]),
    "cut short": (b"model: {path: a\n", ["recipe.yaml:2: expected ',' or '}'"]),
    "given twice": (b"model: {path: a}\nmodel: {path: b}\n", ["recipe.yaml:2: `model` is given twice"]),
    "of another version": (
        b"version: 3\nmodel: {path: a}\ndata: {train: [b]}\noutput_dir: c\n",
        ["recipe.yaml:1: version: unknown key", "the keys at the top level are"],
    ),
    "a wrong key": (
        b"model: {path: a}\ndata: {train: [b]}\ntrain: {max_step: 4}\noutput_dir: c\n",
        ["recipe.yaml:3: train.max_step: unknown key", "did you mean `max_steps`?"],
    ),
    "a wrong type": (
        b"model: {path: a}\ndata: {train: [b]}\ntrain: {max_steps: many}\noutput_dir: c\n",
        ["recipe.yaml:3: train.max_steps: expected a whole number", "found the text 'many'"],
    ),
}


@pytest.mark.parametrize("name", BAD_RECIPES)
@pytest.mark.parametrize("verb", RECIPE_VERBS)
def test_a_recipe_that_cannot_be_read_is_named_with_its_line(verb, name, here):
    content, parts = BAD_RECIPES[name]
    if content is not None:
        Path("recipe.yaml").write_bytes(content)
    check_said(run_rpft(verb, "recipe.yaml"), *parts)


@pytest.mark.parametrize("verb", RECIPE_VERBS)
def test_a_folder_in_the_place_of_a_recipe_is_said_to_be_one(verb, made, here):
    Path("folder").mkdir()
    check_said(run_rpft(verb, "folder"), "folder: that is a folder; a recipe is a YAML file")
    run = made.folder / "done"
    check_said(run_rpft(verb, str(run)), f"{run / 'recipe.yaml'} is the recipe of the run there")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("train.max_steps", ["an override is written key=value"]),
        ("train.max_step=3", ["train.max_step: unknown key", "did you mean `max_steps`?"]),
        ("train.max_steps=x", ["expected a whole number", "found the text 'x'"]),
        ("train.max_steps=[1", ["override train.max_steps=[1: expected ',' or ']'"]),
        ("data.train.7.path=x", ["has 1 elements, so the next index is 1"]),
        ("model.path=${env:NO_SUCH_NAME}", ["NO_SUCH_NAME is not set", "${env:NO_SUCH_NAME:-default}"]),
    ],
)
@pytest.mark.parametrize("verb", RECIPE_VERBS)
def test_a_change_that_cannot_be_made_is_quoted(verb, change, parts, made):
    check_said(run_rpft(verb, str(made.recipe), change), *parts)


def spoil_model(folder, file, content):
    def spoil(made):
        shutil.copytree(made.folder / "base", folder)
        Path(folder, file).write_bytes(content)
        return f"model.path={folder}"

    return spoil


def rows(content):
    def write(made):
        Path("rows.jsonl").write_bytes(content)
        return "data.train=[rows.jsonl]"

    return write


def folder(key):
    def make(made):
        Path("folder").mkdir()
        return f"{key}=folder"

    return make


BAD_CONTENT = {
    "a model that is nowhere": (lambda made: "model.path=./no", ["model.path './no': no such folder"], ()),
    "a model that is a file": (
        lambda made: f"model.path={made.recipe}",
        ["that is a file; the folder that it is in may be the checkpoint"],
        (),
    ),
    "a model folder without a model": (folder("model.path"), ["model.path", "folder"], ()),
    "a torn config": (spoil_model("m", "config.json", b"{nope"), ["m/config.json", "not a valid JSON"], ()),
    "torn weights": (
        spoil_model("m", "model.safetensors", b"abc"),
        ["m/model.safetensors: not a whole safetensors file", "again"],
        ("data",),
    ),
    "a torn tokenizer": (spoil_model("m", "tokenizer.json", b"{nope"), ["model.path m", "tokenizer"], ()),
    "a template that is no template": (
        spoil_model("m", "chat_template.jinja", b"{% for m in messages %}{{ m }}{% endfor"),
        ["The chat template (of the tokenizer in model.path) is not valid jinja, line 1", "data.chat_template"],
        (),
    ),
    "a template that asks too much": (
        spoil_model("m", "chat_template.jinja", b"{{ messages[0].no.such }}"),
        ["train.jsonl:1", "the chat template refused this row"],
        (),
    ),
    "a template that is a folder": (
        folder("data.chat_template"),
        ["data.chat_template folder: cannot be read"],
        (),
    ),
    "rows that are nowhere": (
        lambda made: "data.train=[no.jsonl]",
        ["no.jsonl does not exist", "correct the path"],
        (),
    ),
    "a folder without rows": (folder("data.train.0.path"), ["folder is a folder without a file", ".jsonl"], ()),
    "no rows": (rows(b""), ["rows.jsonl holds no rows"], ()),
    "rows not UTF-8": (rows(b'{"text": "a"}\n{"text": "\xff"}\n'), ["rows.jsonl:2: byte 0xff", "UTF-8"], ()),
    "rows that are no JSON": (rows(b'{"text": "a"}\n{"text": }\n'), ["rows.jsonl:2: not JSON"], ()),
    "rows of no format": (rows(b'{"foo": 1}\n'), ["rows.jsonl:1: no format is known", "`columns`"], ()),
    "rows that are all too long": (
        lambda made: "data.max_seq_len=8",
        ["No row with a token to train on is left", "raise data.max_seq_len"],
        (),
    ),
    "a token cache that is a file": (
        lambda made: f"data.token_cache={made.recipe}",
        ["data.token_cache", "nothing can be kept there", "off"],
        (),
    ),
    "no GPU": (lambda made: "engine.device=cuda", ["engine.device is cuda", "engine.device=cpu"], ("data",)),
    "a plan that is a recipe": (
        lambda made: f"engine.plan={made.recipe}",
        ["not a plan file", "rpft plan"],
        ("data",),
    ),
    "a plan that is a folder": (folder("engine.plan"), ["folder: cannot be read as a plan file"], ("data",)),
}


LOOKED_AT = [
    (v, name) for name, (_, _, fine) in BAD_CONTENT.items() for v in ("train", "plan", "data") if v not in fine
]


@pytest.mark.parametrize(("verb", "name"), LOOKED_AT)
def test_what_a_recipe_names_and_cannot_be_used_is_named(verb, name, made, here, monkeypatch):
    monkeypatch.setattr("rpft.engine.device.cuda_available", lambda: False)
    change, parts, _ = BAD_CONTENT[name]
    check_said(run_rpft(verb, str(made.recipe), "output_dir=new", change(made)), *parts)
    assert not Path("new").exists()


@pytest.mark.parametrize("verb", ["train", "plan", "data"])
def test_a_model_that_the_hub_does_not_give_is_said_to_be_one_at_once(verb, made, here, monkeypatch):
    def refuse(*_, **__):
        raise LocalEntryNotFoundError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    ran = run_rpft(verb, str(made.recipe), "output_dir=new", "model.path=nobody/nothing")
    check_said(
        ran, "'nobody/nothing'", "the hub did not give it", "Name or service", "Check the name, the network"
    )


@pytest.mark.parametrize(
    ("place", "dry"),
    [("{file}", []), ("{file}/inside", []), ("/proc/nothing/here", []), ("{file}/inside", ["--dry-run"])],
)
def test_an_output_dir_that_can_be_no_folder_is_refused(place, dry, made, here):
    path = place.format(file=made.recipe)
    check_said(run_rpft("train", str(made.recipe), f"output_dir={path}", *dry), f"output_dir {path}")


LINKS = ("checkpoints", "metrics.jsonl", "layer_norms.jsonl", "run.log", "model", "not_finite")


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("words", [[], ["--resume"], ["--dry-run"]], ids=str)
def test_a_link_that_leads_out_of_output_dir_is_refused_and_not_followed(name, words, made, here):
    for folder in ("outside", "run"):
        Path(folder).mkdir()
    Path("run", name).symlink_to(Path("outside", name).absolute())
    ran = run_rpft("train", str(made.recipe), "output_dir=run", *words)
    check_said(ran, f"output_dir run: {name} in it is a link to", "remove it")
    assert not list(Path("outside").iterdir())
    assert [path.name for path in Path("run").iterdir()] == [name]


def test_output_dir_may_be_a_link_and_so_may_what_stays_inside(made, here):
    Path("elsewhere").mkdir()
    Path("run").symlink_to("elsewhere")
    Path("elsewhere", "last").symlink_to("checkpoints")
    assert run_rpft("train", str(made.recipe), "output_dir=run", "--dry-run").code == 0


@pytest.mark.parametrize("verb", RUN_VERBS)
def test_what_is_no_run_is_refused_by_the_commands_that_read_one(verb, made, here):
    Path("folder").mkdir()
    check_said(run_rpft(*command(verb, "nowhere")), "nowhere: no such folder")
    check_said(run_rpft(*command(verb, made.recipe)), "that is a file")
    check_said(run_rpft(*command(verb, "folder")), "folder: n", "recipe.yaml")


@pytest.mark.parametrize("verb", RUN_VERBS)
def test_a_run_of_another_rpft_is_said_to_be_one(verb, made, here):
    shutil.copytree(made.folder / "done", "old")
    recipe, about = Path("old/recipe.yaml"), Path("old/about.json")
    recipe.write_text(written(recipe).replace("max_steps:", "most_steps:"))
    told = json.loads(about.read_text())
    about.write_text(json.dumps({**told, "versions": {**told["versions"], "rpft": "0.0.1"}}))
    words = command(verb, "old") if verb != "compare" else ["compare", "old", str(made.folder / "done")]
    said = check_said(run_rpft(*words), "recipe.yaml:", "train.most_steps: unknown key")
    assert "The run was made by rpft 0.0.1" in said


DAMAGE = {
    "metrics.jsonl": ('{"step": 1, "loss": 1.0}\n', "metrics.jsonl: step 1: "),
    "about.json": ('{"a": 1}', "about.json: begun, machine"),
    "plan.json": ("{", "plan.json: not JSON"),
    "samples.json": ('{"samples": [{"a": 1}]}', "samples.json: not as a run leaves it"),
    "traces/step-1.idle.json": ('{"steps": [{}]}', "step-1.idle.json: step, workers missing"),
}


@pytest.mark.parametrize("verb", ["report", "compare"])
@pytest.mark.parametrize("file", DAMAGE)
def test_a_file_of_a_run_that_is_damaged_is_named(file, verb, made, here):
    shutil.copytree(made.folder / "done", "damaged")
    content, said = DAMAGE[file]
    path = Path("damaged", file)
    path.parent.mkdir(exist_ok=True)
    Path("damaged/traces").mkdir(exist_ok=True)
    Path("damaged/traces/step-1.svg").write_text("<svg/>")
    path.write_text(content)
    words = ["report", "damaged"] if verb == "report" else ["compare", "damaged", str(made.folder / "done")]
    check_said(run_rpft(*words), said, "move it away")


def test_layer_norms_that_are_damaged_are_left_out_of_the_page(made, here):
    shutil.copytree(made.folder / "done", "damaged")
    Path("damaged/layer_norms.jsonl").write_text('{"step": 1}\n{"step": 2, "norms": 3}\n[1]\n')
    done = str(made.folder / "done")
    assert run_rpft("report", "damaged").code == 0
    assert run_rpft("compare", "damaged", done, "--html", "both.html").code == 0


BAD_OPTIONS = {
    "plan --out": (["plan", "RECIPE", "--out", "folder"], ["--out folder: that is a folder"]),
    "plan --html": (
        ["plan", "RECIPE", "--html", "no/x.html"],
        ["--html no/x.html: there is no folder no; make it"],
    ),
    "plan --machine": (["plan", "RECIPE", "--machine", "9x9999"], ["no machine is called '9x9999'", "8x4090"]),
    "plan --machine, a recipe": (["plan", "RECIPE", "--machine", "RECIPE"], ["not a machine", "docs/planning.md"]),
    "profile --out": (["profile", "RECIPE", "--out", "folder"], ["--out folder: that is a folder"]),
    "bench": (["bench"], ["give a recipe", "--simulate"]),
    "bench --workers": (["bench", "RECIPE", "--workers", "x"], ["--workers x", "--workers 1,2"]),
    "bench --simulate": (["bench", "--simulate", "no"], ["--simulate no", "8x4090"]),
    "bench --model": (
        ["bench", "--simulate", "8x4090", "--model", "no"],
        ["no model shape is called 'no'", "qwen3"],
    ),
    "bench --json": (["bench", "RECIPE", "--json", "no/x.json"], ["--json no/x.json: there is no folder no"]),
    "bench --chart": (["bench", "RECIPE", "--chart", "x.png"], ["--chart x.png", "ends in .svg"]),
    "data --row": (["data", "RECIPE", "--row", "999"], ["has 24 rows; the last one is row 23"]),
    "data --html": (["data", "RECIPE", "--html", "folder"], ["--html folder"]),
    "report --html": (["report", "RUN", "--html", "/proc/x.html"], ["--html /proc/x.html: cannot be written"]),
    "report --base": (["report", "RUN", "--samples", "--base", "no"], ["base model of", "--base"]),
    "compare of one": (["compare", "RUN"], ["give 2 to 8"]),
    "compare --html": (["compare", "RUN", "RUN", "--html", "folder"], ["--html folder"]),
    "export --out": (["export", "RUN", "--out", "RECIPE"], ["not an empty folder; give another"]),
    "export --out /proc": (["export", "RUN", "--out", "/proc/x"], ["nothing can be written there"]),
    "export --max-shard-size": (["export", "RUN", "--max-shard-size", "big"], ["--max-shard-size", "24GiB"]),
    "export --adapter-only": (["export", "RUN", "--adapter-only"], ["has no adapter; leave it out"]),
    "export --checkpoint": (
        ["export", "RUN", "--checkpoint", "step-9"],
        ["there are: step-00000001, step-00000002"],
    ),
    "generate --checkpoint": (
        ["generate", "RUN", "hi", "--checkpoint", "no"],
        ["--checkpoint no", "there are: step-"],
    ),
    "generate, long": (["generate", "RUN", "hi " * 200], ["128 positions", "shorten the prompt"]),
    "recipes show": (["recipes", "show", "no"], ["no shipped recipe is called 'no'", "quickstart"]),
    "recipes copy": (["recipes", "copy", "no"], ["no shipped recipe is called 'no'"]),
    "recipes import": (["recipes", "import", "no.yml"], ["no.yml"]),
    "recipes import, a recipe": (["recipes", "import", "RECIPE"], ["it looks like a recipe of rpft"]),
    "train --resume": (
        ["train", "RECIPE", "output_dir=new", "--resume"],
        ["no whole checkpoint in", "leave out --resume"],
    ),
    "train --resume PATH": (
        ["train", "RECIPE", "output_dir=new", "train.resume_from_checkpoint=nowhere"],
        ["nowhere: no such checkpoint"],
    ),
    "train again": (["train", "RECIPE", "output_dir=RUN"], ["already holds a run", "--resume"]),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_an_option_that_cannot_be_followed_is_named_with_the_way_out(name, made, here):
    Path("folder").mkdir()
    words, parts = BAD_OPTIONS[name]
    places = {"RECIPE": str(made.recipe), "RUN": str(made.folder / "done")}
    words = [re.sub("RECIPE|RUN", lambda found: places[found[0]], word) for word in words]
    check_said(run_rpft(*words), *parts)


@pytest.mark.parametrize(
    "words", [["trian"], ["train"], ["train", "r.yaml", "--nope"], ["export", "x", "--dtype", "int3"]]
)
def test_a_line_that_does_not_parse_says_how_it_is_used(words):
    ran = run_rpft(*words)
    assert ran.code == 2
    assert "Usage: rpft" in ran.err
    assert "--help" in ran.err
    assert "Traceback" not in ran.err


INTERRUPTED = {
    "train RECIPE": "rpft.recipe.load.load_recipe",
    "plan RECIPE": "rpft.train.prepare.set_up",
    "profile RECIPE": "rpft.train.prepare.set_up",
    "bench RECIPE": "rpft.recipe.load.load_recipe",
    "data RECIPE": "rpft.train.rows.load_tokenizer",
    "report RUN": "rpft.train.run_report.report_run",
    "compare RUN RUN": "rpft.train.run_compare.read_runs",
    "export RUN": "rpft.train.run_folder.open_run",
    "generate RUN hello": "rpft.train.generate.Speaker",
    "doctor": "rpft.train.doctor.examine",
    "recipes import RECIPE": "rpft.recipe.importing.run.import_recipe",
}


@pytest.mark.parametrize("line", INTERRUPTED)
def test_ctrl_c_ends_any_command_with_130_and_a_fault_is_told_in_short_unless_debug(line, made, here, monkeypatch):
    places = {"RECIPE": str(made.recipe), "RUN": str(made.folder / "done")}
    words = [places.get(word, word) for word in line.split()]

    def ends_in(error):
        def end(*_, **__):
            raise error

        monkeypatch.setattr(INTERRUPTED[line], end)

    ends_in(KeyboardInterrupt())
    ran = run_rpft(*words)
    assert (ran.code, ran.err.strip().splitlines()[-1]) == (130, "interrupted")
    ends_in(ZeroDivisionError("no such thing"))
    ran = run_rpft(*words)
    assert ran.code == 1
    assert "fault: ZeroDivisionError: no such thing" in ran.err
    assert "Traceback" not in ran.err
    assert f"rpft --debug {words[0]}" in ran.err
    assert "Traceback" in run_rpft("--debug", *words).err
