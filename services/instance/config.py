"""instance.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from kvsp.bulk.source import SCHEMES
from kvsp.protocol import limits
from kvsp.protocol.policy import Identity, Policy
from kvsp.protocol.routes import INSTANCE
from kvsp.rpc.config import ConfigError, Party, Peer, ServiceConfig, Tls, own_identity
from services.instance.engine import CHUNK_TOKENS, KV_OCTETS

Count = Annotated[int, Meta(ge=0, le=limits.INT_MAX)]
Positive = Annotated[int, Meta(ge=1, le=limits.INT_MAX)]

STATUS_TTL_MS_MIN: Final = 100


class InstanceConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an inference instance needs besides.

    `base_uri` is its public name, which the holder beside it (`holder`) shares. `model` is a directory of a causal
    language model; blocks have `block_tokens` tokens. `holders` are those that it may load from, `durable` of them
    get a copy of each new block. `scopes` are files of scope keys by name. `https` are the credentials for parties
    without an internal address. `state_dir` keeps the epoch. Times are milliseconds; 0 for `sleep_after_ms`: never
    ask to sleep. `threads` compute (0: as many as the machine has); `device_octets` of hot blocks' first
    `device_layers` layers (0: all) stay in the engine's memory. `link_mbit_per_s` is assumed of holders until
    measured. `queue_octets` bounds what waits to be stored. Blocks move by `schemes`, as far as holders have them.
    Contexts may be shared with `instances`, at their internal addresses; `group_octets` hold the KV of them all.

    `kv_octets` hold the KV of all sessions together. A prompt is computed in chunks of about `chunk_tokens`; the
    output of instances is the same only if theirs are, as the model, `threads` and machine.

    What of an outage a session survives: a front end that is away finds its output for `keep_output_ms` after the
    end; where blocks are lost the prompt's tokens have to come from the front end within `prompt_wait_ms`; without
    any answer of the placement controller it goes on for session.SILENCE_MS_MAX, tokens of a sampler that is not
    deterministic staying here as long. `batch_invariant`: without it no sampler is deterministic here.
    """

    base_uri: str
    model: str
    block_tokens: Annotated[int, Meta(ge=1, le=4096)]
    placement: Party
    index: Peer
    holder: Peer
    holders: tuple[Party, ...] = ()
    durable: tuple[str, ...] = ()
    scopes: dict[str, str]
    https: Tls | None = None
    state_dir: str
    status_ttl_ms: Annotated[int, Meta(ge=STATUS_TTL_MS_MIN, le=limits.STATUS_TTL_MS_MAX)] = 1_500
    sleep_after_ms: Count = 0
    keep_output_ms: Positive = 60_000
    prompt_wait_ms: Positive = 10_000
    batch_size: Annotated[int, Meta(ge=1, le=4096)] = 16
    queue_max: Count = 64
    batch_invariant: bool = True
    kv_octets: Positive = KV_OCTETS
    chunk_tokens: Positive = CHUNK_TOKENS
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    device_octets: Count = 0
    device_layers: Count = 0
    link_mbit_per_s: Annotated[float, Meta(gt=0, le=1e9)] = 10_000.0
    parallel: Annotated[int, Meta(ge=1, le=64)] = 4
    lease_ms: Annotated[int, Meta(ge=1, le=limits.LEASE_TTL_MS_MAX)] = 10_000
    fetch_timeout_ms: Positive = 5_000
    queue_octets: Positive = 256 << 20
    instances: tuple[Party, ...] = ()
    group_octets: Positive = 1 << 30
    schemes: Annotated[tuple[str, ...], Meta(min_length=1)] = SCHEMES


def check_identity(config: InstanceConfig, policy: Policy) -> Identity:
    """The instance's own identity. Raises ConfigError unless the policy lets it be this instance."""
    return own_identity(config, policy, INSTANCE, "instance", config.base_uri)


def check_model(config: InstanceConfig) -> None:
    """What can be seen at once is not found out after seconds of loading. Raises ConfigError."""
    if not Path(config.model).is_dir():
        raise ConfigError(f"model {config.model}: no such directory")


def check_parties(config: InstanceConfig, policy: Policy) -> None:
    """Who is called is registered (D10), and can be. Raises ConfigError."""
    names = [holder.base_uri for holder in config.holders]
    if config.base_uri in names or len(set(names)) != len(names):
        raise ConfigError("holders: each once, and not the instance itself")
    if unknown := set(config.durable) - set(names):
        raise ConfigError(f"durable: {min(unknown)} is none of the holders")
    for party in (config.placement, *config.holders, *config.instances):
        # "only connect to registered base URIs" (D10)
        if not policy.is_party(party.base_uri):
            raise ConfigError(f"{config.policy}: {party.base_uri} is nobody's base URI")
        if party.peer is None and config.https is None:
            raise ConfigError(f"{party.base_uri}: has no address, and there is no [https] to reach it with")
    for party in config.instances:
        if party.peer is None or party.base_uri == config.base_uri:
            raise ConfigError(f"instances: {party.base_uri} is this one, or has no address")
