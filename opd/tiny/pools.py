"""Pools of the tiny family: `opd prompts author` with its defaults, except that 64 prompts are written at once."""

from __future__ import annotations

from pathlib import Path

from opd.data_free.author import Request, author_prompts, instruction_text
from opd.eval.options import EvalOptions
from opd.tiny.members import Pool

MAX_NEW_TOKENS = 32
"""Four times what a problem takes."""


def write_pool(path: Path, pool: Pool, seed: int) -> None:
    """The teacher writes the pool's prompts; its drafts are not kept."""
    options = EvalOptions(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, max_rows=64)
    instruction = instruction_text(None, pool.domain)
    author_prompts(Request(f"tiny:{pool.teacher}@{seed}", pool.num_prompts, options, instruction, pool.domain), path)
    for beside in path.parent.iterdir():
        if beside != path:
            beside.unlink()
