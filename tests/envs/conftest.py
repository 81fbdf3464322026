"""A byte-level tokenizer whose chat template a test chooses, and templates of the kinds that models have."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = "<|im_end|>"
MARKS = ["<|endoftext|>", "<|im_start|>", EOS]

PLAIN = r"""
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""

QWEN2_5 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- set content = m.content %}
    {%- if m.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\n' if content or not loop.first }}
            {{- '<tool_call>\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
            {{- '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""

# The reasoning of the turns before the user's last message is left out.
QWEN3 = r"""
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}""" + QWEN2_5.replace(
    "{%- set content = m.content %}",
    r"""{%- set content = m.content %}
    {%- if m.role == 'assistant' and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}""",
)

# As Mistral's: the tools stand before the user's last message, and calls need ids.
TOOLS_LAST = r"""
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and m == users[-1] %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id | length != 9 %}
            {{- raise_exception('ids have length 9') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]' + {'content': m.content, 'call_id': m.tool_call_id} | tojson + '[/TOOL_RESULTS]' }}
    {%- elif m.tool_calls %}
        {{- m.content + '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}
                {{- raise_exception('ids have length 9') }}
            {%- endif %}
            {{- call.function | tojson + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- else %}
        {{- m.content + eos_token }}
    {%- endif %}
{%- endfor %}"""

STRIPPING = PLAIN.replace("m.content", "m.content | trim")
WITHOUT_EOS = PLAIN.replace(EOS, "")
SPACE_BEFORE_EOS = PLAIN.replace(EOS, f" {EOS}")


def beginning(condition: str, statement: str, template: str) -> str:
    """The template with a statement at the beginning of the loop, for some of the messages `m`."""
    loop = "{%- for m in messages %}"
    return template.replace(loop, f"{loop}{{%- if {condition} %}}{statement}{{%- endif %}}")


ONLY_USERS = beginning("m.role == 'tool'", "{{- raise_exception('Only user and assistant roles!') }}", PLAIN)
SILENT = PLAIN.replace("in messages %}", "in messages if m.role != 'tool' %}")
CALL_FIRST = beginning(
    "m.role == 'tool' and not messages[loop.index0 - 1].tool_calls",
    "{{- raise_exception('a tool message without a call') }}",
    QWEN2_5,
)


@pytest.fixture(scope="session")
def chat_tokenizer():
    """`chat_tokenizer(template, **marks)`: bytes and a few merges; `marks` are further special tokens by their text, with
    options of `AddedToken`."""

    def build(template: str | None, **marks: dict) -> PreTrainedTokenizerFast:
        merges = [("Ċ", "Ċ"), ("a", "b"), ("Ċ", "<"), (".", "Ċ"), ("Ġ", "a")]
        tokens = [*MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
        bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # type: ignore[assignment]
        bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        bpe.add_special_tokens([AddedToken(mark, special=True, **marks.get(mark, {})) for mark in [*MARKS, *marks]])
        return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS, pad_token=MARKS[0], chat_template=template)

    return build
