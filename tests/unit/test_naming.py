"""Do local layer numbers become the right global ones, in every layout, with nothing lost or doubled?"""

from __future__ import annotations

import pytest
import torch

from megappo.errors import RunFailed
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.naming import get_all_params, normalize_pp_vpp_params


def local_params(layout: ParallelLayout) -> list[list[dict[str, int]]]:
    """[pp][chunk]{local name: the global layer that the chunk holds there}."""
    return [
        [{f"decoder.layers.{i}.w": layer for i, layer in enumerate(layout.layers(stage, chunk))} for chunk in range(layout.vpp)]
        for stage in range(layout.pp)
    ]


@pytest.mark.parametrize(
    "layout, held",
    [
        (ParallelLayout(8, pp=2, vpp=2), [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]),
        (ParallelLayout(16, pp=4, vpp=2), [[(0, 1), (8, 9)], [(2, 3), (10, 11)], [(4, 5), (12, 13)], [(6, 7), (14, 15)]]),
        (ParallelLayout(12, pp=2, vpp=3), [[(0, 1), (4, 5), (8, 9)], [(2, 3), (6, 7), (10, 11)]]),
        (ParallelLayout(10, pp=3, vpp=2, layers_per_stage=(4, 4, 2)), [[(0, 1), (5, 6)], [(2, 3), (7, 8)], [(4,), (9,)]]),
    ],
)
def test_layers_are_numbered_chunk_major(layout: ParallelLayout, held: list[list[tuple[int, ...]]]) -> None:
    params = [[{f"decoder.layers.{i}.w": layer for i, layer in enumerate(chunk)} for chunk in stage] for stage in held]
    assert normalize_pp_vpp_params(params, layout) == {f"decoder.layers.{k}.w": k for k in range(layout.num_layers)}


def test_rank_major_numbering_would_fail_the_same_test() -> None:
    layout = ParallelLayout(8, pp=2, vpp=2)
    flat = [value for stage in local_params(layout) for chunk in stage for value in chunk.values()]
    assert flat != list(range(8))


def test_a_name_that_two_stages_give_is_an_error() -> None:
    params = [[{"embedding.w": 0, "decoder.layers.0.w": 0}], [{"embedding.w": 0, "decoder.layers.0.w": 1}]]
    with pytest.raises(RunFailed, match=r"embedding.w comes twice: from stage 0, chunk 0 .* and from stage 1, chunk 0"):
        normalize_pp_vpp_params(params, ParallelLayout(2, pp=2))


def test_a_layer_that_no_chunk_holds_is_an_error() -> None:
    with pytest.raises(RunFailed, match=r"no chunk holds layers \[3\] of 4"):
        normalize_pp_vpp_params(
            [[{"decoder.layers.0.w": 0, "decoder.layers.1.w": 1}], [{"decoder.layers.0.w": 2}]], ParallelLayout(4, pp=2)
        )


def test_a_global_number_in_a_chunk_is_an_error() -> None:
    params = [[{"decoder.layers.0.w": 0, "decoder.layers.1.w": 1}], [{"decoder.layers.2.w": 2, "decoder.layers.3.w": 3}]]
    with pytest.raises(RunFailed, match=r"stage 1, chunk 0: decoder.layers.2.w is not one of its 2 layers"):
        normalize_pp_vpp_params(params, ParallelLayout(4, pp=2))


def test_the_wrong_number_of_chunks_is_an_error() -> None:
    with pytest.raises(RunFailed, match=r"got \[1, 2\] chunks a stage; the layout has pp=2, vpp=2"):
        normalize_pp_vpp_params([[{}], [{}, {}]], ParallelLayout(4, pp=2, vpp=2))


def test_params_of_a_wrapped_chunk_come_without_copy_or_prefix_and_with_persistent_buffers() -> None:
    inner = torch.nn.Module()
    inner.layer = torch.nn.Linear(2, 2, bias=False)
    inner.twin = torch.nn.Linear(2, 2, bias=False)
    inner.twin.weight = inner.layer.weight
    inner.register_buffer("expert_bias", torch.ones(2))
    inner.register_buffer("scratch", torch.ones(2), persistent=False)
    outer, outermost = torch.nn.Module(), torch.nn.Module()
    outer.module, outermost.module = inner, outer
    for chunk in (inner, outer, outermost):
        (params,) = get_all_params([chunk])
        assert list(params) == ["expert_bias", "layer.weight"]
        assert params["layer.weight"] is inner.layer.weight and params["expert_bias"] is inner.expert_bias
