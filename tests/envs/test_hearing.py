"""What the customer of the help desk understands of a reply."""

import time

import pytest

from opd.envs.returns_desk.hearing import hear


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("May I have your e-mail address?", {"email"}),
        ("Please provide your full name and zip code.", {"name"}),
        ("Sure! Which order number is it, and what's the reason?", {"order", "reason"}),
        ("What colour do you want?", {"wanted"}),
        ("How can I help you today?", {"wish"}),
        ("Your email is on file.", set()),
    ],
)
def test_questions_are_heard(text, asked):
    assert set(hear(text).asked) == asked


@pytest.mark.parametrize(
    ("text", "refused", "done"),
    [
        ("Unfortunately, this item was delivered 45 days ago.", True, False),
        ("Only delivered items can be returned.", True, False),
        ("It’s not possible, I’m afraid.", True, False),
        ("We can’t do this.", True, False),
        ("Size L is out of stock.", True, False),
        ("I cannot find your order.", False, False),
        ("I can't do this without your email.", False, False),
        ("Is it not possible to wait?", False, False),
        ("Your order W1234 has been cancelled.", False, True),
        ("I've successfully processed your request.", False, True),
        ("It will be cancelled once it has been processed.", False, False),
        ("Your order is being processed.", False, False),
        ("Has it been returned?", False, False),
    ],
)
def test_statements_are_heard(text, refused, done):
    heard = hear(text)
    assert (heard.refused, heard.done) == (refused, done)


def test_long_replies_are_read_quickly():
    begun = time.monotonic()
    for text in ("how ", "?", "is ", "i a ", "only ", "not\n", "please ", "'", ". ", "a" * 50):
        hear(text * 10000)
    assert time.monotonic() - begun < 10
