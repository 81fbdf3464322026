"""The family's tokenizers, with marks for the turns of a chat.

`characters` and `operators` know all bytes, so every text round-trips, and a few merges. `calculator` knows nothing but what
episodes of `opd.envs.calculator` are made of, one token each: a student samples no stray bytes, and other text is refused.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
ASSISTANT = "<|assistant|>"
ROLES = ["<|system|>", "<|user|>", ASSISTANT]
MARKS = [PAD, BOS, *ROLES, END]
PAD_ID, BOS_ID, END_ID = (MARKS.index(mark) for mark in (PAD, BOS, END))  # the marks come first in every vocabulary

MERGES: dict[str, list[tuple[str, str]]] = {
    "characters": [("#", "#"), ("##", "##")],
    "operators": [*((digit, sign) for sign in "+=," for digit in "0123456789"), ("#", "#")],
}
"""Byte-pair merges of each tokenizer, in order of priority; all else is a token a byte.

`characters` has the answer mark `####`. `operators` has a sign together with the digit before it (`7+`, `0=`, `2,`) and the
mark in two halves, so that beside `characters` some of its tokens are several and several are one.
"""

TOOL, CALL = "<|tool|>", "<|call|>"
CALCULATOR_TOKENS = [*"0123456789+-*", "error"]
"""What is written in an episode, and a token each in `calculator`."""

# Each turn is its role's mark, its content and the end mark; a role without a mark is refused.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('no such role in this chat template: ' + message.role) }}
    {%- endif %}
    {{- '<|' + message.role + '|>' + message.content + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}"""


# As above; a call is its mark and the expression. Only the student's own text, which is sampled, needs no check.
CALCULATOR_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('no such role in this chat template: ' + message.role) }}
    {%- endif %}
    {%- for character in (message.content | replace('error', '') if message.role != 'assistant' else '') %}
        {%- if character not in '0123456789+-*' %}
            {{- raise_exception('this tokenizer knows digits, + - * and the word error; no ' + character | tojson) }}
        {%- endif %}
    {%- endfor %}
    {{- '<|' + message.role + '|>' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<|call|>' + call.function.arguments.expression }}
    {%- endfor %}
    {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}"""


def build_tokenizer(name: str, max_tokens: int) -> PreTrainedTokenizerFast:
    """A fast tokenizer that adds no token of its own: the chat template writes the marks. Pads on the left."""
    calculator = name == "calculator"
    return PreTrainedTokenizerFast(
        tokenizer_object=_of_the_calculator() if calculator else _of_bytes(MERGES[name]),
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        extra_special_tokens=[*ROLES, TOOL] if calculator else ROLES,
        chat_template=CALCULATOR_TEMPLATE if calculator else CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
        padding_side="left",
    )


def _of_bytes(merges: list[tuple[str, str]]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*MARKS, *alphabet, *(left + right for left, right in merges)]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return bpe


def _of_the_calculator() -> Tokenizer:
    # The mark of a call is no special token: it is the student's text, and is there where special ones are left out.
    tokens = [*MARKS, TOOL, CALL, *CALCULATOR_TOKENS]
    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="none"))  # none: it raises
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\|call\|>|error|[\s\S]"), "isolated")  # type: ignore[assignment]
    words.decoder = decoders.Fuse()  # type: ignore[assignment]
    return words
