"""What each way to go on from a cached prefix stores, computes again and changes, with the golden checkpoint.

Its weights are random, so deviations say how far the arithmetic drifts and nothing about the quality of a trained model.
"""

from __future__ import annotations

from array import array
from importlib.util import find_spec
from pathlib import Path

import msgspec
from measure import Claim, Figure, Options, Result, figure, main

HAS_ENGINE = all(find_spec(name) for name in ("torch", "numpy"))
if HAS_ENGINE:
    import numpy as np

BLOCK_TOKENS, NUM_TOKENS = 32, 24
HITS, LENGTH = (32, 96, 160), 200
QUICK_HITS, QUICK_LENGTH = (32,), 50
MODES = ("exact", "bounded replay", "decoder replay")
BLOCKS_EACH = -(-(LENGTH + NUM_TOKENS) // BLOCK_TOKENS)
QUESTION = "What does each way to resume a cached prefix store, compute again and change?"
CLOCK = "none: counted and compared; one value per prompt"


class Going(msgspec.Struct):
    """A sequence being decoded: log-probabilities at the end of its prompt, the output so far."""

    number: int
    logprobs: np.ndarray
    output: list[int]


class Trial:
    """One runner; a prompt is computed cold and, for every hit and mode, from the cold run's blocks."""

    def __init__(self) -> None:
        from rackserve.model.deepseek_v41.layout import kv_layout
        from rackserve.model.deepseek_v41.runner import DeepseekV41Runner
        from rackserve.model.files import open_model

        files = open_model("golden")
        self.config = files.deepseek_v41
        self.layout = kv_layout(self.config, BLOCK_TOKENS)
        num_blocks = (1 + len(HITS) * len(MODES)) * BLOCKS_EACH
        self._memory = bytearray(num_blocks * self.layout.block_bytes + len(HITS) * self.layout.window_bytes)
        self._runner = DeepseekV41Runner(files, memoryview(self._memory), num_blocks, BLOCK_TOKENS)

    def _run(self, *items):
        from rackserve.base.step import Step

        return self._runner.run(Step(0, items)).items

    def _prompt(self, number: int, ids: list[int], start: int, blocks: list[int], **fields) -> Going:
        from rackserve.base.step import StepItem

        def packed(part: list[int]) -> bytes:
            return array("i", part).tobytes()

        before = ids[max(0, start - self.layout.history_tokens) : start]
        shape = (number, start, len(ids) - start, packed(ids[start:]), tuple(blocks), True)
        (result,) = self._run(StepItem(*shape, history=packed(before), logprobs=self.config.vocab_size, **fields))
        shares = [share for _, share in sorted(result.logprobs[0].top)]
        return Going(number, np.array(shares), list(result.tokens))

    def _decode(self, going: list[Going], length: int) -> None:
        from rackserve.base.step import StepItem

        for index in range(1, NUM_TOKENS):
            items = [StepItem(one.number, length + index - 1, 1, b"", (), True, index) for one in going]
            for one, result in zip(going, self._run(*items), strict=True):
                one.output += result.tokens

    def resume(self, ids: list[int], hits: tuple[int, ...]) -> tuple[Going, dict[tuple[str, int], Going], bool]:
        """The cold run, those that resume by (mode, hit), and whether the blocks they hit are the same bytes afterwards."""
        from rackserve.base.step import Step, StepItem

        window, donors = self.config.sliding_window, list(range(BLOCKS_EACH))
        at = 0
        for slot, hit in enumerate(hits):  # the prompt's first chunks, a snapshot after each
            part = array("i", ids[at:hit]).tobytes()
            self._run(StepItem(0, at, hit - at, part, tuple(donors) if not at else (), False, snapshot=slot))
            at = hit
        cold = self._prompt(0, ids, at, [])
        held = self._memory[: hits[-1] // BLOCK_TOKENS * self.layout.block_bytes]
        resumed: dict[tuple[str, int], Going] = {}
        for slot, hit in enumerate(hits):
            for mode in MODES:
                number = len(resumed) + 1
                own = range(number * BLOCKS_EACH, (number + 1) * BLOCKS_EACH)
                shared = hit // BLOCK_TOKENS
                blocks = [*donors[:shared], *own[shared:]]
                start = hit if mode == "exact" else max(0, hit - window)
                fields = {"restore": slot} if mode == "exact" else {"replayed": hit - start}
                if mode == "decoder replay":
                    fields["full_from"] = max(0, len(ids) - window)
                resumed[mode, hit] = self._prompt(number, ids, start, blocks, **fields)
        self._decode([cold, *resumed.values()], len(ids))
        same = self._memory[: len(held)] == held
        self._runner.run(Step(0, (), tuple(range(len(resumed) + 1))))
        return cold, resumed, same

    def layer_rows(self, mode: str, length: int, hit: int) -> int:
        """Rows that pass a layer until the prompt's last token is done, over all layers."""
        window, layers, encoder = self.config.sliding_window, self.config.num_hidden_layers, self.config.first_decoder_layer
        rows = length - hit + (0 if mode == "exact" else min(hit, window))
        return rows * layers if mode != "decoder replay" else rows * encoder + min(rows, window) * (layers - encoder)


def run(options: Options) -> Result:
    if not HAS_ENGINE:
        return Result("resume_modes", QUESTION, CLOCK, skipped="the engine extra is not installed")
    hits, length = (QUICK_HITS, QUICK_LENGTH) if options.quick else (HITS, LENGTH)
    trial = Trial()
    draw = np.random.default_rng(options.seed)
    prompts = [draw.integers(3, trial.config.vocab_size, length).tolist() for _ in range(options.rounds)]
    found = [trial.resume(ids, hits) for ids in prompts]
    figures = [*stored(trial), *computed(trial, hits, length)]
    for hit in hits:
        for mode in MODES:
            figures += changed(mode, hit, [(cold, resumed[mode, hit]) for cold, resumed, _ in found])
    exact = [(cold, resumed["exact", hit]) for cold, resumed, _ in found for hit in hits]
    claims = (
        Claim(
            "exact resume gives the log-probabilities and the output of a cold run, to the last bit",
            all(np.array_equal(cold.logprobs, one.logprobs) and cold.output == one.output for cold, one in exact),
        ),
        Claim("no way to resume changes a byte of the blocks that were hit", all(same for _, _, same in found)),
    )
    notes = (
        f"Golden checkpoint: random weights, so no statement on quality. {length} random ids a prompt; a window of "
        f"{trial.config.sliding_window} positions, {trial.config.num_hidden_layers} layers of which "
        f"{trial.config.num_hidden_layers - trial.config.first_decoder_layer} are the decoder's. Deviations are those of "
        f"log-probabilities at the prompt's last position. Equal tokens: of {NUM_TOKENS} greedy ones, place by place; after "
        "the first that differs the sequences are others.",
    )
    return Result("resume_modes", QUESTION, CLOCK, claims, tuple(figures), notes)


def stored(trial: Trial) -> list[Figure]:
    """Bytes beside the blocks for each boundary at which a sequence can be resumed."""
    import rackserve.model.deepseek_v41 as package
    from rackserve.model.deepseek_v41.config import read_config
    from rackserve.model.deepseek_v41.layout import kv_layout

    released = kv_layout(read_config(Path(package.__file__).with_name("flash.json")), BLOCK_TOKENS)
    figures = []
    for name, layout in (("golden checkpoint", trial.layout), ("released shape", released)):
        per_token, to = layout.block_bytes / BLOCK_TOKENS, "the blocks' bytes per token"
        figures.append(figure(f"state per boundary, exact: {name}", "bytes", [float(layout.window_bytes)], to, per_token))
        figures.append(figure(f"state per boundary, either replay: {name}", "bytes", [0.0], to, per_token))
    return figures


def computed(trial: Trial, hits: tuple[int, ...], length: int) -> list[Figure]:
    """Positions computed again, and rows through layers."""
    figures = []
    for hit in (0, *hits):
        for mode in MODES:
            again = 0 if mode == "exact" else min(hit, trial.config.sliding_window)
            rows, cold = trial.layer_rows(mode, length, hit), trial.layer_rows("exact", length, 0)
            if hit:
                figures.append(figure(f"computed again: hit of {hit}, {mode}", "tokens", [float(again)], "the hit", hit))
            what = f"hit of {hit}" if hit else "no hit"
            figures.append(figure(f"rows through layers: {what}, {mode}", "rows", [float(rows)], "exact without a hit", cold))
    return figures


def changed(mode: str, hit: int, pairs: list[tuple[Going, Going]]) -> list[Figure]:
    """How far log-probabilities and output are from the cold run's."""
    where, scale = f"hit of {hit}, {mode}", [float(cold.logprobs.std()) for cold, _ in pairs]
    off = [np.abs(cold.logprobs - one.logprobs) for cold, one in pairs]
    equal = [float(np.mean(np.equal(cold.output, one.output))) for cold, one in pairs]
    to = "standard deviation of the logits"
    return [
        figure(f"median deviation: {where}", "nats", [float(np.median(values)) for values in off], to, scale),
        figure(f"largest deviation: {where}", "nats", [float(values.max()) for values in off], to, scale),
        figure(f"equal greedy tokens: {where}", "share", equal),
    ]


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
