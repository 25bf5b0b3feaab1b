import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from headway.text.tokenizer import TextTokenizer

WORDS = ["<unk>", "<s>", "</s>", "user:", "assistant:", "system:", "hello", "world", "x"]
CHAT_TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{% generation %}{{ ' assistant: ' + message.content + ' ' + eos_token }}{% endgeneration %}
{%- else %}
{{- ' ' + message.role + ': ' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ ' assistant:' }}{% endif %}"""


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    """A word-level tokenizer that puts <s> in front of plain text, without a chat template."""
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token) for token in ("<s>", "</s>")])
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def plain_tokenizer(tokenizer_dir: Path) -> TextTokenizer:
    return TextTokenizer(str(tokenizer_dir))


@pytest.fixture
def chat_tokenizer(tokenizer_dir: Path) -> TextTokenizer:
    (tokenizer_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return TextTokenizer(str(tokenizer_dir))
