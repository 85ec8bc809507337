"""What do all tests share? The environment of a rank, a pool of live workers, small model folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from tests.models import make_llama_folder
from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Live workers: `pool.run(world, function, *args)`."""
    from megappo.parallel_state.device import import_megatron

    import_megatron()  # once, before the fork
    import megappo.models.pipeline_model  # noqa: F401

    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied random Llama: 4 layers, hidden 64, 4 heads of 32, 2 KV heads, vocabulary 61."""
    return make_llama_folder(tmp_path_factory.mktemp("llama"), tied=False)


@pytest.fixture(scope="session")
def tied_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with tied embeddings."""
    return make_llama_folder(tmp_path_factory.mktemp("llama_tied"), tied=True)
