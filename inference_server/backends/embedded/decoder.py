"""Decoder: one forward and one read-back turn the scheduled tokens of a step into sampled tokens and
prompt logprobs.

What the device found out comes to the host once per step. A step can be launched behind one that was not
read yet: the device then computes while the host learns what it drew before.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import DataError, ServiceError
from headway.contracts.sampling_mask import MAX_MASK_TOKENS
from headway.contracts.types import LLMDelta, PolicyVersion, TopLogprobs
from inference_server.backends.base import Limits
from inference_server.backends.embedded.device import Device
from inference_server.backends.embedded.expert_recorder import ExpertRecorder
from inference_server.backends.embedded.runner import StepRunner
from inference_server.backends.embedded.sampler import (
    Sampled,
    SamplingPlan,
    SamplingRow,
    StepMasks,
    top_logprobs,
)
from inference_server.backends.embedded.scheduler import ScheduledTokens
from inference_server.backends.embedded.sequence import Sequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """Sampled token of one sequence in one step."""

    sequence: Sequence
    token: int
    logprob: float
    """Logprob of the token; not finite where the logits are not."""
    top: TopLogprobs | None
    """Alternatives, if it asks for them."""
    left: NDArray[np.int32] | None = None
    """Ids of the tokens that were left to draw from, ascending, if it asks for its sampling mask."""
    place: int = 0
    """Number of guessed tokens before it in the step, all of them right."""

    def delta(self, version: PolicyVersion) -> LLMDelta:
        """Return the delta that its caller gets."""
        return LLMDelta(
            output_tokens=[self.token],
            output_logprobs=[self.logprob],
            version=version,
            top_logprobs=None if self.top is None else [self.top],
        )


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
    samples: _StepSamples | None
    """None where nothing is drawn."""
    scores: _Scores
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
            ids,
            positions,
            wanted,
            [work.span for work in scheduled],
            [sequence.uniform(ahead=place) for sequence, place in drawn],
            [sequence.tokens[position] for sequence, position in scored],
        )
        self._extend_rows(scheduled)
        scores = _Scores(scored, logits[: len(scored)], targets, self._device.is_host)
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
        starts = [work.span.start for work in scheduled]
        logits, uniforms, targets = self._runner.run(
            [0] * len(scheduled),
            starts,
            range(len(scheduled)),
            [work.span for work in scheduled],
            [sequence.uniform(ahead=1) for sequence in sequences],
            [],
            in_flight.samples.tensors[0],
        )
        for work in scheduled:
            work.span.row.length = work.span.end
        scores = _Scores([], logits[:0], targets, self._device.is_host)
        return self.sample(scheduled, sequences, logits, uniforms, scores)

    def sample(
        self,
        scheduled: list[ScheduledTokens],
        sequences: list[Sequence],
        logits: Tensor,
        uniforms: Tensor,
        scores: _Scores,
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
        samples = _StepSamples(sequences, sampled, logits, uniforms, self._device.is_host)
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
            samples = _StepSamples(
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


class _Tops:
    """The most likely tokens of those rows of logits that ask for them."""

    def __init__(self, logits: Tensor, counts: list[int], is_host: bool) -> None:
        """
        Args:
            counts: how many each row asks for, or 0.
        """
        self._counts = counts
        wanted = sorted(set(counts) - {0})
        if is_host:
            self._groups = [[r for r, own in enumerate(counts) if own == n] for n in wanted]
        else:  # all rows at once: choosing some would take a copy to the device
            self._groups = [list(range(len(counts)))] if wanted else []
            wanted = wanted[-1:]
        self.tensors: list[Tensor] = []
        for rows, count in zip(self._groups, wanted, strict=True):
            chosen = logits if len(rows) == len(counts) else logits[rows]
            self.tensors += top_logprobs(chosen, count)

    def read(self, read: list[Tensor]) -> dict[int, TopLogprobs]:
        """Return the top logprobs by row, from the values read back of `tensors`."""
        found: dict[int, TopLogprobs] = {}
        for index, rows in enumerate(self._groups):
            tokens, values = read[2 * index].tolist(), read[2 * index + 1].tolist()
            for row, ids, logprobs in zip(rows, tokens, values, strict=True):
                pairs = [  # what a grammar forbids is no alternative
                    pair for pair in zip(ids, logprobs, strict=True) if pair[1] > -math.inf
                ]
                if self._counts[row]:
                    found[row] = pairs[: self._counts[row]]
        return found


class _Scores:
    """Logprobs of prompt tokens: row i of the logits predicts the token at `scored[i]`."""

    def __init__(
        self, scored: list[tuple[Sequence, int]], logits: Tensor, targets: Tensor, is_host: bool
    ) -> None:
        """
        Args:
            logits: [S, V]; targets: [S] the tokens that they predict.
        """
        self._scored = scored
        self.tensors: list[Tensor] = []
        if scored:
            table = torch.log_softmax(logits.float(), dim=-1)
            self._tops = _Tops(table, [s.request.top_logprobs for s, _ in scored], is_host)
            self.tensors = [table.gather(1, targets[:, None])[:, 0], *self._tops.tensors]

    def record(self, read: list[Tensor]) -> None:
        """Write down what was read back of `tensors`."""
        if not self._scored:
            return
        tops = self._tops.read(read[1:])
        for row, logprob in enumerate(read[0].tolist()):
            sequence, position = self._scored[row]
            sequence.prompt_logprobs[position] = logprob
            if row in tops:
                sequence.prompt_top[position] = tops[row]


class _StepSamples:
    """Tokens drawn in one step."""

    def __init__(
        self,
        sequences: list[Sequence],
        sampled: Sampled,
        logits: Tensor,
        uniforms: Tensor,
        is_host: bool,
    ) -> None:
        self.sequences = sequences
        self.logits = logits
        self.uniforms = uniforms
        counts = [sequence.request.top_logprobs for sequence in sequences]
        self._tops = _Tops(sampled.scaled, counts, is_host)
        checked = [] if sampled.is_enough is None else [sampled.is_enough]
        self._num_checked = len(checked)
        self.is_final = not checked
        """True if no later check can require drawing again."""
        self._masks = sampled.masks
        masks = [] if self._masks is None else [self._masks.counts, self._masks.tokens]
        self._first_top = 2 + len(checked) + len(masks)
        self.tensors = [sampled.tokens, sampled.logprobs, *checked, *masks, *self._tops.tensors]

    def is_enough(self, read: list[Tensor]) -> bool:
        """True if the values read back of `tensors` pass their checks; otherwise it is drawn again,
        from whole rows.
        """
        return all(bool(part.all()) for part in read[2 : 2 + self._num_checked])

    def outcomes(self, read: list[Tensor]) -> list[SampledToken]:
        """One for each row, from what was read back of `tensors`."""
        tops = self._tops.read(read[self._first_top : len(self.tensors)])
        left: dict[int, NDArray[np.int32]] = {}
        if self._masks is not None:
            left = _tokens_left(self._masks, *read[self._first_top - 2 : self._first_top])
        pairs = zip(read[0].tolist(), read[1].tolist(), strict=True)
        return [
            SampledToken(self.sequences[row], token, logprob, tops.get(row), left.get(row))
            for row, (token, logprob) in enumerate(pairs)
        ]


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


def _tokens_left(masks: StepMasks, counts: Tensor, tokens: Tensor) -> dict[int, NDArray[np.int32]]:
    """Return the ids left by row, ascending.

    Args:
        counts, tokens: those of the masks, read back.
    """
    sizes = counts.tolist()
    if tokens.ndim == 1:
        ids = np.split(tokens.numpy(), np.cumsum(sizes)[:-1])
    else:
        ids = [np.sort(row[:size]) for row, size in zip(tokens.numpy(), sizes, strict=True)]
    return dict(zip(masks.rows, ids, strict=True))


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
