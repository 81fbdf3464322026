"""`opd prompts inspect | filter | calibrate` on micro models."""

import json
import sys

import pytest
from datasets import load_dataset

from opd.cli import main
from opd.data_free.pool import Row, read_pool, write_pool

STORY = "a farmer has seventeen sheep and all but nine of them run away so how many sheep does he have left now"
LETTERS = "ijklmnopqrstuvwxyz"  # tokens of the micro tokenizer that are answers here
WHOLE_BAND = ("--low", "0", "--high", "1")
ANSWERING = ("--template", "{prompt}", "--max-new-tokens", "6", "--max-rows", "5")


@pytest.fixture(scope="module")
def talker(model_folder):
    """`talker(seed)`: a model whose tokens are letters a to h and boxed numbers from 0 to 2."""

    def build(seed):
        folder = model_folder(seed)
        content = json.loads((folder / "tokenizer.json").read_text())
        vocab = content["model"]["vocab"]
        for place, letter in enumerate(LETTERS):
            vocab[rf"\boxed{{{place % 3}}}{' ' * (place // 3)}"] = vocab.pop(letter)
        (folder / "tokenizer.json").write_text(json.dumps(content))
        return str(folder)

    return build


@pytest.fixture(scope="module")
def student(talker):
    return talker(3)


@pytest.fixture(scope="module")
def teacher(talker):
    return talker(7)


@pytest.fixture
def pool(tmp_path):
    """A pool whose prompts the micro models read, with answers."""
    path = tmp_path / "pool.jsonl"
    texts = ["".join("abcdefgh"[(n * k) % 8] for k in range(1, 5)) for n in range(12)]
    rows = [Row(f"p{n}", text, provenance={"teacher": "t"}, further={"gold": "1"}) for n, text in enumerate(texts)]
    write_pool(path, rows)
    return path


@pytest.fixture
def prompts(monkeypatch, capsys):
    """`prompts(*arguments)`: (exit code, stdout, error lines) of `opd prompts`."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["opd", "prompts", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return end.value.code or 0, said.out, [line for line in said.err.splitlines() if line.startswith("error")]

    return call


def write(path, *texts):
    write_pool(path, [Row(f"p{n}", text, provenance={"teacher": "t"}) for n, text in enumerate(texts)])
    return path


def suite(path, *texts):
    rows = [{"id": f"s{n}", "problem": text, "answer": "1"} for n, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_inspect_tells_of_pools_side_by_side(prompts, tmp_path):
    first = write(tmp_path / "a" / "pool.jsonl", STORY, "2 + 2", STORY)
    second = write(tmp_path / "b" / "pool.jsonl", "[bold]7[/bold] \u202e", *(f"{STORY} {n}" for n in range(6)))
    before = first.read_bytes()
    farm = suite(tmp_path / "farm.jsonl", STORY)
    code, out, errors = prompts("inspect", first, second, "--suite", farm, "--show", "2", "--out", tmp_path / "page.html")
    assert (code, errors) == (0, [])
    assert "overlaps with 1 of 1 problems of farm" in out
    assert "\u202e" not in out
    assert str(first) in out.replace("\n", "")  # both are called pool
    assert "<h1>" in (tmp_path / "page.html").read_text()
    assert first.read_bytes() == before
    code, out, _ = prompts("inspect", first, "--suite", "farm", "--suite-dir", tmp_path, "--json")
    facts = json.loads(out)
    assert facts["pool"]["exact_duplicates"]["num_repeats"] == 1
    assert facts["pool"]["overlap"]["farm"]["prompts"] == ["p0", "p2"]
    assert "solvability" not in facts["pool"]


def test_inspect_measures_in_tokens(prompts, pool, teacher):
    _, out, _ = prompts("inspect", pool, "--tokenizer", teacher, "--json")
    assert json.loads(out)["pool"]["u4"]["unit"] == "tokens"
    assert json.loads(out)["pool"]["length"]["tokens"]["max"] == 4


def test_the_teacher_is_asked_and_a_killed_command_goes_on(prompts, pool, teacher, tmp_path):
    asked = ("inspect", pool, "--teacher", teacher, "--samples", "3", "--json", *ANSWERING)
    code, out, errors = prompts(*asked, "--out", tmp_path / "page.html")
    assert (code, errors) == (0, [])
    found = json.loads(out)["pool"]["solvability"]
    assert (found["num_asked"], found["num_skipped"], sum(found["histogram"].values())) == (12, 0, 12)
    assert 0 < found["histogram"]["1/3"] + found["histogram"]["2/3"] < 12
    votes = [int(level[0]) * number for level, number in found["histogram"].items()]
    assert found["agreement"] == pytest.approx(sum(votes) / 36)
    samples = tmp_path / "page.1.samples.jsonl"
    whole = samples.read_text().splitlines(keepends=True)
    assert len(whole) == 37
    assert "Agreement of the teacher" in (tmp_path / "page.html").read_text()
    samples.write_text("".join(whole[:20]) + whole[20][:9])
    code, again, _ = prompts(*asked, "--out", tmp_path / "page.html", "--resume")
    assert (code, json.loads(again)) == (0, json.loads(out))
    assert prompts(*asked, "--out", tmp_path / "page.html")[0] == 2
    code, _, errors = prompts(*asked, "--out", tmp_path / "page.html", "--resume", "--seed", "1")
    assert (code, errors[0][:15]) == (2, "error: --resume")


def test_filter_writes_what_stays_and_says_what_goes(prompts, tmp_path):
    path = write(tmp_path / "pool.jsonl", STORY, "2 + 2", f"{STORY} then", "2 + 2 ", "fine")
    before = path.read_bytes()
    sums = suite(tmp_path / "sums.jsonl", "2 + 2")
    out = tmp_path / "new.jsonl"
    code, said, _ = prompts("filter", path, "--out", out, "--dedup", "near", "--decontaminate", sums)
    assert code == 0
    assert [json.loads(line) for line in said.splitlines()] == [
        {"id": "p1", "because": "overlaps with sums", "of": "s0"},
        {"id": "p2", "because": "near duplicate", "of": "p0"},
        {"id": "p3", "because": "overlaps with sums", "of": "s0"},
    ]
    assert [row.id for row in read_pool(out, "")] == ["p0", "p4"]
    assert load_dataset("json", data_files=str(out), split="train")[1]["prompt"] == "fine"
    assert path.read_bytes() == before
    assert prompts("filter", path, "--out", out, "--dedup", "exact")[0] == 2
    assert prompts("filter", path, "--out", out, "--dedup", "exact", "--overwrite")[0] == 0
    assert [row.id for row in read_pool(out, "")] == ["p0", "p1", "p2", "p4"]


def rates(path):
    return {row.id: row.further["pass_rate"] for row in read_pool(path, "")}


def last_boxes(path, answer):
    """For each prompt the share of samples whose last box holds `answer`."""
    found = {}
    for line in path.read_text().splitlines()[1:]:
        row = json.loads(line)
        found.setdefault(row["index"], []).append(row["response"].rpartition("boxed{")[2][:1] == answer)
    return {f"p{index}": sum(right) / len(right) for index, right in sorted(found.items())}


def test_calibrate_by_the_answers_in_the_rows(prompts, pool, student, tmp_path):
    out = tmp_path / "new.jsonl"
    asked = ("calibrate", pool, "--out", out, "--student", student, "--samples", "5", "--temperature", "1", *ANSWERING)
    code, said, errors = prompts(*asked, "--answers", "gold")
    assert (code, errors) == (0, [])
    counts = json.loads(said)
    assert counts["num_kept"] + counts["num_too_easy"] + counts["num_too_hard"] == counts["num_prompts"] == 12
    assert 0 < counts["num_kept"] < 12
    kept = read_pool(out, "")
    assert [row.id for row in kept] == [row.id for row in read_pool(pool, "") if row.id in rates(out)]
    assert all(0.2 <= rate <= 0.8 for rate in rates(out).values())
    assert kept[0].further["gold"] == "1"
    (told,) = kept[0].provenance["selected"]
    assert (told["by"], told["band"], told["judge"], told["samples"]) == ("calibrate", [0.2, 0.8], {"answers": "gold"}, 5)
    before = out.read_bytes()
    assert prompts(*asked, "--answers", "gold")[0] == 2
    code, said, errors = prompts(*asked, "--answers", "gold", "--resume", "--low", "0.99", "--high", "0.99")
    assert (code, out.read_bytes()) == (2, before)  # nothing is left, nothing is lost
    assert "no prompt is left (" in errors[0]
    code, _, _ = prompts(*asked, "--answers", "gold", "--resume", "--low", "0", "--high", "1")
    assert len(rates(out)) == 12
    assert rates(out) == last_boxes(out.with_suffix(".samples.jsonl"), "1")


def test_calibrate_goes_on_where_it_was_killed(prompts, pool, student, tmp_path):
    asked = ("--student", student, "--samples", "4", "--answers", "gold", "--low", "0", *ANSWERING)
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    assert prompts("calibrate", pool, "--out", whole, *asked)[0] == 0
    lines = whole.with_suffix(".samples.jsonl").read_text().splitlines(keepends=True)
    killed.with_suffix(".samples.jsonl").write_text("".join(lines[:17]) + lines[17][:5])
    assert prompts("calibrate", pool, "--out", killed, *asked, "--resume")[0] == 0
    assert killed.read_bytes() == whole.read_bytes()


def test_calibrate_by_a_function(prompts, pool, student, tmp_path):
    (tmp_path / "judge.py").write_text("def starts_low(response, answer, prompt):\n    return response[:1] < 'e'\n")
    out = tmp_path / "new.jsonl"
    asked = ("calibrate", pool, "--out", out, "--student", student, "--samples", "4", *WHOLE_BAND, *ANSWERING)
    code, _, errors = prompts(*asked, "--reward", f"{tmp_path}/judge.py:starts_low")
    assert (code, errors) == (0, [])
    lines = out.with_suffix(".samples.jsonl").read_text().splitlines()[1:]
    first = [json.loads(line)["response"][:1] < "e" for line in lines if json.loads(line)["index"] == 0]
    assert rates(out)["p0"] == sum(first) / 4
    assert read_pool(out, "")[0].provenance["selected"][0]["judge"] == {"reward": "judge.py:starts_low"}


def test_calls_that_do_not_end_are_no_failures(prompts, pool, student, tmp_path):
    """Those of one prompt hang, those of another end their process: nothing is said about either."""
    judge = tmp_path / "judge.py"
    lost = "if row['id'] == 'p1': time.sleep(60)\n    if row['id'] == 'p2': os._exit(1)"
    judge.write_text(f"import os, time\n\ndef judge(response, answer, row):\n    {lost}\n    return response[:1] < 'e'\n")
    out = tmp_path / "new.jsonl"
    asked = ("calibrate", pool, "--out", out, "--student", student, "--samples", "2", *WHOLE_BAND, *ANSWERING)
    asked += ("--reward", f"{judge}:judge", "--time-limit-s", "0.5")
    code, said, errors = prompts(*asked)
    assert (code, errors) == (0, [])
    counts = json.loads(said)
    assert (counts["num_kept"], counts["num_unjudged"], counts["num_too_long"], counts["num_lost_calls"]) == (10, 2, 0, 4)
    assert {"p1", "p2"}.isdisjoint(rates(out))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("import os; os._exit(1)", "took longer than --time-limit-s 0.5 or ended its process in every call; mend it"),
        ("return -1", "returned -1 for prompt p0; return a bool, or a number from 0 to 1"),
        ("return {}[1]", "failed on prompt p0: KeyError: 1 (judge.py, line 1: def judge("),
    ],
)
def test_a_function_that_cannot_judge(prompts, pool, student, tmp_path, body, expected):
    judge, out = tmp_path / "judge.py", tmp_path / "new.jsonl"
    judge.write_text(f"def judge(response, answer, row): {body}\n")
    asked = ("--reward", f"{judge}:judge", "--time-limit-s", "0.5", "--samples", "2", *WHOLE_BAND, *ANSWERING)
    code, _, errors = prompts("calibrate", pool, "--out", out, "--student", student, *asked)
    assert (code, len(errors), out.exists()) == (2, 1, False)
    assert expected in errors[0]


def test_a_teacher_without_final_answers(prompts, pool, student, model_folder, tmp_path):
    """The bare micro model writes letters alone."""
    asked = ("--teacher", model_folder(3), *ANSWERING, "--temperature", "1")
    code, said, _ = prompts("inspect", pool, "--out", tmp_path / "page.html", *asked)
    assert (code, "no final answer in any sample" in " ".join(said.split())) == (0, True)
    assert "agrees with itself in" not in said
    code, _, errors = prompts("calibrate", pool, "--out", tmp_path / "new.jsonl", "--student", student, *asked)
    assert (code, "--teacher: no final answer in any sample; see --template" in errors[0]) == (2, True)


def test_calibrate_by_the_teachers_agreement_with_itself(prompts, pool, student, teacher, tmp_path):
    out = tmp_path / "new.jsonl"
    asked = ("calibrate", pool, "--out", out, "--student", student, "--samples", "4", *WHOLE_BAND, *ANSWERING)
    asked += ("--teacher", teacher, "--teacher-samples", "5", "--temperature", "1")
    code, said, errors = prompts(*asked, "--min-agreement", "0.6")
    assert (code, errors) == (0, [])
    counts = json.loads(said)
    assert 0 < counts["num_unjudged"] < 12
    assert counts["num_kept"] == len(rates(out)) == 12 - counts["num_unjudged"]
    told = read_pool(out, "")[0].provenance["selected"][0]["judge"]
    assert (told["min_agreement"], told["samples"]) == (0.6, 5)
    code, _, errors = prompts(*asked, "--min-agreement", "0", "--resume")  # other prompts are judged, and so asked
    assert (code, "new.samples.jsonl was begun with other prompts: look at POOL" in errors[0]) == (2, True)


def test_no_more_rows_than_can_be_decoded_at_once(prompts, pool, student, tmp_path):
    page, new = tmp_path / "page.html", tmp_path / "new.jsonl"
    many = (*ANSWERING[:-1], "4097")
    assert prompts("inspect", pool, "--teacher", student, "--out", page, *many)[0] == 2
    assert prompts("calibrate", pool, "--student", student, "--out", new, "--answers", "gold", *WHOLE_BAND, *many)[0] == 2
    assert [file.name for file in tmp_path.iterdir()] == ["pool.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("inspect nowhere.jsonl", "POOL: no such file"),
        ("inspect tiny:nothing", "no tiny member is called 'tiny:nothing'"),
        ("inspect tiny:prompts", "has no 'prompt'"),
        ("inspect {pool} {pool}", "is given twice"),
        ("inspect {pool} --suite nothing", "--suite: 'nothing' is none of these"),
        ("inspect {pool} --suite {pool}", "--suite: line 1 has no column 'problem'"),
        ("inspect {pool} --suite-dir .", "--suite-dir has no effect without --suite"),
        ("inspect {pool} --tokenizer ./nowhere", "--tokenizer: no such folder"),
        ("inspect {pool} --out page.txt", "--out: page.txt: name a file that ends in .html"),
        ("inspect {pool} --samples 3", "--samples has no effect without --teacher"),
        ("inspect {pool} --resume", "--resume has no effect without --teacher"),
        ("inspect {pool} --overwrite", "--overwrite has no effect without --out"),
        ("inspect {pool} --teacher {student}", "--out is missing"),
        ("inspect {pool} --teacher ./nowhere --out {new}.html", "--teacher: no such folder"),
        ("inspect {pool} --teacher {student} --out {new}.html --template x", "--template: it must contain {{prompt}}"),
        ("inspect {pool} --teacher {student} --out {new}.html --deadline-s 3", "--deadline-s has no effect without --url"),
        ("inspect {pool} --teacher {student} --out {new}.html --resume --overwrite", "exclude each other"),
        ("inspect {pool} --teacher http://a:1 --out {new}.html", "http://a:1 is an address; name a model folder"),
        ("inspect {pool} --teacher {student} --out {new}.html --template {{prompt}}{{x}}", "{{x}} stands for nothing"),
        ("inspect {pool} --out {folder}", "is a folder: name a file that ends in .html"),
        ("inspect {pool} --out {pool} --overwrite", "name a file that ends in .html"),
        ("filter {pool} --out {new}", "--dedup or --decontaminate is missing"),
        ("filter {pool} --out {pool} --dedup exact --overwrite", "is what is read"),
        ("filter {pool} --out {new}.txt --dedup exact", "name a file that ends in .jsonl"),
        ("filter {pool} --out {new} --decontaminate nothing", "--decontaminate: 'nothing' is none of these"),
        ("filter {pool} --out {new} --decontaminate {empty}", "--decontaminate: {empty} holds no"),
        ("filter {pool} --out {new} --decontaminate {same}", "--decontaminate: of 12 prompts none is left"),
        ("filter {pool} --out {new} --dedup near --suite-dir .", "--suite-dir has no effect without --decontaminate"),
        ("calibrate {pool} --out {new} --student {student}", "give one of --answers, --reward and --teacher"),
        ("calibrate {pool} --out {new} --student {student} --answers a --reward b", "give one of"),
        ("calibrate {pool} --out {new} --student {student} --answers wrong", "no row has an answer in column 'wrong'"),
        ("calibrate {pool} --out {new} --student {student} --answers gold --low 0.9", "--low: 0.9 is above --high 0.8"),
        ("calibrate {pool} --out {new} --student {student} --reward f", "--reward: 'f' is not of the form"),
        ("calibrate {pool} --out {new} --student {student} --reward {judge}:two", "is given three arguments"),
        ("calibrate {pool} --out {new} --student {student} --reward {judge}:three", "defines no function 'three'"),
        ("calibrate {pool} --out {new} --student {student} --answers gold --time-limit-s 3", "no effect without --reward"),
        ("calibrate {pool} --out {new} --student http://a:1 --answers gold", "a vLLM server of it with --url"),
        ("calibrate {pool} --out {new} --student {student} --teacher http://a:1", "of it with --teacher-url"),
        ("calibrate {pool} --out {new} --student ./nowhere --answers gold", "--student: no such folder"),
        ("calibrate {pool} --out {new} --student {student} --teacher ./no", "--teacher: no such folder"),
        ("calibrate {pool} --out {new} --student {student} --answers gold --min-agreement 1", "without --teacher"),
        ("calibrate {pool} --out {new} --student {student} --answers gold --token-file x", "without --url"),
        ("calibrate {pool} --out {pool} --student {student} --answers gold --overwrite", "is what is read"),
        ("calibrate {pool} --out {new} --student {student} --answers gold --template x", "--template: it must contain"),
        ("calibrate {pool} --out {new} --student {student} --answers gold --resume --overwrite", "exclude each other"),
    ],
)
def test_bad_input_is_one_line(prompts, pool, student, tmp_path, arguments, expected):
    empty, same, judge = tmp_path / "empty.jsonl", tmp_path / "same.jsonl", tmp_path / "judge.py"
    empty.touch()
    suite(same, *(row.text for row in read_pool(pool, "")))
    judge.write_text("def two(response, answer):\n    return True\n")
    places = {"pool": pool, "student": student, "new": tmp_path / "new.jsonl", "empty": empty, "same": same, "judge": judge}
    (folder := tmp_path.with_name(f"{tmp_path.name}.html")).mkdir(exist_ok=True)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    words = [word.format(**places, folder=folder) for word in arguments.split()]
    words = [word.replace(".jsonl.html", ".html").replace(".jsonl.txt", ".txt") for word in words]
    code, _, errors = prompts(*words)
    assert (code, len(errors)) == (2, 1)
    assert expected.replace("{empty}", str(empty)).replace("{{", "{").replace("}}", "}") in errors[0]
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_page_without_the_extra_is_refused_before_any_work(prompts, pool, student, tmp_path, monkeypatch):
    for name in ("opd.data_free.inspection_page", "opd.report.figures", "opd.report.page"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, errors = prompts("inspect", pool, "--out", tmp_path / "page.html", "--teacher", student, *ANSWERING)
    assert (code, "needs matplotlib: pip install 'opd[report]'" in errors[0]) == (2, True)
    assert [file.name for file in tmp_path.iterdir()] == ["pool.jsonl"]
    assert prompts("inspect", pool)[0] == 0


def test_suites_of_one_name_are_refused(prompts, pool, tmp_path):
    files = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        files += ["--suite", suite(tmp_path / folder / "sums.jsonl", "2 + 2")]
    code, _, errors = prompts("inspect", pool, *files)
    assert (code, errors[0].startswith("error: --suite: two suites are called sums")) == (2, True)
