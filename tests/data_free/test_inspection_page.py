"""The page about pools: one file without scripts, whatever the prompts hold."""

import re
from html.parser import HTMLParser

from opd.data_free.inspection import inspect_pools, lengths
from opd.data_free.inspection_page import render
from opd.data_free.pool import Row

NASTY = "<script>alert(1)</script> \u202e & <img src=x onerror=y> $x^2$"


class Reader(HTMLParser):
    """The tags that are open, and every tag, id and link seen."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.ids, self.links = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [value for name, value in attrs if name in {"href", "src", "xlink:href"}]
        if tag not in {"meta", "link", "input", "br", "use", "path"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in {"use", "path"}:
            assert self.open.pop() == tag


def page(pools, solvability=None):
    facts = inspect_pools(pools, {"farm": [("f0", NASTY)]}, show=2)
    for pool in facts.values():
        pool |= {"solvability": solvability} if solvability else {}
    return render(facts, {name: lengths(rows, None) for name, rows in pools.items()}, "words")


def read(html):
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    return reader


def test_it_is_whole_and_escaped():
    pools = {f"{NASTY}-{n}": [Row(f"p{k}", f"{NASTY} {k % 2}", NASTY) for k in range(4 + n)] for n in range(3)}
    solved = {"teacher": NASTY, "samples": 2, "num_asked": 4, "num_skipped": 0, "answered": 0.5, "agreement": 0.25}
    html = page(pools, {**solved, "histogram": {"0/2": 2, "1/2": 2, "2/2": 0}})
    reader = read(html)
    assert not {"script", "img"} & set(reader.tags)
    assert "\u202e" not in html
    assert "\\u202e" in html
    assert len(set(reader.ids)) == len(reader.ids)
    assert {link[1:] for link in reader.links if link.startswith("#")} <= set(reader.ids)
    assert all(link.startswith(("#", "data:")) for link in reader.links)
    assert html.count("<svg") - html.count('<svg class="') == 2  # the histograms of length and agreement
    assert html.count("<article>") == 6


def test_histograms_are_shares_of_each_pool():
    one = page({"one": [Row(f"p{k}", "w " * (k + 1)) for k in range(5)]})
    assert re.search(r"\b1 pool\b(?!s)", one)
    assert re.search(r"\b5 prompts\b", one)
    assert re.search(r'aria-label="Length in words\. one median 3 \(words\)', one)
    assert "Agreement of the teacher" not in one
    read(one)


def test_many_pools_and_texts_of_one_length():
    html = page({f"pool-{n}": [Row("a", "x")] for n in range(14)})
    read(html)
    assert html.count("group-11-bins") == 1
    assert "group-12-bins" not in html  # it has no colour of its own, and is in the tables
