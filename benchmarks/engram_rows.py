"""Rows of n-gram tables for decode steps and prefill chunks: mapped or over a socket, kept near or not, asked early or late.

The tables are files with holes: every row is zeros, but each is read, sent and converted like any other.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns, process_time_ns, sleep

import msgspec
from measure import CPU_TIME, Figure, Options, Result, at_most, figure, interleave, main

HAS_ENGINE = all(find_spec(name) for name in ("torch", "numpy"))
if HAS_ENGINE:
    import numpy as np

HOT_ROWS = 1 << 17
BATCH, CHUNK = 64, 2048
DELAY_S = 0.05
KINDS = ("mapped", "socket")
CLOCK = f"{CPU_TIME}, that of the rows' owner not included; wall time where it says so"
QUESTION = "What does it cost to fetch n-gram rows, what does keeping some near save, and does it hide behind computation?"
Rows = Mapping[int, "np.ndarray"]


class Tables:
    """The released shape with `engram_vocab_size` rows a column, in files under `folder`."""

    def __init__(self, folder: Path, engram_vocab_size: int) -> None:
        import rackserve.model.deepseek_v41 as package
        from rackserve.model.deepseek_v41.config import read_config
        from rackserve.model.deepseek_v41.engram.ngrams import column_primes
        from rackserve.model.deepseek_v41.engram.tables import open_tables

        config = read_config(Path(package.__file__).with_name("flash.json"))
        config = msgspec.structs.replace(config, engram_vocab_size=engram_vocab_size)
        rows = tuple(column_primes(config).sum(1).tolist())
        self.config = msgspec.structs.replace(config, engram_num_embeddings=rows)
        self.num_rows = dict(zip(config.engram_layer_ids, rows, strict=True))

        def location(name: str) -> tuple[Path, int, int]:
            layer = int(name.split(".")[1])
            width = config.engram_head_dim if name.endswith("weight") else config.engram_head_dim // 32
            path = folder / name
            path.touch()
            with path.open("r+b") as file:
                file.truncate(self.num_rows[layer] * width)
            return path, 0, self.num_rows[layer] * width

        self.tables = open_tables(location, self.config)


def phrases(draw: np.random.Generator, tokens: int, vocabulary: int) -> np.ndarray:
    """Token ids made of phrases of 4 to 40 ids. Few phrases are common, many are rare; so are ids inside them."""
    ranks = np.arange(1, vocabulary + 1)
    weights = ranks**-1.0 / (ranks**-1.0).sum()
    lengths = draw.integers(4, 41, 4000)
    library = np.split(draw.choice(vocabulary, lengths.sum(), p=weights), lengths.cumsum()[:-1])
    popular = np.arange(1, len(library) + 1) ** -1.0
    chosen = draw.choice(len(library), tokens // 4, p=popular / popular.sum())
    return np.concatenate([library[number] for number in chosen])[:tokens]


class Readers:
    """The rows of every load, over and over, by each kind of reader."""

    def __init__(self, tables: Tables, address: str, draw: np.random.Generator, batches: int, chunks: int) -> None:
        from rackserve.model.deepseek_v41.engram.links import MappedLink
        from rackserve.model.deepseek_v41.engram.ngrams import NgramHash
        from rackserve.model.deepseek_v41.engram.reader import EngramReader
        from rackserve.model.deepseek_v41.engram.sockets import SocketLink

        config = tables.config
        hashing = NgramHash(config, np.arange(config.vocab_size, dtype=np.int32) % config.engram_compressed_vocab_size)
        texts = phrases(draw, BATCH * (batches + 3), config.vocab_size).reshape(BATCH, -1)
        self.decode = [
            hashing.addresses([(text[at : at + 3], text[at + 3 : at + 4]) for text in texts]) for at in range(batches)
        ]
        text = phrases(draw, CHUNK * chunks, config.vocab_size)
        self.prefill = [hashing.addresses([(text[:at][-3:], text[at : at + CHUNK])]) for at in range(0, len(text), CHUNK)]
        local = self._local = MappedLink(tables.tables)
        self.readers = {}
        for hot in (0, HOT_ROWS):
            for kind in KINDS:
                link = local if kind == "mapped" else SocketLink(address, local.owned, local.row_bytes)
                self.readers[kind, hot] = EngramReader(tables.num_rows, [link], config.engram_head_dim, hot)
        self._tables = tables

    def steps(self, kind: str, hot: int, steps: list[Rows]) -> Callable[[], float]:
        """CPU nanoseconds a step, over a quarter of `steps` at a time."""
        reader, turns = self.readers[kind, hot], cycle(np.array_split(np.arange(len(steps)), 4))

        def go() -> float:
            turn = next(turns)
            begin = process_time_ns()
            for number in turn:
                pending = reader.begin(steps[number])
                for layer in steps[number]:
                    pending.rows(layer)
            return (process_time_ns() - begin) / len(turn)

        return go

    def copy(self, steps: list[Rows]) -> Callable[[], float]:
        """CPU nanoseconds a step to copy its rows, repeated ones too, from the mapped files, and nothing else."""
        tables, turns = self._tables.tables, cycle(np.array_split(np.arange(len(steps)), 4))

        def go() -> float:
            turn = next(turns)
            begin = process_time_ns()
            for number in turn:
                for layer, rows in steps[number].items():
                    tables[layer].read(rows.reshape(-1))
            return (process_time_ns() - begin) / len(turn)

        return go

    def bytes_per_token(self, steps: list[Rows], hot: int) -> float:
        """Bytes fetched per token of `steps`, by a reader that has seen nothing before."""
        from rackserve.model.deepseek_v41.engram.reader import EngramReader

        reader = EngramReader(self._tables.num_rows, [self._local], self._tables.config.engram_head_dim, hot)
        for step in steps:
            pending = reader.begin(step)
            for layer in step:
                pending.rows(layer)
        reader.close()
        return sum(reader.counts().fetched_bytes) / sum(len(rows) for step in steps for rows in list(step.values())[:1])

    def overlapped(self, ahead: bool, compute: Callable[[], object]) -> Callable[[], float]:
        """Wall nanoseconds of `compute` and a decode step's rows from a slow owner, asked for before or after it."""
        from rackserve.model.deepseek_v41.engram.reader import EngramReader

        reader = EngramReader(self._tables.num_rows, [Slow(self._local)], self._tables.config.engram_head_dim)
        turns = cycle(self.decode)
        self.readers["slow", ahead] = reader

        def go() -> float:
            wanted = next(turns)
            begin = perf_counter_ns()
            pending = reader.begin(wanted) if ahead else None
            compute()
            pending = pending or reader.begin(wanted)
            for layer in wanted:
                pending.rows(layer)
            return perf_counter_ns() - begin

        return go

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()


class Slow:
    """A link whose owner answers `DELAY_S` after it was asked."""

    is_near = False

    def __init__(self, link) -> None:
        self._link = link

    def fetch(self, layer: int, rows: np.ndarray) -> Callable[[], np.ndarray]:
        there, take = perf_counter_ns() + DELAY_S * 1e9, self._link.fetch(layer, rows)

        def wait() -> np.ndarray:
            sleep(max(0, there - perf_counter_ns()) / 1e9)
            return take()

        return wait

    def close(self) -> None:
        self._link.close()


def products(seconds: float) -> Callable[[], object]:
    """Products of matrices that take about so long."""
    import torch

    torch.set_num_threads(1)
    matrix = torch.ones(512, 512)
    torch.mm(matrix, matrix)
    begin = process_time_ns()
    for _ in range(10):
        torch.mm(matrix, matrix)
    count = round(seconds * 1e10 / (process_time_ns() - begin))
    return lambda: [torch.mm(matrix, matrix) for _ in range(count)]


def run(options: Options) -> Result:
    if not HAS_ENGINE:
        return Result("engram_rows", QUESTION, CLOCK, skipped="the engine extra is not installed")
    vocabulary, batches, chunks = (2000, 4, 4) if options.quick else (160_000, 128, 8)
    with TemporaryDirectory() as folder:
        address = f"ipc://@rackserve-bench-{secrets.token_hex(8)}"
        words = [sys.executable, __file__, "--serve", folder, str(vocabulary), address]
        tables = Tables(Path(folder), vocabulary)
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
            assert owner.stdout is not None
            owner.stdout.readline()
            readers = Readers(tables, address, np.random.default_rng(options.seed), batches, chunks)
            try:
                return measure(options, readers, tables)
            finally:
                readers.close()
                owner.kill()


def measure(options: Options, readers: Readers, tables: Tables) -> Result:
    loads = {f"decode step of {BATCH} tokens": readers.decode, f"prefill chunk of {CHUNK} tokens": readers.prefill}
    parts = [_of_load(options, readers, load, steps) for load, steps in loads.items()]
    compute = products(DELAY_S)
    both = interleave({str(ahead): readers.overlapped(ahead, compute) for ahead in (False, True)}, options.rounds)
    slow = f"{DELAY_S * 1e3:.0f} ms of computing, then rows from an owner as slow (wall time)"
    early = figure("the same, rows asked for before the computation (wall time)", "ms", both["True"], "asking after it",
                   both["False"], 1e-6)  # fmt: skip
    figures = (*(part for of_load in parts for part in of_load), figure(slow, "ms", both["False"], scale=1e-6), early)
    claims = (
        *(at_most(f"{part.what}: at most twice {part.to}", part.ratios, 2) for part in figures if part.to == "over a socket"),
        *(
            at_most(f"{part.what}: at most 0.8 of {part.to}", part.ratios, 0.8)
            for part in figures
            if part.unit == "bytes/token"
        ),
        at_most("asking for rows before the computation takes at most 0.75 of the time of asking after it", early.ratios, 0.75),
    )
    size = sum(table.num_rows for table in tables.tables.values()) * 264 / 1e9
    notes = (
        f"Two tables of {size:.1f} GB together, in the page cache after the first round; 24 rows of 264 bytes per token and "
        "table. Texts are made-up phrases, few of them common; how many rows repeat in real ones is not known here.",
        "Copying does no more than read the mapped rows; a reader also finds repeated rows, converts to float32 and spreads. "
        "On one machine, rows kept near save no time: they save bytes of a network.",
    )
    return Result("engram_rows", QUESTION, CLOCK, claims, figures, notes)


def _of_load(options: Options, readers: Readers, load: str, steps: list[Rows]) -> list[Figure]:
    variants = {f"{kind} {hot}": readers.steps(kind, hot, steps) for kind in KINDS for hot in (0, HOT_ROWS)}
    ns = interleave(variants | {"copy": readers.copy(steps)}, options.rounds)
    near = f"{HOT_ROWS:,} rows near"
    plain, hot = ([readers.bytes_per_token(steps, rows)] for rows in (0, HOT_ROWS))
    return [
        figure(f"{load}, mapped", "ms", ns["mapped 0"], "copying its rows alone", ns["copy"], 1e-6),
        figure(f"{load}, mapped, {near}", "ms", ns[f"mapped {HOT_ROWS}"], "mapped", ns["mapped 0"], 1e-6),
        figure(f"{load}, over a socket", "ms", ns["socket 0"], "mapped", ns["mapped 0"], 1e-6),
        figure(f"{load}, over a socket, {near}", "ms", ns[f"socket {HOT_ROWS}"], "over a socket", ns["socket 0"], 1e-6),
        figure(f"{load}, fetched with {near}", "bytes/token", hot, "fetching each row once a step", plain),
    ]


def serve(folder: str, vocabulary: str, address: str) -> None:
    """Own all rows until standard input ends."""
    from rackserve.model.deepseek_v41.engram.links import MappedLink
    from rackserve.model.deepseek_v41.engram.sockets import ShardServer

    with ShardServer(address, MappedLink(Tables(Path(folder), int(vocabulary)).tables)):
        print("serving", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        raise SystemExit(main(run, __doc__))
