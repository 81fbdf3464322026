"""Array annotations of the kernels, which run with torch and triton alone: without jaxtyping they say Tensor."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool as Bool
    from jaxtyping import Float as Float
    from jaxtyping import Int as Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:

        class _Shaped:
            def __class_getitem__(cls, shape: Any) -> type[Tensor]:
                return Tensor

        Bool = Float = Int = _Shaped
