"""What does `make train` start from? A sentencepiece tokenizer, zero-padded sums, and a tiny Llama warm-started by `megappo sft`.

Writes into one folder (`.cache/demo`):
    train.jsonl, validation.jsonl   {"prompt": "07+35=", "answer": "042"}; no unordered pair of addends is in both
    fresh/                          Hugging Face folder, random weights
    warm/                           the same after the warm start (written by `megappo sft`)
    stamp                           hash of what it was all made from; nothing is done while it still fits
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from scripts import sums

SEED = 1234
NUM_VALIDATION = 512
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
SYMBOLS = "0123456789+="
MODEL = {
    "vocab_size": len(SPECIALS) + len(SYMBOLS),
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_data(folder: Path) -> list[str]:
    """Write both JSONL files and return all texts."""
    texts = []
    for name, pairs in sums.split_sums(range(100), NUM_VALIDATION, SEED).items():
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for a, b in pairs:
                prompt, answer = f"{a:02d}+{b:02d}=", f"{a + b:03d}"
                texts.append(prompt + answer)
                file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
    return texts


def write_tokenizer(folder: Path, texts: list[str]) -> None:
    """Train `tokenizer.model` with one piece a symbol, and check that each symbol survives a round trip.

    (The `char` model type has been seen to drop digits silently; the check is cheap.)"""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=MODEL["vocab_size"],
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        pad_piece=SPECIALS[0],
        split_digits=True,
        add_dummy_prefix=False,
        character_coverage=1.0,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    if processor.vocab_size() != MODEL["vocab_size"]:
        raise RuntimeError(f"the tokenizer has {processor.vocab_size()} pieces, not {MODEL['vocab_size']}")
    for symbol in SYMBOLS:
        ids = processor.encode(symbol)
        if len(ids) != 1 or ids[0] < len(SPECIALS) or processor.decode(ids) != symbol:
            raise RuntimeError(f"the tokenizer turns {symbol!r} into {ids} and back into {processor.decode(ids)!r}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "add_eos_token": False}) + "\n")


def write_model(folder: Path) -> None:
    """Write a Llama with random weights as a Hugging Face folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    LlamaForCausalLM(LlamaConfig(**MODEL)).to(torch.float32).save_pretrained(folder)


def fingerprint(sft_config: Path) -> str:
    """Hash of all that the folder is made from."""
    parts = (Path(__file__).read_bytes(), Path(sums.__file__).read_bytes(), sft_config.read_bytes())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".cache/demo"))
    parser.add_argument("--sft-config", type=Path, default=Path("configs/demo_sft_cpu.yaml"))
    parser.add_argument("--no-sft", action="store_true", help="stop after the fresh model")
    args = parser.parse_args()

    stamp, wanted = args.folder / "stamp", fingerprint(args.sft_config)
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    if args.folder.exists():
        shutil.rmtree(args.folder)
    fresh = args.folder / "fresh"
    fresh.mkdir(parents=True)
    write_tokenizer(fresh, write_data(args.folder))
    write_model(fresh)
    print(f"demo model: tokenizer, data and random weights written to {args.folder}", flush=True)
    if args.no_sft:
        return
    megappo = Path(sys.executable).with_name("megappo")
    overrides = [f"data.train={args.folder}/train.jsonl", f"data.validation={args.folder}/validation.jsonl"]
    overrides += [f"model.path={fresh}", f"sft.output={args.folder}/warm"]
    result = subprocess.run([str(megappo), "sft", str(args.sft_config), *overrides])
    if result.returncode != 0:
        sys.exit(result.returncode)
    stamp.write_text(wanted)


if __name__ == "__main__":
    main()
