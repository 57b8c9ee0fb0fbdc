"""Envoy and streams of tokens: silence that would end another reply does not end theirs."""

from __future__ import annotations

import http.client

import pytest

from deploy.local.envoy import Tuning
from tests.stack.edge import start_edge
from tests.stack.harness import temporary_layout

pytestmark = pytest.mark.stack

DRIPS = 3
"""The mirror sends as many octets, 0.3 s apart."""


def test_a_stream_of_tokens_may_be_silent_for_longer_than_others() -> None:
    impatient = Tuning(idle_timeout_s=0.2, token_idle_timeout_s=60.0)
    with temporary_layout() as layout, start_edge(layout, impatient) as edge:
        assert edge.get(f"/fe/v1/completions?drip={DRIPS}").body == bytes(DRIPS)
        with pytest.raises(http.client.IncompleteRead):
            edge.get(f"/h1/blocks?drip={DRIPS}")
