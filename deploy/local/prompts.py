"""What the demo asks: a document of some 2,000 tokens, in as many copies as are wanted, and questions about it."""

from __future__ import annotations

from typing import Final

_DOCUMENT: Final = """You are the night clerk of the harbour archive. Answer from the document alone.

THE BREAKWATER LOG, WINTER QUARTER

The breakwater was begun in the spring by two crews who never met, one working out from the lighthouse and
one from the customs stairs, and the stones of the two halves are still of different colours. The eastern
half is grey and was cut at the quarry above the mill; the western half is nearly black and came by barge,
forty blocks to a load, each with a number painted on the side that faces the sea. A clerk kept the numbers
in a ledger. When a block was lost the clerk wrote the weather beside its number and nothing else.

In the second week of December the wind went round to the north and stayed there for nine days. The pilot
boats were drawn up to the chapel wall. On the fourth day a block of the western half, number 1187, was
found lying on the quay, forty paces from its place and the right way up, and nobody had heard it come.
The harbour master had it measured and weighed, compared the number with the ledger, found that both
agreed, and had it put back. He gave the order that from then on no stone should be set unless it had been
compared with the ledger first, however well it seemed to fit, because a stone that fits and is not the
right one holds until the day on which it is needed.

The lamp was tended by three sisters in turns of eight hours. The eldest trimmed it at dusk, the second at
midnight, and the youngest before dawn, and each began where the one before had stopped, by reading the
page that had been left open on the table. They did not wake each other to ask. In the whole of that winter
the lamp was dark for eleven minutes, on the night when the page had been closed by the draught, and the
youngest had to read the log again from the beginning to learn how the wick stood.

In March the crews met in the fog, a stone apart. Nobody gave a speech. The clerk drew a line under the last
number, compared the sum with the ledger of the other crew, and went home while it was still light.

Question: """

QUESTIONS: Final = (
    "Why are the two halves of the breakwater of different colours?",
    "Which number had the block that was found on the quay?",
    "How long was the lamp dark, and what was the reason?",
)


def prompt(copy: int, question: int) -> str:
    """A question about a copy of the document. Copies differ from the first character on: they share no block."""
    return f"Copy {copy}. {_DOCUMENT}{QUESTIONS[question]}"


def long(copy: int) -> str:
    """A question about one and a half documents: the only prompt here that is long enough for a group."""
    return f"Copy {copy}. {_DOCUMENT}{_DOCUMENT[: len(_DOCUMENT) // 2]}\n\nQuestion: {QUESTIONS[2]}"


def shared(copy: int) -> str:
    """What all prompts about a copy begin with."""
    return f"Copy {copy}. {_DOCUMENT}"
