"""The rules of the index: publish, withdraw, look up, estimate. Pure: an event and `now_ms` in, a reply out.

Callers have been authorized (`kvsp.protocol.access`) before any of this is asked, so that no answer
tells an outsider whether something exists (D8).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Final

from msgspec import UNSET

from kvsp.protocol import estimate, jsonio, limits, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import InstanceStatus, Link, ReplicaRecord, TargetEstimate
from services.index.table import Replica, ReplicaTable

# Withdrawals on behalf, per identity: a client reports a bad block now and then; emptying the
# index faster than holders refresh it must not be possible (U-47).
BEHALF_BURST: Final = 200
BEHALF_PER_S: Final = 20


@dataclass(slots=True)
class _Instance:
    """The newest status of an instance; the epoch outlives it (R-103)."""

    epoch: int
    prefill_tokens_per_s: float
    links: Mapping[str, Link]
    expires_ms: int


@dataclass(frozen=True, slots=True)
class Found:
    """A lookup's result: the reply's JSON but for targets, in pieces, and what estimates need."""

    matched: int
    pieces: list[bytes]
    survey: estimate.Survey
    block_tokens: int | None


class IndexState:
    """One index. `block_tokens` gives tokens per block by compat_id, as far as descriptors are known."""

    def __init__(
        self, *, replica_ttl_ms_max: int = limits.REPLICA_TTL_MS_MAX, block_tokens: Mapping[bytes, int]
    ) -> None:
        self.table = ReplicaTable(replica_ttl_ms_max)
        self._block_tokens = block_tokens
        self._instances: dict[str, _Instance] = {}
        self._withdrawals: dict[str, tuple[float, int]] = {}

    def publish(self, record: ReplicaRecord, records_max: int, now_ms: int) -> tuple[bool, int]:
        """Create or refresh a record: (created, granted ttl in ms). Raises KvspError as ReplicaTable."""
        return self.table.publish(record, records_max, now_ms)

    def withdraw(self, holder_id: str, key: bytes, now_ms: int) -> None:
        """The holder itself withdraws. Raises KvspError (kvsp-not-found)."""
        self.table.withdraw(self._known(self.table.find(holder_id, key, now_ms)))

    def withdraw_on_behalf(
        self, caller: str, scopes: Collection[str], holder_id: str, key: bytes, now_ms: int
    ) -> tuple[str, str]:
        """Another identity withdraws: (holder, scope id in hex), for the log (U-47).

        Raises KvspError: kvsp-not-found for an unknown record and for one in a scope that is not
        among `scopes` alike, as the path names no scope to be refused (D1); 429 when too fast.
        """
        replica = self.table.find(holder_id, key, now_ms)
        scope_id = replica.table.scope_id.hex() if replica else ""
        replica = self._known(replica if scope_id in scopes else None)
        self._take_withdrawal(caller, now_ms)
        self.table.withdraw(replica)
        return replica.holder, scope_id

    def lookup(
        self, scope_id: bytes, compat_id: bytes, keys: Sequence[bytes], now_ms: int, *, survey: bool = False
    ) -> Found:
        """Longest prefix; with `survey`, also what `estimate` needs."""
        matched = self.table.longest_prefix(scope_id, compat_id, keys, now_ms)
        prepared = estimate.Survey(_runs(matched) if survey else [])
        return Found(len(matched), _render(matched, now_ms), prepared, self._block_tokens.get(compat_id))

    def survey(self, scope_id: bytes, compat_id: bytes, keys: Sequence[bytes], now_ms: int) -> list[estimate.Run]:
        """Longest prefix, reduced to who holds which layers: their blocks add up to what is matched."""
        return _runs(self.table.longest_prefix(scope_id, compat_id, keys, now_ms))

    def observe(self, status: InstanceStatus, now_ms: int) -> bool:
        """Take over an instance's status; False when its epoch is older than one that is still good (R-103).

        The placement controller keeps the highest epochs for good. Here one that has expired counts no more: else
        an epoch that an operator has reset there (D12) would lock the instance out until the index starts again.
        """
        known = self._instances.get(status.instance)
        if known is not None and status.epoch < known.epoch and now_ms < known.expires_ms:
            return False
        self._instances[status.instance] = _Instance(
            epoch=status.epoch,
            prefill_tokens_per_s=status.prefill_tokens_per_s,
            links={link.holder: link for link in status.links},
            expires_ms=now_ms + min(status.ttl_ms, limits.STATUS_TTL_MS_MAX),
        )
        return True

    def estimate(self, found: Found, target: str, now_ms: int) -> TargetEstimate:
        """Estimates for one target; a member that is not known is absent (R-093, U-41, U-42)."""
        known = self._instances.get(target)
        if known is None or known.expires_ms <= now_ms:
            return TargetEstimate(target)
        fetch = found.survey.fetch_us(target, known.links)
        recompute = None
        if found.block_tokens is not None:
            tokens = found.matched * found.block_tokens  # U-44
            recompute = estimate.recompute_us(tokens, known.prefill_tokens_per_s)
        return TargetEstimate(target, UNSET if fetch is None else fetch, UNSET if recompute is None else recompute)

    @staticmethod
    def _known(replica: Replica | None) -> Replica:
        if replica is None:
            raise KvspError(registry.NOT_FOUND)
        return replica

    def _take_withdrawal(self, caller: str, now_ms: int) -> None:
        """A token bucket per identity."""
        left, since_ms = self._withdrawals.get(caller, (BEHALF_BURST, now_ms))
        left = min(BEHALF_BURST, left + (now_ms - since_ms) * BEHALF_PER_S / 1000)
        if left < 1:
            wait_s = math.ceil((1 - left) / BEHALF_PER_S)
            raise KvspError(registry.TOO_MANY_REQUESTS, "too many withdrawals on behalf", retry_after_s=wait_s)
        self._withdrawals[caller] = left - 1, now_ms


def render_targets(targets: Sequence[TargetEstimate]) -> bytes:
    """The member that follows `Found.pieces`, with its comma."""
    return b',"targets":' + jsonio.encode(targets)


_SOURCE: Final = attrgetter("source")


def _runs(matched: Sequence[Sequence[Replica]]) -> list[estimate.Run]:
    """`estimate.survey`: equal sources of a holder are one object here, so that most blocks compare at no cost."""
    runs: list[estimate.Run] = []
    for found, group in groupby([tuple(map(_SOURCE, replicas)) for replicas in matched]):
        sources, blocks = tuple(sorted(found)), len(list(group))
        if runs and runs[-1][0] == sources:  # the same holders, which published in another order
            blocks += runs.pop()[1]
        runs.append((sources, blocks))
    return runs


def _render(matched: Sequence[Sequence[Replica]], now_ms: int) -> list[bytes]:
    """The reply's JSON (U-11) as pieces, stored octets by reference, without its last brace.

    "Returned `ttl_ms` = remaining ms (>= 1)": nothing expired is in the table.
    """
    pieces = [b'{"matched":%d,"replicas":[' % len(matched)]
    between = b"["
    for replicas in matched:
        for replica in replicas:
            pieces += (between, replica.text, b"%d}" % (replica.expires_ms - now_ms))
            between = b","
        between = b"],["
    pieces.append(b"]]" if matched else b"]")
    return pieces
