"""How does the last chunk's output become log-probs of tokens? `PolicyHead` knows, of logits and of hidden states.

legend: n scored tokens, h hidden size, V vocabulary, t tensor-parallel degree
"""

from __future__ import annotations

from torch import Tensor

from megappo.models.hidden_log_probs import log_probs_and_entropy_from_hidden, log_probs_from_hidden
from megappo.models.pipeline_model import PipelineModel
from megappo.models.vocab_parallel import (
    VocabularyShard,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_from_logits,
)


class PolicyHead:
    """Log-probs and entropies of a language model at a temperature. All tensor-parallel ranks of the last stage call.

    output: what the last chunk returned: logits (n, padded V / t), in whose place the backward pass writes their gradient; or,
      from chunks built with log_probs_from="hidden_states", hidden states (n, h): then logits never exist as a whole.
    labels: (n,) int64.
    Results: (n,) float32, the same on every rank; differentiable.
    """

    def __init__(self, model: PipelineModel, temperature: float) -> None:
        groups = model.groups
        self.temperature = temperature
        self._chunk = model.chunks[-1]
        self._vocabulary = VocabularyShard(
            model.shape.vocab_size, groups.coordinates.tp, groups.tp_group if groups.layout.tp > 1 else None
        )

    def log_probs(self, output: Tensor, labels: Tensor) -> Tensor:
        """Log-prob of each label alone: for where nobody looks at the entropy."""
        if self._chunk.log_probs_from == "hidden_states":
            weight = self._chunk.head_weight()
            return log_probs_from_hidden(output, weight, labels, self._vocabulary, temperature=self.temperature)
        return vocab_parallel_log_probs_from_logits(
            output, labels, self._vocabulary, temperature=self.temperature, overwrite_logits=True
        )

    def log_probs_and_entropy(self, output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Log-prob of each label, and entropy of each distribution."""
        if self._chunk.log_probs_from == "hidden_states":
            weight = self._chunk.head_weight()
            return log_probs_and_entropy_from_hidden(output, weight, labels, self._vocabulary, temperature=self.temperature)
        return vocab_parallel_log_probs_and_entropy(
            output, labels, self._vocabulary, temperature=self.temperature, overwrite_logits=True
        )
