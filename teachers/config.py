"""Configuration of frozen teachers."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from opd.records import DEFAULT_DOMAIN


@dataclass(frozen=True)
class FrozenConfig:
    """A frozen model that scores rollouts: in process on the student's device, or behind `opd serve teacher`."""

    model: str | None = None
    """A Hugging Face folder, a hub id, or a member of the tiny family (`tiny:teacher`). With `url`, what `opd launch` serves
    there."""
    revision: str | None = None
    """Commit, tag or branch of a hub id."""
    adapter: str | None = None
    """Folder of a LoRA adapter over `model`. Teachers with the same model share its weights, in process and on a server."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; `auto` is the checkpoint's own."""
    attention: str = "sdpa"
    """Attention kind, as transformers' `attn_implementation`."""
    quantization: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of transformers' quantisation config, with its `quant_method`; empty loads the weights plainly."""
    active_experts: int | None = None
    """Experts that each token is routed to, fewer than a mixture-of-experts model has; shared ones stay. Null is the
    model's own number."""
    max_batch_tokens: int = 16384
    """Tokens scored in one forward pass, padding included."""
    logp_floor: float = -30.0
    """Log-probs below this are raised to it, and counted."""
    url: str | None = None
    """Address of the server that scores, as `http://127.0.0.1:8400`; several replicas are separated by commas. Null scores
    in process."""
    served_as: str | None = None
    """Which of the server's models; null is its base, or with `adapter` or `active_experts` the one of this teacher's
    name."""
    token_file: str | None = None
    """File with the server's bearer token."""
    digest: str | None = None
    """Digest of the weights that the server must show; null takes whatever it serves."""
    timeout_s: float = 60.0
    """Longest single attempt of a request, in seconds."""
    deadline_s: float = 180.0
    """A request that no replica has answered within this many seconds stops the run, which can be resumed."""
    max_in_flight: int = 64
    """Requests at once to each replica; others wait."""

    @property
    def urls(self) -> tuple[str, ...]:
        """The replicas' addresses."""
        return tuple(part.strip().rstrip("/") for part in (self.url or "").split(",") if part.strip())


@dataclass(frozen=True)
class TeacherConfig(FrozenConfig):
    """A teacher, and the weak model of its family, where a term compares the two."""

    weak_reference: FrozenConfig | None = None
    """A weaker model of the teacher's family, for terms such as `compass`. With `active_experts` and neither `model` nor
    `url` it is the teacher itself with fewer experts at work."""
    other_family: bool = False
    """Accept a weak reference whose token -> id map is not the teacher's."""


START = "student.start"  # the student's frozen start among the frozen models; no teacher is called so


def field_of(name: str) -> str:
    """The recipe's field that names a frozen model, for messages."""
    return "student.model" if name == START else f"teachers.{name}.model"


def teacher_of(domain: str, teachers: Collection[str]) -> str | None:
    """The one of these teachers that is asked about a domain's prompts: the one of its name. A single teacher also takes the
    prompts without a domain, and called `default` all. None: nobody teaches this domain."""
    if domain in teachers:
        return domain
    only = next(iter(teachers)) if len(teachers) == 1 else None
    return only if DEFAULT_DOMAIN in (domain, only) else None


def weak_name(teacher: str) -> str:
    """What the weak reference of a teacher is called among the frozen models."""
    return f"{teacher}.weak_reference"


def frozen_models(teachers: Mapping[str, TeacherConfig], *, weak: bool) -> dict[str, FrozenConfig]:
    """Every frozen model of a recipe by name: the teachers, and with `weak` the weak references of those that have one."""
    models: dict[str, FrozenConfig] = {}
    for name, teacher in teachers.items():
        models[name] = teacher
        if weak and teacher.weak_reference is not None:
            models[weak_name(name)] = _resolved(teacher, teacher.weak_reference)
    return models


def _resolved(teacher: TeacherConfig, weak: FrozenConfig) -> FrozenConfig:
    if weak.model is not None or weak.url is not None:
        return weak
    shared = {one.name: getattr(teacher, one.name) for one in fields(FrozenConfig)}
    return replace(FrozenConfig(**shared), active_experts=weak.active_experts, served_as=weak.served_as, digest=None)
