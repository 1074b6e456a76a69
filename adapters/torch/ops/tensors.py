"""Converts torch tensors to views of memory, and results to tensors: an `ArrayAdapter`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.request import Batch
from sirtaki.common.ops.handles import Streams
from sirtaki.common.ops.tensor import DTYPE_CODES, REDUCIBLE, ROW_MAJOR, TensorView, dense_layout
from sirtaki.torch import device

streams: Streams | None = device
address_of = Tensor.data_ptr

CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for name, code in DTYPE_CODES.items() if hasattr(torch, name)
}
_DTYPES = {code: dtype for dtype, code in CODES.items()}

# Dtypes whose memory holds the tensor's values: a complex tensor may be a conjugate.
_PLAIN = frozenset(dtype for dtype, code in CODES.items() if code in REDUCIBLE and not dtype.is_complex)


def plain_name(dtype: torch.dtype) -> str:
    """Returns "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _calling(name: str | None) -> str:
    return "the tensor" if name is None else f"the tensor {name!r}"


def is_reachable(tensor: Tensor) -> bool:
    """Returns whether a tensor is in CPU memory or on a GPU of NVIDIA: torch for ROCm says CUDA for AMD's."""
    return tensor.is_cpu or (tensor.is_cuda and torch.version.cuda is not None)


def code_of(tensor: Tensor, name: str | None = None) -> int:
    """Returns the core's code of a tensor's dtype.

    Raises:
        TypeError: not a tensor.
        UnsupportedError: a tensor that cannot be exchanged; the text gives the reason and the remedy.
    """
    if (
        isinstance(tensor, Tensor)
        and is_reachable(tensor)
        and tensor.layout is torch.strided
        and not is_lazy(tensor)
    ):
        code = CODES.get(tensor.dtype)
        if code is not None:
            return code
    raise _refusal(tensor, _calling(name))


def _refusal(tensor: Any, what: str) -> Exception:
    """Explains why a tensor cannot be exchanged, and the remedy."""
    if not isinstance(tensor, Tensor):
        return TypeError(f"{what} has to be a torch.Tensor, not {type(tensor).__name__}")
    if is_lazy(tensor):
        return UnsupportedError(
            f"{what} belongs to a lazy module and has no shape yet; pass a batch through the model first"
        )
    if tensor.layout is not torch.strided:
        return UnsupportedError(
            f"{what} is sparse ({tensor.layout}), and this exchanges dense ones only; use sparse_allreduce, "
            "or convert it with to_dense()"
        )
    if tensor.is_meta:
        return UnsupportedError(f"{what} is on the device meta and has no data; load the weights first")
    if not is_reachable(tensor):
        return UnsupportedError(
            f"{what} is on the device {tensor.device}, and only tensors on GPUs of NVIDIA and in the memory "
            "of the CPU can be exchanged; move it with tensor.cpu() first"
        )
    known = ", ".join(plain_name(dtype) for dtype in CODES)
    return UnsupportedError(
        f"{what} has the dtype {plain_name(tensor.dtype)}, which cannot be exchanged; convert it with "
        f"tensor.to() to one of {known}"
    )


def view(tensor: Tensor, name: str | None = None) -> TensorView:
    """Returns a view of a tensor; its owner is the tensor, or a copy if the tensor is not dense.

    Raises the errors of `code_of`.
    """
    code = code_of(tensor, name)
    layout: int | None = ROW_MAJOR
    if tensor.is_neg() or tensor.is_conj():  # the memory holds other values than the tensor
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        layout = dense_layout(tensor.shape, tensor.stride())
        if layout is None:
            tensor, layout = tensor.contiguous(), ROW_MAJOR
    scope = device.ordinal(tensor)
    if scope >= 0:
        device.refuse_capture()
    return TensorView(tensor.data_ptr(), tensor.shape, code, layout or ROW_MAJOR, tensor, scope)


def reducible_view(tensor: Tensor, name: str | None = None) -> TensorView:
    """Works like `view`, for reducible elements. Raises UnsupportedError for other tensors."""
    found = view(tensor, name)
    if found.dtype not in REDUCIBLE:
        raise _irreducible(tensor, name)
    return found


def _irreducible(tensor: Tensor, name: str | None) -> UnsupportedError:
    return UnsupportedError(
        f"{_calling(name)} has the dtype {plain_name(tensor.dtype)}, and an all-reduce cannot combine "
        "such elements; convert it with tensor.to(torch.float32)"
    )


def row_major_view(tensor: Tensor, name: str | None = None) -> TensorView:
    """Returns a view of a tensor in row-major order; copies the tensor if it is not."""
    code_of(tensor, name)
    return view(tensor.contiguous(), name)


def writable_view(tensor: Tensor, name: str | None = None, reduces: bool = False) -> TensorView:
    """Returns a view of a tensor to overwrite; the view's owner is another tensor if it is not dense.

    Raises the errors of `code_of`, and ValueError if elements of the tensor share memory. If it is combined
    (`reduces`), also those of `reducible_view`.
    """
    found = view(tensor, name)
    if reduces and found.dtype not in REDUCIBLE:
        raise _irreducible(tensor, name)
    if found.owner is not tensor:
        refuse_overlap(tensor, name)
    return found


def shares_elements(tensor: Tensor) -> bool:
    """Returns whether elements of a tensor share memory: it was expanded, and cannot be written to."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(stride == 0 and extent > 1 for extent, stride in pairs)


def refuse_overlap(tensor: Tensor, name: str | None = None) -> None:
    """Raises ValueError if a result cannot be written to the tensor because its elements share memory."""
    if shares_elements(tensor):
        raise ValueError(
            f"elements of {_calling(name)} share their memory (it was expanded), so no result can be written "
            "to it; pass tensor.clone()"
        )


def sharing_memory(named: Iterable[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """Returns the names of two of these dense tensors that share memory; None if all have their own."""
    ends, last = 0, ""
    for name, tensor in sorted(named, key=lambda entry: entry[1].data_ptr()):
        if tensor.numel() and tensor.data_ptr() < ends:
            return last, name
        ends, last = tensor.data_ptr() + tensor.numel() * tensor.element_size(), name
    return None


def refuse_shared_gradients(gradients: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError if two of these gradients, given by their parameters' names, share memory."""
    if (pair := sharing_memory(gradients)) is not None:
        raise ValueError(
            f"the gradients of the parameters {pair[0]!r} and {pair[1]!r} use the same memory, so the "
            "exchange of one would overwrite the other; give each parameter a gradient of its own, for "
            "example parameter.grad = gradient.clone()"
        )


def empty_like(source: Tensor) -> tuple[Tensor, int]:
    """Returns a new tensor of the same shape and order, and its address."""
    result = torch.empty_like(source, requires_grad=False)
    return result, result.data_ptr()


def empty_rows_like(source: Tensor, rows: int) -> tuple[Tensor, int]:
    """Returns a new tensor with `rows` rows like the source's, and its address."""
    result = torch.empty((rows, *source.shape[1:]), dtype=source.dtype, device=source.device)
    return result, result.data_ptr()


def wrapped(memory: Tensor) -> Tensor:
    """Returns the tensor itself."""
    return memory


def from_output(context: Context, batch: Batch, index: int) -> Tensor:
    """Returns the result that the core allocated for request `index`, as a tensor in the current stream."""
    gpu = batch.devices[index]
    if gpu >= 0:
        found = context.device_output(batch, index)
        return device.copy_of(found, gpu).view(_DTYPES[found.dtype]).view(found.shape)
    output = context.output(batch, index)
    dtype = _DTYPES[output.dtype]
    if not output.buffer:
        return torch.empty(output.shape, dtype=dtype)
    return torch.frombuffer(output.buffer, dtype=dtype).view(output.shape)


def split_counts(splits: Tensor | Sequence[int] | None) -> list[int] | None:
    """Returns the splits of an all-to-all as numbers. Raises ValueError if they are invalid."""
    if splits is None:
        return None
    if isinstance(splits, Tensor):
        if splits.dtype != torch.int32 or splits.dim() != 1:
            raise ValueError(
                f"splits has dtype {splits.dtype} and shape {list(splits.shape)}, but it has to be one "
                "number a rank: a list, or an int32 tensor of one dimension"
            )
        return splits.tolist()
    try:
        return [operator.index(count) for count in splits]
    except TypeError:
        raise ValueError(f"splits has to be a list of whole numbers, one a rank, not {splits!r}") from None


def from_counts(counts: Sequence[int]) -> Tensor:
    """Returns numbers of rows as an int32 tensor."""
    return torch.tensor(counts, dtype=torch.int32)


def is_plain(tensor: Any) -> bool:
    """Returns whether a tensor can be combined and is in CPU memory as it is, in row-major order."""
    return (
        type(tensor) is Tensor
        and device.ordinal(tensor) < 0
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dtype in _PLAIN
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def _version_counter() -> Callable[[Sequence[Tensor]], None]:
    count = torch.autograd.graph.increment_version
    try:
        count([])
    except (RuntimeError, TypeError):  # before torch 2.7 it counts a single tensor

        def count_each(tensors: Sequence[Tensor]) -> None:
            for tensor in tensors:
                count(tensor)

        return count_each
    return count


# Notifies autograd that the core has written to these tensors, so that it rejects their saved values.
count_write = _version_counter()


def written(tensor: Tensor, owner: Any) -> Tensor:
    """Ends a write to a tensor: `owner` is the memory that was written, the tensor itself or its copy."""
    if owner is tensor:
        count_write([tensor])
    else:
        with torch.no_grad():
            tensor.copy_(owner)
    return tensor
