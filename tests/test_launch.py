"""What `opd launch` would start, and that it starts, waits for, and stops it."""

import shlex
from dataclasses import replace

import pytest

from opd.config import load_config
from opd.errors import UserError
from opd.launch import ServerPlan, commands_elsewhere, rollout_plans, running, server_plans, teacher_plans
from opd.students.config import SamplerConfig, StudentConfig
from opd.teachers.config import FrozenConfig, TeacherConfig, frozen_models

BASE = TeacherConfig(model="models/large", url="http://127.0.0.1:8400")
SAMPLER = SamplerConfig(url="http://127.0.0.1:8500")
STUDENT = StudentConfig(model="models/small")


def test_a_teacher_in_process_needs_no_server():
    assert teacher_plans({"default": TeacherConfig(model="models/large")}) == []


def test_only_what_differs_from_the_defaults_is_said():
    (plan,) = teacher_plans({"default": BASE})
    assert shlex.join(plan.command()) == "serve teacher --model models/large --host 127.0.0.1 --port 8400"
    config = replace(BASE, dtype="bfloat16", max_batch_tokens=9, quantization={"quant_method": "x"}, token_file="t")
    (plan,) = teacher_plans({"default": config})
    words = plan.command()
    for option, value in (("--dtype", "bfloat16"), ("--max-batch-tokens", "9"), ("--token-file", "t")):
        assert words[words.index(option) + 1] == value
    assert words[words.index("--quantization") + 1] == '{"quant_method": "x"}'


def test_adapters_at_one_address_share_a_process():
    teachers = {name: replace(BASE, adapter=f"adapters/{name}") for name in ("maths", "code")}
    (plan,) = teacher_plans(teachers | {"default": BASE})
    assert plan.names == ("maths", "code", "default")
    assert shlex.join(plan.arguments) == ("--model models/large --adapter maths=adapters/maths --adapter code=adapters/code")


def test_a_teacher_that_is_its_own_weak_reference_is_served_once():
    teacher = replace(BASE, weak_reference=FrozenConfig(active_experts=1))
    (plan,) = teacher_plans(frozen_models({"default": teacher}, weak=True))
    assert plan.names == ("default", "default.weak_reference")
    assert shlex.join(plan.arguments) == "--model models/large --active-experts default.weak_reference=1"
    text = commands_elsewhere([plan], "compass", [])
    assert "teachers.default.url=http://TEACHER1:8400" in text
    assert "teachers.default.weak_reference.url=http://TEACHER1:8400" in text
    named = replace(teacher, weak_reference=FrozenConfig(active_experts=2, served_as="weak"))
    (plan,) = teacher_plans(frozen_models({"default": named}, weak=True))
    assert plan.arguments[-2:] == ("--active-experts", "weak=2")


def test_replicas_are_processes_of_their_own():
    config = replace(BASE, url="http://127.0.0.1:8400, http://127.0.0.1:8401/")
    assert [plan.port for plan in teacher_plans({"default": config})] == [8400, 8401]


def test_different_bases_cannot_share_an_address():
    with pytest.raises(UserError, match=r"teachers\.b\.url: http://127\.0\.0\.1:8400 is shared with a, which differs"):
        teacher_plans({"a": BASE, "b": replace(BASE, model="models/other")})
    with pytest.raises(UserError, match=r"teachers\.a\.model is missing"):
        teacher_plans({"a": replace(BASE, model=None)})


@pytest.mark.parametrize("url", ["https://127.0.0.1:8400", "http://localhost:8400/teacher"])
def test_an_address_that_no_server_started_here_has_is_refused(url):
    with pytest.raises(UserError, match=r"teachers\.a\.url: a server started here is at http://HOST:PORT"):
        teacher_plans({"a": replace(BASE, url=url)})
    elsewhere = url.replace("127.0.0.1", "10.0.0.1").replace("localhost", "gpu7")
    assert len(teacher_plans({"a": replace(BASE, url=elsewhere)})) == 1


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:1", True),
        ("http://localhost:1", True),
        ("http://[::1]:1", True),
        ("http://10.0.0.1:1", False),
        ("http://gpu7:1", False),
    ],
)
def test_only_loopback_is_started_here(url, local):
    assert ServerPlan(url, ("a",), (), None).is_local == local


def test_commands_for_several_machines():
    config = replace(BASE, url="http://127.0.0.1:8400,http://127.0.0.1:8401")
    overrides = ["steps=5", "teachers.default.url=http://127.0.0.1:8400"]
    text = commands_elsewhere(teacher_plans({"default": config}), "reverse-kl", overrides)
    assert "127.0.0.1" not in text
    assert "opd serve teacher --model models/large --host 0.0.0.0 --port 8401 --token-file token.txt" in text
    assert "teachers.default.url=http://TEACHER1:8400,http://TEACHER2:8401 teachers.default.token_file=token.txt" in text
    assert "opd train reverse-kl steps=5 " in text


def test_a_rollout_server_decodes_as_the_sampler_in_process_would():
    (plan,) = rollout_plans(SAMPLER, STUDENT, "bfloat16")
    assert shlex.join(plan.command()) == "serve student --model models/small --dtype bfloat16 --host 127.0.0.1 --port 8500"
    sampler = replace(SAMPLER, dtype="float32", max_rows=8, chunk_tokens=4, kept_mib=0, token_file="t")
    student = replace(STUDENT, revision="r", attention="eager")
    (plan,) = rollout_plans(sampler, student, "bfloat16")
    assert shlex.join(plan.arguments) == (
        "--model models/small --dtype float32 --revision r --attention eager --max-rows 8 --chunk-tokens 4 --kept-mib 0"
    )
    assert plan.command()[-2:] == ["--token-file", "t"]
    assert rollout_plans(SamplerConfig(), STUDENT, "float32") == []


def test_a_recipe_s_servers_are_those_of_its_teachers_and_of_its_rollouts():
    overrides = [
        "student.model=models/small",
        "prompts.path=p.jsonl",
        "teachers.default.model=models/large",
        "teachers.default.url=http://127.0.0.1:8400",
        "sampler.url=http://127.0.0.1:8500,http://127.0.0.1:8501",
    ]
    plans = server_plans(load_config("reverse-kl", overrides))
    assert [(plan.serves, plan.port, plan.field) for plan in plans] == [
        ("teacher", 8400, "teachers.default.url"),
        ("student", 8500, "sampler.url"),
        ("student", 8501, "sampler.url"),
    ]
    with pytest.raises(
        UserError, match=r"^sampler\.url: http://127\.0\.0\.1:8400 is teachers\.default\.url as well; give each"
    ):
        server_plans(load_config("reverse-kl", [*overrides, "sampler.url=http://127.0.0.1:8400"]))
    with pytest.raises(UserError, match=r"^sampler\.url: a server started here is at http://HOST:PORT"):
        server_plans(load_config("reverse-kl", [*overrides, "sampler.url=https://127.0.0.1:8500"]))


def test_commands_go_by_machine():
    teacher = replace(BASE, url="http://gpu7:8400,http://gpu7:8401,http://127.0.0.1:8402", token_file="word")
    plans = teacher_plans({"default": teacher}) + rollout_plans(SAMPLER, STUDENT, "float32")
    text = commands_elsewhere(plans, "reverse-kl", ["sampler.url=http://127.0.0.1:8500", "seed=1"])
    serve = "opd serve teacher --model models/large --host 0.0.0.0 --port"
    assert text.splitlines() == [
        "# the same on several machines; each needs word, token.txt: one random word, the same everywhere (chmod 600)",
        "# on gpu7, each in a shell of its own:",
        f"CUDA_VISIBLE_DEVICES=0 {serve} 8400 --token-file word",
        f"CUDA_VISIBLE_DEVICES=1 {serve} 8401 --token-file word",
        "# on TEACHER1:",
        f"{serve} 8402 --token-file word",
        "# on STUDENT1:",
        "opd serve student --model models/small --dtype float32 --host 0.0.0.0 --port 8500 --token-file token.txt",
        "# on the trainer:",
        "opd train reverse-kl seed=1 "
        "teachers.default.url=http://gpu7:8400,http://gpu7:8401,http://TEACHER1:8402 teachers.default.token_file=word "
        "sampler.url=http://STUDENT1:8500 sampler.token_file=token.txt",
    ]


def test_behind_a_proxy_a_server_stays_on_the_loopback():
    (plan,) = teacher_plans({"default": replace(BASE, url="https://gpu7/teacher")})
    text = commands_elsewhere([plan], "reverse-kl", [])
    assert "opd serve teacher --model models/large --token-file token.txt  # https://gpu7/teacher is a proxy's:" in text
    assert "--host" not in text
    assert "teachers.default.url=https://gpu7/teacher" in text


def test_a_server_that_ends_is_reported_with_its_last_line(tmp_path):
    plan = ServerPlan("http://127.0.0.1:9", ("a",), ("--model", str(tmp_path / "nothing")), None)
    with (
        pytest.raises(
            UserError, match=r"teachers\.a\.url: the server at http://127\.0\.0\.1:9 ended: --model: no such folder"
        ),
        running([plan], tmp_path / "logs", (), 60, lambda line: None),
    ):
        raise AssertionError("not reached")
    assert (tmp_path / "logs" / "9.log").read_text().startswith("error: ")
