"""How fast two tokenizers are aligned, and what an aligner that decodes token by token loses.

    OMP_NUM_THREADS=1 python -m benchmarks.alignment [--models FOLDER] [--out FILE]

Answers of 4,096 student tokens (English, mathematics, code and Chinese, cut from a seeded mixture) are aligned by
`opd.alignment` from ids to units, the teacher's tokenisation included, and by the method of public toolkits: decode each
token of both sides by itself and grow two strings until they are equal (`decoded_units`, from the same teacher ids, which
it is not charged for). The two are measured in turns on the same answers; a round's time is the processor time of all
answers, on one core. A second table has the share of a text's bytes that each aligns where a multi-byte character, a
newline or neither is followed by more text. Without `--models` and without `OPD_REAL_MODELS`, small trained tokenizers
stand in.
"""

import argparse
import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe
from opd.alignment.aligner import Aligner
from opd.alignment.coverage import Coverage

PIECES = [
    "Tom has 3 apples and buys 12 more, so he has 3 + 12 = 15. ",
    "Let $f(x) = \\frac{x^2 - 1}{2}$; then $f(-3) = 4$ and $\\sqrt{1234567} \\approx 1111.1$. ",
    "First, we note that the remaining eggs are sold at the farmers' market every day. ",
    "Therefore the answer is \\boxed{18}.\n\n",
    "def total(items):\n\treturn sum(i.price * 1.19 for i in items)  # with tax\n",
    "他一共有十五个苹果，所以答案是十五。",
    "Zoë’s naïve café costs 5 € – isn’t it? ",
]
WEIGHTS = [6, 6, 6, 2, 2, 1, 1]
CASES = {
    "plain": "the answer is 15, and so on to the end of the line.",
    "newlines": "the answer\nis 15,\n\nand so on\nto the end of the line.",
    "accents": "the naïve café’s answer is 15 – and so on to the end of the line.",
    "Chinese": "答案是十五。 the answer is 15, and so on to the end of the line.",
    "emoji": "the answer 😀 is 15, and 👩‍🔬 so on to the end of the line.",
}
Units = list[tuple[int, int, bool]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="folder with smollm2 and qwen05; default: OPD_REAL_MODELS")
    parser.add_argument("--tokens", type=int, default=4096, help="student tokens of an answer")
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="also write JSON here")
    options = parser.parse_args(arguments)
    folder = options.models or os.environ.get("OPD_REAL_MODELS")
    tokenizers = real(Path(folder)) if folder else trained()
    (first, one), (second, other) = tokenizers.items()
    rows, cases = [], []
    for names, student, teacher in (((first, second), one, other), ((second, first), other, one)):
        pair = Aligner(student, teacher, student_eos=[student.eos_token_id], teacher_eos=[teacher.eos_token_id])
        answers = texts(student, options.tokens, options.answers)
        rows.append({"student": names[0], "teacher": names[1], **measure(pair, student, teacher, answers, options.rounds)})
        cases += [{"student": names[0], "teacher": names[1], **kept(pair, student, teacher, name)} for name in CASES]
    report = {
        "machine": describe() | {"threads": 1},
        "settings": {name: getattr(options, name) for name in ("tokens", "answers", "rounds")},
        "speed": rows,
        "byte_coverage": cases,
    }
    print(table(rows), "", table(cases), sep="\n")
    if options.out:
        options.out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def real(folder: Path) -> dict[str, Any]:
    from opd.tokenization import load_tokenizer

    return {name: load_tokenizer(str(folder / name), "--models") for name in ("smollm2", "qwen05")}


def trained() -> dict[str, Any]:
    """A byte-level and a SentencePiece-like tokenizer trained on the same pieces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    kinds = {
        "byte-level": (pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(), 600),
        "metaspace": (pre_tokenizers.Metaspace(), decoders.Metaspace(), 400),
    }
    found = {}
    for name, (pre_tokenizer, decoder, size) in kinds.items():
        backend = Tokenizer(models.BPE(unk_token="<unk>"))
        backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoder  # type: ignore[assignment]
        alphabet = pre_tokenizers.ByteLevel.alphabet() if name == "byte-level" else []
        special = ["<unk>", "</s>"]
        backend.train_from_iterator(
            PIECES,
            trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
        )
        found[name] = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    return found


def texts(student: Any, num_tokens: int, num_answers: int) -> list[np.ndarray]:
    """Answers of so many student tokens each, all different."""
    rng = random.Random(0)
    found = []
    for _ in range(num_answers):
        ids: list[int] = []
        while len(ids) < num_tokens:
            ids = student("".join(rng.choices(PIECES, WEIGHTS, k=4 + num_tokens // 8)), add_special_tokens=False)[
                "input_ids"
            ]
        found.append(np.array(ids[:num_tokens], np.int32))
    return found


def measure(pair: Aligner, student: Any, teacher: Any, answers: Sequence[np.ndarray], rounds: int) -> dict[str, Any]:
    """Student tokens a second of both aligners and of the teacher's tokenisation alone, medians of interleaved rounds."""
    nothing = np.zeros(0, np.int32)
    shown = [pair.text_of(ids) for ids in answers]
    teacher_ids = [pair.align(ids, nothing).token_ids for ids in answers]
    backend = teacher.backend_tokenizer

    def encode() -> None:
        for text in shown:
            backend.encode(text, add_special_tokens=False)

    ways: dict[str, Callable[[], object]] = {
        "opd": lambda: [pair.align(ids, nothing) for ids in answers],
        "encode": encode,
        "decoded": lambda: [decoded_units(student, teacher, ids, theirs) for ids, theirs in zip(answers, teacher_ids)],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        gc.collect()
        for name, way in ways.items():
            start = time.process_time()
            way()
            times[name].append(time.process_time() - start)
    median = {name: statistics.median(found) for name, found in times.items()}
    num_tokens = sum(map(len, answers))
    coverage = sum((Coverage.of(pair.align(ids, nothing)) for ids in answers), Coverage())
    return {
        "tokens": num_tokens,
        "opd_tokens_per_s": round(num_tokens / median["opd"]),
        "encode_share": round(median["encode"] / median["opd"], 3),
        "decoded_tokens_per_s": round(num_tokens / median["decoded"]),
        "byte_coverage": round(coverage.byte_coverage, 6),
        "one_to_one": round(coverage.one_to_one_share, 4),
    }


def kept(pair: Aligner, student: Any, teacher: Any, name: str) -> dict[str, Any]:
    """The share of a text's bytes in aligned units of both aligners, and the most student tokens in one unit."""
    ids = np.array(student(CASES[name], add_special_tokens=False)["input_ids"], np.int32)
    spans = pair.align(ids, ids[:0])
    units = decoded_units(student, teacher, ids, spans.token_ids)
    sizes = [len(piece) for piece in pair.pieces(spans, ids)[0]]
    starts = [0, *(end for end, _, _ in units)]
    return {
        "text": name,
        "opd": round(Coverage.of(spans).byte_coverage, 4),
        "decoded": round(sum(sum(sizes[i:j]) for i, (j, _, aligned) in zip(starts, units) if aligned) / sum(sizes), 4),
        "opd_longest": int(spans.student_sizes.max()),
        "decoded_longest": int(np.diff(starts).max()),
        "student_tokens": len(ids),
    }


def decoded_units(student: Any, teacher: Any, student_ids: np.ndarray, teacher_ids: np.ndarray) -> Units:
    """(student end, teacher end, aligned) by growing two strings of single decoded tokens until they are equal.

    As in TRL's GOLD trainer and others: the shorter string takes the next token; what is left when a side ends is one span
    that is aligned to nothing.
    """
    mine = [student.decode([token]) for token in student_ids.tolist()]
    theirs = [teacher.decode([token]) for token in teacher_ids.tolist()]
    units: Units = []
    i = j = 0
    left = right = ""
    while i < len(mine) or j < len(theirs):
        if i < len(mine) and (len(left) <= len(right) or j == len(theirs)):
            left += mine[i]
            i += 1
        else:
            right += theirs[j]
            j += 1
        if left and left == right:
            units.append((i, j, True))
            left = right = ""
    if left or right:
        units.append((i, j, False))
    return units


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of equal keys as text."""
    cells = [list(rows[0])]
    cells += [[f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in cells)


if __name__ == "__main__":
    main()
