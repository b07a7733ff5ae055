"""The quickstart's model and data: digits stay single tokens, and no evaluated question is trained on."""

from __future__ import annotations

import json
from pathlib import Path

import get_quickstart_data as data
import get_quickstart_model as model
import numpy as np
import pytest
import quickstart
import quickstart_assets as assets

from rpft.errors import UserError

GREETING = ("How are you?", "I am doing very well.")


def tiny_tokenizer():
    """Byte-level BPE over single bytes with merges for " the", for "20" and for "026"."""
    from tokenizers import pre_tokenizers

    tokens = ["<|start|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = ["Ġ t", "h e", "Ġt he", "2 0", "2 6"]
    tokens += ["".join(merge.split(" ")) for merge in merges]
    return model.build_tokenizer(tokens, merges, control_tokens=["<|start|>", "<|end|>"])


# --- the tokenizer and the weights


def test_every_digit_is_its_own_token_whatever_the_merges_say():
    assert tiny_tokenizer().encode("the 2026").tokens == ["t", "he", "Ġ", "2", "0", "2", "6"]


def test_words_are_merged_with_the_space_before_them():
    assert "Ġthe" in tiny_tokenizer().encode("a the").tokens


def test_control_tokens_are_never_split_and_carry_their_id():
    encoding = tiny_tokenizer().encode("<|start|>7<|end|>")
    assert encoding.tokens == ["<|start|>", "7", "<|end|>"]
    assert [encoding.ids[0], encoding.ids[2]] == [0, 1]


@pytest.mark.parametrize("text", ["the 12, the  345", "Grüße 你好 the 🙂\n\tx"])
def test_offsets_cover_the_text_and_decoding_gives_it_back(text: str):
    tokenizer = tiny_tokenizer()
    encoding = tokenizer.encode(text)
    covered = {position for start, end in encoding.offsets for position in range(start, end)}
    assert covered == set(range(len(text)))
    assert tokenizer.decode(encoding.ids) == text


def test_gguf_tensor_names_become_the_names_of_a_llama_model():
    assert model.parameter_name("token_embd.weight") == "model.embed_tokens.weight"
    assert model.parameter_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"


def test_an_unknown_gguf_tensor_is_refused_by_name():
    with pytest.raises(UserError, match=r"blk\.0\.ssm_in\.weight"):
        model.parameter_name("blk.0.ssm_in.weight")


def test_unpermuting_a_head_takes_even_rows_first():
    # Two heads of four rows; row r of a head holds the value 10 * head + r.
    stored = np.array([[0], [1], [2], [3], [10], [11], [12], [13]])
    assert model.unpermute_heads(stored, num_heads=2)[:, 0].tolist() == [0, 2, 1, 3, 10, 12, 11, 13]


def test_a_changed_download_is_refused(tmp_path: Path):
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"not the model")
    with pytest.raises(UserError, match="sha256"):
        model.check_sha256(file, model.GGUF_SHA256)


# --- the rows


@pytest.mark.parametrize("same", ["how are you", "  How  are\nyou ?", "HOW ARE YOU!", "How, are_you..."])
def test_case_spaces_and_punctuation_make_no_other_question(same: str):
    assert data.normalize(same) == data.normalize("How are you?")


def test_other_words_make_another_question():
    assert data.normalize("How are you?") != data.normalize("How old are you?")


def test_a_dialogue_ends_with_an_answer():
    text = "conversations:\n- [Hello, Hi, Well]\n- [One, Two, Three, Four]\n- [Alone]\n"
    assert data.read_conversations(text, alternatives=False) == [
        ("Hello", "Hi"),
        ("One", "Two", "Three", "Four"),
    ]


def test_alternatives_are_a_conversation_each():
    text = "conversations:\n- ['Are you sad?', No., Not now.]\n"
    rows = data.read_conversations(text, alternatives=True)
    assert rows == [("Are you sad?", "No."), ("Are you sad?", "Not now.")]


def test_an_entry_that_is_a_text_or_says_nothing_is_left_out():
    text = "conversations:\n- What number is this? - '22'\n- ['?', 'Yes']\n- ['What year?', 1963]\n"
    assert data.read_conversations(text, alternatives=False) == [("What year?", "1963")]


def test_of_repeated_conversations_the_first_stays():
    rows = [("Hello", "Hi"), GREETING, ("hello!", "hi."), ("Hello", "Hey")]
    assert data.without_duplicates(rows) == [("Hello", "Hi"), GREETING, ("Hello", "Hey")]


def many_rows() -> list[data.Conversation]:
    """40 plain pairs, 10 questions with two answers, a dialogue that asks pair 0's question later on."""
    rows = [(f"Question number {n}?", f"This is the answer {n}.") for n in range(40)]
    rows += [(f"Asked twice {n % 10}", f"This is answer {n} of two.") for n in range(20)]
    rows += [("Hello", "Hi", "QUESTION number 0", "I said that before.")]
    rows += [("A short one", "No."), ("A long one", "word " * 100)]
    return rows


def test_no_question_of_the_evaluation_is_trained_on():
    train, evaluation = data.split(many_rows(), eval_rows=39)
    trained_questions = {data.normalize(turn) for turns in train for turn in turns[::2]}
    assert len(evaluation) == 39
    assert not trained_questions & {data.normalize(turns[0]) for turns in evaluation}


def test_every_row_is_in_exactly_one_part():
    train, evaluation = data.split(many_rows(), eval_rows=10)
    assert len(evaluation) == 10
    assert sorted(train + evaluation) == sorted(many_rows())


def test_only_questions_with_one_answer_of_moderate_length_are_evaluated():
    _, evaluation = data.split(many_rows(), eval_rows=1000)
    assert {turns[0] for turns in evaluation} == {f"Question number {n}?" for n in range(1, 40)}


def test_the_split_depends_on_the_rows_and_not_on_their_order():
    assert data.split(many_rows()[::-1], eval_rows=10)[1] == data.split(many_rows(), eval_rows=10)[1]


def test_a_row_is_one_line_of_messages():
    line = data.to_row(("Wie geht's?\nGut?", "Größtenteils.", "So?", "Ja."))
    assert line.count("\n") == 1
    roles = [message["role"] for message in json.loads(line)["messages"]]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert "Größtenteils." in line


# --- folders and the report


def test_a_folder_appears_whole(tmp_path: Path):
    with assets.published_folder(tmp_path / "made") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "made").exists()
    assert (tmp_path / "made" / "file").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def fail_halfway(dest: Path) -> None:
    with assets.published_folder(dest) as folder:
        (folder / "file").write_text("x")
        raise OSError("disk full")


def test_a_failure_leaves_nothing_behind(tmp_path: Path):
    with pytest.raises(OSError, match="disk full"):
        fail_halfway(tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


def test_a_finished_folder_is_left_alone_and_a_foreign_one_refused(tmp_path: Path):
    assert not assets.is_finished(tmp_path / "new", ("a", "b"))
    (tmp_path / "a").write_text("")
    with pytest.raises(UserError, match="lacks b"):
        assets.is_finished(tmp_path, ("a", "b"))
    (tmp_path / "b").write_text("")
    assert assets.is_finished(tmp_path, ("a", "b"))


def test_a_package_that_cannot_be_had_is_an_error_with_pips_reason(tmp_path: Path):
    with pytest.raises(UserError, match=r"no-such-file\.whl"):
        assets.install_package(str(tmp_path / "no-such-file.whl"), tmp_path / "target")


def test_evaluation_losses_are_read_in_order_among_the_lines_of_steps():
    lines = ['{"step": 0, "eval_loss": 2.5, "eval_tokens": 9}', '{"step": 1, "loss": 2.4}', ""]
    with pytest.raises(UserError, match="1 evaluations"):
        quickstart.evaluation_losses(lines)
    lines.append('{"step": 1, "eval_loss": 2.1, "eval_tokens": 9}')
    assert quickstart.evaluation_losses(lines) == [2.5, 2.1]


def test_an_earlier_run_is_not_written_into(tmp_path: Path):
    assert quickstart.unused_folder(tmp_path / "run") == tmp_path / "run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").mkdir()
    assert quickstart.unused_folder(tmp_path / "run") == tmp_path / "run-3"


def quickstart_in(root: Path, monkeypatch: pytest.MonkeyPatch, loss_after: float, train_exit_code: int = 0) -> int:
    """Exit code of the quickstart with stand-ins for the downloads, the training and the model."""
    (root / "data").mkdir()
    rows = [data.to_row((f"Question {n}", "Answer")) for n in range(quickstart.SHOWN_ROW + 1)]
    (root / "data" / "eval.jsonl").write_text("".join(rows))
    paths = quickstart.Paths(Path("model"), Path("data"), Path("data/eval.jsonl"), Path("out"))

    def train(output: Path, default_output: Path) -> int:
        (root / output).mkdir()
        lines = [{"step": 0, "eval_loss": 2.0}, {"step": 9, "eval_loss": loss_after}]
        (root / output / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return train_exit_code

    monkeypatch.setattr(quickstart, "ROOT", root)
    monkeypatch.setattr(quickstart, "read_paths", lambda recipe: paths)
    monkeypatch.setattr(quickstart, "get_model", lambda dest: True)
    monkeypatch.setattr(quickstart, "get_data", lambda dest: True)
    monkeypatch.setattr(quickstart, "train", train)
    monkeypatch.setattr(quickstart, "answers", lambda model, adapter, question: (f"long {question}", "short"))
    return quickstart.main()


def test_the_report_says_loss_and_answers_before_and_after(tmp_path, monkeypatch, capsys):
    assert quickstart_in(tmp_path, monkeypatch, loss_after=1.5) == 0
    report = capsys.readouterr().out
    for said in ("2.000 -> 1.500", "-25%", f"long Question {quickstart.SHOWN_ROW}", "short", "out/adapter"):
        assert said in report


@pytest.mark.parametrize("loss_after", [2.0, 2.5, float("nan")])
def test_the_quickstart_fails_when_the_loss_did_not_fall(tmp_path, monkeypatch, loss_after):
    assert quickstart_in(tmp_path, monkeypatch, loss_after) == 1


def test_the_quickstart_ends_with_the_exit_code_of_a_failed_training(tmp_path, monkeypatch):
    assert quickstart_in(tmp_path, monkeypatch, loss_after=1.5, train_exit_code=130) == 130


def test_the_shipped_recipe_names_the_files_that_the_scripts_make():
    paths = quickstart.read_paths(quickstart.ROOT / quickstart.RECIPE)
    assert (paths.model, paths.data) == (model.DEFAULT_DEST, data.DEFAULT_DEST)
    assert paths.eval_file.name in data.FINISHED_FILES
