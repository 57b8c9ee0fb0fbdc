"""What an event leaves to be done: rows first, then instructions in order. Pure."""

from __future__ import annotations

from services.placement.instructions import Instruction, Persist, Row, key_of


class Outbox:
    """Collects; of several rows of one key the last one counts."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], Row] = {}
        self._instructions: list[Instruction] = []

    def save(self, row: Row) -> None:
        """To be on disk before anything else happens."""
        self._rows[key_of(row)] = row

    def do(self, instruction: Instruction) -> None:
        """To be done then."""
        self._instructions.append(instruction)

    def drain(self) -> list[Instruction]:
        """All of it."""
        taken = self._instructions
        if self._rows:
            taken = [Persist(tuple(self._rows.values())), *taken]
        self._rows, self._instructions = {}, []
        return taken
