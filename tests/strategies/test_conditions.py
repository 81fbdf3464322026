"""Negative conditions: what writers are asked, what is taken of what they say, and the prompt that holds it."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from opd.config import load_config
from opd.contexts import Contexts
from opd.errors import UserError
from opd.records import Prompt, Rollout, Turn
from opd.strategies.conditions import (
    INSTRUCTION,
    Condition,
    ConditionConfig,
    Conditions,
    holds_answer,
    read_passages,
    whole_sentences,
)
from opd.student_side import StudentSide
from opd.teachers.pool import Tally, TeacherPool

MESSAGES = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is {x}? Box it."})
PROMPT = Prompt("p7", MESSAGES, problem="What is {x}?", answer="12", chat_template_kwargs={"enable_thinking": False})
SAID = "You are a student who guesses. You skip the check."


class Scripted(Tally):
    """The student's side of a run, whose writer says what a test gives and notes what it was asked."""

    def __init__(self, tokenizer, answer: str | None, max_context: int) -> None:
        contexts = Contexts(tokenizer, max_context, 64, (2,))
        super().__init__(TeacherPool({}, student=StudentSide(contexts, {})))
        self.answer, self.asked = answer, []

    async def write(self, model, prompt, number, max_new_tokens, temperature):
        self.asked.append((model, prompt, number, max_new_tokens, temperature))
        return self.answer


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer):
    """A token a byte, whatever the text."""
    return byte_tokenizer("", "".join(sorted(pre_tokenizers.ByteLevel.alphabet())))


@pytest.fixture(scope="module")
def models(tokenizer):
    """`models(answer)`: such a student's side."""
    return lambda answer=SAID, max_context=2000: Scripted(tokenizer, answer, max_context)


@pytest.fixture(scope="module")
def rollout(tokenizer):
    """`rollout(response, prompt, slot)`: a response as the student wrote it, its EOS with it."""

    def build(response: str = "I think {y} 4", prompt: Prompt = PROMPT, slot: int = 3) -> Rollout:
        ids = np.array([*tokenizer(response)["input_ids"], tokenizer.eos_token_id], np.int32)
        return Rollout(prompt, slot, (Turn(ids[:1], ids, np.zeros(len(ids), np.float32), "eos"),))

    return build


def of(rollout: Rollout, models: Tally, writer: str = "w", seed: int = 0, **settings: Any) -> Condition:
    config = ConditionConfig(**settings)
    config.check()
    return asyncio.run(Conditions(config, writer, seed).of(rollout, models))


def test_online_shows_the_writer_problem_and_response(rollout, models):
    asked = models()
    found = of(rollout(), asked, online_prompt="P {problem} R {response} \\frac{1}{2}", max_tokens=9, temperature=0.5)
    assert found == Condition(SAID)
    ((model, prompt, *rest),) = asked.asked
    assert (model, rest) == ("w", [3, 9, 0.5])
    assert prompt.messages == ({"role": "user", "content": "P What is {x}? R I think {y} 4 \\frac{1}{2}"},)
    assert prompt.chat_template_kwargs == {"enable_thinking": False}
    assert prompt.text is prompt.answer is None


def test_question_shows_it_the_problem_alone(rollout, models):
    asked = models()
    of(rollout(), asked, source="question", question_prompt="Q {problem} { response }")
    assert asked.asked[0][1].messages[0]["content"] == "Q What is {x}? { response }"


def test_a_plain_prompt_is_asked_as_plain_text(rollout, models):
    asked, plain = models(), Prompt("p", text="2+2=", problem="2+2")
    of(rollout(prompt=plain), asked, online_prompt="{problem}|{response}")
    assert asked.asked[0][1] == Prompt("p", text="2+2|I think {y} 4")


def test_the_published_prompts_ask_for_a_flawed_reasoner(rollout, models):
    for source in ("online", "question"):
        asked = models()
        of(rollout(), asked, source=source)
        text = asked.asked[0][1].messages[0]["content"]
        assert "What is {x}?" in text
        assert '"You are a student who"' in text
        assert ("I think {y} 4" in text) == (source == "online")
        assert "{}" not in text


@pytest.mark.parametrize(
    ("answer", "taken"),
    [
        (None, ""),  # the writer's prompt is too long
        ("  \n", ""),
        ("You guess. You sk", "You guess."),
        ("You guess, and skip", "You guess, and skip"),
        ("<think>Hm. So.</think>\n\nYou guess.", "You guess."),
        ("Hm. So.</think> You guess.", "You guess."),
        ("<think>Hm. So", ""),
        ('You say "done!" Then', 'You say "done!"'),
        ("\u4f60\u731c\u3002\u4f60\u8df3", "\u4f60\u731c\u3002"),
        ("You take 3.5 for it", "You take 3.5 for it"),
    ],
)
def test_what_is_taken_of_an_answer(rollout, models, answer, taken):
    assert of(rollout(), models(answer)) == Condition(taken)


def test_a_condition_that_holds_the_answer_is_none(rollout, models):
    assert of(rollout(), models("You say 12. Always.")) == Condition("", leaked=True)
    assert of(rollout(), models("You say 12")) == Condition("", leaked=True)
    assert of(rollout(), models("You say 112 or 120.")) == Condition("You say 112 or 120.")
    assert of(rollout(), models("You stop. Say 12")) == Condition("You stop.")  # what was cut off is not said
    unknown = replace(PROMPT, answer=None)
    assert of(rollout(prompt=unknown), models("You say 12.")) == Condition("You say 12.")


def test_answers_are_words():
    several = replace(PROMPT, answer=("\\frac{1}{2}", " 0.5 ", ""))
    assert holds_answer("it is \\frac{1}{2}.", several)
    assert holds_answer("it is 0.5.", several)
    assert not holds_answer("it is 10.55", several)
    assert not holds_answer("", several)


@pytest.mark.parametrize("answer", ["7", "x", "A"])
def test_a_single_character_is_an_answer_only_where_it_is_said_to_be_one(answer):
    prompt = replace(PROMPT, answer=answer)
    for text in (f"The answer is {answer}.", f"so it equals ${answer}$", f"y = {answer}", f"which gives \\({answer}\\)"):
        assert holds_answer(text, prompt)
    for text in (f"a student of grade {answer}", f"Let {answer} be", f"{answer} careless student", f"in {answer}-8 steps"):
        assert not holds_answer(text, prompt)


def test_fixed_text_is_cut_at_a_sentence(rollout, models):
    assert of(rollout(), models(), source="fixed", text=" Hurry up ") == Condition("Hurry up")
    assert of(rollout(), models(), source="fixed", text="One two. Three four.", max_tokens=12) == Condition("One two.")
    assert of(rollout(), models(), source="fixed", text="One two three four.", max_tokens=7) == Condition("One two")
    long = "Stop here. " + "x" * 5000  # does not fit into any context
    assert of(rollout(), models(max_context=100), source="fixed", text=long, max_tokens=50) == Condition("Stop here.")


def test_passages_of_a_file(rollout, models, tmp_path):
    texts = [f"Passage {letter} is about rocks." for letter in "abcdefgh"]
    (tmp_path / "some.txt").write_text("\n\n".join(texts) + "\n \n\n")
    (tmp_path / "some.jsonl").write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts))
    for name in ("some.txt", "some.jsonl"):
        path = str(tmp_path / name)
        assert read_passages(path) == texts
        settings: dict[str, Any] = {"source": "file", "path": path}
        chosen = [of(rollout(slot=slot), models(), **settings).text for slot in range(40)]
        assert chosen == [of(rollout(slot=slot), models(), **settings).text for slot in range(40)]
        assert set(chosen) == set(texts)
        assert chosen != [of(rollout(slot=slot), models(), **settings, seed=1).text for slot in range(40)]
        others = [of(rollout(slot=slot, prompt=replace(PROMPT, id="p8")), models(), **settings).text for slot in range(40)]
        assert chosen != others


def test_a_passage_with_the_answer_gives_way_to_the_next(rollout, models, tmp_path):
    (tmp_path / "some.txt").write_text("There were 12.\n\nThere were 13.")
    for slot in range(8):
        assert of(rollout(slot=slot), models(), source="file", path=str(tmp_path / "some.txt")).text == "There were 13."
    (tmp_path / "some.txt").write_text("There were 12.")
    assert of(rollout(), models(), source="file", path=str(tmp_path / "some.txt")) == Condition("", leaked=True)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    files = {"empty.txt": b"\n\n", "latin.txt": b"\xe4", "rows.jsonl": b'{"text": "a"}\n{"txt": 1}\n', "bad.jsonl": b"{\n"}
    said = {"empty.txt": "holds no passages", "latin.txt": "is not UTF-8", "rows.jsonl": "line 2", "bad.jsonl": "line 1"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"^terms.negative.condition.path: .*{said[name]}"):
            read_passages(str(tmp_path / name))
    with pytest.raises(UserError, match=r"^terms.negative.condition.path: no such file"):
        read_passages(str(tmp_path / "none.txt"))


def test_the_negative_prompt_differs_in_the_last_user_message_alone():
    messages = (*MESSAGES, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?", "name": "u"})
    prompt = replace(PROMPT, messages=messages)
    config = ConditionConfig(template="{condition}|{problem}|{prompt}|{instruction}|{other} {}", instruction="Go.")
    found = Conditions(config, "w", 0).negative(prompt, "Be {prompt}.")
    said = "Be {prompt}.|What is {x}?|Sure?|Go.|{other} {}"
    assert found == replace(prompt, messages=(*messages[:3], {"role": "user", "content": said, "name": "u"}))


def test_the_negative_prompt_of_a_plain_text():
    prompt = Prompt("p", text="2+2=", problem="2+2")
    config = ConditionConfig(template="{condition} {prompt} {problem}")
    assert Conditions(config, "w", 0).negative(prompt, "Hurry.").text == "Hurry. 2+2= 2+2"


def test_the_prompts_differ_by_the_condition_alone():
    prompt = replace(PROMPT, messages=MESSAGES[1:])
    (message,) = Conditions(ConditionConfig(), "w", 0).negative(prompt, "Hurry.").messages
    assert message["content"] == f"Hurry.\n\n{prompt.messages[-1]['content']}"


def test_the_published_template():
    condition = load_config("negative/paper", ["prompts.path=p.jsonl"]).terms["negative"].condition
    (message,) = Conditions(condition, "w", 0).negative(replace(PROMPT, messages=MESSAGES[1:]), "Hurry.").messages
    said = "Problem: What is {x}?\nHurry.\nNow solve the problem following this instruction:\n"
    assert message["content"] == said + INSTRUCTION


def test_a_prompt_without_a_users_text_is_refused():
    for messages in ((MESSAGES[0],), ({"role": "user", "content": [{"type": "image"}]},)):
        with pytest.raises(UserError, match=r"^prompts: .*p7"):
            Conditions(ConditionConfig(), "w", 0).negative(replace(PROMPT, messages=messages), "Hurry.")


def test_whole_sentences():
    assert whole_sentences(" One. Two? Three") == "One. Two?"
    assert whole_sentences("no end here ") == "no end here"
    assert whole_sentences("") == ""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_tokens": 0}, "max_tokens is 0: it must be at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0: it must be 0 or more"),
        ({"source": "file"}, "path is missing: source file needs it"),
        ({"source": "fixed"}, "text is missing: source fixed needs it"),
        ({"source": "fixed", "text": " \n"}, "text is missing"),
        ({"text": "Hurry."}, "text: has no effect with source online"),
        ({"source": "fixed", "text": "x", "path": "y.txt"}, "path: has no effect with source fixed"),
        ({"source": "file", "path": "y.csv"}, "path: y.csv is neither .txt nor .jsonl"),
        ({"template": "{problem}"}, "template: it must contain {condition}"),
        ({"online_prompt": "{problem}"}, "online_prompt: it must contain {response}"),
        ({"question_prompt": "what?"}, "question_prompt: it must contain {problem}"),
        (
            {"template": "{condition} {promt}"},
            "template: {promt} stands for nothing; allowed is {condition}, {prompt}, {problem}, {instruction}, and",
        ),
        ({"online_prompt": "{problem} {response} {prompt}"}, "online_prompt: {prompt} stands for nothing; allowed is"),
        (
            {"question_prompt": "{problem} {response}"},
            "question_prompt: {response} stands for nothing; allowed is {problem},",
        ),
        (
            {"source": "fixed", "text": "x", "temperature": 0.5},
            "temperature: has no effect with source fixed; leave it out, or set it to 1.0 where it is inherited",
        ),
        ({"source": "file", "path": "y.txt", "online_prompt": "{problem} {response}"}, "online_prompt: has no effect"),
        (
            {"source": "fixed", "text": "x", "path": "y.txt"},
            "path: has no effect with source fixed; leave it out, or set it to null",
        ),
        ({"instruction": "Be quick."}, "instruction: has no effect with a template without {instruction}; leave it out"),
    ],
)
def test_refusals(settings, said):
    with pytest.raises(UserError) as error:
        ConditionConfig(**settings).check()
    assert str(error.value).startswith(f"terms.negative.condition.{said}")


def test_a_missing_file_is_found_before_a_run(tmp_path):
    ConditionConfig().check_files()
    with pytest.raises(UserError, match=r"^terms.negative.condition.path: no such file"):
        ConditionConfig(source="file", path=str(tmp_path / "none.txt")).check_files()
    with pytest.raises(UserError, match=r"^terms.negative.condition.path: '.*' is a folder; name a file in it"):
        ConditionConfig(source="file", path=str(tmp_path)).check_files()


def test_a_template_must_hold_the_problem():
    with pytest.raises(UserError, match=r"^terms\.negative\.condition\.template: it must contain \{prompt\} or \{problem\}"):
        ConditionConfig(template="{condition} {instruction}").check()
    ConditionConfig(template="{condition} {problem}").check()
