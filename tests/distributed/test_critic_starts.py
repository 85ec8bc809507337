"""What does a critic start from? The actor's weights with a head of zeros, a reward model, or random weights of any layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.weights_memory import LiveStorages
from megappo.config.check import check_config
from megappo.config.load import load_config
from megappo.models.families import shape_of
from megappo.models.fresh import fill_fresh, fresh_tensor
from megappo.models.gpt import DTYPES, build_chunks
from megappo.models.pipeline_model import PipelineModel
from megappo.parallel_state.groups import create_role_groups
from megappo.pp_weights.mapping import expected_hf_tensors
from megappo.trainer.workers import build_worker
from tests.distributed import bodies
from tests.distributed.test_parity import world
from tests.distributed.ways import Way
from tests.models import PLAIN_ADAM, make_batch, make_model_folder, transformers_values
from tests.pool import Pool

pytestmark = pytest.mark.distributed

BATCH = make_batch([5, 1, 9, 3], [7, 14, 1, 12])


def critic_of_a_run(config: Path, overrides: list[str], batch: dict[str, Tensor]) -> Any:
    """(values, metrics of one update, pieces before it, pieces after it) of the critic that a training run builds."""
    plan = check_config(load_config(str(config), overrides, "train"))
    worker = build_worker(plan, ("actor", "critic")).worker
    model = worker.roles["critic"].model
    before = bodies.exported_pieces(model)
    rows, number = Way(size=2).rows(model.groups, batch)
    values = worker.method("critic", "compute_values")(rows, number)[0].get("values")
    if values is not None:
        values = values[rows["sample_ids"].argsort()]
    metrics = worker.method("critic", "update")(rows, number, step=1)[1]
    return values, metrics, before, bodies.exported_pieces(model)


@pytest.fixture
def config(tmp_path: Path, llama_folder: Path) -> Path:
    """Of a run of the llama folder over tp2 x pp2, whose critic takes plain Adam steps."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    adam = f"lr: {PLAIN_ADAM.lr}, betas: {list(PLAIN_ADAM.betas)}, eps: {PLAIN_ADAM.eps}"
    adam += f", weight_decay: {PLAIN_ADAM.weight_decay}, clip_grad: {PLAIN_ADAM.clip_grad}"
    (tmp_path / "config.yaml").write_text(
        f"model: {{path: {llama_folder}, dtype: float32}}\n"
        f"data: {{train: {tmp_path / 'data.jsonl'}}}\n"
        f"rollout: {{engine: hf, max_prompt_tokens: 32, max_new_tokens: 32}}\n"
        f"actor: {{parallel: {{tp: 2, pp: 2}}}}\n"
        f"critic: {{optimizer: {{{adam}}}}}\n"
    )
    return tmp_path / "config.yaml"


def transformers_value_update(folder: Path, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    """The independent answer to one update of a reward model as a critic: plain autograd and AdamW on the mean of (V - R)^2 / 2,
    vectors not decayed, each sample alone. ({name: tensor}, loss)."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    total = batch["response_mask"].sum()
    loss = torch.zeros(())
    for i in range(len(batch["input_ids"])):
        ids = batch["input_ids"][i][batch["attention_mask"][i]]
        count = int(batch["response_mask"][i].sum())
        values = model.score(model.model(ids[None]).last_hidden_state)[0, -count - 1 : -1, 0]
        loss = loss + (values - batch["returns"][i, :count]).square().sum() / 2 / total
    loss.backward()
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": PLAIN_ADAM.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=PLAIN_ADAM.lr, betas=PLAIN_ADAM.betas, eps=PLAIN_ADAM.eps).step()
    return dict(model.state_dict()), loss.item()


def test_a_run_whose_critic_is_a_reward_model_starts_with_its_values_and_trains_it(
    pool: Pool, tmp_path: Path, config: Path
) -> None:
    folder = make_model_folder(tmp_path / "reward_model", head="value", seed=11)
    results = pool.run(4, critic_of_a_run, config, [f"critic.path={folder}"], BATCH)
    values, metrics = results[-1][:2]
    torch.testing.assert_close(values, transformers_values(folder, BATCH), atol=1e-4, rtol=0)
    want, want_loss = transformers_value_update(folder, BATCH)
    assert metrics["loss"] == pytest.approx(want_loss, rel=1e-5)
    got = bodies.assemble([result[3] for result in results])
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert ((got[name] - tensor).norm() / tensor.norm()).item() <= 1e-5, name


def test_a_run_without_a_critic_path_starts_from_the_actors_weights_and_values_of_0(
    pool: Pool, llama_folder: Path, config: Path
) -> None:
    from safetensors.torch import load_file

    results = pool.run(4, critic_of_a_run, config, [], BATCH)
    assert (results[-1][0] == 0).all()
    before = bodies.assemble([result[2] for result in results])
    want = load_file(llama_folder / "model.safetensors")
    want.pop("lm_head.weight")
    assert not before.pop("score.weight").any()
    assert before.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(before[name], tensor), name
    after = bodies.assemble([result[3] for result in results])
    assert after["score.weight"].any()  # a head of zeros learns


def test_a_run_whose_critic_starts_fresh_needs_its_sizes_alone_and_draws_by_the_runs_seed(
    pool: Pool, config: Path, sizes_alone: Path
) -> None:
    overrides = [f"critic.path={sizes_alone}", "critic.start=fresh", "run.seed=9"]
    results = pool.run(4, critic_of_a_run, config, overrides, BATCH)
    assert (results[-1][0] == 0).all()
    shape = shape_of(sizes_alone, head="value")
    for name, tensor in bodies.assemble([result[2] for result in results]).items():
        assert torch.equal(tensor, fresh_tensor(name, tuple(tensor.shape), shape, 9)), name
    assert bodies.assemble([result[3] for result in results])["score.weight"].any()


def fresh(folder: Path, layout: bodies.Layout, seed: int, head: str) -> Any:
    """(pieces of this rank, its shard of the embedding with the padding)."""
    groups = create_role_groups({"critic": bodies.layout_for(folder, layout)}, seed=1)["critic"]
    with groups.active():
        chunks = build_chunks(shape_of(folder, head=head), groups, DTYPES["float32"])  # type: ignore[arg-type]
    for chunk in chunks:
        for param in chunk.parameters():
            param.data.fill_(float("nan"))
    fill_fresh(chunks, groups, seed)
    params = dict(chunks[0].named_parameters())
    embedding = params.get("embedding.word_embeddings.weight")
    return bodies.exported_pieces(PipelineModel(chunks, groups, Way().batching)), embedding


@pytest.fixture(scope="module")
def sizes_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model with every kind of bias, less its weights."""
    folder = make_model_folder(tmp_path_factory.mktemp("sizes"), "llama3_biases", initializer_range=0.05)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture(scope="module")
def alone(pool: Pool, sizes_alone: Path) -> dict[str, Tensor]:
    """The whole model as one process draws it."""
    return bodies.assemble([pool.run(1, fresh, sizes_alone, {}, 5, "value")[0][0]])


@pytest.mark.parametrize("layout", [{"tp": 4}, {"pp": 2, "vpp": 2}, {"tp": 2, "pp": 2}, {"dp": 2}], ids=str)
def test_random_weights_are_the_same_in_every_layout(
    pool: Pool, sizes_alone: Path, alone: dict[str, Tensor], layout: dict[str, Any]
) -> None:
    results = pool.run(world(layout), fresh, sizes_alone, layout, 5, "value")
    found = bodies.assemble([result[0] for result in results])
    assert found.keys() == alone.keys()
    for name, tensor in alone.items():
        assert torch.equal(found[name], tensor), name
    for _, embedding in results:
        assert embedding is None or torch.isfinite(embedding).all()  # rows of padding, too


def test_random_weights_are_those_that_each_name_and_the_seed_alone_draw(sizes_alone: Path, alone: dict[str, Tensor]) -> None:
    shape = shape_of(sizes_alone, head="value")
    names = list(reversed(expected_hf_tensors(shape).items()))  # in another order than the model's
    assert alone.keys() == {name for name, _ in names}
    for name, size in names:
        assert torch.equal(alone[name], fresh_tensor(name, size, shape, 5)), name


def test_random_weights_are_spread_as_config_json_says(sizes_alone: Path, alone: dict[str, Tensor]) -> None:
    assert json.loads((sizes_alone / "config.json").read_text())["initializer_range"] == 0.05
    drawn = {}
    for name, tensor in alone.items():
        if name.endswith(".bias") or name == "score.weight":
            assert not tensor.any(), name
        elif name.endswith("norm.weight"):
            assert (tensor == 1).all(), name
        else:
            drawn[name] = tensor
            assert tensor.std().item() == pytest.approx(0.05, rel=0.05), name
            assert tensor.mean().abs() < 4 * 0.05 / tensor.numel() ** 0.5, name
    assert len(drawn) == 1 + 4 * 7
    first_numbers = {round(tensor.flatten()[0].item(), 6) for tensor in drawn.values()}
    assert len(first_numbers) == len(drawn)  # no two tensors are alike


def test_another_seed_draws_another_model(pool: Pool, sizes_alone: Path, alone: dict[str, Tensor]) -> None:
    other = bodies.assemble([pool.run(1, fresh, sizes_alone, {}, 6, "value")[0][0]])
    for name, tensor in alone.items():
        constant = name.endswith((".bias", "norm.weight")) or name == "score.weight"
        assert torch.equal(other[name], tensor) is constant, name


def memory_of_a_draw(folder: Path) -> int:
    """Bytes that were held beside the parameters."""
    groups = create_role_groups({"critic": bodies.layout_for(folder, {"tp": 2})}, seed=1)["critic"]
    with groups.active():
        chunks = build_chunks(shape_of(folder, head="value"), groups, DTYPES["bfloat16"])
    with LiveStorages([param.data for param in chunks[0].parameters()]) as live:
        fill_fresh(chunks, groups, 5)
    return live.peak


def test_one_whole_tensor_is_held_at_a_time(pool: Pool, sizes_alone: Path) -> None:
    largest = max(math.prod(size) for size in expected_hf_tensors(shape_of(sizes_alone, head="value")).values())
    for peak in pool.run(2, memory_of_a_draw, sizes_alone):
        assert 0 < peak <= 1.1 * largest * 4


def test_tied_embeddings_of_a_language_model_are_drawn_alike_on_both_ends(pool: Pool, tied_llama_folder: Path) -> None:
    results = pool.run(2, tied_ends, tied_llama_folder)
    assert torch.equal(results[0], results[1])


def tied_ends(folder: Path) -> Tensor:
    groups = create_role_groups({"actor": bodies.layout_for(folder, {"pp": 2})}, seed=1)["actor"]
    with groups.active():
        (chunk,) = build_chunks(shape_of(folder), groups, DTYPES["float32"])
    fill_fresh([chunk], groups, 5)
    return chunk.shared_embedding_or_output_weight().detach().clone()
