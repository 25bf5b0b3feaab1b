"""Decoder: one forward and one read-back turn the scheduled tokens of a step into sampled tokens and
prompt logprobs.

What the device found out comes to the host once per step. A step can be launched behind one that was not
read yet: the device then computes while the host learns what it drew before.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import DataError, ServiceError
from headway.contracts.sampling_mask import MAX_MASK_TOKENS
from inference_server.backends.base import Limits
from inference_server.backends.embedded.attention import StepTokens
from inference_server.backends.embedded.device import Device
from inference_server.backends.embedded.expert_recorder import ExpertRecorder
from inference_server.backends.embedded.runner import StepRunner
from inference_server.backends.embedded.sampler import Sampled, SamplingPlan
from inference_server.backends.embedded.sampling_rows import SamplingRow
from inference_server.backends.embedded.scheduler import ScheduledTokens
from inference_server.backends.embedded.sequence import Sequence
from inference_server.backends.embedded.step_outputs import (
    PromptScores,
    SampledToken,
    StepSamples,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refused:
    """A sequence that cannot be sampled."""

    sequence: Sequence
    error: ServiceError


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was launched, and is waited for when it is landed."""

    scheduled: list[ScheduledTokens]
    refused: list[Refused]
    samples: StepSamples | None
    """None where nothing is drawn."""
    scores: PromptScores
    read: Callable[[], list[Tensor]]

    @property
    def can_be_followed(self) -> bool:
        """True if its tokens are on the device, in their final form."""
        samples = self.samples
        return (
            samples is not None
            and samples.is_final
            and not self.refused
            and not any(s.grammar or s.ngrams for s in samples.sequences)
        )


class Decoder:
    """Computes steps; used by the engine's thread."""

    def __init__(
        self, runner: StepRunner, limits: Limits, device: Device, recorder: ExpertRecorder
    ) -> None:
        self._runner = runner
        self._recorder = recorder
        self._limits = limits
        self._device = device
        self._plan: tuple[list[Sequence], SamplingPlan] | None = None

    def forget(self) -> None:
        """The rows of the next step are new ones."""
        self._plan = None

    def launch(self, scheduled: list[ScheduledTokens]) -> InFlightStep:
        """One forward over the tokens of a step; draws where nothing is pending then."""
        ids: list[int] = []
        positions: list[int] = []
        for work in scheduled:
            span = work.span
            ids.extend(work.sequence.tokens[span.start : span.end])
            ids.extend(work.guess)
            positions.extend(range(span.start, span.end))
        wanted, scored = _wanted_logits(scheduled)
        drawn = [
            (work.sequence, place)
            for work in scheduled
            if work.is_last
            for place in range(len(work.guess) + 1)
        ]
        sequences = [sequence for sequence, _ in drawn]
        logits, uniforms, targets = self._runner.run(
            StepTokens(
                ids,
                positions,
                wanted,
                [work.span for work in scheduled],
                [sequence.uniform(ahead=place) for sequence, place in drawn],
                [sequence.tokens[position] for sequence, position in scored],
            )
        )
        self._extend_rows(scheduled)
        scores = PromptScores(scored, logits[: len(scored)], targets, self._device.is_host)
        return self.sample(scheduled, sequences, logits[len(scored) :], uniforms, scores)

    def _extend_rows(self, scheduled: list[ScheduledTokens]) -> None:
        """Their rows hold the tokens of a step now."""
        experts = self._recorder.take(self._runner.places)
        for work in scheduled:
            span = work.span
            span.row.length = span.end - len(work.guess)  # until they are known to be right
            if experts is not None:
                computed = experts[span.first : span.first + span.end - span.start]
                span.row.experts[span.start :] = list(computed)

    def launch_behind(
        self, in_flight: InFlightStep, scheduled: list[ScheduledTokens]
    ) -> InFlightStep:
        """The same for a step of the same sequences whose tokens the device has just drawn."""
        assert in_flight.samples is not None
        sequences = [work.sequence for work in scheduled]
        # A new plan would count tokens that are not known yet.
        assert self._plan is not None and self._plan[0] == sequences
        logits, uniforms, targets = self._runner.run(
            StepTokens(
                [0] * len(scheduled),
                [work.span.start for work in scheduled],
                range(len(scheduled)),
                [work.span for work in scheduled],
                [sequence.uniform(ahead=1) for sequence in sequences],
            ),
            in_flight.samples.tensors[0],
        )
        for work in scheduled:
            work.span.row.length = work.span.end
        scores = PromptScores([], logits[:0], targets, self._device.is_host)
        return self.sample(scheduled, sequences, logits, uniforms, scores)

    def sample(
        self,
        scheduled: list[ScheduledTokens],
        sequences: list[Sequence],
        logits: Tensor,
        uniforms: Tensor,
        scores: PromptScores,
    ) -> InFlightStep:
        """Draw, and ask for what was drawn and the scores."""
        if not sequences:
            return InFlightStep(scheduled, [], None, scores, self._device.fetch(scores.tensors))
        refused: list[Refused] = []
        try:
            sampled = self._sample(sequences, logits, uniforms)
        except Exception:
            self._check_sampling(logits, uniforms)
            refused = self._refusals(sequences, logits, uniforms)
            if not refused:
                raise  # no request's fault
            broken = {id(each.sequence) for each in refused}
            sound = [row for row, s in enumerate(sequences) if id(s) not in broken]
            sequences = [sequences[row] for row in sound]
            logits, uniforms = logits[sound], uniforms[sound]
            if not sequences:
                read = self._device.fetch(scores.tensors)
                return InFlightStep(scheduled, refused, None, scores, read)
            sampled = self._sample(sequences, logits, uniforms)
        samples = StepSamples(sequences, sampled, logits, uniforms, self._device.is_host)
        read = self._device.fetch([*samples.tensors, *scores.tensors])
        return InFlightStep(scheduled, refused, samples, scores, read)

    def land(self, in_flight: InFlightStep) -> list[SampledToken | Refused]:
        """Wait for a step; prompt logprobs are recorded in their sequences."""
        read = in_flight.read()
        samples = in_flight.samples
        if samples is None:
            in_flight.scores.record(read)
            return list(in_flight.refused)
        in_flight.scores.record(read[len(samples.tensors) :])
        if not samples.is_enough(read):
            plan = self._plan_for(samples.sequences)
            sampled = plan.sample(samples.logits, samples.uniforms, is_whole=True)
            is_host = self._device.is_host
            samples = StepSamples(
                samples.sequences, sampled, samples.logits, samples.uniforms, is_host
            )
            read = self._device.fetch(samples.tensors)()
        guesses = {id(work.sequence): work.guess for work in in_flight.scheduled}
        return [*in_flight.refused, *_confirmed(samples.outcomes(read), guesses)]

    def _sample(self, sequences: list[Sequence], logits: Tensor, uniforms: Tensor) -> Sampled:
        return self._plan_for(sequences).sample(logits, uniforms)

    def _check_sampling(self, logits: Tensor, uniforms: Tensor) -> None:
        """Raise what a request without any wish raises, too: then the engine is broken, not a request."""
        plain = SamplingRow(SamplingConfig())
        plan = SamplingPlan([plain], self._limits.vocab_size, self._device)
        plan.sample(logits[:1], uniforms[:1])

    def _refusals(
        self, sequences: list[Sequence], logits: Tensor, uniforms: Tensor
    ) -> list[Refused]:
        """The requests that cannot be sampled alone."""
        refused = []
        for row, sequence in enumerate(sequences):
            self._plan = None
            try:
                self._sample([sequence], logits[row : row + 1], uniforms[row : row + 1])
            except Exception as error:
                name = sequence.request.rid
                log.exception("a request cannot be sampled", extra={"rid": name})
                reason = f"request {name} cannot be sampled: {type(error).__name__}: {error}"
                refused.append(Refused(sequence, DataError(reason)))
        self._plan = None
        return refused

    def _plan_for(self, sequences: list[Sequence]) -> SamplingPlan:
        """The plan of these rows; that of the last step if they are the same."""
        if self._plan is None or self._plan[0] != sequences:
            rows = [
                SamplingRow(
                    s.request.gconfig,
                    s.request.input_ids,
                    s.output,
                    sorted(s.stop_ids),
                    s.request.sampling_mask,
                    s.grammar,
                )
                for s in sequences
            ]
            plan = SamplingPlan(rows, self._limits.vocab_size, self._device)
            self._plan = (sequences, plan)
        return self._plan[1]


def _confirmed(
    outcomes: list[SampledToken], guesses: Mapping[int, tuple[int, ...]]
) -> list[SampledToken | Refused]:
    """Drop what was drawn behind a wrong guess, and refuse masks that become too large to be stored.

    Args:
        guesses: by the id of the sequence.
    """
    kept: list[SampledToken | Refused] = []
    places: dict[int, int | None] = {}
    mask_tokens: Counter[int] = Counter()
    for outcome in outcomes:
        sequence = outcome.sequence
        key = id(sequence)
        place, guess = places.get(key, 0), guesses.get(key, ())
        if place is None:
            continue
        is_right = place < len(guess) and outcome.token == guess[place]
        mask_tokens[key] += 0 if outcome.left is None else len(outcome.left)
        kept.append(_within_bound(replace(outcome, place=place), mask_tokens[key]))
        places[key] = place + 1 if is_right else None
        if guess and sequence.ngrams is not None and not is_right:
            sequence.ngrams.learn(len(guess), place)
    return kept


def _within_bound(sampled: SampledToken, more: int) -> SampledToken | Refused:
    """Refuse a sequence whose sampling mask becomes too large to be stored.

    Args:
        more: ids that this step adds to it, up to this token.
    """
    sequence = sampled.sequence
    size = sequence.mask_tokens + more
    if size <= MAX_MASK_TOKENS:
        return sampled
    gconfig = sequence.request.gconfig
    reason = (
        f"request {sequence.request.rid}: {size} tokens were left to draw from over "
        f"{sequence.num_output + sampled.place + 1} positions, a sampling mask holds "
        f"{MAX_MASK_TOKENS}; cut more than top_p={gconfig.top_p:g}, top_k={gconfig.top_k}, "
        f"min_p={gconfig.min_p:g} (top_k bounds each position), or do not ask for the mask "
        "(algorithm.sampling_mask=ignore)"
    )
    return Refused(sequence, DataError(reason))


def _wanted_logits(
    scheduled: list[ScheduledTokens],
) -> tuple[list[int], list[tuple[Sequence, int]]]:
    """Positions in the step whose logits are wanted: first those that score a prompt's tokens, each
    with its sequence and the position that it predicts, then the last ones of what is sampled."""
    wanted: list[int] = []
    scored: list[tuple[Sequence, int]] = []
    for work in scheduled:
        sequence, span = work.sequence, work.span
        first = sequence.scored_from
        if first is None:
            continue
        for position in range(max(span.start, first - 1), min(span.end, sequence.num_prompt - 1)):
            wanted.append(span.first + position - span.start)
            scored.append((sequence, position + 1))
    last = [
        work.span.first + at
        for work in scheduled
        if work.is_last
        for span in [work.span]
        for at in range(span.end - span.start - 1 - len(work.guess), span.end - span.start)
    ]
    return wanted + last, scored
