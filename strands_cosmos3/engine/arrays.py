"""Arrays of NumPy and torch's tensors, which the functions around the network take alike.

Their operators, methods and slices are the same where the two kinds share them; what else is needed
stands in the namespace of the array API standard that ``array_namespace`` finds for an array. These
functions need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from array_api_compat import is_numpy_array, is_torch_array

from strands_cosmos3.checks import ArrayKind

if TYPE_CHECKING:
    Array: TypeAlias = Any
    """An array of NumPy or a tensor; a function answers in the kind that it is given."""
else:

    class _ArrayType(ArrayKind):
        def __instancecheck__(cls, value: object) -> bool:
            return is_numpy_array(value) or is_torch_array(value)

    class Array(metaclass=_ArrayType):
        """An array of NumPy or a tensor, for checks of types at run time."""
