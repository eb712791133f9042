"""Chat templates: what is an answer, and what a stranger's template cannot do."""

import json

import pytest

from mpjax.data.text import ChatTemplate, template_beside
from mpjax.errors import UsageError


pytestmark = pytest.mark.extra
pytest.importorskip("jinja2")

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKING = (
    "{% for m in messages %}\n    <|{{ m.role }}|>\n    {%- if m.role == 'assistant' %}\n"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}\n{% else %}{{ m.content }}{% endif %}\n"
    "{%- endfor %}"
)
TALK = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "22"},
]


def template(source, **special):
    return ChatTemplate("tok", source, {"eos_token": "<e>", **special})


def answers(source, messages):
    text, places = template(source).conversation(messages)
    return [text[first:last] for first, last in places]


@pytest.mark.parametrize("source", [CHATML, MARKING])
def test_answers_are_the_assistants_turns_with_what_ends_them(source):
    text = template(source).conversation(TALK).text
    assert (
        text.replace("\n", "").replace(" ", "")
        == "<|user|>one?"
        + ("<e>" if source == CHATML else "")
        + "<|assistant|>1<e><|user|>two?"
        + ("<e>" if source == CHATML else "")
        + "<|assistant|>22<e>"
    )
    assert answers(source, TALK) == ["1<e>", "22<e>"]
    assert answers(source, TALK[:1]) == []


def test_a_prompt_ends_where_the_answer_begins():
    assert template(CHATML).prompt(TALK[:1]) == "<|user|>one?<e><|assistant|>"


def test_a_template_whose_prefixes_are_none_is_an_error():
    last_only = "{% for m in messages %}{{ m.role if loop.last else '' }}{{ m.content }}{% endfor %}"
    with pytest.raises(UsageError, match="has another text for the first 2 of 4 messages .* write|mark answers"):
        template(last_only).conversation(TALK)
    counting = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(UsageError, match="another text for the first 2 of 2 messages"):
        template(counting).conversation(TALK[:2])


def test_marks_that_mark_nothing_are_an_error():
    with pytest.raises(UsageError, match="has {% generation %}, and marks nothing in a conversation with an answer"):
        template("{% if false %}{% generation %}{% endgeneration %}{% endif %}x").conversation(TALK)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ strftime_now.__globals__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ self._TemplateReference__context }}",
        "{% include '/etc/passwd' %}",
        "{% set x = messages.append(1) %}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
    ],
)
def test_a_template_reaches_nothing_but_the_messages(source):
    with pytest.raises(UsageError, match="the chat template of tok fails: "):
        template(source).prompt(TALK)


def test_a_templates_own_refusal_is_the_error():
    with pytest.raises(UsageError, match="the chat template of tok fails: ValueError: roles must alternate"):
        template("{{ raise_exception('roles must alternate') }}").prompt(TALK)
    with pytest.raises(UsageError, match="the chat template of tok is damaged"):
        template("{% for %}")


def test_a_file_of_its_own_comes_before_the_settings(tmp_path):
    with pytest.raises(UsageError, match="the tokenizer tok has no chat template"):
        template_beside(tmp_path, "tok")
    settings = {
        "eos_token": {"content": "</s>"},
        "chat_template": [{"name": "default", "template": "a{{ eos_token }}"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert template_beside(tmp_path, "tok").prompt([]) == "a</s>"
    (tmp_path / "chat_template.jinja").write_text("b{{ eos_token }}")
    assert template_beside(tmp_path, "tok").prompt([]) == "b</s>"
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(UsageError, match=r"tokenizer_config.json is damaged"):
        template_beside(tmp_path, "tok")
