"""What an instance reports (R-217). Labels name states, reasons and statuses, never sessions or scopes (R-215)."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

PROMPT_TOKENS = Counter(
    "kvsp_instance_prompt_tokens_total", "Prompt tokens of sessions, loaded or computed here", ["how"]
)
OUTPUT_TOKENS = Counter("kvsp_instance_output_tokens_total", "Output tokens released")
SESSIONS = Counter("kvsp_instance_sessions_total", "Sessions, by what became of them", ["outcome"])
SESSIONS_RUNNING = Gauge("kvsp_instance_sessions_running", "Sessions whose output has not ended")
CHECKPOINTS = Counter("kvsp_instance_checkpoints_total", "Checkpoints, by outcome", ["outcome"])
DIRECTIVES = Counter("kvsp_instance_directives_total", "Prefetch directives, by final state", ["state"])
DIRECTIVE_REFUSALS = Counter("kvsp_instance_directive_refusals_total", "Directives refused, by status", ["status"])
FETCHED_OCTETS = Counter("kvsp_instance_fetched_octets_total", "Block octets fetched from other holders")
SOURCE_FAILURES = Counter("kvsp_instance_source_failures_total", "Fetches that failed, by status", ["status"])
DIGEST_FAILURES = Counter(
    "kvsp_instance_digest_failures_total", "Octets that do not match their digest", ["where"]
)
STORE_DROPPED = Counter("kvsp_instance_store_dropped_total", "New blocks dropped because too many waited")
STORED = Counter("kvsp_instance_stored_total", "New blocks put to a holder, by outcome", ["outcome"])
STATUS_REPORTS = Counter("kvsp_instance_status_reports_total", "Status reports, by outcome", ["outcome"])
GROUP_OCTETS = Counter(
    "kvsp_instance_group_octets_total", "KV of parallel groups at a new version, by how it came here", ["how"]
)
GROUPS = Gauge("kvsp_instance_groups", "Parallel groups that this instance is a member of")
