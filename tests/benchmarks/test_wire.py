"""`benchmarks.wire` on small messages, and what its kept figures must show."""

import json
from pathlib import Path

from benchmarks import wire

RESULT = Path(wire.__file__).parent / "results" / "wire.json"


def test_every_form_of_every_payload(tmp_path, capsys):
    out = tmp_path / "wire.json"
    small = ["--tokens", "16", "--k", "4", "--hidden", "8", "--hidden-tokens", "4", "--rounds", "1", "--seconds", "0"]
    wire.main([*small, "--out", str(out)])
    report = json.loads(out.read_text())
    assert {row["form"] for row in report["rows"]} == wire.FORMS.keys()
    assert len(report["rows"]) == 4 * len(wire.FORMS)
    assert report["settings"]["tokens"] == 16
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + len(report["rows"])


def test_the_kept_figures():
    rows = {(row["payload"], row["form"]): row for row in json.loads(RESULT.read_text())["rows"]}
    row = rows["top-64 + tail + sampled", "opd"]
    assert row["tokens"] == 2048
    assert row["bytes_per_token"] <= 530
    assert row["encode_us_per_token"] + row["decode_us_per_token"] <= 0.1
    assert rows["sampled", "opd"]["bytes_per_token"] < 4.2
