"""Pins, reservations, leases and evictions in any order, against a model of plain lists."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvsp.protocol import limits, registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.policy import Identity
from services.holder.allocator import ALIGN
from services.holder.blocks import Block, Kept, Name
from services.holder.state import Publish, Withdraw
from services.holder.transfers import Pin, Reservation
from tests.services.holder_states import A, B, digested, name, state_of


def outcome(call: Callable[..., Any], *args: Any) -> Any:
    """What a call returns, or the KvspError that it raises."""
    try:
        return call(*args)
    except KvspError as error:
        return error


class HolderMachine(RuleBasedStateMachine):
    PAGES = 6

    @initialize()
    def start(self) -> None:
        self.state = state_of(self.PAGES)
        self.now = 0
        self.pins: list[Pin] = []
        self.reservations: list[tuple[Reservation, int, int]] = []
        self.leases: dict[str, tuple[Identity, set[Block], int]] = {}
        self.blocks: dict[Name, Block] = {}
        self.kept: dict[Block, set[int]] = {}
        self.gone: set[Block] = set()
        self.serial = 0

    def after(self) -> None:
        for instruction in self.state.instructions():
            if isinstance(instruction, Withdraw):
                block = instruction.block
                assert self.blocks.pop(block.name) is block
                self.gone.add(block)
        self.gone &= {pin.block for pin in self.pins}  # their extents go with the last reader

    def leased(self) -> set[Block]:
        return {block for _, blocks, expires in self.leases.values() if expires > self.now for block in blocks}

    def longest_run(self) -> int:
        """Pages in a row that are free or may be."""
        taken = self.leased() | {pin.block for pin in self.pins} | self.gone
        extents = [(block.offset, block.octets) for block in taken]
        extents += [(reservation.offset, reservation.length) for reservation, _, _ in self.reservations]
        free = ["x"] * self.PAGES
        for offset, octets in extents:
            free[offset // ALIGN : -(-(offset + octets) // ALIGN)] = "-" * -(-octets // ALIGN)
        return max(map(len, "".join(free).split("-")))

    @rule(i=st.integers(0, 5), pages=st.integers(1, 3), stream=st.integers(1, 2), shared=st.booleans())
    def reserve(self, i: int, pages: int, stream: int, shared: bool) -> None:
        made = digested(i, pages)
        safe = self.leased() | {pin.block for pin in self.pins}
        room = self.longest_run()
        before = set(self.state.store.all())
        octets = made.header.total_octets
        found = outcome(partial(self.state.reserve, shared=shared), stream, A, name(i), octets, self.now)
        if isinstance(found, KvspError):
            if name(i) in self.blocks:
                assert found.problem is registry.PRECONDITION_FAILED
            else:
                assert found.problem is registry.UNAVAILABLE
                assert room < pages
            assert set(self.state.store.all()) == before  # nothing is evicted that does not help
        else:
            writing = any(r.name == name(i) and not r.lapsed for r, _, _ in self.reservations)
            assert (found is None) == writing
            if found is not None:
                assert room >= pages
                self.reservations.append((found, i, pages))
        self.after()
        assert safe <= set(self.blocks.values()) | self.gone

    @rule(n=st.integers(0, 9))
    def commit(self, n: int) -> None:
        if self.reservations:
            reservation, i, pages = self.reservations[n % len(self.reservations)]
            if not reservation.lapsed:
                block = self.state.commit(reservation, digested(i, pages))
                self.blocks[block.name] = block
                self.reservations.remove((reservation, i, pages))
        self.after()

    @rule(n=st.integers(0, 9))
    def abort(self, n: int) -> None:
        if self.reservations:
            entry = self.reservations.pop(n % len(self.reservations))
            assert self.state.abort(entry[0].stream, entry[0].id) is entry[0]
        self.after()

    @rule(i=st.integers(0, 5), stream=st.integers(1, 2))
    def open(self, i: int, stream: int) -> None:
        if name(i) in self.blocks:
            pin = self.state.open(stream, A, name(i), self.now)
            self.pins.append(pin)

    @rule(n=st.integers(0, 9))
    def close(self, n: int) -> None:
        if self.pins:
            pin = self.pins.pop(n % len(self.pins))
            self.state.close(pin.stream, pin.id)
        self.after()

    @rule(stream=st.integers(1, 2))
    def end_stream(self, stream: int) -> None:
        self.pins = [pin for pin in self.pins if pin.stream != stream]
        expected = {entry[0] for entry in self.reservations if entry[0].stream == stream}
        self.reservations = [entry for entry in self.reservations if entry[0].stream != stream]
        assert set(self.state.end_stream(stream)) == expected
        self.after()

    @rule(i=st.sets(st.integers(0, 5), min_size=1), ttl=st.integers(1, 2000), who=st.sampled_from([A, B]))
    def lease(self, i: set[int], ttl: int, who: Identity) -> None:
        self.serial += 1
        held = all(name(each) in self.blocks for each in i)
        keys = [name(each).block_key for each in i]
        lease = outcome(self.state.lease, who, str(self.serial), keys, ttl, self.now)
        if isinstance(lease, KvspError):
            if held:
                live = [
                    blocks for owner, blocks, until in self.leases.values() if owner is who and until > self.now
                ]
                wanted = set().union(*live) | {self.blocks[name(each)] for each in i}
                assert lease.problem is registry.LEASE_QUOTA
                assert sum(block.extent_octets for block in wanted) > self.PAGES * ALIGN // 2
            else:
                assert lease.problem is registry.NOT_FOUND
        else:
            assert held
            self.leases[lease.id] = who, {self.blocks[name(each)] for each in i}, self.now + ttl
        self.after()

    @rule(n=st.integers(0, 9), ttl=st.integers(1, 2000))
    def renew_or_release(self, n: int, ttl: int) -> None:
        live = [each for each, (_, _, expires) in self.leases.items() if expires > self.now]
        if live:
            lease_id = live[n % len(live)]
            who, blocks, _ = self.leases.pop(lease_id)
            if n % 2:
                self.state.leases.renew(lease_id, who, ttl, self.now)
                self.leases[lease_id] = who, blocks, self.now + ttl
            else:
                self.state.release_lease(who, lease_id, self.now)
        self.after()

    @rule(i=st.integers(0, 5))
    def purge(self, i: int) -> None:
        if name(i) in self.blocks:
            block = self.blocks[name(i)]
            self.state.drop(block)
            for _, blocks, _ in self.leases.values():
                blocks.discard(block)
        self.after()

    @rule(i=st.none() | st.integers(0, 5), kept=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3)))
    def set_tier(self, i: int | None, kept: tuple[int, int] | None) -> None:
        named = [block for block in self.blocks.values() if i is None or block.name == name(i)]
        layers = set() if kept is None else set(range(min(kept), max(kept) + 1)) & {0, 1}
        changed = [block for block in named if self.kept.get(block, set()) != layers]
        self.kept |= dict.fromkeys(named, layers)
        names = [] if i is None else [name(i)]
        self.state.set_tier(None if kept is None else Kept("device", min(kept), max(kept)), names)
        assert self.state.instructions() == [Publish(block) for block in changed]

    @invariant()
    def every_layer_has_one_tier(self) -> None:
        for block in self.blocks.values() if hasattr(self, "blocks") else ():
            ranges = [(tier, range(first, last + 1)) for tier, (first, last) in block.residency]
            found = sorted((layer, tier) for tier, layers in ranges for layer in layers)
            kept = self.kept.get(block, set())
            assert found == [(layer, "device" if layer in kept else "host") for layer in (0, 1)]

    @rule(ms=st.sampled_from([1, 500, 3000, limits.transfer_ms(3 * ALIGN)]))
    def tick(self, ms: int) -> None:
        self.now += ms
        self.pins = [pin for pin in self.pins if pin.deadline_ms > self.now]
        ended = {r for r, _, _ in self.reservations if not r.shared and r.deadline_ms <= self.now}
        assert set(self.state.tick(self.now)) == ended
        self.reservations = [entry for entry in self.reservations if entry[0] not in ended]
        self.after()

    @invariant()
    def octets_are_accounted_exactly(self) -> None:
        if not hasattr(self, "state"):
            return
        extents = sum(block.extent_octets for block in [*self.blocks.values(), *self.gone])
        extents += sum(pages * ALIGN for _, _, pages in self.reservations)
        assert self.state.store.used_octets == extents
        assert set(self.state.store.all()) == set(self.blocks.values())
        self.state.expire_leases(self.now)
        for who in (A, B):
            live = [
                blocks for owner, blocks, expires in self.leases.values() if owner is who and expires > self.now
            ]
            assert self.state.leases.octets(who.uri) == sum(block.extent_octets for block in set().union(*live))

    def teardown(self) -> None:
        """Whatever happened, nothing leaks."""
        if not hasattr(self, "state"):
            return
        self.state.end_stream(1)
        self.state.end_stream(2)
        for block in list(self.state.store.all()):
            self.state.drop(block)
        assert self.state.store.used_octets == 0


HolderMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestHolder = pytest.mark.spec("R-087", "R-141", "R-143", "R-086", "R-044")(HolderMachine.TestCase)
