"""Completions on disk: what a killed evaluation keeps, and what it samples again."""

import json

import pytest

from opd.errors import UserError
from opd.eval.samples import Sampled, SampleFile

HEADER = {"model": "m", "temperature": 0.7}
PAIRS = [(index, sample) for index in range(3) for sample in range(2)]


def sampled(pair):
    return Sampled(*pair, response=f"é{pair}", num_tokens=3, finish="eos", repetitive=False)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "suite.samples.jsonl"


def begin(path, count, **options):
    file = SampleFile(path, HEADER, **options)
    file.blocks(PAIRS, 2)
    for pair in PAIRS[:count]:
        file.add(sampled(pair))
    return file


def test_nothing_yet(path):
    assert SampleFile(path, HEADER).blocks(PAIRS, 4) == [PAIRS[:4], PAIRS[4:]]


def test_only_whole_blocks_are_kept(path):
    begin(path, 3)
    file = SampleFile(path, HEADER, resume=True)
    assert file.blocks(PAIRS, 2) == [PAIRS[2:4], PAIRS[4:]]
    assert list(file.done) == PAIRS[:2]
    assert len(path.read_text().splitlines()) == 3  # what is sampled again is gone from the file


def test_a_single_block_is_kept_whole_or_not_at_all(path):
    begin(path, 3)
    assert SampleFile(path, HEADER, resume=True).blocks(PAIRS, 64) == [PAIRS]


def test_without_blocks_every_completion_is_kept(path):
    begin(path, 3)
    file = SampleFile(path, HEADER, resume=True)
    assert file.blocks(PAIRS, None) == [PAIRS[3:]]
    assert file.done == {pair: sampled(pair) for pair in PAIRS[:3]}


def test_a_finished_file_leaves_nothing_to_do(path):
    begin(path, len(PAIRS))
    assert SampleFile(path, HEADER, resume=True).blocks(PAIRS, 2) == []


@pytest.mark.parametrize("cut", [2, 7, 30])
def test_a_torn_line_is_dropped(path, cut):
    begin(path, 4)
    path.write_bytes(path.read_bytes()[:-cut])
    assert SampleFile(path, HEADER, resume=True).blocks(PAIRS, 2) == [PAIRS[2:4], PAIRS[4:]]


def test_a_line_torn_inside_a_letter_is_dropped(path):
    begin(path, 2)
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex("é".encode()) + 1])
    assert SampleFile(path, HEADER, resume=True).blocks(PAIRS, None) == [PAIRS[1:]]


def test_what_is_no_file_of_samples_is_refused(path):
    path.write_text('["another", "file"]\n')
    with pytest.raises(UserError, match="is no file of samples"):
        SampleFile(path, HEADER, resume=True)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="cannot be read"):
        SampleFile(path, HEADER, resume=True)


def test_samples_of_no_problem_are_left_out(path):
    begin(path, 1)
    with path.open("a") as file:
        file.write(json.dumps({**vars(sampled((9, 0)))}) + "\n")
    file = SampleFile(path, HEADER, resume=True)
    file.blocks(PAIRS, None)
    assert list(file.done) == PAIRS[:1]


def test_a_torn_header_begins_anew(path):
    path.write_text('{"model": "m", "temp')
    assert SampleFile(path, HEADER, resume=True).blocks(PAIRS, None) == [PAIRS]


def test_other_settings_are_refused(path):
    begin(path, 1)
    with pytest.raises(UserError, match=r"has temperature 0.7, not 0.6.*--overwrite"):
        SampleFile(path, {**HEADER, "temperature": 0.6}, resume=True)


def test_existing_samples_are_not_lost_by_accident(path):
    begin(path, 1)
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"--resume or replace it with --overwrite"):
        SampleFile(path, HEADER)
    assert path.read_bytes() == before
    assert SampleFile(path, HEADER, overwrite=True).blocks(PAIRS, 6) == [PAIRS]


def test_the_file_is_plain_json_lines(path):
    begin(path, 1)
    header, line = path.read_text().splitlines()
    assert json.loads(header) == HEADER
    assert json.loads(line)["response"] == "é(0, 0)"
