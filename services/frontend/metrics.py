"""Metrics of the front end (R-217). Labels hold paths of the API, statuses and causes: nothing confidential."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter("kvsp_frontend_requests_total", "API requests by path and status", ["path", "status"])
TOKENS = Counter("kvsp_frontend_tokens_total", "Tokens by kind: prompt, cached (of the prompt), output", ["kind"])
ATTACHES = Counter("kvsp_frontend_attaches_total", "Streams opened at instances, by cause", ["cause"])
STALE = Counter("kvsp_frontend_stale_tokens_total", "Tokens dropped because their epoch was over")
LEFT = Counter("kvsp_frontend_unended_sessions_total", "Sessions whose end could not be told to the fleet")
SESSIONS = Gauge("kvsp_frontend_sessions", "Sessions under way")
FIRST_TOKEN = Histogram(
    "kvsp_frontend_first_token_seconds",
    "From the request to the first output token",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
