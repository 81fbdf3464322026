"""`benchmarks.load` with a few clients, and what its kept figures must show."""

import json
from pathlib import Path

from benchmarks import load

RESULT = Path(load.__file__).parent / "results" / "load.json"


def test_a_short_run(tmp_path, capsys):
    out = tmp_path / "load.json"
    load.main(["--requests", "120", "--clients", "8", "--out", str(out)])
    report = json.loads(out.read_text())
    assert report == json.loads(capsys.readouterr().out)
    assert report["errors"] == {}
    assert set(report["requests_by_kind"]) == set(load.KINDS)
    assert 120 <= sum(report["requests_by_kind"].values()) < 120 + 8 * 2 * load.APPENDS
    assert report["server"]["opd_scored_tokens_total"] > 1000
    assert report["server"]["opd_stream_hits_total"] > 0


def test_the_kept_figures():
    report = json.loads(RESULT.read_text())
    assert report["settings"]["clients"] == 32
    assert report["settings"]["requests"] == 5000
    assert report["errors"] == {}
    assert len(report["rss_mib_every_1000"]) == 5
    assert abs(report["rss_growth"]) < 0.1
    assert report["server"]["opd_stream_evictions_total"] > 0
    assert report["streams_sent_again"] > 0
