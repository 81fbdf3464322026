"""Which drafts are kept, and which prompts are still to be written."""

import pytest

from opd.data_free.drafts import Drafts
from opd.eval.samples import Sampled, SampleFile


@pytest.fixture
def drafts(tmp_path):
    """`drafts(texts, max_attempts)`: those of prompts by (prompt, attempt); a text of "" cannot be used."""

    def build(texts, max_attempts=3):
        file = SampleFile(tmp_path / "p.drafts.jsonl", {"seed": 0}, overwrite=True)
        file.keep([])
        for (index, attempt), text in texts.items():
            file.add(Sampled(index, attempt, text, 1, "eos", False))
        return Drafts(
            SampleFile(file.path, {"seed": 0}, resume=True), max_attempts, lambda one: "" if one.response else "empty"
        )

    return build


def test_a_block_is_whole_or_written_anew(drafts):
    complete = {(0, 0): "a", (1, 0): "", (1, 1): "b"}
    torn = {(2, 0): "c", (3, 0): ""}
    found = drafts({**complete, **torn})
    assert found.blocks(5, 2) == [range(2, 4), range(4, 6)]
    assert set(found.file.done) == set(complete)
    assert set(SampleFile(found.file.path, {"seed": 0}, resume=True).done) == set(complete)


def test_a_smaller_pool_leaves_the_other_blocks_alone(drafts):
    found = drafts({(index, 0): "a" for index in range(6)})
    assert found.blocks(1, 2) == []
    assert len(found.file.done) == 6


def test_behind_a_server_each_draft_stands_for_itself(drafts):
    found = drafts({(0, 0): "a", (2, 0): "", (3, 0): "", (3, 1): "", (3, 2): ""})
    assert [list(block) for block in found.blocks(4, None)] == [[1], [2]]  # prompt 3 has had all its attempts
    assert len(found.file.done) == 5
    assert found.unusable(range(4)) == {"empty": 4, "truncated": 0, "too_long": 0}


def test_more_attempts_than_before_begin_a_block_again(drafts):
    texts = {(0, 0): "", (0, 1): "", (1, 0): "a"}
    assert drafts(texts, max_attempts=2).blocks(2, 2) == []
    assert drafts(texts, max_attempts=3).blocks(2, 2) == [range(2)]
