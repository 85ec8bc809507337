"""How do responses come from a machine without vLLM? `HfEngine`: transformers' model in this process, sampled token by token.

Slow, and small on purpose. It keeps every promise of `RolloutEngine`: samples depend on a request's seed alone, weights are one
complete version or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megappo.algorithms.masking import response_mask_from_eos
from megappo.errors import RunFailed
from megappo.pp_weights.assemble import Assembler
from megappo.pp_weights.cuda_ipc import memory_of
from megappo.pp_weights.update import Bucket, Update
from megappo.rollout.announce import check_announcement
from megappo.rollout.engine import Completion, SamplingParams
from megappo.rollout.request import check_request, read_limits
from megappo.rollout.state import EngineState


class HfEngine:
    """transformers behind the `RolloutEngine` Protocol. The model starts with random weights, like vLLM's with dummy ones."""

    def __init__(
        self, model_path: str | Path, *, max_model_len: int, dtype: str = "float32", max_num_seqs: int = 128, device: str = "cpu"
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._limits = read_limits(model_path, max_model_len)
        self._state = EngineState("the hf engine")
        self._max_num_seqs = max_num_seqs
        self._device = torch.device(device)
        config = AutoConfig.from_pretrained(model_path)
        with torch.random.fork_rng(devices=[]):  # the random start must not move the trainer's generator
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._parameters = dict(model.named_parameters())  # tied ones come once
        self._expected = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    @property
    def weight_version(self) -> int | None:
        """The complete version that it holds, or None."""
        return self._state.weight_version

    def wait_ready(self) -> None:
        """Nothing to wait for: construction has loaded the model."""

    def start(self, update: Update) -> None:
        self._state.begin_update(update.version)
        with self._state.updating():
            if update.shards > 1:
                raise RunFailed(f"the hf engine takes whole tensors, not {update.shards} shards; use pp_weights.gather=full")
            check_announcement(update, self._expected, "transformers")
            self._assembler = Assembler(update, keep=False)

    def settle(self) -> None:
        """Nothing to wait for: `load` has read the bucket."""

    @torch.no_grad()
    def load(self, bucket: Bucket) -> None:
        with self._state.updating(), memory_of(bucket.paths[0], bucket.manifests[0]) as views:
            for name, tensor in self._assembler.tensors(bucket.manifests[0], views):
                self._parameters[name].copy_(tensor)

    def finish(self) -> None:
        with self._state.updating():
            self._assembler.finish()
            self._state.commit()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]) -> list[Completion]:
        version = self._state.require_generate()
        check_request(self._limits, prompts, sampling, seeds)
        completions = []
        for start in range(0, len(prompts), self._max_num_seqs):
            part = slice(start, start + self._max_num_seqs)
            completions += self._generate_batch(prompts[part], sampling, seeds[part], version)
        return completions

    def sleep(self) -> None:
        """Give the weights up, as vLLM does; the memory stays taken."""
        self._state.sleep()

    def wake(self) -> None:
        self._state.wake()

    def fault(self) -> str | None:
        """None: it has no process of its own."""
        return None

    def close(self) -> None:
        self._state.close()
        self._model, self._parameters = None, {}

    @torch.no_grad()
    def _generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int], version: int
    ) -> list[Completion]:
        ids, mask = left_pad(prompts)  # (b, p)
        draws = uniform_draws(seeds, sampling.max_new_tokens)  # (b, r)
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        next_position = positions[:, -1:]
        cache = None
        tokens: list[torch.Tensor] = []
        log_probs: list[torch.Tensor] = []
        stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.long)
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        for step in range(sampling.max_new_tokens):
            output = self._model(
                input_ids=ids.to(self._device),
                attention_mask=mask.to(self._device),
                position_ids=positions.to(self._device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            log_p = processed_log_probs(output.logits[:, -1].float().cpu(), sampling)  # (b, V)
            chosen = log_p.argmax(-1) if sampling.temperature == 0 else inverse_cdf(log_p, draws[:, step])  # (b,)
            tokens.append(chosen)
            log_probs.append(log_p.gather(-1, chosen[:, None])[:, 0])
            ended |= torch.isin(chosen, stop_ids)
            if ended.all():
                break
            ids = chosen[:, None]
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=-1)
            next_position = next_position + 1
            positions = next_position
        responses = torch.stack(tokens, 1)  # (b, r); rows that ended early went on with the others
        lengths = response_mask_from_eos(responses, sampling.stop_token_ids).sum(1)
        rows = zip(responses.tolist(), torch.stack(log_probs, 1).tolist(), lengths.tolist(), strict=True)
        return [
            Completion(
                token_ids=tuple(row[:length]),
                log_probs=tuple(probs[:length]),
                finish_reason="stop" if row[length - 1] in sampling.stop_token_ids else "length",
                weight_version=version,
            )
            for row, probs, length in rows
        ]


def left_pad(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids (b, p) with zeros on the left, and the mask of real tokens (b, p)."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts])
    return ids, mask


def uniform_draws(seeds: Sequence[int], count: int) -> torch.Tensor:
    """(b, count) float64 in [0, 1); row i comes from a generator of its own, seeded by seeds[i]."""
    return torch.stack([torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def processed_log_probs(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Log-probs (b, V) that tokens are drawn from: temperature, then top-k, then top-p, as in vLLM. Greedy: untempered."""
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        probs = ordered.softmax(-1)
        outside = probs.cumsum(-1) - probs >= sampling.top_p  # the token that crosses top_p stays in
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    return logits.log_softmax(-1)


def inverse_cdf(log_p: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Token (b,) where the cumulative probability of log_p (b, V) first exceeds the draw (b,); never one of probability 0."""
    probs = log_p.double().exp()
    cumulative = probs.cumsum(-1)
    chosen = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None], right=True)[:, 0]
    last_possible = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(-1)
    return torch.minimum(chosen, last_possible)
