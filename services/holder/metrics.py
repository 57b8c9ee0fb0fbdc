"""What a holder reports (R-217). Labels name transports and reasons, never blocks or scopes (R-215)."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

OCTETS = Counter("kvsp_holder_octets_total", "Block octets by direction and transport", ["direction", "scheme"])
TRANSFERS = Counter("kvsp_holder_transfers_total", "Transfers by direction and transport", ["direction", "scheme"])
LEASE_REJECTIONS = Counter("kvsp_holder_lease_rejections_total", "Leases refused, by HTTP status", ["status"])
DIGEST_FAILURES = Counter("kvsp_holder_digest_failures_total", "Octets that do not match their digest", ["where"])
EVICTIONS = Counter("kvsp_holder_evictions_total", "Blocks evicted to make room")
NO_ROOM = Counter("kvsp_holder_no_room_total", "Reservations refused for want of room")
PUBLICATIONS = Counter("kvsp_holder_publications_total", "Answers of the index", ["item", "outcome"])
ARENA_OCTETS = Gauge("kvsp_holder_arena_octets", "Size of the arena")
ARENA_USED_OCTETS = Gauge("kvsp_holder_arena_used_octets", "Octets of the arena in use")
BLOCKS = Gauge("kvsp_holder_blocks", "Blocks held")
LEASES = Gauge("kvsp_holder_leases", "Leases in force")
