"""What the runner does about drafts in a step: draw them, choose which to verify, say which stand."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rackserve.base.errors import ConfigError
from rackserve.base.step import StepItem
from rackserve.model.acceptance import SyntheticAcceptance, verify
from rackserve.model.deepseek_v41.dspark import DraftHead, Drafting, Drafts
from rackserve.model.deepseek_v41.options import RunnerOptions
from rackserve.model.deepseek_v41.state import SequenceState
from rackserve.model.sampler import sample
from rackserve.model.sampling_state import SamplingState
from rackserve.sched.draft_budget import POLICIES, UNMEASURED, DraftCosts, Drafted, acceptance


class Speculation:
    """Drafts of one device's steps.

    costs  what passes cost, for a policy that `needs_costs`; until they are set, a pass counts as costing the same always
    """

    __slots__ = ("_block", "_dspark", "_policy", "_synthetic", "costs", "needs_costs")

    def __init__(self, dspark: DraftHead, block: int, options: RunnerOptions) -> None:
        self._dspark, self._block = dspark, block
        self._policy = POLICIES[options.draft_policy]()
        self.needs_costs = self._policy.weighs_costs
        mean = options.synthetic_acceptance
        if mean > block + 1:
            raise ConfigError(
                f"runner.synthetic_acceptance is {mean:g}: this model drafts {block} tokens, so a step yields "
                f"{block + 1} at most; lower it"
            )
        self._synthetic = SyntheticAcceptance(mean) if mean else None
        self.costs: DraftCosts = UNMEASURED

    @property
    def is_synthetic(self) -> bool:
        """Whether how many drafts stand is set beforehand, so that output is not the model's."""
        return self._synthetic is not None

    def draft(
        self,
        items: Sequence[StepItem],
        anchors: Sequence[int],
        states: Sequence[SequenceState],
        choices: Sequence[SamplingState | None],
    ) -> list[Drafts | None]:
        """The drafts to verify for each item, None where there are to be none. `anchors`: each item's last token.

        Each choice is as it was afterwards.
        """
        wanted = [number for number, item in enumerate(items) if wants_drafts(item)]
        requests = [
            Drafting(states[number], anchors[number], items[number].sampling, items[number].output_index, choices[number])
            for number in wanted
        ]
        drawn = self._dspark.draft(requests)
        limits = [min(items[number].num_draft, self._block) for number in wanted]
        chances = tuple(acceptance(drafts.confidence.tolist()[:limit]) for drafts, limit in zip(drawn, limits, strict=True))
        others = sum(item.num_tokens for item in items) - len(wanted)
        drafted = Drafted(chances, other_tokens=others, max_drafts=self._block, budget=sum(limits))
        chosen: list[Drafts | None] = [None] * len(items)
        for number, drafts, count in zip(wanted, drawn, self._policy.choose(drafted, self.costs), strict=True):
            chosen[number] = Drafts(drafts.tokens[:count], drafts.logits[:count], drafts.confidence[:count])
        return chosen

    def accept(self, item: StepItem, logits: Tensor, drafts: Drafts | None, choice: SamplingState | None) -> list[int]:
        """The output of an item that samples, from the logits [k + 1, vocab] at its last token and its k drafts.

        `choice` takes in the tokens, and may end the output.
        """
        if drafts is None or not drafts.tokens:
            return verify(logits, [], None, item.sampling, item.output_index, choice)
        if self._synthetic is not None:
            count = self._synthetic.num_tokens(item.sequence, item.output_index, len(drafts.tokens))
            bonus = sample(logits[count - 1], item.sampling, item.output_index + count - 1)
            return [*drafts.tokens[: count - 1], bonus]
        return verify(logits, drafts.tokens, drafts.logits, item.sampling, item.output_index, choice)


def wants_drafts(item: StepItem) -> bool:
    """Whether drafts are drawn for an item: it samples after one token, that of the position DSpark's windows end before."""
    return item.num_draft > 0 and item.sample and item.num_tokens == 1 and item.start > 0
