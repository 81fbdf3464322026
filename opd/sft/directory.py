"""The directory of a fine-tuning run.

`sft.yaml` (resolved), `data.json` (how many answers, and their digest), `env.json`, `metrics.jsonl` (a line an update),
`checkpoints/step-N/` (a model folder, and in `trainer/` what a resumed run needs), `final/` (the model alone),
`tensorboard/` where it is asked for, `summary.json`.
"""

from opd.errors import UserError
from opd.recipes import read_recipe
from opd.run_directory import RunDirectory, refuse_differences
from opd.sft.config import build_sft_config, to_mapping, to_yaml

STARTED = {"env.json", "sft.yaml"}
BEFORE_THE_FIRST_UPDATE = STARTED | {"data.json", "tensorboard", ".saving"}
FREE_TO_CHANGE = ("checkpoint", "report_to", "micro_batch_tokens", "max_logits_mib")


class SftDirectory(RunDirectory):
    """As `RunDirectory`, with a recipe of `opd sft`. Its name is another one: this is no run of `opd train`."""

    RECIPE = "sft.yaml"

    def _refuse_conflicts(self, overwrite: bool) -> bool:
        """As there; but a run that failed before its first update has nothing to lose, and may begin anew."""
        names = {file.name for file in self.path.iterdir()} if self.path.exists() else set()
        if STARTED <= names <= BEFORE_THE_FIRST_UPDATE:
            return True
        return super()._refuse_conflicts(overwrite)

    def _recipe(self) -> str:
        return to_yaml(self.config)

    def _refuse_other_recipe(self) -> None:
        file = self.path / self.RECIPE
        try:
            before = to_mapping(build_sft_config(read_recipe(file)))
        except UserError as error:
            raise UserError(f"{file} is damaged ({error}); restore it, or use --overwrite") from None
        refuse_differences(self.path, before, to_mapping(self.config), lambda key: key.partition(".")[0] in FREE_TO_CHANGE)
