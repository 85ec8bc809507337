"""Who starts the ranks: what run.launcher and the environment say."""

from __future__ import annotations

import pytest

from megappo.controller.rendezvous import detect_launcher
from megappo.errors import UserError

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29500",
}


def test_auto_is_torchrun_exactly_where_rank_and_world_size_are_set():
    assert detect_launcher("auto", {}) == "local"
    assert detect_launcher("auto", {"RANK": "0"}) == "local"
    assert detect_launcher("auto", TORCHRUN) == "torchrun"


def test_local_and_torchrun_are_taken_at_their_word_where_the_environment_fits():
    assert detect_launcher("local", {}) == "local"
    assert detect_launcher("local", {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}) == "local"
    assert detect_launcher("torchrun", TORCHRUN) == "torchrun"


def test_one_torchrun_on_each_slurm_node_is_no_contradiction():
    environ = {**TORCHRUN, "RANK": "5", "WORLD_SIZE": "8", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
    assert detect_launcher("auto", environ) == "torchrun"


@pytest.mark.parametrize(
    ("launcher", "change", "message"),
    [
        ("local", {}, "run.launcher=local, but another launcher started this process as rank 1 of 2"),
        ("torchrun", {"MASTER_PORT": "", "LOCAL_RANK": ""}, "LOCAL_RANK, MASTER_PORT are not set"),
        ("auto", {"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ("auto", {"RANK": "2"}, "RANK=2 in the environment must be below WORLD_SIZE=2"),
        ("auto", {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 in the environment must be below LOCAL_WORLD_SIZE=2"),
        ("auto", {"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4 in the environment exceeds WORLD_SIZE=2"),
        ("auto", {"WORLD_SIZE": "two"}, "WORLD_SIZE=two in the environment is not a number"),
        ("auto", {"MASTER_ADDR": "(null)"}, r"MASTER_ADDR=\(null\)"),
        ("auto", {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "RANK=1 and SLURM_PROCID=0 in the environment contradict"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(launcher, change, message):
    with pytest.raises(UserError, match=message) as refused:
        detect_launcher(launcher, {**TORCHRUN, **change})
    assert "\n" not in str(refused.value)
