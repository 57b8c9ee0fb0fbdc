"""Extents against a dumb model: a list of octets taken."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from services.holder.allocator import ALIGN, Allocator, rounded

PAGES = 64


class AllocatorMachine(RuleBasedStateMachine):
    extents = Bundle("extents")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(PAGES * ALIGN + 100)
        self.pages = [False] * PAGES

    @rule(target=extents, octets=st.integers(1, 20 * ALIGN))
    def allocate(self, octets: int) -> object:
        size = rounded(octets) // ALIGN
        runs = "".join("x" if taken else "." for taken in self.pages).split("x")
        fitting = [len(run) for run in runs if len(run) >= size]
        offset = self.allocator.allocate(octets)
        if offset is None:
            assert not fitting
            return multiple()
        first = offset // ALIGN
        assert offset % ALIGN == 0
        assert not any(self.pages[first : first + size])
        assert self._run_around(first) == min(fitting)
        self.pages[first : first + size] = [True] * size
        return first, size, offset

    @rule(extent=consumes(extents))
    def free(self, extent: tuple[int, int, int]) -> None:
        first, size, offset = extent
        self.allocator.free(offset)
        self.pages[first : first + size] = [False] * size
        with pytest.raises(KeyError):
            self.allocator.free(offset)

    @invariant()
    def counts(self) -> None:
        assert self.allocator.used_octets == sum(self.pages) * ALIGN

    def _run_around(self, page: int) -> int:
        start = end = page
        while start and not self.pages[start - 1]:
            start -= 1
        while end < PAGES and not self.pages[end]:
            end += 1
        return end - start


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestAllocator = AllocatorMachine.TestCase


def test_everything_freed_is_one_extent_again() -> None:
    allocator = Allocator(8 * ALIGN)
    offsets = [allocator.allocate(1) for _ in range(8)]
    assert allocator.allocate(1) is None
    for offset in offsets[::2] + offsets[1::2]:
        assert offset is not None
        allocator.free(offset)
    assert allocator.allocate(8 * ALIGN) == 0


def test_an_extent_is_never_empty() -> None:
    with pytest.raises(ValueError, match="at least one octet"):
        Allocator(ALIGN).allocate(0)


def test_an_arena_smaller_than_a_page_holds_nothing() -> None:
    assert Allocator(ALIGN - 1).allocate(1) is None
