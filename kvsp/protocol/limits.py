"""Every bound of the protocol and of this implementation, with their relations asserted (R-214, U-10).

Units are in the names. Services may be configured below these, never above.
"""

from __future__ import annotations

from typing import Final

INT_MAX: Final = 2**53 - 1  # I-JSON's exact integers (U-03)
TOKEN_MAX: Final = 2**32 - 1
LAYER_MAX: Final = 2**32 - 1  # U-23: syntax of `layers=`

JSON_OCTETS_MAX: Final = 8 << 20
JSON_DEPTH_MAX: Final = 32
JSON_OBJECTS_MAX: Final = 8192  # in one text

LOOKUP_KEYS_MAX: Final = 8192
LOOKUP_TARGETS_MAX: Final = 256
LEASE_KEYS_MAX: Final = 1024
DIRECTIVE_BLOCKS_MAX: Final = 4096
DIRECTIVE_SOURCES_MAX: Final = 16
DIRECTIVES_PENDING_MAX: Final = 64
RESHARD_RANGES_MAX: Final = 4096
RESIDENCY_RANGES_MAX: Final = 4096

BLOCK_OCTETS_MAX: Final = 256 << 20
CONTAINER_LAYERS_MAX: Final = 4096  # D5: a claimed layer table is capped before it is read
CONTAINER_HEADER_FIXED_OCTETS: Final = 20
CONTAINER_LAYER_ENTRY_OCTETS: Final = 16
CONTAINER_HEADER_OCTETS_MAX: Final = (
    CONTAINER_HEADER_FIXED_OCTETS + CONTAINER_LAYERS_MAX * CONTAINER_LAYER_ENTRY_OCTETS
)

URI_OCTETS_MAX: Final = 8192
BASE_URI_OCTETS_MAX: Final = 2048
NAME_OCTETS_MAX: Final = 1024  # model name, sampler method, map id, request_ref

REPLICA_TTL_MS_MAX: Final = 3_600_000
STATUS_TTL_MS_MAX: Final = 60_000  # U-37
LEASE_TTL_MS_MAX: Final = 600_000
LEASED_OCTETS_DEFAULT: Final = 4 << 30  # per identity, unless the policy says otherwise
LEASE_COUNT_MAX: Final = 4096
RECORDS_PER_HOLDER_MAX: Final = 2_000_000
RESERVED_OCTETS_DEFAULT: Final = 1 << 30  # per identity: room for uploads under way (D4, D13)
PINNED_OCTETS_DEFAULT: Final = 4 << 30  # per identity: blocks being read (D13)

RATE_OCTETS_PER_S_MIN: Final = 300_000  # a slower transfer is cut (D4)
TRANSFER_BASE_MS: Final = 10_000


def transfer_ms(octets: int) -> int:
    """Milliseconds that a transfer of `octets` may take: a start, and the slowest accepted rate."""
    return TRANSFER_BASE_MS + -(-octets * 1000 // RATE_OCTETS_PER_S_MIN)


PIN_DEADLINE_MS: Final = transfer_ms(BLOCK_OCTETS_MAX)  # the longest that a transfer of a block may take

GRPC_CHUNK_OCTETS: Final = 256 << 10  # D14: stream chunks stay far below gRPC's 4 MiB default
GRPC_MESSAGE_OCTETS_MAX: Final = 16 << 20

_RELATIONS: Final = (
    LOOKUP_KEYS_MAX * 67 + LOOKUP_TARGETS_MAX * BASE_URI_OCTETS_MAX < JSON_OCTETS_MAX,
    CONTAINER_HEADER_OCTETS_MAX < BLOCK_OCTETS_MAX,
    CONTAINER_LAYERS_MAX * 67 < JSON_OCTETS_MAX,
    JSON_OCTETS_MAX < GRPC_MESSAGE_OCTETS_MAX,
    max(DIRECTIVE_BLOCKS_MAX, RESIDENCY_RANGES_MAX, RESHARD_RANGES_MAX) < JSON_OBJECTS_MAX,
    GRPC_CHUNK_OCTETS < 4 << 20,
    BLOCK_OCTETS_MAX < INT_MAX,
    BLOCK_OCTETS_MAX <= RESERVED_OCTETS_DEFAULT <= PINNED_OCTETS_DEFAULT,
    PIN_DEADLINE_MS >= 900_000,  # 256 MiB may take a quarter of an hour
)
if not all(_RELATIONS):
    raise ValueError("limits contradict each other")
