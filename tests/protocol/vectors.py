"""The vectors of the text and those derived from it, as one object."""

import json
from pathlib import Path
from typing import Any

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors.json").read_text())
INPUTS: dict[str, Any] = VECTORS["inputs"]
DERIVED: dict[str, Any] = VECTORS["derived"]
DESCRIPTOR: dict[str, Any] = INPUTS["descriptor"]


def text(name: str) -> str:
    """A vector that stands in the text."""
    return str(VECTORS[name]["text"])
