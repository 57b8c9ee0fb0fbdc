"""Where the dev stack keeps things, which ports it takes, and the base URIs that follow."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

DEFAULT_PORT = 8443
DEFAULT_ADMIN_PORT = 9901
SOCKET_PATH_OCTETS_MAX = 107  # sun_path of unix(7), less its final NUL


class StackError(Exception):
    """The dev stack cannot do what was asked; the text says why, in one line."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths under `home` (absolute) and the two TCP ports, Envoy's and that of its admin page."""

    home: Path
    port: int = DEFAULT_PORT
    admin_port: int = DEFAULT_ADMIN_PORT

    @classmethod
    def from_env(cls) -> Layout:
        """KVSP_HOME (default .kvsp), KVSP_PORT and KVSP_ADMIN_PORT. Raises StackError."""
        return cls(
            Path(os.environ.get("KVSP_HOME", ".kvsp")).absolute(),
            _port("KVSP_PORT", DEFAULT_PORT),
            _port("KVSP_ADMIN_PORT", DEFAULT_ADMIN_PORT),
        )

    @property
    def pki(self) -> Path:
        """Certificates and keys."""
        return self.home / "pki"

    @property
    def policy(self) -> Path:
        """The identity registry that services read."""
        return self.home / "policy.toml"

    @property
    def envoy(self) -> Path:
        """The rendered Envoy configuration."""
        return self.home / "envoy.yaml"

    @property
    def endpoints(self) -> Path:
        """What describes the running stack to clients."""
        return self.home / "endpoints.json"

    @property
    def descriptor(self) -> Path:
        """The Compatibility Descriptor of the demo model."""
        return self.home / "descriptor.json"

    @property
    def admin_url(self) -> str:
        """Envoy's admin page."""
        return f"http://127.0.0.1:{self.admin_port}"

    def config(self, name: str) -> Path:
        """The configuration file of a process."""
        return self.home / "config" / f"{name}.toml"

    def log(self, name: str) -> Path:
        """The log file of a process."""
        return self.home / "logs" / f"{name}.log"

    def socket(self, name: str) -> Path:
        """The Unix socket of a process."""
        return self.home / "run" / f"{name}.sock"

    def state(self, name: str) -> Path:
        """The directory in which a process keeps state."""
        return self.home / "state" / name

    def scope_key(self, name: str) -> Path:
        """The key file of a scope."""
        return self.home / "scopes" / f"{name}.key"

    def base_uri(self, prefix: str) -> str:
        """The base URI of a role; the default port is left out, as a normalised URI has it (U-07)."""
        authority = "localhost" if self.port == 443 else f"localhost:{self.port}"
        return f"https://{authority}/{prefix}/"

    def make_directories(self) -> None:
        """Create what is missing, closed to other users. Raises StackError."""
        longest = len(os.fsencode(self.socket("ii1-blocks"))) + len(".control")
        if longest > SOCKET_PATH_OCTETS_MAX:
            raise StackError(
                f"KVSP_HOME {self.home}: too long, a Unix socket path holds {SOCKET_PATH_OCTETS_MAX} octets"
            )
        try:
            for name in ("", "pki", "config", "logs", "run", "scopes", "state"):
                directory = self.home / name
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                directory.chmod(0o700)
        except OSError as error:
            raise StackError(f"KVSP_HOME {self.home}: {error.strerror}") from None

    def lock(self) -> int:
        """Claim the home for this process until it ends. Returns the open file. Raises StackError."""
        descriptor = os.open(self.home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise StackError(f"another stack is running in {self.home}; choose another with KVSP_HOME") from None
        return descriptor


def write_private(path: Path, octets: bytes) -> None:
    """Put the octets in place at once, readable by this user alone."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(octets)
    temporary.replace(path)


def _port(variable: str, default: int) -> int:
    text = os.environ.get(variable) or str(default)
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 16):
        raise StackError(f"{variable}={text}: not a TCP port")
    return int(text)
