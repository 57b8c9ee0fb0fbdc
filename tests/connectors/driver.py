"""A client without a network: it drives the connector's side of the interface, octet by octet."""

from __future__ import annotations

import threading

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvsp.client.block import Block
from kvsp.connectors.layout import dtype_name
from kvsp.protocol import container, digests, registry
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import LookupReply, ReplicaRecord, Residency

HOLDER = "https://h1.example/kvsp/"
DIGEST = "sha-256:" + "0" * 64


class Store:
    """Keeps containers by key and hands out layers; `release` lets one more layer range through."""

    def __init__(self, *, gated: bool = False) -> None:
        self.containers: dict[str, bytes] = {}
        self.records: dict[str, ReplicaRecord] = {}
        self.others: dict[str, list[ReplicaRecord]] = {}
        self.requests: list[tuple[str, tuple[int, int]]] = []
        self._gated = gated
        self._open_to = -1
        self._opened = threading.Condition()

    def release(self, last: int) -> None:
        """Let requests for layers up to `last` through."""
        with self._opened:
            self._open_to = last
            self._opened.notify_all()

    def put(self, holder: str, compat_id: str, scope_id: str, block_key: str, octets: bytes) -> bool:
        if block_key in self.containers:
            return False
        header = container.parse_header(octets)
        payload = octets[header.header_octets :]
        spans = [header.layer_span(layer) for layer in range(header.layer_count)]
        layers = [digests.layer_digest(payload[at : at + length]) for at, length in spans]
        self.containers[block_key] = octets
        self.records[block_key] = ReplicaRecord(
            block_key=block_key,
            compat_id=compat_id,
            scope_id=scope_id,
            holder=holder,
            codec=1,
            size=header.payload_octets,
            digest=digests.format_digest(digests.replica_digest(layers)),
            layer_digests=[digest.hex() for digest in layers],
            residency=[Residency("host", (0, header.layer_count - 1))],
            ttl_ms=1000,
        )
        return True

    def lookup(self, scope_id: str, compat_id: str, block_keys: list[str]) -> LookupReply:
        replicas: list[list[ReplicaRecord]] = []
        for block_key in block_keys:
            own = [self.records[block_key]] if block_key in self.records else []
            found = [*self.others.get(block_key, []), *own]
            if not found or any((row.scope_id, row.compat_id) != (scope_id, compat_id) for row in found):
                break
            replicas.append(found)
        return LookupReply(len(replicas), replicas)

    def get(self, replicas: list[ReplicaRecord], *, layers: tuple[int, int], descriptor: Descriptor) -> Block:
        record = replicas[0]
        if self._gated:
            with self._opened:
                self._opened.wait_for(lambda: self._open_to >= layers[1])
        self.requests.append((record.block_key, layers))
        octets = self.containers[record.block_key]
        whole = container.parse_header(octets)
        header = whole.select(*layers)
        start = whole.header_octets + whole.layer_span(layers[0])[0]
        container.check_sections(header, descriptor)
        block = Block(header, memoryview(octets)[start : start + header.payload_octets], HOLDER, True)
        for layer in range(layers[0], layers[1] + 1):
            if digests.layer_digest(*block.layer(layer)[1:]).hex() != record.layer_digests[layer]:
                raise KvspError(registry.DIGEST_MISMATCH, "layer digest differs")
        return block

    def corrupt(self, block_key: str, layer: int) -> None:
        """Flip one bit of a layer that is stored."""
        octets = bytearray(self.containers[block_key])
        header = container.parse_header(octets)
        octets[header.header_octets + header.layer_span(layer)[0] + 5] ^= 0x10
        self.containers[block_key] = bytes(octets)


def small_llama(
    kv_heads: int = 2, dtype: torch.dtype = torch.float32, attention: str = "sdpa", layers: int = 4
) -> LlamaForCausalLM:
    """A Llama whose output depends on what it reads: larger weights than the usual initial ones."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        initializer_range=0.3,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def descriptor_of(model: LlamaForCausalLM, block_tokens: int = 8) -> Descriptor:
    config = model.config
    return Descriptor(
        model="small",
        model_digest=DIGEST,
        tokenizer_digest=DIGEST,
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        kv_dtype=dtype_name(model.dtype),
        positional="rope",
        block_tokens=block_tokens,
        layout="kvsp-layout-1",
    )


@torch.inference_mode()
def prefilled(model: LlamaForCausalLM, tokens: list[int]) -> DynamicCache:
    """The cache of these tokens."""
    return model(torch.tensor([tokens]), use_cache=True).cache


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, output: object, count: int) -> list[int]:
    """The next `count` tokens after a forward pass."""
    tokens: list[int] = []
    while True:
        tokens.append(int(output.logits[0, -1].argmax()))  # type: ignore[attr-defined]
        if len(tokens) == count:
            return tokens
        output = model(torch.tensor([tokens[-1:]]), cache=output.cache, use_cache=True)  # type: ignore[attr-defined]


def from_scratch(model: LlamaForCausalLM, tokens: list[int], count: int = 12) -> list[int]:
    with torch.inference_mode():
        return greedy(model, model(torch.tensor([tokens]), use_cache=True), count)
