"""What a model keeps per block of token positions, as groups the caches can move without knowing the model."""

from __future__ import annotations

from typing import Literal

import msgspec

from rackserve.base.errors import ConfigError

GroupKind = Literal["full", "window"]


class KvGroup(msgspec.Struct, frozen=True):
    """One kind of cached state.

    `full`: each logical block stores `bytes_per_slot`; attention reads every block of the prefix.
    `window`: only the state at a boundary where computation resumes is needed, `bytes_per_slot` per stored boundary.
    """

    name: str
    kind: GroupKind
    bytes_per_slot: int


class KvLayout(msgspec.Struct, frozen=True):
    """The groups of one model, the number of token positions in a logical block, and how a cached prefix is resumed.

    history_tokens  ids before its first position that the engine needs when it first sees a sequence
    replay_tokens   0: resume state is stored and restored (exact). n: it is not; the last n positions of a cached prefix are
                    computed again for it, and their KV is not rewritten (bounded replay)
    tail_tokens     0: every position of a prompt passes all layers. n: only the last n do, earlier ones merely fill the KV
                    that later positions read (decoder replay)
    """

    block_tokens: int
    groups: tuple[KvGroup, ...]
    history_tokens: int = 0
    replay_tokens: int = 0
    tail_tokens: int = 0

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError(f"kv_layout.block_tokens must be at least 1, got {self.block_tokens}")
        if not any(group.kind == "full" for group in self.groups):
            raise ConfigError("kv_layout.groups needs at least one group of kind 'full'")

    @property
    def block_bytes(self) -> int:
        """Bytes of one logical block over all `full` groups."""
        return sum(group.bytes_per_slot for group in self.groups if group.kind == "full")

    @property
    def window_bytes(self) -> int:
        """Bytes of the resume state at one boundary over all `window` groups; 0 if the model has none."""
        return sum(group.bytes_per_slot for group in self.groups if group.kind == "window")

    @property
    def has_window(self) -> bool:
        return self.window_bytes > 0

    @property
    def stores_state(self) -> bool:
        """Whether a cached prefix can be used only where its resume state is stored too."""
        return self.has_window and self.replay_tokens == 0

    def fingerprint(self) -> str:
        """A text that differs whenever the stored bytes would be read differently; part of `CacheNamespace`."""
        groups = ";".join(f"{group.name}:{group.kind}:{group.bytes_per_slot}" for group in self.groups)
        resume = f"|replay:{self.replay_tokens}:{self.tail_tokens}" if self.replay_tokens or self.tail_tokens else ""
        return f"{self.block_tokens}|{groups}{resume}"
