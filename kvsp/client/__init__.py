"""The SDK that engines import: find, fetch, verify, store and lease KV-cache blocks over HTTPS.

client = Client(Credentials(ca, cert, key), Endpoints(index, frozenset({holder})))
found = client.lookup(scope_id, compat_id, keys)
for replicas in found.replicas:
    block = client.get(replicas)        # verified, from whichever replica delivers
    k, v = block.layer(0)[1:]
"""

from kvsp.client.aio import AsyncClient
from kvsp.client.block import Block, Layer
from kvsp.client.client import BlockInfo, Client
from kvsp.client.config import Credentials, Endpoints, Options, Stack, load_stack
from kvsp.client.errors import BlockUnavailable
from kvsp.client.lease import Lease

__all__ = [
    "AsyncClient",
    "Block",
    "BlockInfo",
    "BlockUnavailable",
    "Client",
    "Credentials",
    "Endpoints",
    "Layer",
    "Lease",
    "Options",
    "Stack",
    "load_stack",
]
