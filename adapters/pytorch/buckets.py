"""Flat buffers whose pieces are the gradients of several parameters, so that nothing is copied to fuse them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite import InvalidRequestError

from .tensors import describe

BUCKET_BYTES = 4 * 2**20  # of a buffer
ALONE_BYTES = 2**20  # a gradient of so many is its own buffer: to copy it into another would gain nothing


class Bucket:
    """One buffer, and a view into it for each parameter, with the parameter's strides where it is dense.

    Args:
        parameters: of one dtype.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters
        self.memory = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
        self.views: list[torch.Tensor] = []
        start = 0
        for p in parameters:
            strides = torch.empty_like(p, device="meta").stride()
            self.views.append(self.memory[start : start + p.numel()].as_strided(p.shape, strides))
            start += p.numel()

    def holds(self, i: int) -> bool:
        """Return whether the gradient of parameter i lives in the buffer."""
        return self.parameters[i].grad is self.views[i]

    def adopt(self, i: int) -> None:
        """Let the gradient of parameter i live in the buffer. One that is sparse waits until `fill`."""
        parameter, view = self.parameters[i], self.views[i]
        gradient = parameter.grad
        if gradient is not view and gradient is not None and not gradient.is_sparse:
            if gradient.dtype is not view.dtype or gradient.shape != view.shape:
                raise InvalidRequestError(
                    f"a parameter became {describe(parameter)}, with a buffer for {describe(view)}: change dtypes and "
                    "shapes before the optimizer is wrapped."
                )
            view.copy_(gradient.detach())
            parameter.grad = view

    def fill(self, wanted: Sequence[bool]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Let all gradients live in the buffer, and return those parameters and their views.

        Parameters without a gradient get zeros; those that are not wanted get none, but their place in the buffer is 0.
        """
        owners = []
        for i, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if parameter.grad is None:
                view.zero_()
                if wanted[i]:
                    parameter.grad = view
            elif parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
                self.adopt(i)
            else:
                self.adopt(i)
            if parameter.grad is view:
                owners.append((parameter, view))
        return owners

    def give(self) -> None:
        """Let frozen parameters, too, have what their place in the buffer holds."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view


def cut_into_buckets(lists: Sequence[Sequence[torch.Tensor]]) -> list[tuple[list[torch.Tensor], Bucket | None]]:
    """Split lists of parameters so that each piece has one dtype and one buffer's size, the last parameters first.

    Lists of one are neighbours that may share a buffer; longer ones were meant to stay together. A large parameter
    that stands alone needs no buffer.
    """
    pieces: list[list[torch.Tensor]] = []
    large: list[torch.Tensor] = []
    open_pieces: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameters in reversed(lists):
        if len(parameters) > 1:
            by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
            for p in parameters:
                by_dtype.setdefault(p.dtype, []).append(p)
            pieces.extend(by_dtype.values())
            continue
        (p,) = parameters
        if p.nbytes >= ALONE_BYTES:
            large.append(p)
            continue
        piece = open_pieces.get(p.dtype)
        if piece is None or sum(one.nbytes for one in piece) + p.nbytes > BUCKET_BYTES:
            piece = open_pieces[p.dtype] = []
            pieces.append(piece)
        piece.append(p)
    return [*((piece, Bucket(piece)) for piece in pieces), *(([p], None) for p in large)]
