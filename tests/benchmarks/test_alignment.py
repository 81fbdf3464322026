"""`benchmarks.alignment` on short answers, the aligner it compares with, and what its kept figures must show."""

import json
from pathlib import Path

from benchmarks import alignment

RESULT = Path(alignment.__file__).parent / "results" / "alignment.json"


def test_a_short_run(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("OPD_REAL_MODELS", raising=False)
    out = tmp_path / "out.json"
    alignment.main(["--tokens", "64", "--answers", "2", "--rounds", "1", "--out", str(out)])
    report = json.loads(out.read_text())
    assert [row["tokens"] for row in report["speed"]] == [128, 128]
    assert all(row["byte_coverage"] == 1.0 for row in report["speed"])
    assert len(report["byte_coverage"]) == 2 * len(alignment.CASES)
    assert len(capsys.readouterr().out.splitlines()) == 3 + 1 + 1 + 2 * len(alignment.CASES)


def test_decoding_token_by_token_finds_common_ends_until_a_character_is_split():
    class Letters:
        """Decodes an id to that letter; 99 is a byte that is no character."""

        def decode(self, ids):
            return "".join(
                "\ufffd" if index == 99 else chr(ord("a") + index // 10) + chr(ord("a") + index % 10) for index in ids
            )

    units = alignment.decoded_units(Letters(), Letters(), *map(alignment.np.array, ([1, 23, 99, 4], [1, 23, 4])))
    assert units == [(1, 1, True), (2, 2, True), (4, 3, False)]


def test_the_kept_figures():
    report = json.loads(RESULT.read_text())
    assert report["settings"]["tokens"] == 4096
    for row in report["speed"]:
        assert row["opd_tokens_per_s"] >= 300_000
        assert row["byte_coverage"] >= 0.995
    for row in report["byte_coverage"]:
        assert row["opd"] == 1.0
        assert row["decoded"] < 0.2 or row["text"] in {"plain", "newlines", "accents"}
