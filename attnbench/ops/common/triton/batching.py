"""The batching rule of operators whose first axis is a batch: a mapped axis joins it."""

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.library import CustomOpDef  # pyright: ignore[reportPrivateImportUsage]


def join_the_batch(operator: CustomOpDef, shared: Collection[int] = ()) -> None:
    """Register the rule of vmap by which `operator` takes stacked models at once, as a larger batch.

    Args:
        operator: the sequences of its tensors' first axes are independent, those of its results too.
        shared: indices of tensors that have no such axis and are the same for all models.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        joined = []
        for index, (x, axis) in enumerate(zip(inputs, in_dims, strict=True)):
            if isinstance(x, Tensor) and index not in shared:
                x = x.expand(info.batch_size, *x.shape) if axis is None else x.movedim(axis, 0)
                x = x.flatten(0, 1)
            elif axis is not None:
                raise ValueError(f"argument {index} of this operator is one for all stacked models")
            joined.append(x)
        results = operator(*joined)
        if isinstance(results, Tensor):
            return _apart(results, info.batch_size), 0
        return tuple(_apart(x, info.batch_size) for x in results), (0,) * len(results)

    operator.register_vmap(rule)


def _apart(x: Tensor, size: int) -> Tensor:
    # Not -1, which is ambiguous where a result was not asked for and is empty.
    return x.unflatten(0, (size, x.shape[0] // size))
