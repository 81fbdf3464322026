"""Fewer active experts in a loaded mixture-of-experts model: a weaker model of the same weights.

Routers copy how many experts to pick when they are built, so that a later change of the configuration does nothing: the
number is set where the forward pass reads it, for one pass at a time. Shared experts stay on, and the weights of those
picked are normalised, or not, as the model does it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from opd.errors import UserError
from opd.models import last_states

NUM_TRIED = 8  # tokens on which fewer experts must make a difference

NO_EXPERTS = "the model has no experts whose number can be set: leave active_experts out"


def check_configured(config: Any, num_active: int, field: str) -> None:
    """What can be said from a model's text configuration alone, before it is loaded. Raises `UserError` naming `field`."""
    own = getattr(config, "num_experts_per_tok", None)
    if own is None:
        raise UserError(f"{field}: {NO_EXPERTS}")
    _check_number(num_active, own, field)


def _check_number(num_active: int, own: int, field: str) -> None:
    if not 1 <= num_active < own:
        raise UserError(f"{field}: {num_active} is not between 1 and {own - 1}: the model's own number is {own}")


class Experts:
    """The routers of a decoder."""

    def __init__(self, decoder: nn.Module) -> None:
        config: Any = decoder.config
        own = getattr(config.get_text_config(), "num_experts_per_tok", None)
        self._decoder = decoder
        self._routers: list[Any] = [one for one in decoder.modules() if own is not None and vars(one).get("top_k") == own]
        self.num_active: int | None = own if self._routers else None
        """How many each token is routed to in the model as it is; None where it has no experts."""

    @contextmanager
    def on(self, num_active: int | None) -> Iterator[None]:
        """Each token is routed to so many experts within, None being the model's own number, and as before afterwards."""
        if num_active is None:
            yield
            return
        self._set(num_active)
        try:
            yield
        finally:
            self._set(self.num_active)

    def check(self, num_active: int, field: str) -> None:
        """Raises `UserError` naming `field`: a dense model, one without more active experts, or one that ignores the number.

        The last is found by trying it on a few tokens.
        """
        own = self.num_active
        if own is None:
            raise UserError(f"{field}: {NO_EXPERTS}")
        _check_number(num_active, own, field)
        if torch.equal(self._states(None), self._states(num_active)):
            raise UserError(f"{field}: fewer experts make no difference to this model; give another model as weak reference")

    def _set(self, num_active: int | None) -> None:
        for router in self._routers:
            router.top_k = num_active

    @torch.no_grad()
    def _states(self, num_active: int | None) -> torch.Tensor:
        ids = torch.arange(NUM_TRIED, device=next(self._decoder.parameters()).device)[None]
        with self.on(num_active):
            return last_states(self._decoder(input_ids=ids, use_cache=False))
