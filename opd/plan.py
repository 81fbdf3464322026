"""What a run would do, from the recipe and its prompts alone."""

from pathlib import Path

from opd.config import RunConfig, to_yaml
from opd.data import load_prompts
from opd.envs.config import load_tasks
from opd.registry import PROMPT_SOURCES, TERM_MAKERS
from opd.reward.checks import check_answers
from opd.validation import check_domains


def _beside(config: RunConfig) -> str:
    """What is generated beside the rollouts that are trained."""
    makers = [TERM_MAKERS.load(name, "terms")(term, config) for name, term in config.terms.items()]
    more = [what for maker in makers for what in maker.generates]
    return f", beside {' and '.join(more)}" if more else ""


def plan(config: RunConfig, out: Path) -> str:
    """The resolved recipe and the size of the run, as text. Reads the prompts. Raises `UserError`."""
    source = PROMPT_SOURCES.load(config.prompts["type"], "prompts.type")(config.prompts["config"], config.seed)
    check_answers(config, source.known())
    check_domains(config, source.known(), "prompts")
    first = source.at(0, 0, config.batch.prompts)[0]
    heldout = load_prompts(config.eval.prompts, "eval.prompts") if config.eval.prompts else []
    if config.eval.environment is not None:
        heldout = load_tasks(config.eval.environment, "eval.environment")
    check_domains(config, heldout[: config.eval.kl_prompts], "eval.prompts")
    rollouts = config.batch.prompts * config.batch.rollouts_per_prompt
    longest = config.sampling.max_new_tokens
    most = f"{longest:,} sampled tokens in each of their turns"
    if first.single_turn:
        most = f"{config.steps * rollouts * longest:,} sampled tokens in all"
    lines = [
        to_yaml(config).rstrip(),
        "",
        f"# run directory: {out}" + (" (holds a run)" if (out / "config.yaml").exists() else ""),
        f"# first prompt: {first.id}",
        f"# {config.steps} steps of {rollouts} rollouts, at most {most}{_beside(config)}",
        f"# {config.steps * config.objective.updates_per_batch} optimizer updates",
        f"# {len(heldout)} held-out problems",
    ]
    return "\n".join(lines)
