"""What does a run read before its models are built? `load_data`: the tokenizer, the training rows, the validation rows."""

from __future__ import annotations

from dataclasses import dataclass

from megappo.config.schema import Config
from megappo.data.prompts import PromptRow, load_prompts
from megappo.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Data:
    """Rows with their token ids. validation: None where the config names none."""

    tokenizer: Tokenizer
    train: list[PromptRow]
    validation: list[PromptRow] | None


def load_data(config: Config) -> Data:
    """Everything that data.train and data.validation name. Raises UserError for a tokenizer or row that cannot be used."""
    tokenizer = load_tokenizer(str(config.model.tokenizer))
    train = load_prompts(config.data.train, config.data, tokenizer, config.rollout.max_prompt_tokens, config.run.seed)
    return Data(tokenizer, train, load_validation(config, tokenizer) if config.data.validation is not None else None)


def load_validation(config: Config, tokenizer: Tokenizer) -> list[PromptRow]:
    """The first eval.max_rows rows of data.validation, which is given. A generated task draws other rows than for training."""
    data, longest = config.data, config.rollout.max_prompt_tokens
    assert data.validation is not None
    rows = load_prompts(data.validation, data, tokenizer, longest, config.run.seed + 1, key="data.validation")
    return rows[: config.eval.max_rows]
