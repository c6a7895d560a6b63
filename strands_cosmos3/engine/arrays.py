"""Arrays of NumPy and torch's tensors, which the functions around the network take alike.

Their operators, methods and slices are the same where the two kinds share them; what else is needed
stands in the namespace of the array API standard that ``array_namespace`` finds for an array. These
functions need no torch.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Array: TypeAlias = Any
"""An array of NumPy or a tensor; a function answers in the kind that it is given."""
