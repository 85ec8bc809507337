"""How do the parts of a benchmark run? Each in processes of its own, under the Python it needs; it answers in JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

Found = dict[str, Any]


def peers_python() -> str:
    """The Python of the environment that holds the peers; this one where none is named."""
    return os.environ.get("MEGAPPO_PEERS_PY") or sys.executable


def run(module: str, *arguments: str, python: str = sys.executable) -> Found:
    """What `python -m benchmarks.MODULE ARGUMENTS FILE` wrote to FILE."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [python, "-W", "ignore", "-m", f"benchmarks.{module}", *arguments, str(file)]
        if subprocess.run(command).returncode != 0:
            sys.exit(f"{module} {' '.join(arguments)} failed; its own message is above")
        found: Found = json.loads(file.read_text())
        return found
