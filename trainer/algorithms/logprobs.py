"""Log-probabilities (and entropies) of given tokens; free functions on tensors.

`token_logprobs` is the plain formula on logits. `chunked_logprobs` gives the same from hidden states and
the head's weight, tile by tile, so that no `[T, V]` tensor exists in the forward or the backward pass.
With a sampling mask, distributions are renormalised over the tokens that could be drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.batching.sampling_mask import PackedSamplingMask

VOCABULARY_TILE = 4096
"""Columns of a tile of logits. On a CPU, 512 to 4096 cost the same and 16384 nearly twice as much."""
CHUNK_TOKENS = 1024
"""Rows of a tile on a CPU."""
GPU_VOCABULARY_TILE = 8192
GPU_CHUNK_TOKENS = 16384
"""Rows of a tile on a GPU, which has 512 MiB at most: a few dozen launches per tile, and few tiles."""


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    sampling_mask: PackedSamplingMask | None = None,
) -> Tensor:
    """Log-probability of each label under the temperature-scaled distribution.

    Args:
        logits: [T, V].
        labels: [T] int64, or [T, K]: several tokens at each position.
        temperature: the one that the tokens were sampled with; 0 (greedy) counts as 1, as the
            generation servers do.
        sampling_mask: of the T positions; None leaves every token.
    Returns:
        float32 in the shape of `labels`, differentiable.
    """
    scaled = scaled_logits(logits, temperature, sampling_mask)
    if labels.ndim == 2:
        return scaled.log_softmax(-1).gather(1, labels)
    return -torch.nn.functional.cross_entropy(scaled, labels, reduction="none")


def scaled_logits(
    logits: Tensor, temperature: float, sampling_mask: PackedSamplingMask | None
) -> Tensor:
    """[T, V] float32 logits of the distribution that tokens were drawn from; see `token_logprobs`."""
    scaled = logits.float()
    if temperature not in (0.0, 1.0):
        scaled = scaled / temperature
    if sampling_mask is not None:
        scaled = sampling_mask.cut_(scaled.clone(), *(slice(0, size) for size in scaled.shape))
    return scaled


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    bias: Tensor | None = None,
    with_entropy: bool = False,
    kept_bytes: int = 0,
    sampling_mask: PackedSamplingMask | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each label, and entropy, without the logits.

    Beside inputs, outputs and gradients it holds a few tiles of logits: `chunk_tokens` rows of
    `VOCABULARY_TILE` columns, on a GPU of `GPU_VOCABULARY_TILE`. The backward pass computes them
    again, which costs one more product with the weight, except those that fit into `kept_bytes`.
    Sums are in float32 whatever the inputs' type; the gradient of the weight is rounded to the
    weight's type once per call, after all tokens. What autograd adds to it (other micro-batches, a
    tied embedding) it adds in that type.

    Args:
        hidden: [T, H], what the head would be applied to.
        weight: [V, H], whole, on the device of `hidden`; its storage must live until the backward pass.
        labels: [T] int64, or [T, K]: several tokens at each position. One outside the vocabulary gives
            NaN: an error would wait for the device.
        temperature: as in `token_logprobs`.
        chunk_tokens: rows of a tile; larger is faster up to some size and takes more memory. None
            takes `CHUNK_TOKENS` or `GPU_CHUNK_TOKENS`.
        bias: [V].
        with_entropy: also the entropy of the temperature-scaled distribution, in nats.
        kept_bytes: logits that may stay in memory until the backward pass.
        sampling_mask: as in `token_logprobs`.
    Returns:
        logprobs in the shape of `labels` and entropy [T] (or None) in float32 (float64 for float64
        inputs), once differentiable in `hidden`, `weight` and `bias`.
    Raises:
        ValueError: shapes differ or `chunk_tokens` < 1.
    """
    if (
        hidden.ndim != 2
        or weight.shape[1:] != hidden.shape[1:]
        or labels.shape[:1] != hidden.shape[:1]
        or labels.ndim > 2
    ):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)};"
            " wanted [T, H], [V, H], [T] or [T, K]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)}, wanted [V] = ({weight.shape[0]},)")
    if chunk_tokens is None:
        chunk_tokens = GPU_CHUNK_TOKENS if hidden.is_cuda else CHUNK_TOKENS
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}, wanted at least 1")
    scale = 1.0 if temperature == 0.0 else 1.0 / temperature
    room = kept_bytes if torch.is_grad_enabled() else 0
    tokens = labels if labels.ndim == 2 else labels[:, None]
    logprobs, entropy = _ChunkedLogprobs.apply(
        hidden, weight, bias, tokens, scale, chunk_tokens, with_entropy, room, sampling_mask
    )
    return logprobs.view(labels.shape), entropy


@torch.no_grad()
def chunked_top(
    hidden: Tensor,
    weight: Tensor,
    count: int,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    sampling_mask: PackedSamplingMask | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens of each position and their log-probabilities, without the logits.

    Args:
        hidden, weight, temperature, bias, sampling_mask: as in `chunked_logprobs`.
        count: K, at most V.
    Returns:
        ids [T, K] int64 and logprobs [T, K], the likeliest first.
    """
    scale = 1.0 if temperature == 0.0 else 1.0 / temperature
    rows = GPU_CHUNK_TOKENS if hidden.is_cuda else CHUNK_TOKENS
    head = _Head(hidden, weight, bias, scale, rows, sampling_mask)
    ids = torch.zeros(len(hidden), count, dtype=torch.long, device=hidden.device)
    lowest = torch.finfo(head.sum_dtype).min
    top = torch.full_like(ids, lowest, dtype=head.sum_dtype)
    log_norms = torch.full_like(top[:, 0], lowest)
    for columns, tile_weight in head.tiles():
        for chunk in head.chunks():
            logits = head.logits(chunk, columns, tile_weight)
            log_norms[chunk] = torch.logaddexp(log_norms[chunk], logits.logsumexp(1))
            found, at = logits.topk(min(count, logits.shape[1]), dim=1)
            top[chunk], best = torch.cat([top[chunk], found], 1).topk(count, dim=1)
            ids[chunk] = torch.cat([ids[chunk], at + columns.start], 1).gather(1, best)
    return ids, top - log_norms[:, None]


class _Head:
    """The scaled logits of hidden states, in tiles of some rows (tokens) and columns (vocabulary)."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        chunk_tokens: int,
        sampling_mask: PackedSamplingMask | None,
    ) -> None:
        self.dtype = torch.promote_types(hidden.dtype, weight.dtype)
        self.sum_dtype = torch.promote_types(self.dtype, torch.float32)
        if not hidden.is_cuda:  # no product of halves with a float32 result there
            self.dtype = self.sum_dtype
        self.hidden = hidden.to(self.dtype)
        self._weight, self._bias, self._scale = weight, bias, scale
        self._chunk_tokens = chunk_tokens
        self._sampling_mask = sampling_mask

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Parts of the vocabulary and their weights [v, H]."""
        width = GPU_VOCABULARY_TILE if self.hidden.is_cuda else VOCABULARY_TILE
        for columns in _slices(self._weight.shape[0], width):
            yield columns, self._weight[columns].to(self.dtype)

    def chunks(self) -> Iterator[slice]:
        """Parts of the tokens."""
        return _slices(self.hidden.shape[0], self._chunk_tokens)

    def logits(self, rows: slice, columns: slice, tile_weight: Tensor) -> Tensor:
        """[t, v] in the type of sums."""
        logits = _product(self.hidden[rows], tile_weight.t())
        if self._bias is not None:
            logits += self._bias[columns]
        if self._scale != 1.0:
            logits.mul_(self._scale)
        if self._sampling_mask is not None:
            self._sampling_mask.cut_(logits, rows, columns)
        return logits

    def sums(self, like: Tensor) -> Tensor:
        """Zeros in the shape of `like` and the type of sums."""
        return torch.zeros_like(like, dtype=self.sum_dtype)


class _ChunkedLogprobs(torch.autograd.Function):
    """Vocabulary outside, tokens inside: a tile's weight is read, and its gradient written, once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: float,
        chunk_tokens: int,
        with_entropy: bool,
        room: int,
        sampling_mask: PackedSamplingMask | None,
    ) -> tuple[Tensor, Tensor | None]:
        head = _Head(hidden, weight, bias, scale, chunk_tokens, sampling_mask)
        # Of the distribution over the columns seen so far.
        entropies = head.sums(labels[:, 0])
        log_norms = torch.full_like(entropies, torch.finfo(entropies.dtype).min)
        label_logits = torch.full_like(labels, float("nan"), dtype=head.sum_dtype)
        kept: list[Tensor] = []
        for columns, tile_weight in head.tiles():
            for rows in head.chunks():
                logits = head.logits(rows, columns, tile_weight)
                # The first ones, so that the backward pass knows them by their number.
                room -= logits.nbytes
                if room >= 0:
                    kept.append(logits)
                at, is_inside = _places(labels[rows], columns)
                label_logits[rows] = torch.where(
                    is_inside, logits.gather(1, at), label_logits[rows]
                )
                before = log_norms[rows]
                after = torch.logaddexp(before, logits.logsumexp(1))
                if with_entropy:
                    log_p = logits - after[:, None]
                    seen = (entropies[rows] + after - before) * (before - after).exp()
                    entropies[rows] = seen - torch.einsum("tv,tv->t", log_p.exp(), log_p)
                log_norms[rows] = after
        ctx.save_for_backward(hidden, weight, bias, labels, log_norms, entropies, *kept)
        ctx.scale, ctx.chunk_tokens, ctx.sampling_mask = scale, chunk_tokens, sampling_mask
        ctx.set_materialize_grads(False)
        return label_logits - log_norms[:, None], entropies if with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, log_norms, entropies, *kept = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        of_logprobs = None if of_logprobs is None else of_logprobs * ctx.scale
        of_entropies = None if of_entropies is None else (of_entropies * ctx.scale)[:, None]
        head = _Head(hidden, weight, bias, ctx.scale, ctx.chunk_tokens, ctx.sampling_mask)
        known = iter(kept)
        hidden_grad = head.sums(hidden) if for_hidden else None
        weight_grad = torch.empty_like(weight) if for_weight else None
        bias_grad = torch.empty_like(bias) if for_bias else None
        for columns, tile_weight in head.tiles():
            tile_grad, tile_bias_grad = head.sums(tile_weight), head.sums(tile_weight[:, 0])
            for rows in head.chunks():
                logits = next(known, None)
                slopes = _slopes(
                    head.logits(rows, columns, tile_weight) if logits is None else logits,
                    *_places(labels[rows], columns),
                    log_norms[rows, None],
                    entropies[rows, None],
                    None if of_logprobs is None else of_logprobs[rows],
                    None if of_entropies is None else of_entropies[rows],
                )
                if for_bias:
                    tile_bias_grad += slopes.sum(0)
                slopes = slopes.to(head.dtype)
                if hidden_grad is not None:
                    _add_product(hidden_grad[rows], slopes, tile_weight)
                if for_weight:
                    _add_product(tile_grad, slopes.t(), head.hidden[rows])
            if weight_grad is not None:
                weight_grad[columns] = tile_grad
            if bias_grad is not None:
                bias_grad[columns] = tile_bias_grad
        if hidden_grad is not None:
            hidden_grad = hidden_grad.to(hidden.dtype)
        return hidden_grad, weight_grad, bias_grad, None, None, None, None, None, None


def _slopes(
    logits: Tensor,
    at: Tensor,
    is_inside: Tensor,
    log_norms: Tensor,
    entropies: Tensor,
    of_logprobs: Tensor | None,
    of_entropies: Tensor | None,
) -> Tensor:
    """[t, v] derivative of the loss by a tile of logits z.

    With p = softmax(z) and H its entropy: d logprob / d z = onehot - p and d H / d z = -p · (log p + H).

    Args:
        at, is_inside: [t, K], of `_places`.
        log_norms, entropies: [t, 1].
        of_logprobs, of_entropies: [t, K] and [t, 1], the loss's derivatives by logprobs and entropy.
    """
    log_p = logits - log_norms
    of_all = of_logprobs
    if of_all is not None and of_all.shape[1] > 1:
        of_all = of_all.sum(1, keepdim=True)
    if of_entropies is None:
        slopes = log_p.exp_().mul_(0.0 if of_all is None else -of_all)
    else:
        slopes = log_p.exp().neg_()
        factor = log_p.add_(entropies).mul_(of_entropies)
        slopes.mul_(factor if of_all is None else factor.add_(of_all))
    if of_logprobs is not None:
        slopes.scatter_add_(1, at, torch.where(is_inside, of_logprobs, 0.0))
    return slopes


def _places(labels: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """[t, K] column of each label within a tile (any, if outside), and whether it is inside."""
    is_inside = (labels >= columns.start) & (labels < columns.stop)
    return torch.where(is_inside, labels - columns.start, 0), is_inside


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` with sums and result in at least float32."""
    if left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`, in the type of `total`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += _product(left, right)


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))
