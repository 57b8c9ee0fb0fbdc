"""Parallel groups: what moves when one is resized, what decoding sees of it, and a long prompt on two instances.

The dev stack runs with the demo model, one compute thread an instance on two cores. A long prompt is decoded
while its group goes from three instances to two, one, two and three; octets are those that the holders count. What
it takes to fetch a member's ranges is timed alone, by an instance in this process that loads as many blocks. For
prefill, prompts of equal length go to two instances and to one, taking turns.
"""

from __future__ import annotations

import asyncio
import statistics
from itertools import pairwise

from benchmarks.fleet import BLOCK, Samples, instance, require, stack, timed
from benchmarks.measure import Row, Timing
from deploy.local import prompts
from deploy.local.api import Answer
from deploy.local.configs import INSTANCES, SPARE
from deploy.local.fleet import Fleet
from deploy.local.groups_act import Groups, Step, resized_while_streaming
from deploy.local.stack import Background

ROUNDS = 6
ROUNDS_RESIZED = 4
RESIZED_TOKENS = 192
DECODED = 48
MIB = 1 << 20


def resizes(fleet: Fleet, samples: Samples) -> list[Step]:
    """Every step of ROUNDS_RESIZED answers.

    A pause is what the longest silence was longer than the usual time of a token.
    """
    steps: list[Step] = []
    with fleet.spare():
        for copy in range(ROUNDS_RESIZED):
            fleet.settle()
            act = Groups()
            resized_while_streaming(fleet, act, prompts.long(200 + copy), RESIZED_TOKENS)
            require(act.answer.output_tokens == RESIZED_TOKENS and not act.answer.moved, "the group was lost")
            usual_s = statistics.median(after - before for before, after in pairwise(act.answer.pieces))
            for step in act.steps:
                samples.add("silence", step.pause_s)
                samples.add("pause", max(0.0, step.pause_s - usual_s))
                samples.add("step", step.took_s)
            steps += act.steps
    return steps


def prefills(fleet: Fleet, samples: Samples) -> None:
    """A long prompt on two instances and on one, taking turns."""
    for copy in range(ROUNDS + 1):
        fleet.settle()
        two = fleet.ask(prompts.long(300 + copy), DECODED)
        fleet.settle()
        with fleet.drained(INSTANCES[copy % 2]):
            one = fleet.ask(prompts.long(400 + copy), DECODED)
        require(max(two.cached_tokens, one.cached_tokens) < BLOCK, "a prompt was known")
        if copy:  # the first warms
            for name, answer in (("two", two), ("one", one)):
                samples.add(f"prefill, {name}", answer.first_token_s)
                samples.add(f"decode, {name}", _token_s(answer))


def _token_s(answer: Answer) -> float:
    return (answer.pieces[-1] - answer.pieces[0]) / (len(answer.pieces) - 1)


async def fetches(background: Background, octets: int, samples: Samples) -> None:
    """What it takes an instance to load so many octets of blocks, that and nothing else."""
    async with instance(background, SPARE) as here:
        blocks = octets // here.engine.descriptor.payload_octets
        prompt = here.prompt(blocks * BLOCK + 1)
        await here.serve(prompt)
        for _ in range(ROUNDS):
            await here.forget(prompt)
            took, _ = await here.load_alone(prompt)
            samples.add("fetch", took)
        await here.settle()


def run() -> list[Row]:
    """Rows of the table; prints every step and all medians."""
    samples = Samples()
    with stack(metrics=True) as background:
        with Fleet(background) as fleet:
            prefills(fleet, samples)
            steps = resizes(fleet, samples)
        largest = statistics.median_high(step.largest for step in steps)
        background.start_again(f"{SPARE}-blocks")
        asyncio.run(fetches(background, largest, samples))
    for step in steps:
        print(
            f"{', '.join(step.members)}: {step.moved / MIB:.2f} MiB moved of {step.due / MIB:.2f} due, "
            f"{step.retained / MIB:.2f} stayed, {1000 * step.took_s:.0f} ms, pause {1000 * step.pause_s:.0f} ms",
            flush=True,
        )
    for name in samples.of:
        timing = samples.timing(name)
        print(f"{name}: {1000 * timing.seconds:.1f} ms, spread {timing.spread:.0%}", flush=True)
    return [_moved(steps), *_times(samples)]


def _moved(steps: list[Step]) -> Row:
    moved, due = (sum(values) for values in ([step.moved for step in steps], [step.due for step in steps]))
    figures = [f"{octets / MIB:.2f} MiB" for octets in (moved, due)]
    return Row(
        "resizing", "moved, as holders count", figures[0], "octets of fetch ranges", figures[1], due / moved, 0
    )


def _times(samples: Samples) -> list[Row]:
    fetch = samples.timing("fetch")
    bound = Timing(1.2 * fetch.seconds, fetch.spread)
    rows = [
        ("resizing", "longest silence between tokens", "silence", "1.2 x fetch of the largest member", bound),
        ("resizing", "of it, beyond the usual", "pause", "1.2 x fetch of the largest member", bound),
        ("resizing", "the whole step", "step", "fetch of the largest member", fetch),
        ("first token of a long prompt", "two instances", "prefill, two", "one", samples.timing("prefill, one")),
        ("decoding after it, a token", "two instances", "decode, two", "one", samples.timing("decode, one")),
    ]
    return [timed(what, ours, samples.timing(mine), peer, theirs) for what, ours, mine, peer, theirs in rows]
