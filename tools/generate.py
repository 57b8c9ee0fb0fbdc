"""Write, or with --check compare, what is generated: kvsp/v1, docs/openapi.json, docs/conformance.md, diagrams."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def protobuf(target: Path) -> None:
    """Generate messages, typing stubs and gRPC services of proto/kvsp/v1 below `target`."""
    sources = sorted((ROOT / "proto/kvsp/v1").glob("*.proto"))
    well_known = str(files("grpc_tools") / "_proto")
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", f"-I{well_known}"]
    outputs = ["python_out", "mypy_out", "grpc_python_out", "mypy_grpc_out"]
    subprocess.run([*command, *(f"--{name}={target}" for name in outputs), *map(str, sources)], check=True)


def openapi(target: Path) -> None:
    """docs/openapi.json from the route table and the records."""
    from tools.openapi import render

    (target / "docs").mkdir(parents=True, exist_ok=True)
    (target / "docs/openapi.json").write_text(render())


def conformance(target: Path) -> None:
    """docs/conformance.md from the spec marks of the tests."""
    from tools.conformance import render

    (target / "docs").mkdir(parents=True, exist_ok=True)
    (target / "docs/conformance.md").write_text(render(ROOT / "tests"))


def diagrams(target: Path) -> None:
    """docs/resharding.md with the diagram of its transition table."""
    from tools.diagrams import render

    (target / "docs").mkdir(parents=True, exist_ok=True)
    page = (ROOT / "docs/resharding.md").read_text(encoding="utf-8")
    (target / "docs/resharding.md").write_text(render(page), encoding="utf-8")


GENERATORS = (protobuf, openapi, conformance, diagrams)


def main() -> int:
    if "--check" not in sys.argv[1:]:
        for generate in GENERATORS:
            generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder)
        for generate in GENERATORS:
            generate(target)
        fresh = [path for path in target.rglob("*") if path.is_file()]
        stale = [
            path.relative_to(target)
            for path in fresh
            if not (ROOT / path.relative_to(target)).exists()
            or (ROOT / path.relative_to(target)).read_bytes() != path.read_bytes()
        ]
    for path in stale:
        print(f"stale: {path} (run `make proto`)")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
