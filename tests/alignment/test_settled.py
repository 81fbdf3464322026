"""Where a text may be taken up again. What settles is tested in whole alignments: test_aligner.py and test_growing.py."""

import pytest
from hypothesis import example, given
from tokenizers import Tokenizer

from opd.alignment.settled import Settling
from tests.alignment.conftest import TEXT
from tests.alignment.test_aligner import FIXED, TEXTS


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_nfc", "byte_plain", "gemma", "wordpiece", "wordpiece_lower"])
@FIXED
@given(text=TEXTS)
@example(text=TEXT)
@example(text="x  y   12 345 6789 'it's \n\n z")
def test_the_tokens_from_a_joint_on_are_those_of_the_text_from_there(tokenizers, kind, text):
    """Of those kinds that put no space before a text."""
    backend = Tokenizer.from_str(tokenizers[kind].backend_tokenizer.to_str())
    backend.post_processor = None  # type: ignore[assignment]
    encoding = backend.encode(text, add_special_tokens=False)
    counts = range(1, len(encoding))
    joints = Settling(backend).joints(encoding, text, counts)
    for count in (count for count, joint in zip(counts, joints) if joint):
        rest = text[encoding.offsets[count][0] :]
        assert backend.encode(rest, add_special_tokens=False).ids == encoding.ids[count:]
    assert any(joints) or text != TEXT
