"""The family's tokenizers: bytes (so every text round-trips), a few merges, and marks for the turns of a chat."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
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


def build_tokenizer(name: str, max_tokens: int) -> PreTrainedTokenizerFast:
    """A fast tokenizer that adds no token of its own: the chat template writes the marks. Pads on the left."""
    merges = MERGES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*MARKS, *alphabet, *(left + right for left, right in merges)]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        extra_special_tokens=ROLES,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
        padding_side="left",
    )
