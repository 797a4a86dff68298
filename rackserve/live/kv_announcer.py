"""The rack as one worker to other routers: presence events of its ranks and pool, told as KV events with token ids.

Presence events name blocks by key alone, so the tokens behind the keys are taken from requests as they pass. A block is told
once its tokens are known and the block before it is told: `GPU` while some prefill rank has it, `CPU` while the pool has it.
Blocks of prompts under a tenant's salt are never told: their tokens would be there for other tenants to read.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from rackserve.base.ids import POOL_RANK, Rank
from rackserve.base.keys import KEY_BYTES, TOKEN_BYTES, CacheNamespace, Chain, count, extend_chain, key_at
from rackserve.base.messages import BlocksRemoved, BlocksStored, Message, Output, PresenceSnapshot, RankDown, RankUp, Submit
from rackserve.live.kv_events import GPU, HOST, BlockHash, BlockRemoved, BlockStored, KvEvent, encode_batch
from rackserve.ports import Node, Transport
from rackserve.text.tokenizer import pack, unpack

MAX_REMEMBERED = 200_000
"""Blocks whose tokens are kept though nobody has announced them (yet)."""


def name_of(key: bytes) -> bytes:
    """A key as other routers get it: 32 bytes, of which either end will do for those that shorten it."""
    return key + key


class _Block:
    """A block some holder has. `told`: the media it was told to be in."""

    __slots__ = ("children", "holders", "parent", "told")

    def __init__(self, parent: bytes) -> None:
        self.parent = parent
        self.children: set[bytes] = set()
        self.holders: dict[Rank, str] = {}
        self.told: set[str] = set()


class KvAnnouncer:
    """Hears what the router and the client side hear, and publishes what follows. `ranks`: the prefill ranks; what others hold
    serves no new prompt.
    """

    __slots__ = ("_block_tokens", "_blocks", "_media", "_now", "_open", "_out", "_publish", "_root", "_tokens", "_unheld")

    def __init__(
        self,
        ranks: Iterable[Rank],
        publish: Callable[[bytes], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        """`publish` gets encoded batches."""
        self._root = b""
        self._block_tokens = 1
        self._media = {**dict.fromkeys(ranks, GPU), POOL_RANK: HOST}
        self._publish = publish
        self._now = now
        self._blocks: dict[bytes, _Block] = {}
        self._tokens: dict[bytes, bytes] = {}
        self._unheld: OrderedDict[bytes, None] = OrderedDict()  # keys in `_tokens` that nobody has
        self._open: dict[str, tuple[bytearray, Chain, int]] = {}
        self._out: list[KvEvent] = []

    def speak_of(self, namespace: CacheNamespace) -> None:
        """What is served, without a salt; to be called before the first request."""
        self._root, self._block_tokens = namespace.root(), namespace.block_tokens

    # ------------------------------------------------------------ what is heard

    def heard(self, message: Message) -> None:
        """A message to the router."""
        if isinstance(message, BlocksStored) and message.holder in self._media:
            self._add(message.holder, message.chain, message.start)
        elif isinstance(message, BlocksRemoved) and message.holder in self._media:
            self._withdraw(message.holder, message.chain, message.keep)
        elif isinstance(message, PresenceSnapshot) and message.holder in self._media:
            self._drop(message.holder)
            for chain in message.chains:
                self._add(message.holder, chain, 0)
        elif isinstance(message, (RankUp, RankDown)):
            self._drop(message.rank)
        self._flush()

    def submitted(self, message: Submit) -> None:
        """A request on its way in."""
        request = message.request
        step = self._block_tokens * TOKEN_BYTES
        first = extend_chain(b"", self._root, request.tokens[:step], self._block_tokens)
        if first != request.chain[:KEY_BYTES]:
            return  # under a salt
        self._open[request.id] = (bytearray(request.tokens), request.chain, request.num_tokens)
        self._learn(request.tokens, request.chain, 0)
        self._flush()

    def answered(self, output: Output) -> None:
        """Tokens on their way out: they are part of the blocks that decode ranks fill."""
        known = self._open.get(output.request)
        if known is None:
            return
        tokens, chain, num_prompt = known
        seen = len(tokens) // TOKEN_BYTES - num_prompt - output.index
        if seen < 0:  # some were lost on the way
            del self._open[output.request]
            return
        tokens += pack(output.tokens[seen:])
        start = count(chain)
        if len(tokens) // (self._block_tokens * TOKEN_BYTES) > start:
            chain = extend_chain(chain, self._root, bytes(tokens), self._block_tokens)
            self._learn(bytes(tokens), chain, start)
        if output.finish is not None or output.error is not None:
            del self._open[output.request]
        else:
            self._open[output.request] = (tokens, chain, num_prompt)
        self._flush()

    # ------------------------------------------------------------ who has what

    def _add(self, holder: Rank, chain: Chain, start: int) -> None:
        """`holder` has all of `chain`; blocks from `start` on are new there."""
        before = self._blocks.get(key_at(chain, start - 1)) if start else None
        if before is None or holder not in before.holders:
            start = 0  # what came before was not heard
        parent = key_at(chain, start - 1) if start else b""
        fresh = []
        for at in range(start, count(chain)):
            key = key_at(chain, at)
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = _Block(parent)
                if parent:
                    self._blocks[parent].children.add(key)
                self._unheld.pop(key, None)
            block.holders[holder] = self._media[holder]
            fresh.append(key)
            parent = key
        self._tell(fresh)

    def _withdraw(self, holder: Rank, chain: Chain, keep: int) -> None:
        """Of the blocks along `chain`, `holder` has only the first `keep`, and none beyond `chain`."""
        if keep < count(chain):
            tops = [key_at(chain, keep)]
        else:
            last = self._blocks.get(chain[-KEY_BYTES:])
            tops = [] if last is None else list(last.children)
        self._take(holder, tops)

    def _drop(self, holder: Rank) -> None:
        self._take(holder, [key for key, block in self._blocks.items() if not block.parent and holder in block.holders])

    def _take(self, holder: Rank, tops: list[bytes]) -> None:
        """Take `holder` out of the blocks `tops` and all that follow them."""
        keys = [key for key in tops if key in self._blocks and holder in self._blocks[key].holders]
        for key in keys:  # grows while it is walked: parents before children
            keys += [child for child in self._blocks[key].children if holder in self._blocks[child].holders]
        gone: dict[str, list[BlockHash]] = {}
        for key in reversed(keys):
            block = self._blocks[key]
            del block.holders[holder]
            for medium in sorted(block.told - set(block.holders.values())):
                block.told.discard(medium)
                gone.setdefault(medium, []).append(name_of(key))
            if not block.holders:
                self._remove(key, block)
        self._out += [BlockRemoved(names, medium) for medium, names in gone.items()]

    def _remove(self, key: bytes, block: _Block) -> None:
        del self._blocks[key]
        if block.parent:
            self._blocks[block.parent].children.discard(key)
        if key in self._tokens:
            self._remember(key)

    # ------------------------------------------------------------ tokens, and what can be told

    def _learn(self, tokens: bytes, chain: Chain, start: int) -> None:
        """The tokens of blocks [start, count(chain)) of `chain` are in `tokens`."""
        step = self._block_tokens * TOKEN_BYTES
        fresh = []
        for at in range(start, count(chain)):
            key = key_at(chain, at)
            if key not in self._tokens:
                self._tokens[key] = tokens[at * step : (at + 1) * step]
                fresh.append(key)
            if key not in self._blocks:
                self._remember(key)
        self._tell([key for key in fresh if key in self._blocks])

    def _remember(self, key: bytes) -> None:
        self._unheld[key] = None
        self._unheld.move_to_end(key)
        while len(self._unheld) > MAX_REMEMBERED:
            del self._tokens[self._unheld.popitem(last=False)[0]]

    def _tell(self, keys: list[bytes]) -> None:
        """Tell of `keys`, parents first, and of what follows them, as far as it can be told."""
        runs: dict[str, list[bytes]] = {}
        pending = list(keys)
        for key in pending:  # grows while it is walked
            block = self._blocks[key]
            if key not in self._tokens or (block.parent and not self._blocks[block.parent].told):
                continue
            news = set(block.holders.values()) - block.told
            if not news:
                continue
            if not block.told:
                pending += [child for child in block.children if not self._blocks[child].told]
            block.told |= news
            for medium in sorted(news):
                run = runs.setdefault(medium, [])
                if run and run[-1] != block.parent:
                    self._out.append(self._stored(run, medium))
                    run = runs[medium] = []
                run.append(key)
        self._out += [self._stored(run, medium) for medium, run in runs.items()]

    def _stored(self, keys: list[bytes], medium: str) -> BlockStored:
        parent = self._blocks[keys[0]].parent
        ids = list(unpack(b"".join(self._tokens[key] for key in keys)))
        names: list[BlockHash] = [name_of(key) for key in keys]
        return BlockStored(names, name_of(parent) if parent else None, ids, self._block_tokens, medium=medium)

    def _flush(self) -> None:
        if self._out:
            self._publish(encode_batch(self._now(), self._out))
            self._out = []

    # ------------------------------------------------------------ where it listens

    def around_router(self, node: Node) -> Node:
        """`node`, with what it is sent heard first."""
        return _Overheard(node, self.heard)

    def around_node(self, node: Node) -> Node:
        """The client side `node`, with outputs heard."""
        return _Overheard(node, lambda message: self.answered(message) if isinstance(message, Output) else None)

    def around_transport(self, transport: Transport) -> Transport:
        """The client side's `transport`, with requests heard."""
        return _Submitting(transport, self)


class _Overheard:
    __slots__ = ("_hear", "_node")

    def __init__(self, node: Node, hear: Callable[[Message], None]) -> None:
        self._node = node
        self._hear = hear

    def handle(self, message: Message) -> None:
        self._hear(message)
        self._node.handle(message)


class _Submitting:
    __slots__ = ("_announcer", "_transport")

    def __init__(self, transport: Transport, announcer: KvAnnouncer) -> None:
        self._transport = transport
        self._announcer = announcer

    def send(self, to: str, message: Message) -> None:
        if isinstance(message, Submit):
            self._announcer.submitted(message)
        self._transport.send(to, message)
