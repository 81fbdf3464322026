"""What the scripted customer understands of the desk's words: questions for facts, statements and refusals.

It goes by keywords, sentence by sentence, and can be mistaken where a person would not be.
"""

import re
from dataclasses import dataclass
from re import I

_SENTENCES = re.compile(r"(?<=[.!?:])\s+|\n+")
_CLAUSES = re.compile(r"[,;()]|\b(?:and|but|so|because)\b", I)
_ASKS = re.compile(
    r"\b(please|could you|can you|may i|i('ll| will| would)? need|we need|provide|tell me|let me know|share|confirm)\b", I
)
_FACTS = {
    "email": r"\be-?mail",
    "name": r"\b(full|first|last|your) name\b|\bname and\b|\bzip|\bpost(al )?code",
    "order": r"\border[ _-]?(number|id|no)\b|\b(which|what) order\b|\border you\b",
    "item": r"\b(which|what) (item|product|article)|\bsku\b|\bname of the (item|product)",
    "wanted": r"\b(size|colou?r|variant)s?\b|\b(exchange|swap) (it |this |that |the \w+ )?(for|to|with)\b",
    "reason": r"\breason|\bwhy\b",
    "refund": r"\b(refund|payment) (method|to)\b|\bhow .{0,40} refund",
    "wish": r"\b(how|what) (can|may|could) (i|we) (help|assist|do)|\bwhat (would|do) you\b|\bthe (issue|problem)\b",
}
_ASKED = {fact: re.compile(pattern, I) for fact, pattern in _FACTS.items()}
_STATED = {
    "processing": re.compile(r"\bprocessing\b|\bbeing processed\b", I),
    "shipped": re.compile(r"\b(shipped|dispatched|in transit)\b|\bon (its|the) way\b", I),
    "delivered": re.compile(r"\b(delivered|arrived)\b", I),
    "cancelled": re.compile(r"\bcancell?ed\b", I),
}
_ACTS = (
    r"(cancell?ed|returned|exchanged|refunded|(?<!being )processed|completed|initiated|issued|created|arranged|submitted)"
)
_DONE = re.compile(
    rf"\b(have|has|been|was|were|is|are|i|we|successfully|'ve)\s+(\w+\s+){{0,2}}{_ACTS}\b|\b{_ACTS} successfully|^\W*done\b",
    I,
)
_HEDGED = re.compile(
    r"\b(not|cannot|never|will|shall|would|should|may|might|can|could|must|only|to be)\b|n't\b|'ll\b|"
    r"\b(once|when|if|whether|until|before|after)\b",
    I,
)
_REFUSED = re.compile(
    r"\b(cannot|can not|can't|won't|unable|unfortunately|impossible|ineligible|unavailable|too late|out of stock)\b|"
    r"\bnot (possible|able|allowed|eligible|permitted|available|in stock|(yet )?(been )?delivered)\b|"
    r"\b(does|do)(n't| not) (allow|permit|offer|accept|qualify|belong|meet)\b|\bagainst (our|the)\b|"
    r"\bno longer (possible|eligible|available|be)\b|\b(outside|beyond|past|exceeds|exceeded) (of )?(our|the)\b|"
    r"\bonly .{0,40}\b(be|within)\b|\balready (been )?shipped\b",
    I,
)
_LOOKS = re.compile(  # the desk lacks something, which is no refusal
    r"(cannot|n't|not|unable to|able to) (find|locate|see|access|verify|identify)\b|\b(without|until)\b", I
)
_CONFIRMS = re.compile(
    r"\b(confirm|proceed|go ahead|shall i|should i|would you like|do you want|(correct|right|okay|ok)\s*\?)", I
)
_WAITS = re.compile(r"\bi('ll| will| am going to)\b|\blet me\b|\b(one|a) moment\b|\bplease (wait|hold)\b", I)


@dataclass(frozen=True)
class Heard:
    """What a reply of the desk says.

    Example: `hear("Your order was shipped. Is there anything else?").statuses == {"shipped"}`
    """

    asked: tuple[str, ...]  # facts it asks for, keys of `_FACTS`
    statuses: frozenset[str]  # of an order, as it states them
    refused: bool  # the desk will not do it
    done: bool  # something is said to have been done
    confirms: bool  # it wants a yes
    waits: bool  # it promises to do something


def hear(text: str) -> Heard:
    """Reads a reply of the desk."""
    sentences = _SENTENCES.split(text.replace("’", "'"))
    questions = [sentence for sentence in sentences if sentence.rstrip(" *_\"')").endswith("?")]
    telling = [sentence for sentence in sentences if sentence not in questions]
    asking = questions + [sentence for sentence in telling if _ASKS.search(sentence)]
    clauses = [clause for sentence in telling for clause in _CLAUSES.split(sentence) if not _HEDGED.search(clause)]
    return Heard(
        asked=tuple(fact for fact, pattern in _ASKED.items() if any(pattern.search(sentence) for sentence in asking)),
        statuses=frozenset(s for s, pattern in _STATED.items() if any(pattern.search(clause) for clause in clauses)),
        refused=any(_REFUSED.search(sentence) and not _LOOKS.search(sentence) for sentence in telling),
        done=any(_DONE.search(clause) for clause in clauses),
        confirms=any(_CONFIRMS.search(sentence) for sentence in asking),
        waits=any(_WAITS.search(sentence) for sentence in telling),
    )
