"""The front end's shell on the virtual clock: asks for an assignment, follows the binding, delivers tokens."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final

from kvsp.protocol import registry
from kvsp.protocol.errors import KvspError
from kvsp.protocol.records import SessionCheckpoint
from services.frontend.state import Delivery
from tests.sim.checker import Checker, Request
from tests.sim.kernel import Future, Kernel, Node
from tests.sim.network import EndOfStreamError, Network, Stream, UnreachableError
from tests.sim.storage import BLOCK_TOKENS, COMPAT, SCOPE, keys_of

if TYPE_CHECKING:
    from services.placement.instructions import Binding
    from tests.sim.instance import Event, InstanceNode
    from tests.sim.placement import PlacementNode

RETRY_MS: Final = 100
ASSIGN_MS: Final = 3_000
ENDING_MS: Final = 20_000
GIVE_UP_MS: Final = 30_000
"""Without any progress for so long, a session is reported failed."""


class FrontendNode(Node):
    """One front end; its clients are gone with a crash of it."""

    def __init__(
        self, kernel: Kernel, network: Network, checker: Checker, placement: PlacementNode,
        instances: Mapping[str, InstanceNode],
    ) -> None:  # fmt: skip
        super().__init__(kernel, "fe")
        self.network = network
        self.checker = checker
        self.placement = placement
        self.instances = instances
        self.asked: dict[str, Request] = {}  # without an outcome yet
        self.ending: set[str] = set()

    def crash(self) -> None:
        super().crash()
        for session in self.asked:
            self.checker.finish(session, "gone")
        self.asked.clear()
        self.ending.clear()

    def left_over(self) -> list[str]:
        return [f"fe: {session}" for session in {*self.asked, *self.ending}]

    def ask(self, request: Request, patience_ms: int) -> None:
        """A client's request arrives; it waits for `patience_ms` at most."""
        if not self.up:
            self.checker.finish(request.session, "refused")
            return
        self.asked[request.session] = request
        self.enter(lambda: self._accept(request, patience_ms))

    def _accept(self, request: Request, patience_ms: int) -> None:
        talk = Conversation(self, request)
        self.spawn(talk.run())
        self.after(patience_ms, lambda: talk.finish("gone"))


class Conversation:
    """One session at the front end."""

    def __init__(self, node: FrontendNode, request: Request) -> None:
        self.node = node
        self.request = request
        self.delivery = Delivery()
        self.binding: Binding | None = None
        self.over = False
        self.began = False
        self._tokens: Stream[Event] | None = None
        self._bindings: Stream[Binding] | None = None
        self._progress = 0
        self._rebound: Future[None] = Future()

    async def run(self) -> None:
        node, session = self.node, self.request.session
        try:
            await self._assign()
        except (KvspError, UnreachableError) as error:
            node.log("refused", session[-2:], error)
            self.finish("refused")
            return
        node.spawn(self._follow())
        self._watch()
        while not self.over:
            if self.binding is None:
                await self._pause()
            else:
                await self._attach(self.binding)

    async def _assign(self) -> None:
        """Again, if it was not answered: that the session exists then means that it was carried out."""
        node, start, broken = self.node, self._start(), False
        until_ms = node.now_ms + ASSIGN_MS
        while not self.over:
            try:
                self._bind(
                    await node.network.call(
                        node, node.placement, lambda: node.placement.assign(start, len(self.request.prompt))
                    )
                )
                return
            except UnreachableError:
                broken = True
                if node.now_ms >= until_ms:
                    raise
            except KvspError as error:
                if not broken or error.problem is not registry.CONFLICT:
                    raise
                return
            await node.sleep(RETRY_MS)

    def _start(self) -> SessionCheckpoint:
        request = self.request
        keys = keys_of(request.prompt)
        tail = request.prompt[len(keys) * BLOCK_TOKENS :]
        return SessionCheckpoint(
            request.session,
            0,
            COMPAT.hex(),
            SCOPE.hex(),
            [key.hex() for key in keys],
            tail,
            [],
            0,
            request.sampler,
        )

    def _watch(self) -> None:
        """A session without progress is given up."""
        before = self._progress

        def look() -> None:
            if self._progress == before:
                self.finish("failed")
            elif not self.over:
                self._watch()

        self.node.after(GIVE_UP_MS, look)

    # --- bindings ---

    async def _follow(self) -> None:
        node, session = self.node, self.request.session
        while not self.over:
            stream = self._bindings = node.network.open(
                node, node.placement, lambda stream: node.placement.follow(session, stream)
            )
            try:
                while True:
                    self._bind(await stream.next())
            except UnreachableError:
                await node.sleep(RETRY_MS)
            except (EndOfStreamError, KvspError) as error:
                self._ended(error)
                return

    def _ended(self, error: Exception) -> None:
        """The placement controller knows no such session any more."""
        if not self.over:
            self.node.log("lost", self.request.session[-2:], error)
            self.finish("failed")

    def _bind(self, binding: Binding) -> None:
        if self.over or not self.delivery.bind(binding.epoch):
            return
        self.node.log("bound", self.request.session[-2:], binding.epoch, binding.instance)
        self.binding = binding
        self._progress += 1
        if self._tokens is not None:
            self._tokens.drop()
        rebound, self._rebound = self._rebound, Future()
        rebound.set(None)

    # --- tokens ---

    async def _attach(self, binding: Binding) -> None:
        """Read what the bound instance sends until the stream ends or breaks, or another binding comes."""
        node, delivery = self.node, self.delivery
        instance = node.instances[binding.instance]
        epoch, index = binding.epoch, delivery.next_index
        stream = self._tokens = node.network.open(
            node, instance, lambda stream: instance.generate(self.request, epoch, index, stream)
        )
        try:
            while not self.over:
                self._take(await stream.next())
        except (EndOfStreamError, UnreachableError) as error:
            node.log("detached", self.request.session[-2:], error)
        except KvspError as error:
            node.log("refused", self.request.session[-2:], error)
            self._consider(error)
        if not self.over and binding is self.binding:
            await self._pause()

    def _consider(self, refused: KvspError) -> None:
        """Some refusals another attempt may change; a new session is a matter for the client here."""
        if refused.problem in (registry.STALE_EPOCH, registry.NOT_FOUND):
            return  # the instance and we know of different bindings
        if refused.problem not in (registry.INVALID_STATE, registry.UNAVAILABLE):
            self.node.checker.fail("attach of", self.request.session, "is refused:", refused)
        if self.delivery.epoch == 1 and not self.began:
            self.finish("refused")

    async def _pause(self) -> None:
        """Before the next attempt at the same instance; a new binding cuts it short."""
        rebound = self._rebound
        self.node.after(RETRY_MS, lambda: rebound.set(None))
        await rebound
        if self._rebound is rebound:
            self._rebound = Future()

    def _take(self, event: Event) -> None:
        delivery, session = self.delivery, self.request.session
        if self.over:
            return  # the client has gone while this was on its way
        self.began = True
        if event.tokens is not None:
            index = delivery.next_index
            ready = delivery.take(event.epoch, event.first_index, event.tokens)
            for offset, token in enumerate(ready):
                self._progress += 1
                self.node.checker.deliver(session, index + offset, token)
        if event.reason is not None:
            delivery.finish(event.epoch, event.reason, event.first_index)
        if delivery.finished is not None:
            self.finish(delivery.finished)

    # --- the end ---

    def finish(self, outcome: str) -> None:
        """Tell the client, and everybody else that nobody waits any more."""
        if self.over:
            return
        self.over = True
        node, session = self.node, self.request.session
        node.checker.finish(session, outcome)
        for stream in (self._tokens, self._bindings):
            if stream is not None:
                stream.drop()
        node.asked.pop(session, None)
        node.ending.add(session)
        node.spawn(self._end())
        if self.binding is not None and self.delivery.finished is None:
            instance = node.instances[self.binding.instance]
            node.spawn(self._insist(instance, lambda: instance.end_generation(session)))

    async def _end(self) -> None:
        node, session = self.node, self.request.session
        await self._insist(node.placement, lambda: node.placement.end_session(session))
        node.ending.discard(session)

    async def _insist(self, target: Node, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Tell it until it has answered, whatever that is."""
        node = self.node
        until_ms = node.now_ms + ENDING_MS
        while node.now_ms < until_ms:
            try:
                await node.network.call(node, target, call)
                return
            except KvspError as error:
                if error.problem is not registry.UNAVAILABLE:
                    return
            except UnreachableError:
                pass
            await node.sleep(RETRY_MS)
