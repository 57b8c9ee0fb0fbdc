"""An instance with a real, small model, among real holders and a real index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvsp.protocol import jsonio, keys
from kvsp.protocol.names import party_id
from kvsp.protocol.records import DirectiveBlock, PrefetchDirective
from kvsp.rpc.clock import now_ms
from kvsp.rpc.convert import directive_to_message
from kvsp.v1 import common_pb2, instance_pb2
from services.instance.device import DeviceTier
from services.instance.scheduler import Scheduler
from services.instance.tiers import keep
from services.instance.torch_engine import TorchEngine
from tests.connectors.driver import descriptor_of, small_llama
from tests.services.instance_engine import tokens_of
from tests.services.instance_rig import PC, SCOPE, SCOPE_KEY, URIS, Instance, World, instance, until, world
from tests.services.instance_states import session_id

BLOCK = 8
PROMPT = tokens_of(1, 45)
METHODS = [("greedy", {}), ("top-k", {"k": 20, "temperature": 1.3}), ("top-p", {"p": 0.9, "temperature": 1.5})]
S1, S2, S3 = (session_id(i) for i in (1, 2, 3))
MODEL = small_llama()


def sampler(method: str = "greedy", params: Any = None, *, deterministic: bool = True, **more: Any) -> Any:
    params = {"max_tokens": 40} | (params or {}) | more
    return common_pb2.Sampler(
        method=method, params_json=jsonio.encode(params), seed=11, deterministic=deterministic
    )


@asynccontextmanager
async def running(made: World, *, device_octets: int = 0, **config: Any) -> AsyncIterator[Instance]:
    """An instance beside ii1 that may load from, and keeps its blocks at, h1."""

    def engine(changed: Callable[..., None]) -> TorchEngine:
        device = DeviceTier(made.descriptor, device_octets, 2, changed=changed) if device_octets else None
        return TorchEngine(MODEL, made.descriptor, chunk_tokens=3 * BLOCK, device=device)

    schedule = partial(partial, Scheduler)
    async with instance(
        made, "h1", durable=(URIS["h1"],), make_engine=engine, schedule=schedule, **config
    ) as served:
        yield served


@asynccontextmanager
async def place(folder: Path) -> AsyncIterator[World]:
    async with world(folder, "ii1", "h1", descriptor=descriptor_of(MODEL, BLOCK)) as made:
        yield made


async def generated(ii: Instance, session: str, **changes: Any) -> Any:
    """A session from start to end."""
    reading = ii.generate(session, **({"prompt": PROMPT, "sampler": sampler()} | changes))
    await reading.reading
    assert reading.error is None, reading.error
    assert reading.finished.reason != "failed"
    return reading


def names(made: World, tokens: list[int]) -> list[bytes]:
    return keys.block_keys(SCOPE_KEY, bytes.fromhex(made.compat_id), tokens, BLOCK)


async def listed(made: World, party: str, tokens: list[int]) -> None:
    for name in names(made, tokens):
        await until(lambda n=name: made.index.table.find(party_id(URIS[party]), n, now_ms()) is not None)  # type: ignore[misc]


@pytest.mark.spec("R-171", "R-074")
async def test_the_second_time_the_prompt_is_loaded(tmp_path: Path) -> None:
    async with place(tmp_path) as made, running(made) as ii:
        first = await generated(ii, S1)
        assert (first.reused.prompt_tokens, first.reused.cached_tokens) == (45, 0)
        assert len(first.tokens) == 40
        await listed(made, "ii1", PROMPT + first.tokens[:-1])
        await listed(made, "h1", PROMPT + first.tokens[:-1])
        second = await generated(ii, S2)
        assert second.reused.cached_tokens == 40
        assert second.tokens == first.tokens


@pytest.mark.spec("R-180", "R-176", "R-177", "R-170")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("method", "params"), METHODS)
async def test_a_session_that_another_life_goes_on_with(
    tmp_path: Path, method: str, params: dict[str, Any], deterministic: bool
) -> None:
    made_sampler = sampler(method, params, deterministic=deterministic)
    async with place(tmp_path) as made:
        async with running(made) as ii:
            undisturbed = await generated(ii, S1, sampler=made_sampler)
            reading = ii.generate(S2, prompt=PROMPT, sampler=made_sampler)
            await until(lambda: len(reading.tokens) >= 20)
            sent = [each for each in ii.controller.checkpoints if each.session == S2]
            last = max(sent[:-1], key=lambda each: each.output_offset)
            before = list(reading.tokens)
        async with running(made) as ii:
            request = instance_pb2.ResumeRequest(session=S2, epoch=2, checkpoint=last)
            await ii.call("Resume", request, PC)
            rest = await generated(ii, S2, sampler=made_sampler, epoch=2, from_index=len(before))
            assert before + rest.tokens == undisturbed.tokens


@pytest.mark.spec("R-180", "R-088")
async def test_blocks_that_were_lost_are_computed_again(tmp_path: Path) -> None:
    async with place(tmp_path) as made:
        async with running(made) as ii:
            undisturbed = await generated(ii, S1)
            last = ii.controller.checkpoints[0]
        for holder in made.places.values():
            for block in list(holder.host.state.store.all()):
                await holder.host.purge(block.name)
        async with running(made, prompt_wait_ms=60_000) as ii:
            await ii.call("Resume", instance_pb2.ResumeRequest(session=S1, epoch=2, checkpoint=last), PC)
            again = await generated(ii, S1, epoch=2)
            assert again.tokens == undisturbed.tokens


async def test_blocks_and_prompt_that_were_lost_end_the_session(tmp_path: Path) -> None:
    async with place(tmp_path) as made:
        async with running(made) as ii:
            await generated(ii, S1)
            last = ii.controller.checkpoints[0]
        for holder in made.places.values():
            for block in list(holder.host.state.store.all()):
                await holder.host.purge(block.name)
        async with running(made, prompt_wait_ms=50) as ii:
            await ii.call("Resume", instance_pb2.ResumeRequest(session=S1, epoch=2, checkpoint=last), PC)
            await until(lambda: ii.host.state.sessions.running == 0)
            reading = ii.generate(S1, epoch=2, prompt=PROMPT, sampler=sampler())
            await reading.reading
            assert reading.finished.reason == "failed"


@pytest.mark.spec("R-127", "R-128")
async def test_prefetch_while_decoding(tmp_path: Path) -> None:
    async with place(tmp_path) as made, running(made) as ii:
        other = tokens_of(2, 64)
        async with running_elsewhere(made, other) as blocks:
            busy = ii.generate(S1, prompt=PROMPT, sampler=sampler(max_tokens=400))
            await until(lambda: len(busy.tokens) > 5)
            directive = PrefetchDirective(
                session_id(9), SCOPE, made.compat_id,
                [DirectiveBlock(block.hex(), [URIS["h1"]]) for block in blocks], 60_000, 2000,
            )  # fmt: skip
            await ii.call("Prefetch", directive_to_message(directive), PC)
            asked = instance_pb2.GetDirectiveRequest(directive=session_id(9))
            async with asyncio.timeout(20):
                while (found := await ii.call("GetDirective", asked, PC)).state == "pending":
                    await asyncio.sleep(0.005)
            assert (found.state, len(found.loaded)) == ("complete", 32 * len(blocks))
            assert busy.finished is None
            hit = await generated(ii, S2, prompt=other, sampler=sampler(max_tokens=5))
            assert hit.reused.cached_tokens == 64
            await busy.reading
            assert len(busy.tokens) == 400


@asynccontextmanager
async def running_elsewhere(made: World, prompt: list[int]) -> AsyncIterator[list[bytes]]:
    """The blocks of a prompt, computed with the same model and stored at h1 alone."""
    import torch

    from kvsp.connectors.layout import export_blocks
    from kvsp.rpc.convert import block_name

    with torch.inference_mode():
        cache = MODEL(torch.tensor([prompt]), use_cache=True).cache
    found = names(made, prompt)
    for name, octets in zip(found, export_blocks(cache, made.descriptor), strict=True):
        named = block_name(made.compat_id, SCOPE, name.hex())
        reserved = await made.places["h1"].client.reserve("spiffe://t/writer", named, len(octets))
        assert reserved is not None
        await reserved.write(octets)
        await reserved.commit()
    await listed(made, "h1", prompt)
    yield found


def container_of(made: World, name: bytes) -> bytes:
    """A block as its own holder has it."""
    [block] = [each for each in made.places["ii1"].host.state.store.all() if each.name.block_key == name]
    octets = block.digested.header.total_octets
    return bytes(made.places["ii1"].host.arena.view[block.offset : block.offset + octets])


def tiers(made: World, name: bytes) -> list[tuple[str, tuple[int, int]]]:
    """Where the own holder says that the layers of a block are."""
    [block] = [each for each in made.places["ii1"].host.state.store.all() if each.name.block_key == name]
    return block.residency


@pytest.mark.spec("R-044", "U-49")
async def test_the_device_tier_is_reported_and_emptied(tmp_path: Path) -> None:
    async with place(tmp_path) as made, running(made, device_octets=1 << 20) as ii:
        first = await generated(ii, S1)
        [*_, name] = names(made, PROMPT)
        await listed(made, "ii1", PROMPT)
        await until(lambda: tiers(made, name) == [("device", (0, 1)), ("host", (2, 3))])
        again = await generated(ii, S2)
        assert again.reused.cached_tokens == 40
        assert again.tokens == first.tokens
        await ii.call("PutState", common_pb2.StateChange(state="sleeping"), PC)
        await until(lambda: tiers(made, name) == [("host", (0, 3))])
        device = ii.host._engine.device
        assert device is not None
        await keep(device, SCOPE, name, [container_of(made, name)])  # stored while it fell asleep
        assert device.names() == []
        await ii.call("PutState", common_pb2.StateChange(state="active"), PC)
        await keep(device, SCOPE, name, [container_of(made, name)])
        await until(lambda: tiers(made, name) == [("device", (0, 1)), ("host", (2, 3))])


async def test_a_token_that_the_model_does_not_know_ends_its_session_alone(tmp_path: Path) -> None:
    async with place(tmp_path) as made, running(made) as ii:
        reading = ii.generate(S1, prompt=[5, 96, 97], sampler=sampler())
        await reading.reading
        assert reading.finished.reason == "failed"
        assert len((await generated(ii, S2)).tokens) == 40
