"""How do chat messages become text? Through the template that lies beside the model's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.errors import UserError

Message = Mapping[str, Any]
"""{"role": ..., "content": ...}, and whatever else the template makes use of."""


def chat_template(folder: Path, config: Mapping[str, Any]) -> str:
    """The template beside the tokenizer: chat_template.jinja, else the key in tokenizer_config.json (the one named `default`)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        raise UserError(
            f"tokenizer {str(folder)!r} has no chat template; set data.chat_template=false or add chat_template.jinja"
        )
    return template


def render_chat_text(template: str, messages: Sequence[Message], special_tokens: Mapping[str, Any], source: Path) -> str:
    """The text of the messages, up to where the assistant begins to speak. Raises UserError where the template refuses them."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, _ = render_jinja_template([list(messages)], chat_template=template, add_generation_prompt=True, **special_tokens)
    except (TemplateError, TypeError) as error:
        raise UserError(f"the chat template of {str(source)!r} refuses the messages ({error}); mend the messages") from None
    return str(texts[0])


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object beside the tokenizer; empty where there is no such file."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); copy the file again from the model's source") from None
    return loaded if isinstance(loaded, dict) else {}
