import json

import pytest

from headway.contracts.errors import ConfigError, DataError
from headway.contracts.types import Prompt
from headway.text.tokenizer import TextTokenizer

CHAT = (
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "world"},
    {"role": "user", "content": "x"},
)


def prompt(**content) -> Prompt:
    return Prompt(group_id="g", **content)


def test_ids_are_used_as_they_are(plain_tokenizer):
    assert plain_tokenizer.encode_prompt(prompt(input_ids=(99, 0, 3))) == [99, 0, 3]


def test_text_is_encoded_with_the_special_tokens_of_the_model(plain_tokenizer):
    assert plain_tokenizer.encode_prompt(prompt(text="hello world")) == [1, 6, 7]


def test_decode_leaves_special_tokens_out(plain_tokenizer):
    assert plain_tokenizer.decode([1, 6, 7, 2]) == "hello world"


def test_a_chat_is_rendered_by_the_template_and_special_tokens_are_not_doubled(chat_tokenizer):
    assert chat_tokenizer.encode_prompt(prompt(messages=CHAT)) == [1, 3, 6, 4, 7, 2, 3, 8, 4]


def test_what_may_end_a_sequence_is_named_by_the_models_files(tokenizer_dir):
    special = TextTokenizer(str(tokenizer_dir)).special_ids
    (tokenizer_dir / "config.json").write_text('{"eos_token_id": 7}')
    (tokenizer_dir / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    assert TextTokenizer(str(tokenizer_dir)).end_ids == sorted({*special, 6, 7})


def test_a_template_inside_the_settings_is_found(tokenizer_dir):
    file = tokenizer_dir / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    assert TextTokenizer(str(tokenizer_dir)).encode_prompt(prompt(messages=CHAT)) == [6, 7, 8]


def test_the_template_named_default_is_taken_from_a_list(tokenizer_dir):
    file = tokenizer_dir / "tokenizer_config.json"
    templates = [
        {"name": "tool_use", "template": "x"},
        {"name": "default", "template": "{{ messages[0].content }}"},
    ]
    file.write_text(json.dumps({"chat_template": templates}))
    assert TextTokenizer(str(tokenizer_dir)).encode_prompt(prompt(messages=CHAT)) == [6]


def test_a_chat_without_a_template_is_a_data_error(plain_tokenizer):
    with pytest.raises(DataError, match="no chat template; send the prompt as text"):
        plain_tokenizer.encode_prompt(prompt(messages=CHAT))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}", "chat template failed on group 'g'"),
        ("{{ messages.x.y }}", "chat template failed on group 'g'"),
        ("{{ messages[0].content + 1 }}", "chat template failed on group 'g'"),
        ("{{ ''.__class__.__mro__ }}", "chat template failed on group 'g'"),
    ],
)
def test_a_template_that_fails_is_a_data_error(tokenizer_dir, template, message):
    (tokenizer_dir / "chat_template.jinja").write_text(template)
    with pytest.raises(DataError, match=message):
        TextTokenizer(str(tokenizer_dir)).encode_prompt(prompt(messages=CHAT))


@pytest.mark.parametrize("content", [{"input_ids": ()}, {"messages": ()}], ids=str)
def test_a_prompt_without_tokens_is_a_data_error(tokenizer_dir, content):
    (tokenizer_dir / "chat_template.jinja").write_text("{% for m in messages %}x{% endfor %}")
    with pytest.raises(DataError, match="group 'g' has no tokens"):
        TextTokenizer(str(tokenizer_dir)).encode_prompt(prompt(**content))


def test_a_directory_without_a_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        TextTokenizer(str(tmp_path))
