"""Recipes: what is read, what is refused, and that every refusal names its place and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpft.errors import UserError
from rpft.recipe.dump import dump_recipe
from rpft.recipe.keys import dotted, fields_in
from rpft.recipe.load import load_recipe
from rpft.recipe.schema import Recipe
from rpft.recipe.schema_text import schema_text
from rpft.recipe.sections.data import Source
from rpft.recipe.sizes import parse_bytes
from rpft.recipe.yaml_tree import MAX_ALIASED_NODES, MAX_DEPTH

MINIMAL = """\
model:
  path: m
data:
  train: [a.jsonl]
output_dir: out
"""


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe that is right, as r.yaml in the current directory."""
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(MINIMAL)
    return Path("r.yaml")


def load(file: Path, *overrides: str, more: str = "") -> Recipe:
    file.write_text(MINIMAL + more)
    return load_recipe(file, overrides)


def errors(file: Path, *overrides: str, more: str = "", text: str | bytes | None = None) -> str:
    if text is None:
        text = MINIMAL + more
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        load_recipe(file, overrides)
    return str(caught.value)


# ---- what is read


def test_a_minimal_recipe_has_the_documented_defaults(recipe_file: Path) -> None:
    recipe = load(recipe_file)
    assert recipe.data.train == (Source(path="a.jsonl"),)
    assert recipe.adapter is None
    assert (recipe.train.learning_rate, recipe.train.gradient_accumulation_steps) == (2e-5, 8)
    assert (recipe.optimizer.betas, recipe.engine.workers) == ((0.9, 0.999), None)


@pytest.mark.parametrize(("written", "value"), [("1e-4", 1e-4), ("1E-4", 1e-4), (".5", 0.5), ("3", 3.0)])
def test_a_number_is_a_number_however_it_is_written(recipe_file: Path, written: str, value: float) -> None:
    assert load(recipe_file, more=f"train:\n  learning_rate: {written}\n").train.learning_rate == value
    assert load(recipe_file, f"train.learning_rate={written}").train.learning_rate == value


def test_bom_and_crlf_change_nothing(recipe_file: Path) -> None:
    plain = load(recipe_file, more="adapter:\n  r: 8\n")
    recipe_file.write_bytes(b"\xef\xbb\xbf" + recipe_file.read_bytes().replace(b"\n", b"\r\n"))
    assert load_recipe(recipe_file) == plain


def test_an_empty_section_has_its_defaults_and_an_empty_adapter_is_absent(recipe_file: Path) -> None:
    assert load(recipe_file, more="train:\nengine:\nadapter:\n") == load(recipe_file)


def test_null_or_zero_turns_clipping_off(recipe_file: Path) -> None:
    assert load(recipe_file, more="train:\n  max_grad_norm: null\n").train.max_grad_norm is None
    assert load(recipe_file, "train.max_grad_norm=null").train.max_grad_norm is None
    assert load(recipe_file, "train.max_grad_norm=0").train.max_grad_norm == 0


def test_a_recipe_cannot_be_changed_and_can_be_hashed(recipe_file: Path) -> None:
    recipe = load(recipe_file, "adapter.target_modules=[q_proj, v_proj]")
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.seed = 1  # type: ignore[misc]
    assert hash(recipe) == hash(load(recipe_file, "adapter.target_modules=[q_proj, v_proj]"))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("adapter.r=8", "adapter.target_modules=[a, 'yes', '1e-4', '0o17', '1:30', '']"),
        ("train.learning_rate=1e-10", "train.max_grad_norm=null", "engine.vram_limit=1.5GiB"),
        ("model.path='1e-4'", "model.revision='null'", "output_dir='a: b # é\u2028😀'", "data.train.0.max_rows=3"),
        (
            "data.train.0.columns={instruction: question, output: answer}",
            "data.template_kwargs={a: {b: [1]}, c: no}",
        ),
        ("train.resume_from_checkpoint=./yes", "data.eval=[b.jsonl]", "train.eval_every=5"),
    ],
)
def test_a_dumped_recipe_loads_equal_and_shows_every_key(recipe_file: Path, overrides: tuple[str, ...]) -> None:
    recipe = load(recipe_file, *overrides)
    text = dump_recipe(recipe)
    Path("dumped.yaml").write_text(text, encoding="utf-8")
    assert load_recipe("dumped.yaml") == recipe
    for path, _ in fields_in(Recipe):
        if path[0] != "adapter" or recipe.adapter:
            assert f"{path[-1]}:" in text, dotted(path)


# ---- the schema's own text


def test_schema_text_shows_every_key_with_its_default_and_description(recipe_file: Path) -> None:
    text = schema_text()
    recipe_file.write_text(text)
    shown = load_recipe(
        recipe_file, ["adapter=null", "model.path=m", "data.train.0.path=a.jsonl", "output_dir=out"]
    )
    assert shown == load(recipe_file)
    words = " ".join(line.strip(" #") for line in text.splitlines())
    for path, field in fields_in(Recipe):
        assert f"{path[-1]}:" in text, dotted(path)
        if field.description:
            assert field.description in words, dotted(path)


def test_every_key_that_holds_a_value_is_described() -> None:
    sections = {"model", "data", "adapter", "train", "optimizer", "engine", "checkpoint", "logging"}
    undescribed = {dotted(path) for path, field in fields_in(Recipe) if not field.description}
    assert undescribed == sections


# ---- unknown, missing and wrong


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("  packng: true\n", "data.packng: unknown key; did you mean `packing`?"),
        ("learning_rate: 1\n", "learning_rate: unknown key; `learning_rate` belongs under `train:`"),
        ("train.seed: 1\n", "train.seed: unknown key; `seed` belongs under `train:`"),
        ("engine: {r: 1}\n", "engine.r: unknown key; `r` belongs under `adapter:`"),
        ("train: {output_dir: x}\n", "train.output_dir: unknown key; `output_dir` belongs at the top level"),
        (
            "optimizer: {zzzzzz: 1}\n",
            "the keys under `optimizer:` are name, state, update, weight_decay, betas, eps",
        ),
    ],
)
def test_an_unknown_key_names_its_line_and_what_was_meant(recipe_file: Path, more: str, message: str) -> None:
    text = f"model: {{path: m}}\noutput_dir: out\ndata:\n  train: [a.jsonl]\n{more}"
    assert errors(recipe_file, text=text).startswith("r.yaml:5: ")
    assert message in errors(recipe_file, text=text)


def test_an_unknown_key_of_a_list_element_names_its_own_line(recipe_file: Path) -> None:
    text = "model: {path: m}\noutput_dir: out\ndata:\n  train:\n    - a.jsonl\n    - path: b\n      fromat: text\n"
    assert errors(recipe_file, text=text) == ("r.yaml:7: data.train.1.fromat: unknown key; did you mean `format`?")


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "Yes", "'true'"])
def test_the_words_of_yaml_1_1_are_not_booleans(recipe_file: Path, word: str) -> None:
    message = errors(recipe_file, more=f"engine:\n  deterministic: {word}\n")
    assert message.startswith("r.yaml:7: engine.deterministic: expected true or false; found the text")
    assert "write " in message


def test_yes_is_not_taken_for_a_checkpoint_folder(recipe_file: Path) -> None:
    assert "write true or false" in errors(recipe_file, "train.resume_from_checkpoint=yes")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.seed=1.0", "expected a whole number >= 0"),
        ("train.seed=true", "found true"),
        ("train.learning_rate=true", "expected a number > 0; found true"),
        ("train.learning_rate='1e-4'", "write 0.0001 without quotes"),
        ("train.max_steps=1_000", "write 1000 without quotes, commas or underscores"),
        ("train.learning_rate=.nan", "expected a number > 0; found nan"),
        ("train.learning_rate=0", "expected a number > 0; found 0"),
        ("model.path=123", "expected text; not empty; found 123; put it in quotes"),
        ("model.dtype=bf16", "expected one of bfloat16, float32, float16; found the text 'bf16'"),
        ("adapter.dropout=1", "expected a number >= 0 and < 1; found 1"),
        ("optimizer.betas=[0.9]", "expected a list of two numbers >= 0 and < 1; found [0.9]"),
        ("optimizer.betas.1=x", "expected a list of two numbers"),
        ("adapter.target_modules=[a, 1]", "a list of module names; found ['a', 1]"),
        ("adapter.target_parameters=a", "expected a list of parameter names; found the text 'a'; write [a]"),
        ("adapter.modules_to_save=[1]", "expected a list of module names; found [1]"),
        ("adapter.lr_ratio_b=0", "expected a number > 0; found 0"),
        ("model.rope_scaling.type=ntk", "expected one of config, yarn, linear; found the text 'ntk'"),
        ("model.rope_scaling.factor=0.5", "expected a number >= 1; found 0.5"),
        ("model.rope_scaling=yarn", "model.rope_scaling: expected a section with type, factor"),
        ("data.template_date='2024-13-01'", "expected a date such as 2024-07-26; found '2024-13-01'"),
        ("data.template_kwargs=[1]", "expected a mapping of names to values, or null; found [1]"),
        ("data.train.0.weight=0", "expected a number > 0 and <= 1000; found 0"),
        ("data.train=a.jsonl", "write [a.jsonl]"),
        ("data.train=[]", "data.train: expected a list"),
        (
            "data.train.0=5",
            "data.train.0: expected a path or a mapping with path, format, max_rows, weight, columns, config",
        ),
        ("engine.vram_limit=24G", "write 24GiB (powers of 1024) or 24GB (powers of 1000)"),
        ("engine=5", "engine: expected a section with device"),
    ],
)
def test_a_wrong_value_says_what_is_allowed_and_what_was_found(
    recipe_file: Path, override: str, message: str
) -> None:
    found = errors(recipe_file, override)
    assert found.startswith(f"override {override}: ")
    assert "\n" not in found
    assert message in found


def test_a_missing_key_names_the_section_where_it_is_missing(recipe_file: Path) -> None:
    message = errors(recipe_file, text="# a comment\nmodel:\n  dtype: float32\noutput_dir: x\n")
    assert "r.yaml:2: model.path: missing; expected text" in message
    assert "r.yaml:2: data: missing; expected a section with train, eval" in message


def test_all_errors_of_a_recipe_are_reported_together(recipe_file: Path) -> None:
    more = (
        "train:\n  sed: 1\n  max_steps: -1\nlogging:\n  console: ${env:RPFT_NOT_SET}\n"
        "engine:\n  device: tpu\n  device: cpu\ndata.eval: 3\ncheckpoint: {keep_best: true}\n"
    )
    lines = errors(recipe_file, "train.lr=3", "output_dir=", more=more).splitlines()
    assert lines[0] == "9 errors in r.yaml:"
    places = sorted(line.split(": ")[0].strip() for line in lines[1:])
    # `device` twice: once for the second key, once for the first one's value; keep_best: no rows to evaluate.
    assert places == [
        "override train.lr=3",
        "r.yaml:1",
        "r.yaml:10",
        "r.yaml:12",
        "r.yaml:13",
        "r.yaml:14",
        "r.yaml:15",
        "r.yaml:7",
        "r.yaml:8",
    ]


# ---- keys that contradict each other


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (
            ["engine.num_microbatches=3"],
            ["engine.num_microbatches", "train.gradient_accumulation_steps", "1, 2, 4, 8"],
        ),
        (["data.eval=[b]", "data.eval_fraction=0.1"], ["data.eval", "data.eval_fraction"]),
        (["data.eval_rows=2", "data.eval_fraction=0.1"], ["data.eval_rows", "data.eval_fraction"]),
        (["train.num_epochs=null"], ["train.num_epochs", "train.max_steps"]),
        (["train.eval_every=5"], ["train.eval_every", "data.eval", "data.eval_fraction"]),
        (["checkpoint.keep_best=true", "train.eval_every=5"], ["checkpoint.keep_best", "data.eval"]),
        (["data.eval=[b]", "checkpoint.keep_best=true"], ["checkpoint.keep_best", "train.eval_every"]),
        (["train.lr_scheduler=wsd", "train.warmup_ratio=0.9"], ["train.warmup_ratio", "train.decay_ratio"]),
        (["engine.host_gradients=bfloat16", "model.dtype=float32"], ["engine.host_gradients", "model.dtype"]),
        (["adapter.dora=true", "model.quantize=nf4"], ["adapter.dora", "model.quantize"]),
        (["adapter.target_modules=[]"], ["adapter.target_modules", "adapter.target_parameters"]),
        (["adapter.target_parameters=[a.b]", "adapter.dora=true"], ["adapter.dora", "adapter.target_parameters"]),
        (["adapter.target_parameters=[a.b]", "adapter.dropout=0.1"], ["adapter.dropout", "target_parameters"]),
        (["model.rope_scaling.type=yarn"], ["model.rope_scaling.type", "factor"]),
        (["model.rope_scaling.factor=4"], ["model.rope_scaling.type", "factor"]),
        (["engine.host_gradients=bfloat16", "model.dtype=float16"], ["engine.host_gradients", "model.dtype"]),
        (
            ["engine.host_gradients=bfloat16", "engine.num_microbatches=4"],
            ["engine.host_gradients", "engine.num_microbatches", "train.gradient_accumulation_steps"],
        ),
    ],
)
def test_a_contradiction_names_both_keys(recipe_file: Path, overrides: list[str], keys: list[str]) -> None:
    message = errors(recipe_file, *overrides)
    for key in keys:
        assert key in message
    with pytest.raises(ValueError, match=keys[0]):
        Recipe.model_validate(_plain(overrides))


def _plain(overrides: list[str]) -> dict:
    from rpft.recipe.overrides import apply_override
    from rpft.recipe.yaml_tree import parse_yaml

    root, _ = parse_yaml(MINIMAL, "r.yaml")
    assert root is not None
    for override in overrides:
        assert apply_override(root, override) == []
    return root.plain()


def test_the_place_of_a_contradiction_is_a_key_that_is_written(recipe_file: Path) -> None:
    more = "train:\n  gradient_accumulation_steps: 4\nengine:\n  num_microbatches: 3\n"
    assert errors(recipe_file, more=more).startswith("r.yaml:9: ")


@pytest.mark.parametrize(
    "more", ["engine.num_microbatches=8", "engine.plan=p.json", "engine.num_microbatches=null"]
)
def test_gradients_may_be_rounded_where_a_step_can_be_one_round(recipe_file: Path, more: str) -> None:
    assert load(recipe_file, "engine.host_gradients=bfloat16", more).engine.host_gradients == "bfloat16"


# ---- overrides


def test_only_the_first_equals_sign_splits(recipe_file: Path) -> None:
    assert load(recipe_file, "output_dir=a=b").output_dir == "a=b"


def test_an_override_reaches_list_elements_and_makes_sections(recipe_file: Path) -> None:
    overrides = ("data.train.0.format=alpaca", "data.train.1.path=b", "data.train.1.max_rows=2", "data.eval.0=c")
    recipe = load(recipe_file, *overrides, "optimizer.betas.1=0.95", "adapter.r=8")
    assert recipe.data.train == (Source(path="a.jsonl", format="alpaca"), Source(path="b", max_rows=2))
    assert recipe.data.eval == (Source(path="c"),)
    assert recipe.optimizer.betas == (0.9, 0.95)
    assert recipe.adapter is not None
    assert (recipe.adapter.r, recipe.adapter.alpha) == (8, 32)


def test_null_removes(recipe_file: Path) -> None:
    more = "adapter: {r: 4}\ntrain: {seed: 7, max_steps: 3}\n"
    removed = load(recipe_file, "adapter=null", "train.seed=null", "train.max_steps=null", more=more)
    assert removed == load(recipe_file)
    assert load(recipe_file, "data.train.1=b", "data.train.0=null").data.train == (Source(path="b"),)


def test_the_last_of_two_overrides_holds(recipe_file: Path) -> None:
    assert load(recipe_file, "train.seed=1", "train.seed=2").train.seed == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lerning_rate=1", "train.lerning_rate: unknown key; did you mean `learning_rate`?"),
        ("seed=1", "seed: unknown key; `seed` belongs under `train:`"),
        ("tran.seed=1", "tran: unknown key; did you mean `train`?"),
        ("train", "an override is written key=value"),
        ("=3", "an override is written key=value"),
        ("data.train.path=x", "name an element by its index, data.train.0"),
        ("data.train.7=x", "`data.train` has 1 elements, so the next index is 1"),
        ("train.seed.x=1", "`train.seed` is a single value"),
        ("train.seed=[1", "override train.seed=[1: "),
        ("train.seed=${env:RPFT_NOT_SET}", "RPFT_NOT_SET is not set"),
        ("train..seed=1", "unknown key"),
        ("output_dir.x=1", "`output_dir` is a single value"),
    ],
)
def test_a_wrong_override_is_named(recipe_file: Path, override: str, message: str) -> None:
    found = errors(recipe_file, override)
    assert found.startswith(f"override {override}: ")
    assert "\n" not in found
    assert message in found


@pytest.mark.parametrize(
    ("more", "override", "message"),
    [
        ("train: 5\n", "train.seed=1", "`train`, given at r.yaml:6, is not a section"),
        ("train: [a]\n", "train.seed=1", "`train`, given at r.yaml:6, is not a section"),
        ("adapter: {target_modules: {a: 1}}\n", "adapter.target_modules.0=x", "is not a list"),
        ("adapter: {target_modules: a}\n", "adapter.target_modules.0=x", "is not a list"),
    ],
)
def test_an_override_below_a_value_of_the_wrong_kind_says_so(
    recipe_file: Path, more: str, override: str, message: str
) -> None:
    assert message in errors(recipe_file, override, more=more)


# ---- the environment


def test_the_environment_is_read_only_where_it_is_asked_for(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RPFT_STEPS", "30")
    monkeypatch.setenv("RPFT_EMPTY", "")
    more = (
        "train:\n  max_steps: ${env:RPFT_STEPS}\n  seed: ${env:RPFT_NOT_SET:-5}\n"
        "engine:\n  plan: '${env:RPFT_STEPS}/${env:RPFT_EMPTY:-x}.json'\n  workers: ${env:RPFT_EMPTY}\n"
    )
    recipe = load(recipe_file, "output_dir=$HOME", more=more)
    assert (recipe.train.max_steps, recipe.train.seed, recipe.engine.plan) == (30, 5, "30/x.json")
    assert recipe.engine.workers is None
    assert recipe.output_dir == "$HOME"


@pytest.mark.parametrize("value", ["${HOME}", "${oc.env:HOME}", "${env:}", "${env:A B}", "x${", "'${train.seed}'"])
def test_any_other_interpolation_is_an_error(recipe_file: Path, value: str) -> None:
    message = errors(recipe_file, more=f"engine:\n  plan: {value}\n")
    assert message.startswith("r.yaml:7: cannot read")
    assert "${env:NAME}" in message


def test_what_the_environment_holds_is_a_value_and_never_structure(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RPFT_TRICK", "{device: cpu}")
    assert "found the text '{device: cpu}'" in errors(recipe_file, more="engine: ${env:RPFT_TRICK}\n")
    monkeypatch.setenv("RPFT_TRICK", "${env:HOME}")
    assert "cannot read" in errors(recipe_file, more="engine:\n  plan: ${env:RPFT_TRICK}\n")


# ---- files that are not a recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.yaml: the recipe is empty"),
        ("# only a comment\n", "r.yaml: the recipe is empty"),
        ("- a\n", "r.yaml:1: a recipe is a mapping of sections"),
        ("text\n", "r.yaml:1: a recipe is a mapping of sections"),
        ("model:\n\tpath: m\n", "r.yaml:2: a tab in the indentation; YAML allows spaces only"),
        ("a: 1\nb: x: y\n", "r.yaml:2: mapping values are not allowed here; check the indentation"),
        ("a: 'x\nb: 1\n", "r.yaml:1: a quoted value that begins here is never closed"),
        ("a: 1\n---\nb: 1\n", "r.yaml:2: a second document begins here"),
        ("a: 1\nb: !!python/object:os.system x\n", "r.yaml:2: the tag"),
        ("a: 1\nb: \x07\n", "r.yaml:2: the character U+0007 is not allowed"),
        (b"a: 1\n# \xe9\n", "r.yaml:2: byte 0xe9 is not UTF-8"),
        (b"\xff\xfea\x00:\x00", "r.yaml:1: byte 0xff is not UTF-8"),
        ("a: &x [*x]\n", "r.yaml:1: an alias (*name) stands inside the value that it repeats"),
        ("a: " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), f"nested more than {MAX_DEPTH} levels deep"),
        ("model: ${env:HOME\n", "r.yaml:1: cannot read"),
        ("data: {train: [${env:X}]}\n", "a value with ${...} must be quoted"),
    ],
)
def test_a_file_that_is_not_a_recipe_says_where_and_why(
    recipe_file: Path, text: str | bytes, message: str
) -> None:
    assert message in errors(recipe_file, text=text)


def test_a_key_given_twice_names_both_lines(recipe_file: Path) -> None:
    message = errors(recipe_file, more="train:\n  seed: 1\n  seed: 2\n")
    assert message == "r.yaml:8: `seed` is given twice, first at r.yaml:7"


def test_merge_keys_are_refused(recipe_file: Path) -> None:
    message = errors(recipe_file, more="train: &t {seed: 1}\nengine:\n  <<: *t\n")
    assert message == "r.yaml:8: merge keys (<<) are not supported; write the keys out"


def test_an_alias_may_repeat_a_value(recipe_file: Path) -> None:
    recipe = load(recipe_file, more="adapter: {r: &n 8, alpha: *n}\n")
    assert recipe.adapter is not None
    assert recipe.adapter.alpha == 8


def test_an_alias_bomb_is_refused_before_it_expands(recipe_file: Path) -> None:
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 20)]
    text = "\n".join(["a0: &a0 [x, x]", *levels])
    assert f"repeat more than {MAX_ALIASED_NODES} values" in errors(recipe_file, text=text)


def test_a_missing_file_and_a_folder_are_explained(recipe_file: Path) -> None:
    with pytest.raises(UserError, match=r"nope.yaml: no such recipe; `rpft recipes` lists"):
        load_recipe("nope.yaml")
    with pytest.raises(UserError, match=r"`rpft recipes copy quickstart` makes the shipped recipe yours"):
        load_recipe("quickstart")
    with pytest.raises(UserError, match="that is a folder; a recipe is a YAML file"):
        load_recipe(".")


# ---- sizes


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("24GiB", 24 * 2**30), ("24 gb", 24 * 10**9), ("1.5TiB", 3 * 2**39), ("7", 7), (7, 7), (24e9, 24 * 10**9)],
)
def test_sizes_are_exact(size: str | float, num_bytes: int) -> None:
    assert parse_bytes(size) == num_bytes


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("24G", "write 24GiB .* or 24GB"),
        ("24Gi", "write 24GiB .* or 24GB"),
        ("24 XB", "units are B, KB"),
        ("", "expected a size"),
        ("-1GiB", "expected a size"),
        ("1e9", "expected a size"),
        (0, "at least one byte"),
        (-5, "at least one byte"),
        (1.5, "must be whole"),
        (float("inf"), "must be whole"),
        (True, "expected a size"),
    ],
)
def test_what_is_not_a_size_is_refused(size: str | float, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_bytes(size)
