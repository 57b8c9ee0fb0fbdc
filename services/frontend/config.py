"""frontend.toml, and what is read with it before anything is served."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta, field

from kvsp.protocol import descriptor, keys, limits
from kvsp.protocol.descriptor import Descriptor
from kvsp.protocol.keys import ScopeKey
from kvsp.protocol.policy import FRONTEND, Identity, Policy
from kvsp.rpc.config import ConfigError, Peer, ServiceConfig, load_descriptors, load_scope_keys, own_identity
from services.frontend.api import CALLER_CHARS_MAX, CALLER_CHOICES_MAX, Served
from services.frontend.fleet import Timing
from services.frontend.tokenizer import Tokenizer

STOP_TOKENS_MAX: Final = 64
"""As many as instances take."""


class InstancePeer(Peer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An instance: its public name, and where it is reached."""

    base_uri: str


class FrontendConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`frontend.toml`: ServiceConfig, the model, the fleet, and what it serves.

    `base_uri` is the API's public base; `model` a directory with tokenizer, chat template and configuration;
    `descriptor` the file of its Compatibility Descriptor, computed from the weights and `block_tokens` when it
    is left out; `model_name` what clients call it, the descriptor's model by default; `scopes` the key files by
    name, mode 0600, and `default_scope` the one for callers of several. `deterministic` asserts that all
    instances yield the same bits when decoding greedily, `deterministic_sampling` also when sampling with a
    seed (R-049). `context_tokens` lowers what the model says; without an instance or any new binding for
    `patience_ms`, a session fails. `requests_max` bounds requests under way; of one caller, `caller_choices_max`
    bounds the answers under way and `caller_chars_max` the characters that wait to become tokens (D13).
    """

    base_uri: str
    model: str
    placement: Peer
    instances: tuple[InstancePeer, ...]
    scopes: dict[str, str] = field(default_factory=dict)
    descriptor: str = ""
    block_tokens: Annotated[int, Meta(ge=1, le=limits.INT_MAX)] | None = None
    model_name: str = ""
    default_scope: str = ""
    deterministic: bool = False
    deterministic_sampling: bool = False
    context_tokens: Annotated[int, Meta(ge=1)] | None = None
    patience_ms: Annotated[int, Meta(ge=1, le=limits.INT_MAX)] = 30_000
    requests_max: Annotated[int, Meta(ge=1)] = 1024
    caller_choices_max: Annotated[int, Meta(ge=1)] = CALLER_CHOICES_MAX
    caller_chars_max: Annotated[int, Meta(ge=1)] = CALLER_CHARS_MAX

    @property
    def timing(self) -> Timing:
        """How patiently the fleet is asked."""
        return Timing(patience_s=self.patience_ms / 1000)


def check(config: FrontendConfig, policy: Policy) -> dict[str, ScopeKey]:
    """The scope keys, once everything that costs nothing to check is in order. Raises ConfigError."""
    own = own_identity(config, policy, FRONTEND, "front end", config.base_uri)
    if not config.instances:
        raise ConfigError("instances: empty")
    for peer in config.instances:
        # "only connect to registered base URIs" (D10)
        if not policy.is_party(peer.base_uri):
            raise ConfigError(f"instances: {peer.base_uri}: nobody's base URI in {config.policy}")
    scopes = load_scope_keys(config.scopes)
    if not scopes:
        raise ConfigError("scopes: empty; without a scope key no block can be named")
    _check_scopes(config, own, scopes)
    return scopes


def load_served(config: FrontendConfig, scopes: dict[str, ScopeKey], tokenizer: Tokenizer) -> Served:
    """What is served. Reads the model's weights when there is no descriptor. Raises ConfigError."""
    described = _descriptor(config)
    context_tokens = min(filter(None, (config.context_tokens, tokenizer.context_tokens)), default=0)
    if not context_tokens:
        raise ConfigError("context_tokens: the model does not say, so it must be here")
    if len(tokenizer.stop_tokens) > STOP_TOKENS_MAX:
        raise ConfigError(f"{config.model}: more than {STOP_TOKENS_MAX} stop tokens")
    return Served(
        model=config.model_name or described.model,
        compat_id=descriptor.compat_id(described),
        block_tokens=described.block_tokens,
        context_tokens=context_tokens,
        scopes=scopes,
        created=int(time.time()),
        default_scope=config.default_scope,
        deterministic=config.deterministic,
        deterministic_sampling=config.deterministic_sampling,
        requests_max=config.requests_max,
        caller_choices_max=config.caller_choices_max,
        caller_chars_max=config.caller_chars_max,
    )


def _check_scopes(config: FrontendConfig, own: Identity, scopes: dict[str, ScopeKey]) -> None:
    for name, key in scopes.items():
        if keys.scope_id(key).hex() not in own.scopes:
            raise ConfigError(f"scope {name}: {config.policy} does not give it to {config.principal}")
    if config.default_scope and config.default_scope not in scopes:
        raise ConfigError(f"default_scope: {config.default_scope} is none of the scopes")


def _descriptor(config: FrontendConfig) -> Descriptor:
    from kvsp.connectors.describe import describe, tokenizer_digest

    model_dir = Path(config.model)
    try:
        if not config.descriptor:
            if config.block_tokens is None:
                raise ConfigError("block_tokens: needed where there is no descriptor")
            return describe(model_dir, block_tokens=config.block_tokens)
        (described,) = load_descriptors([config.descriptor]).values()
        # Tokens of another tokenizer would be named, and computed on, as if they were the model's.
        if described.tokenizer_digest != tokenizer_digest(model_dir):
            raise ConfigError(f"descriptor {config.descriptor}: not of the tokenizer in {model_dir}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model_dir}: {error}") from None
    if config.block_tokens not in (None, described.block_tokens):
        raise ConfigError(f"block_tokens: the descriptor says {described.block_tokens}")
    return described
