"""Which rollouts are put side by side, and how their tokens are shown."""

import json
from pathlib import Path

import pytest

from opd.report.loading import Group, Run
from opd.report.rollouts import MAX_ANSWER, MAX_TEXT, MAX_TOKEN, MAX_TOKENS, gallery


def row(name: str, slot: int = 0, **more) -> dict:
    found = {"id": name, "slot": slot, "prompt": f"text of {name}", "response": "one two three", "finish": "eos"}
    return {**found, "tokens": ["one", " two", " three"], "advantages": [0.0, 1.0, -0.5], **more}


@pytest.fixture
def group(tmp_path):
    def make(name: str, **steps) -> Group:
        """`step_4=[rows]`."""
        folder = tmp_path / name / "rollouts"
        folder.mkdir(parents=True)
        for step, rows in steps.items():
            text = "".join(json.dumps(each) + "\n" for each in rows)
            (folder / f"{step.replace('_', '-')}.jsonl").write_text(text, encoding="utf-8")
        return Group(name, [Run(Path(tmp_path / name), {}, {}, {}, True)])

    return make


def test_the_last_step_at_which_all_sampled_a_prompt(group):
    first = group("first", step_2=[row("p")], step_10=[row("p"), row("q", 1)], step_12=[row("r")])
    second = group("second", step_2=[row("p")], step_10=[row("q", 1), row("s")])
    found = gallery([first, second])
    assert [(sample.step, sample.id) for sample in found.samples] == [(10, "q")]
    assert [completion.group.name for completion in found.samples[0].completions] == ["first", "second"]


def test_without_a_prompt_of_all_the_one_that_most_share(group):
    groups = [group("a", step_4=[row("p")]), group("b", step_4=[row("p")]), group("c", step_4=[row("z")]), group("none")]
    (sample,) = gallery(groups).samples
    assert [completion.group.name for completion in sample.completions] == ["a", "b"]


def test_the_slot_tells_rollouts_of_one_prompt_apart(group):
    first = group("first", step_4=[row("p", 0), row("p", 1, tokens=["slot one"], advantages=[0.0])])
    second = group("second", step_4=[row("p", 1)])
    (sample,) = gallery([first, second]).samples
    assert sample.completions[0].tokens[0].text == "slot one"


def test_levels_follow_the_scale(group):
    only = group("h", step_1=[row("p", tokens=list("abcdefg"), advantages=[1.0, -1.0, 0.5, -0.3, 0.1, 0.0, None])])
    found = gallery([only])
    assert found.scale == 1.0
    assert [token.level for token in found.samples[0].completions[0].tokens] == [4, -4, 2, -1, 0, 0, 0]


def test_a_group_that_went_astray_does_not_set_the_scale(group):
    sizes = {"a": 1.0, "b": 2.0, "astray": 50.0}
    groups = [group(name, step_1=[row("p", advantages=[size, -size, size])]) for name, size in sizes.items()]
    assert gallery(groups).scale == 2.0


def test_the_strongest_tokens_are_listed_in_the_order_of_the_text(group):
    advantages = [0.1 * place for place in range(20)]
    only = group("g", step_1=[row("p", tokens=["t"] * 20, advantages=advantages)])
    strongest = gallery([only]).samples[0].completions[0].strongest
    assert [place for place, _ in strongest] == list(range(13, 21))


def test_older_rollouts_without_advantages_show_the_response(group):
    old = row("p")
    del old["tokens"], old["advantages"]
    completion = gallery([group("g", step_1=[old])]).samples[0].completions[0]
    assert [token.text for token in completion.tokens] == ["one two three"]
    assert completion.strongest == []


def test_rollouts_whose_log_probs_do_not_compare_have_no_colours(group):
    plain = row("p")
    del plain["advantages"]
    found = gallery([group("truncated", step_1=[plain]), group("other", step_1=[row("p")])])
    first, second = found.samples[0].completions
    assert [(token.text, token.advantage, token.level) for token in first.tokens] == [
        (text, None, 0) for text in ("one", " two", " three")
    ]
    assert first.strongest == []
    assert second.tokens[1].level == 4


def test_figures_that_are_missing_are_no_zeros(group):
    (sample,) = gallery([group("g", step_1=[row("p", advantages=[None, 1.0, float("nan")])])]).samples
    assert [token.advantage for token in sample.completions[0].tokens] == [None, 1.0, None]
    assert [place for place, _ in sample.completions[0].strongest] == [2]


def turn(num_tokens: int, *observations: str, num_reused: int = 0) -> dict:
    return {"num_tokens": num_tokens, "num_reused": num_reused, "finish": "eos", "observations": list(observations)}


def parts(group, **more):
    completion = gallery([group("g", step_1=[row("p", **more)])]).samples[0].completions[0]
    shown = [("".join(token.text for token in part.tokens), part.reused, list(part.answers)) for part in completion.parts]
    return completion, shown


def test_a_single_answer_is_one_part(group):
    assert parts(group)[1] == [("one two three", False, [])]
    assert parts(lambda name, **steps: group("turns", **steps), turns=[turn(3)])[1] == [("one two three", False, [])]


def test_turns_are_apart_with_what_the_environment_answered(group):
    turns = [turn(2, "12", num_reused=2), turn(3, "a", "b"), turn(2, "end", num_reused=1)]
    completion, shown = parts(group, tokens=list("abcdefg"), advantages=[None, None, 0.5, 1.0, -1.0, 0.0, 2.0], turns=turns)
    assert shown == [("ab", True, ["12"]), ("cde", False, ["a", "b"]), ("f", True, []), ("g", False, ["end"])]
    assert [token.advantage for token in completion.tokens] == [None, None, 0.5, 1.0, -1.0, 0.0, 2.0]
    assert [place for place, _ in completion.strongest] == [3, 4, 5, 6, 7]


def test_turns_beyond_the_tokens_that_are_shown_are_left_out(group):
    turns = [turn(MAX_TOKENS - 1, "z" * 10**6), turn(2, "cut"), turn(2, "hidden")]
    completion, shown = parts(group, tokens=["t"] * (MAX_TOKENS + 3), advantages=[], turns=turns)
    assert [(len(text), len(answers)) for text, _, answers in shown] == [(MAX_TOKENS - 1, 1), (1, 0)]
    assert len(shown[0][2][0]) < MAX_ANSWER + 50
    assert completion.num_hidden == 3


def test_huge_texts_are_cut_and_said_to_be(group):
    tokens = ["x" * 10**6, *["y"] * 1000]
    only = group("g", step_1=[row("p", tokens=tokens, advantages=[0.1] * 1001, prompt="z" * 10**6)])
    (sample,) = gallery([only]).samples
    assert len(sample.prompt) < MAX_TEXT + 50
    assert "998,000 more characters" in sample.prompt
    completion = sample.completions[0]
    assert len(completion.tokens[0].text) < MAX_TOKEN + 50
    assert (len(completion.tokens), completion.num_hidden) == (MAX_TOKENS, 1001 - MAX_TOKENS)


def test_a_line_cut_short_is_left_out(group, tmp_path):
    only = group("g", step_1=[row("p"), row("q")])
    path = tmp_path / "g" / "rollouts" / "step-1.jsonl"
    path.write_text(path.read_text()[:-30])
    assert [sample.id for sample in gallery([only]).samples] == ["p"]


def test_runs_without_rollouts_have_no_gallery(group):
    assert gallery([group("g")]).samples == []
