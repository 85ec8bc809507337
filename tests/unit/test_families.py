"""Are the sizes of released models read right from their `config.json`, and is the rest refused with a reason?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.errors import UserError
from megappo.models.families import architecture_of, shape_of
from megappo.models.layers import rotary_frequencies
from megappo.models.shape import RopeScaling
from megappo.pp_weights.mapping import expected_hf_tensors

LLAMA2_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
LLAMA31_8B = LLAMA2_7B | {
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "vocab_size": 128256,
}
MISTRAL_7B = LLAMA2_7B | {
    "architectures": ["MistralForCausalLM"],
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
QWEN25_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def folder_of(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "parameters"),  # as the model cards give them
    [
        (LLAMA2_7B, 6_738_415_616),
        (LLAMA31_8B, 8_030_261_248),
        (MISTRAL_7B, 7_241_732_096),
        (QWEN25_05B, 494_032_768),
        (QWEN3_06B, 596_049_920),
    ],
    ids=["llama2-7b", "llama3.1-8b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b"],
)
def test_the_number_of_parameters_is_the_released_one(tmp_path: Path, config: dict[str, Any], parameters: int) -> None:
    assert shape_of(folder_of(tmp_path, config)).num_parameters == parameters


def test_parts_and_positions_are_read(tmp_path: Path) -> None:
    llama = shape_of(folder_of(tmp_path, LLAMA31_8B))
    assert (llama.rope_theta, llama.rope_scaling) == (500000.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192))
    mistral = shape_of(folder_of(tmp_path, MISTRAL_7B))
    assert (mistral.sliding_window, mistral.rope_theta, mistral.rope_scaling) == (4096, 10000.0, None)
    qwen2 = shape_of(folder_of(tmp_path, QWEN25_05B))
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.tied, qwen2.sliding_window, qwen2.head_dim) == (True, False, True, None, 64)
    qwen3 = shape_of(folder_of(tmp_path, QWEN3_06B))
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim, qwen3.num_heads * qwen3.head_dim) == (False, True, 128, 2048)


@pytest.mark.parametrize("keys", [("attention_bias",), ("mlp_bias",), ("attention_bias", "mlp_bias")], ids=str)
@pytest.mark.parametrize("head", ["CausalLM", "SequenceClassification"])
def test_biases_of_llama_are_the_tensors_that_transformers_has(tmp_path: Path, keys: tuple[str, ...], head: str) -> None:
    import transformers

    config = LLAMA31_8B | dict.fromkeys(keys, True) | {"num_hidden_layers": 2, "model_type": "llama", "num_labels": 1}
    shape = shape_of(folder_of(tmp_path, config | {"architectures": [f"LlamaFor{head}"]}))
    with torch.device("meta"):
        model = getattr(transformers, f"AutoModelFor{head}").from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    assert expected_hf_tensors(shape) == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_positions_in_the_form_of_transformers_5(tmp_path: Path) -> None:
    new = {key: value for key, value in LLAMA31_8B.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**LLAMA31_8B["rope_scaling"], "rope_theta": 500000.0}
    assert shape_of(folder_of(tmp_path, new)) == shape_of(folder_of(tmp_path, LLAMA31_8B))


def test_an_absent_window_of_mistral_is_its_default_and_null_is_none(tmp_path: Path) -> None:
    absent = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    assert shape_of(folder_of(tmp_path, absent)).sliding_window == 4096
    assert shape_of(folder_of(tmp_path, MISTRAL_7B | {"sliding_window": None})).sliding_window is None


@pytest.mark.parametrize("config", [LLAMA2_7B, LLAMA31_8B, LLAMA2_7B | {"rope_scaling": {"type": "linear", "factor": 4.0}}])
def test_rotary_frequencies_equal_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    folder = folder_of(tmp_path, config | {"model_type": "llama"})
    want = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder)).inv_freq
    torch.testing.assert_close(rotary_frequencies(shape_of(folder)), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LLAMA2_7B | {"architectures": ["GPT2LMHeadModel"]},
            "architectures=['GPT2LMHeadModel'] is not supported; use one of Llama",
        ),
        (MISTRAL_7B | {"attention_bias": True}, "attention_bias=true is not supported for mistral"),
        (QWEN25_05B | {"mlp_bias": True}, "mlp_bias=true is not supported for qwen2"),
        (QWEN3_06B | {"attention_bias": True}, "attention_bias=true is not supported for qwen3"),
        (LLAMA2_7B | {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        (LLAMA2_7B | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (QWEN25_05B | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn' is not supported"),
        (QWEN25_05B | {"use_sliding_window": True, "max_window_layers": 20}, "use_sliding_window=true is not supported"),
        ({key: value for key, value in LLAMA2_7B.items() if key != "vocab_size"}, "lacks the key 'vocab_size'"),
    ],
)
def test_what_no_family_does_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        shape_of(folder_of(tmp_path, config))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_reward_model_has_a_value_head_and_cannot_generate(tmp_path: Path) -> None:
    config = LLAMA2_7B | {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    folder = folder_of(tmp_path, config)
    shape = shape_of(folder)
    assert shape.head == "value"
    assert architecture_of(shape) == "LlamaForSequenceClassification"
    assert shape.num_parameters == 6_738_415_616 - 32000 * 4096 + 4096
    with pytest.raises(UserError, match="no vocabulary head, so it cannot generate"):
        shape_of(folder, head="lm")


@pytest.mark.parametrize("labels", [{"id2label": {"0": "A", "1": "B", "2": "C"}}, {"num_labels": 3}, {}])
def test_a_classifier_of_several_labels_is_refused(tmp_path: Path, labels: dict[str, Any]) -> None:
    config = LLAMA2_7B | {"architectures": ["LlamaForSequenceClassification"], **labels}
    with pytest.raises(UserError, match=r"has . labels; a value or reward model has 1"):
        shape_of(folder_of(tmp_path, config))


def test_a_language_model_can_be_given_a_value_head(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, LLAMA2_7B)
    assert shape_of(folder).head == "lm"
    assert shape_of(folder, head="value").head == "value"
