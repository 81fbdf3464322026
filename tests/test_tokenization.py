"""Tokenizers as they are loaded."""

import logging

from transformers import AutoTokenizer

from opd.records import Prompt
from opd.tokenization import load_tokenizer, render


def test_long_texts_do_not_reach_the_console(model_folder):
    folder, said = model_folder(0), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("transformers.tokenization_utils_base")
    logger.addHandler(handler)
    try:
        for tokenizer in (load_tokenizer(str(folder), "student.model"), AutoTokenizer.from_pretrained(folder)):
            tokenizer.model_max_length = 4
            render(tokenizer, Prompt(id="p", messages=({"role": "user", "content": "abcdefgh"},)))
    finally:
        logger.removeHandler(handler)
    assert len(said) == 1  # of the other one
