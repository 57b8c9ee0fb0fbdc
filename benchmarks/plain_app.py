"""The peer of the lookup benchmark: a FastAPI route that returns octets from memory."""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import FastAPI, Request, Response

app = FastAPI()
_BODY = Path(os.environ["KVSP_BENCH_BODY"]).read_bytes()


@app.post("/is/lookup")
async def lookup(request: Request) -> Response:
    """The same octets, whatever is asked. The question is read: uvicorn may reset what is answered before."""
    await request.body()
    return Response(_BODY, media_type="application/kvsp+json")
