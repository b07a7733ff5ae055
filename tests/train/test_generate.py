"""`rpft generate` says what plain transformers says of the same weights, wherever they are, and stops in time."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.quantised import as_dequantised, write_quantised
from support.recipes import Project, Ran, chats, run_rpft, tiny_tokenizer
from transformers import AutoModelForCausalLM

from rpft import files
from rpft.errors import UserError
from rpft.train.generate import Speaker

ASKED = "one two three"
SAVING = {"checkpoint": {"every_steps": 2}, "train": {"learning_rate": 3e-4}}
ADAPTER = {"adapter": {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "lm_head"]}}


@pytest.fixture(scope="module")
def full(project: Any) -> Project:
    made = project("generate full", "llama_tied", sections=SAVING)
    made.train_well("out")
    return made


@pytest.fixture(scope="module")
def lora(project: Any) -> Project:
    made = project("generate lora", "llama", sections={**SAVING, **ADAPTER, "train": {"learning_rate": 2e-3}})
    made.train_well("out")
    return made


def expected(folder: Path, adapter: Path | None = None, system: str | None = None, count: int = 12) -> str:
    """The greedy answer of plain transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    tokenizer = tiny_tokenizer()
    messages = [{"role": "user", "content": ASKED}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: Any = tokenizer(text, return_tensors="pt").input_ids
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    out = model.eval().generate(
        input_ids=ids, max_new_tokens=count, do_sample=False, eos_token_id=ends, pad_token_id=0
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def ask(folder: Path, *words: str, prompt: str = ASKED) -> Ran:
    return run_rpft("generate", str(folder), prompt, "--max-new-tokens", "12", *words)


def answer(folder: Path, *words: str) -> dict[str, Any]:
    ran = ask(folder, "--json", *words)
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def without_result(run: Path, target: Path) -> Path:
    """A copy of a run that did not finish."""
    shutil.copytree(run, target)
    for name in ("model", "adapter"):
        shutil.rmtree(target / name, ignore_errors=True)
    return target


def test_a_full_run_answers_from_its_result_and_from_a_checkpoint(full: Project, tmp_path: Path) -> None:
    run = full.folder / "out"
    said = expected(run / "model")
    assert "" != said != expected(full.folder / "base")
    found = answer(run)
    assert (found["text"], found["prompt"]) == (said, ASKED)
    assert found["model"] == f"the finished result of {run}"
    assert (found["tokens"], found["ended"]) == (12, False)
    unfinished = without_result(run, tmp_path / "run")
    found = answer(unfinished)
    assert found["text"] == said
    assert found["model"] == f"the checkpoint of step 4 of {unfinished}"


def test_an_adapter_answers_beside_its_base_from_result_checkpoint_and_folder(
    lora: Project, tmp_path: Path
) -> None:
    run, base = lora.folder / "out", lora.folder / "base"
    said = expected(base, run / "adapter")
    assert "" != said != expected(base)
    assert answer(run)["text"] == said
    assert answer(without_result(run, tmp_path / "run"))["text"] == said
    assert answer(run / "adapter")["text"] == said
    assert answer(run, "--checkpoint", "step-00000002")["model"].startswith("the checkpoint of step 2")


def test_a_plain_model_folder_answers_too(full: Project) -> None:
    assert answer(full.folder / "base")["text"] == expected(full.folder / "base")


def test_text_goes_to_the_output_and_figures_beside_it(full: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(ASKED))
    ran = ask(full.folder / "out", "--system", "Be brief.", prompt="-")
    assert ran.code == 0, ran.err
    assert ran.out == expected(full.folder / "out" / "model", system="Be brief.") + "\n"
    assert "12 tokens in" in ran.err
    assert "cut at --max-new-tokens 12" in ran.err


def test_text_is_written_as_it_comes(full: Project) -> None:
    speaker, pieces = Speaker(full.folder / "out"), []
    said = speaker.answer(ASKED, max_new_tokens=12, write=pieces.append)
    speaker.close()
    assert len(pieces) > 2
    assert "".join(pieces) == said.text


def test_a_model_that_ram_does_not_hold_is_read_from_the_disk(full: Project) -> None:
    run = full.folder / "out"
    whole, streamed = Speaker(run), Speaker(run, ram_bytes=200_000)
    answers = [speaker.answer(ASKED, max_new_tokens=12).text for speaker in (whole, streamed)]
    assert answers[0] == answers[1]
    assert "disk" in streamed._model.hf_device_map.values()
    for speaker in (whole, streamed):
        speaker.close()


LITTLE_RAM = 150_000
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ASKED_OF_DISK: dict[str, tuple[str, dict[str, Any] | None]] = {
    "LoRA": ("llama", {"target_modules": ["q_proj", "v_proj", "lm_head"]}),
    "at one of two tied weights": ("llama_tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    "DoRA": ("llama", {"target_modules": ["q_proj", "lm_head"], "dora": True}),
    "experts": (
        "qwen3_moe",
        {"target_modules": [], "target_parameters": EXPERTS},
    ),
    "in full": ("olmoe", None),
}


@pytest.mark.parametrize("kind", ASKED_OF_DISK)
def test_what_a_run_trained_and_ram_does_not_hold_is_merged_into_files_for_as_long_as_it_is_asked(
    kind: str, fresh: Any
) -> None:
    family, adapter = ASKED_OF_DISK[kind]
    sections = {**SAVING, "train": {"max_steps": 2, "learning_rate": 1e-2}}
    made = fresh(family, sections=sections if adapter is None else {**sections, "adapter": {"r": 4, **adapter}})
    made.train_well("out")
    run, said = made.folder / "out", []
    whole = Speaker(run, "step-00000002")
    expected = whole.answer(ASKED, max_new_tokens=12).text
    base, streamed = Speaker(run, "base"), Speaker(run, "step-00000002", ram_bytes=LITTLE_RAM, say=said.append)
    base.answer(ASKED, max_new_tokens=1)
    assert streamed.answer(ASKED, max_new_tokens=12).text == expected
    ids = torch.arange(5, 45).view(1, -1)
    with torch.no_grad():
        untrained, wanted, found = (each._model(input_ids=ids).logits for each in (base, whole, streamed))
    assert torch.allclose(found, wanted, atol=1e-5)
    assert not torch.allclose(untrained, wanted, atol=1e-3)
    assert "disk" in streamed._model.hf_device_map.values()
    assert len(said) == len(list(run.glob(".rpft-generate-*/*.safetensors"))) == 1, "no stack is written twice"
    for speaker in (whole, base, streamed):
        speaker.close()
    assert not list(run.glob(".rpft-generate-*"))


@pytest.mark.parametrize("ram_bytes", [None, LITTLE_RAM], ids=["in RAM", "from the disk"])
@pytest.mark.parametrize("asked", ["latest", "base"])
def test_a_run_of_a_quantised_checkpoint_answers_as_transformers_with_its_dequantised_weights(
    asked: str, ram_bytes: int | None, lora: Project, tmp_path: Path
) -> None:
    base, run = lora.folder / "base", lora.folder / "quantised run"
    if not run.exists():
        write_quantised(base, lora.folder / "nf4", nested=True)
        tiny_tokenizer().save_pretrained(lora.folder / "nf4")
        lora.train_well("quantised run", f"model.path={lora.folder / 'nf4'}", "model.quantize=nf4")
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    as_dequantised(model, "nf4")
    model.save_pretrained(tmp_path)
    if asked == "latest":
        model = PeftModel.from_pretrained(model, str(run / "adapter"))
    speaker, ids = Speaker(run, asked, ram_bytes=ram_bytes), torch.arange(5, 45).view(1, -1)
    said = speaker.answer(ASKED, max_new_tokens=12).text
    with torch.no_grad():
        found, wanted = (each.eval()(input_ids=ids).logits for each in (speaker._model, model))
    assert torch.allclose(found, wanted, atol=1e-5)
    assert said == expected(tmp_path, run / "adapter" if asked == "latest" else None)
    speaker.close()
    speaker = Speaker(lora.folder / "nf4", ram_bytes=ram_bytes)
    assert speaker.answer(ASKED, max_new_tokens=12).text == expected(tmp_path)
    speaker.close()


def test_an_adapter_of_no_run_is_to_be_merged_first_where_ram_does_not_hold_its_base(lora: Project) -> None:
    with pytest.raises(UserError, match="merge it first"):
        Speaker(lora.folder / "out" / "adapter", ram_bytes=LITTLE_RAM).answer(ASKED, max_new_tokens=12)


@pytest.mark.parametrize(("family", "adapter"), [("llama", {"r": 4}), ("mixtral", None)])
def test_a_disk_without_room_for_what_must_be_written_is_refused(
    family: str, adapter: Any, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fresh(family, sections={"train": {"max_steps": 1}, **({"adapter": adapter} if adapter else {})})
    made.train_well("out")
    monkeypatch.setattr(files, "free_bytes", lambda path: 1000)
    with pytest.raises(UserError, match=r"are to be written into .*out, where 1 KiB are free"):
        Speaker(made.folder / "out", ram_bytes=LITTLE_RAM).answer(ASKED, max_new_tokens=12)
    assert not list((made.folder / "out").glob(".rpft-generate-*"))


def test_sampling_draws_and_greedy_answers_repeat(full: Project) -> None:
    run = full.folder / "out"
    assert answer(run)["text"] == answer(run)["text"]
    torch.manual_seed(1)
    assert len({answer(run, "--temperature", "5")["text"] for _ in range(3)}) > 1


def test_a_run_that_was_taught_one_answer_gives_it_and_stops(fresh: Any) -> None:
    row = {"messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "never maybe"}]}
    train = {"max_steps": 30, "gradient_accumulation_steps": 1, "learning_rate": 0.01}
    made = fresh(rows=[row], eval_rows=0, sections={"train": train})
    made.train_well("out")
    found = answer(made.folder / "out")
    assert (found["text"], found["ended"]) == ("never maybe", True)
    assert found["tokens"] < 12


@pytest.mark.parametrize("words", [["--max-new-tokens", "1000"]])
def test_an_answer_beyond_the_positions_is_refused(words: list[str], full: Project) -> None:
    ran = ask(full.folder / "out", *words)
    assert ran.code == 2
    assert "has 128 positions in all" in ran.err.replace("the model ", "")


def test_a_folder_with_nothing_to_ask_is_refused(tmp_path: Path) -> None:
    ran = ask(tmp_path)
    assert ran.code == 2
    assert "neither a run (recipe.yaml), a model (config.json) nor an adapter" in ran.err


def test_an_adapter_whose_base_is_gone_is_refused_with_the_way_out(lora: Project, tmp_path: Path) -> None:
    shutil.copytree(lora.folder / "out" / "adapter", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "gone/away"
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    ran = ask(tmp_path / "adapter")
    assert ran.code == 2
    assert "give it with --base" in ran.err
    assert answer(tmp_path / "adapter", "--base", str(lora.folder / "base"))["text"]


def test_prompts_are_the_rows_that_were_trained(fresh: Any) -> None:
    """The ids of a prompt are those that the row begins with, whatever template and variables."""
    rows = [row for row in chats(9) if len(row["messages"]) == 2]
    made = fresh(rows=rows, eval_rows=0, sections={"data": {"chat_template": "qwen3"}, "train": {"max_steps": 1}})
    plain = "data.template_kwargs={enable_thinking: false}"
    made.train_well("out", plain)
    ran = run_rpft("data", str(made.recipe), "--row", "0", "--json", plain)
    tokens = json.loads(ran.out)["tokens"]
    first = next(i for i, token in enumerate(tokens) if token["trained"])
    speaker = Speaker(made.folder / "out")
    ids = speaker._source.asking.ids(rows[0]["messages"][0]["content"])
    assert ids == [token["id"] for token in tokens[: len(ids)]]
    assert first <= len(ids) < len(tokens) - 1  # the template has the model say that it does not think
    assert tiny_tokenizer().convert_tokens_to_ids("<|im_end|>") in speaker._source.asking.end_ids()
