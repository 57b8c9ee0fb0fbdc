"""Over how many instances a context is sharded: the policy, and the default one. Pure.

"Prefill wide": the members compute the prompt at the same time. "Early decode narrow": each token asks every
member in every layer. "Later wider by memory": what one instance cannot hold any more.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from services.placement.settings import GroupSettings

PRESSED: Final = 0.9
RELAXED: Final = 0.75
"""Of its KV memory in use: above the one the home gets help, which it keeps until it is below the other."""


class View(NamedTuple):
    """A session as the policy sees it; `members` is 1 while it has no group.

    `tokens` are those of prompt and recorded output, `kv_utilization` is the home's (0 to 1). `cached_tokens` of
    the prompt the home could load instead; a group loads nothing, it computes the whole prompt.
    """

    prompt_tokens: int
    tokens: int
    has_output: bool
    members: int
    kv_utilization: float
    cached_tokens: int = 0


class GroupPolicy(Protocol):
    """Asked when a session is assigned, and at each recorded checkpoint of one that has a group."""

    def width(self, view: View) -> int:
        """The number of members there should be; it is cut to what there can be."""


class ByTokens:
    """The default: so many tokens for each member, and one member more while the home has no memory left."""

    def __init__(self, settings: GroupSettings) -> None:
        self._settings = settings

    def width(self, view: View) -> int:
        """See GroupPolicy."""
        rules = self._settings
        if view.prompt_tokens - view.cached_tokens < rules.tokens:
            return 1
        if not view.has_output:
            return -(-view.prompt_tokens // rules.prefill_tokens)
        wanted = -(-view.tokens // rules.decode_tokens)
        enough = RELAXED if view.members > wanted else PRESSED
        return wanted + (view.kv_utilization > enough)
